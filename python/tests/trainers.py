"""An export of each kind in others' trainers: transformers' Trainer and TRL's SFTTrainer, by the kernels and by plain
PyTorch from the same seed. And the loop of docs/samples.md that trains on samples, as the page shows it.

    python trainers.py PROGRAM [--steps 5] [--only KIND|samples] [--folder EXPORTS]

PROGRAM is `sieve`, which makes the exports in --folder; those that are there are taken as they are, so that a machine
without the program can have them. Without a GPU `on_cpu()` computes. TRL is left out where it is not installed. Prints
one line for each kind and trainer: "works" with the first and the last losses and the steps a second of both, the first
two steps left out, or the error. Ends with 1 where losses of the two differ, or do not fall. The first six steps are
compared: at the eighth plain PyTorch in bf16 is off from itself by up to 0.47 in the loss, with windows and NSA, where
its first weights are moved by a rounding.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("SIEVE_ATTENTION_LIBRARY", str(ROOT / "target/release/libsieve_capi.so"))

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainerCallback, TrainingArguments,
)  # fmt: skip

import sieve_attention as sieve  # noqa: E402
import sieve_attention.transformers as integration  # noqa: E402

RECIPE = """
[model]
hidden_size = 128
intermediate_size = 192
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
max_position_embeddings = 256
[attention]
kind = "mha"
[tokenizer]
train = { vocab_size = 320 }
[data]
paths = [TEXT]
[training]
steps = 2
seq_len = 64
local_batch_size = 2
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 0
[validation]
interval = 100
"""
BLOCKS = ["attention.select_block_size=16", "attention.num_selected_blocks=3"]
POOLED = [*BLOCKS, "attention.compress_block_size=16", "attention.compress_stride=8"]
KINDS = {
    "mha": [],
    "swa": ["attention.sliding_window=12"],
    "dma": ["attention.keep_window_size=16"],
    "dma, one dense layer": ["attention.keep_window_size=16", 'model.layer_types=["dma","mha","dma"]'],
    "dma, preset paper": ["attention.keep_window_size=16", "attention.preset=paper"],
    "nsa": [*POOLED, "attention.window_size=12"],
    "infllm_v2": [*POOLED, "attention.num_local_blocks=1"],
    "moba": BLOCKS,
    "msa": BLOCKS,
    "mla": ["attention.kv_lora_rank=64", "attention.qk_rope_head_dim=32"],
}  # fmt: skip
TEXTS = [f"Item {n} of the list is near {n * 37 % 101}, colour {n % 7}, weight {n * 13 % 89}." for n in range(400)]
IS_GPU = torch.cuda.is_available()
ROWS, TOKENS = 4, 64
COMPARED = 6  # steps


def made(program, root):
    """Folders with an export of each kind, by its name."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "text.txt").write_text("\n".join(TEXTS))
    (root / "recipe.toml").write_text(RECIPE.replace("TEXT", json.dumps(str(root / "text.txt"))))
    for number, (name, sets) in enumerate(KINDS.items()):
        out = root / str(number)
        if not (out / "hf/config.json").exists():
            sets = [f"attention.kind={name.split()[0].rstrip(',')}", *sets]
            sets = [word for text in sets for word in ("--set", text)]
            train = ["train", "--recipe", root / "recipe.toml", "--out", out, "--device", "cpu", "--overwrite", *sets]
            for command in (train, ["export", "--checkpoint", out, "--out", out / "hf"]):
                done = subprocess.run([program, *map(str, command)], capture_output=True, text=True)
                assert done.returncode == 0, f"{name}: {done.stdout[-500:]}{done.stderr[-1000:]}"
        yield name, out / "hf"


def is_doge(folder):
    return json.loads((folder / "config.json").read_text())["model_type"] == "doge"


def loaded(folder, attention):
    torch.manual_seed(1)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    settings = {"attn_implementation": "eager" if is_doge(folder) and attention != "sieve" else attention}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=True, **settings)


def settings_of(out, steps):
    return {
        "output_dir": out, "max_steps": steps, "per_device_train_batch_size": ROWS, "learning_rate": 1e-3, "seed": 1,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": not IS_GPU, "bf16": IS_GPU,
    }  # fmt: skip


