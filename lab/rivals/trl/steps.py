"""Supervised fine-tuning of an export in TRL, by Sieve's kernels and by plain PyTorch from the same seed: their losses.

`python steps.py EXPORT [--steps 20]`; without a GPU the kernels run on the CPU emulator (a few minutes a step).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def losses(arguments, attention):
    """Of each step; the texts are facts of one line, so that twenty steps learn their form."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.export, trust_remote_code=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = {"dtype": torch.bfloat16, "trust_remote_code": True, "attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(arguments.export, **settings)
    count = arguments.steps * arguments.rows
    texts = Dataset.from_dict({"text": [f"Question: {n} + 1? Answer: {n + 1}." * (1 + n % 12) for n in range(count)]})
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out, max_steps=arguments.steps, per_device_train_batch_size=arguments.rows, learning_rate=1e-4,
            lr_scheduler_type="constant", bf16=True, logging_steps=1, report_to="none", save_strategy="no", seed=1,
            max_length=arguments.tokens, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(model=model, args=config, train_dataset=texts, processing_class=tokenizer)
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main():
    """Prints the losses of both and how often kernels ran; returns whether the check failed: a loss that differs by
    more than --tolerance, no call of a kernel, or one in the plain run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--plain", default="sdpa", help="eager, sdpa")
    parser.add_argument("--tolerance", type=float, default=0.1, help="largest difference of a loss")
    arguments = parser.parse_args()
    import sieve_attention.transformers as integration
    from sieve_attention import _library

    if not torch.cuda.is_available():
        sys.path.insert(0, str(Path(__file__).parents[3] / "python/tests"))
        import conftest

        _library.Op.emulator = staticmethod(conftest.emulate)
    integration.register()
    ran = []
    run, emulate = _library._run, _library.Op.emulator
    _library._run = lambda *given: (ran.append(1), run(*given))[1]
    if emulate:
        _library.Op.emulator = staticmethod(lambda *given: (ran.append(1), emulate(*given))[1])
    by_kernels = losses(arguments, "sieve")
    calls = len(ran)
    plain = losses(arguments, arguments.plain)
    print(f"step  kernels    {arguments.plain}")
    for step, (ours, theirs) in enumerate(zip(by_kernels, plain, strict=True), 1):
        print(f"{step:4}  {ours:.5f}  {theirs:.5f}")
    worst = max(abs(ours - theirs) for ours, theirs in zip(by_kernels, plain))
    is_right = calls > 0 and len(ran) == calls and len(plain) == arguments.steps and worst <= arguments.tolerance
    print(f"{calls} calls of plans; largest difference of a loss {worst:.5f} ({'ok' if is_right else 'FAILED'})")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