def by_transformers(folder, attention, steps):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = [x for text in TEXTS for x in tokenizer(text).input_ids]
    rows = [torch.tensor(ids[at : at + TOKENS]) for at in range(0, steps * ROWS * TOKENS, TOKENS)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(loaded(folder, attention), TrainingArguments(**settings_of(out, steps)), train_dataset=data)
        return losses_of(trainer)


class Clock(TrainerCallback):
    """When each step begins, and the last one ends; the logged loss of a step waits for the GPU."""

    def __init__(self):
        self.times = []

    def on_step_begin(self, *_, **__):
        self.times.append(time.perf_counter())

    on_train_end = on_step_begin

    def speed(self):
        """Steps a second: the first compiles kernels, and the second may."""
        later = self.times[2:] if len(self.times) > 3 else self.times
        return 1 / statistics.median(end - begin for begin, end in zip(later, later[1:]))


def losses_of(trainer):
    """Of each step of its training, and steps a second."""
    clock = Clock()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], clock.speed()


def by_trl(folder, attention, steps):
    """Rows of several lengths, padded."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = Dataset.from_dict({"text": [" ".join(TEXTS[n : n + 1 + n % 3]) for n in range(steps * ROWS)]})
    # TRL takes Doge, whose class can have experts, for a model that has some, with any attention.
    more = {"router_aux_loss_coef": 0.0} if is_doge(folder) else {}
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(**settings_of(out, steps), max_length=TOKENS, gradient_checkpointing=False, **more)
        model = loaded(folder, attention)
        return losses_of(SFTTrainer(model=model, args=config, train_dataset=texts, processing_class=tokenizer))


def compared(run, folder, steps):
    """What the line of a kind and a trainer says, and whether it is as it should be."""
    losses, speeds = {}, {}
    for attention in ("sieve", "sdpa"):
        try:
            losses[attention], speeds[attention] = run(folder, attention, steps)
        except Exception as error:  # noqa: BLE001: whatever a trainer raises is the outcome
            return f"{attention}: {type(error).__name__}: {str(error)[:300]}", False
    ours, theirs = losses["sieve"], losses["sdpa"]
    off = max(abs(x - y) for x, y in zip(ours[:COMPARED], theirs[:COMPARED], strict=True))
    is_right = off <= (0.05 if IS_GPU else 1e-3) and ours[-1] < ours[0]
    shown = f"loss {ours[0]:.4f} to {ours[-1]:.4f}, plain PyTorch {theirs[0]:.4f} to {theirs[-1]:.4f}"
    speed = f"{speeds['sieve']:.1f} and {speeds['sdpa']:.1f} steps/s"
    return f"{'works' if is_right else 'WRONG'}: {shown}, largest difference {off:.5f}, {speed}", is_right


def on_samples(program):
    """What the loop of docs/samples.md says, and whether it prints the page's lines and scores tokens as they were drawn,
    but for the roundings of another program."""
    page = (ROOT / "docs/samples.md").read_text()
    _, code, _, shown = re.split("```(?:python)?\n", page)[:4]
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "checkpoints", f"{folder}/checkpoints")
        os.symlink(Path(program).resolve(), f"{folder}/sieve")
        environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ["PATH"]])}
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-1000:], False
    number = r"[\d.]+(?:e-\d+)?"
    words = [re.sub(number, "N", text) for text in (done.stdout, shown)]
    apart = [float(x) for x in re.findall(f"most ({number})", done.stdout)]
    is_right = words[0] == words[1] and len(apart) == 3 and all(0 < x < 1e-3 for x in apart)
    return f"{'works' if is_right else 'WRONG'}: {done.stdout.splitlines()[-1:]}", is_right


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", help="one kind, or samples")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if not IS_GPU:
        sieve.on_cpu()
    integration.register()
    integration.patch_doge()
    trainers = {"transformers": by_transformers}
    try:
        import trl

        trainers[f"TRL {trl.__version__}"] = by_trl
    except ImportError as error:
        print(f"TRL: {error}")
    all_right = True
    if given.only in (None, "samples") and len(trainers) > 1:
        said, all_right = on_samples(given.program)
        print(f"docs/samples.md: {said}", flush=True)
    if given.only == "samples":
        return not all_right
    for name, folder in made(given.program, given.folder or Path(tempfile.mkdtemp())):
        for trainer, run in trainers.items() if given.only in (None, name) else ():
            said, is_right = compared(run, folder, given.steps)
            all_right &= is_right
            print(f"{name}, {trainer}: {said}", flush=True)
    return not all_right


if __name__ == "__main__":
    sys.exit(main())
