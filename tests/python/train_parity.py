"""Twenty training steps of Sieve repeated by PyTorch with Hugging Face transformers, from the same weights and batches.

usage, from the repository's root: train_parity.py [--sieve target/release/sieve] [--kind mha|dma] [--steps 20] [--keep DIR]

Sieve trains a small model on this repository's Rust files, one document a row, and writes its weights before the first step.
For DMA the gates A and the weights W_dt are replaced by random ones first, so that the mask is no sliding window. `sieve
export` and `sieve data batch` hand both over; then transformers' Qwen3 or Doge takes the same steps on the CPU in float32:
AdamW with decay on tensors of rank 2, gradient clipping, and the warm-up, stay, decay schedule, each written again here.

Doge keeps the keys that torch.topk returns, and torch.topk promises no order among equal scores. Equal tokens have equal
scores in the first layer, so ties are the rule in real text. Here, as in Sieve, the later key stays; --torch-ties leaves the
choice to torch.topk.

Prints the losses of every step and the largest differences; exit code 1 when a loss differs by more than 1e-3.
"""

import argparse
import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-3
ATTENTION = {"mha": 'kind = "mha"', "dma": 'kind = "dma"\nkeep_window_size = 24'}

RECIPE = """
[model]
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 96
residual_scale = {residual_scale}
[attention]
{attention}
[tokenizer]
train = {{ vocab_size = 512, sample_bytes = 1_000_000 }}
[data]
paths = ["crates/**/*.rs"]
cache_dir = "{folder}/data"
[training]
steps = {steps}
seq_len = 96
local_batch_size = 4
global_batch_size = 8
max_norm = 0.8
seed = 1
one_document_per_row = true
[optimizer]
lr = 1e-3
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
[lr_scheduler]
warmup_steps = 5
decay_ratio = 0.4
decay_type = "sqrt"
min_lr_factor = 0.1
[checkpoint]
at_start = true
[metrics]
log_freq = 1
enable_tensorboard = false
[validation]
tokens = 1
"""


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up, stay, decay as in the recipe above; `step` counts from 0."""
    warmup, ratio, floor = 5, 0.4, 0.1
    if step < warmup:
        return (step + 1) / warmup
    decay_steps = min(round(steps * ratio), steps - warmup)
    first_decay_step = steps + 1 - decay_steps
    if step < first_decay_step:
        return 1.0
    progress = (step + 1 - first_decay_step) / decay_steps
    return floor + (1 - floor) * (1 - math.sqrt(progress))


class Sieve:
    """The program under test."""

    def __init__(self, program: str, folder: pathlib.Path, kind: str, steps: int) -> None:
        self.program, self.folder = program, folder
        self.recipe = folder / f"{kind}.toml"
        self.recipe.write_text(
            RECIPE.format(
                attention=ATTENTION[kind],
                folder=folder,
                steps=steps,
                # Doge always has residual scales, and trains them.
                residual_scale="true" if kind == "dma" else "false",
            )
        )

    def run(self, *arguments: object) -> None:
        command = [self.program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    def train(self, out: pathlib.Path, *more: object) -> None:
        self.run("train", "--recipe", self.recipe, "--out", out, "--device", "cpu", *more)

    def export(self, checkpoint: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
        self.run("export", "--checkpoint", checkpoint, "--out", out)
        return out

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        out = self.folder / "batch.safetensors"
        self.run("data", "batch", "--recipe", self.recipe, "--step", step, "--out", out)
        return load_file(out)


def randomise_gates(checkpoint: pathlib.Path) -> None:
    """Random A in ±1 and W_dt of deviation 1 in a checkpoint before the first step; the checksums of what is edited are dropped."""
    generator = torch.Generator().manual_seed(5)
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    for name in sorted(weights):
        shape = weights[name].shape
        if name.endswith("self_attn.a"):
            weights[name] = 2 * torch.rand(shape, generator=generator) - 1
        elif name.endswith("dt_proj.weight"):
            weights[name] = torch.randn(shape, generator=generator)
    save_file(weights, path)
    state_path = checkpoint / "state.json"
    state = json.loads(state_path.read_text())
    for name in ("model.safetensors", "state.json"):
        state["checksums"].pop(name, None)
    state_path.write_text(json.dumps(state))


def later_key_stays(topk):
    """torch.topk, of equal values the one with the higher index first."""

    def stable_topk(values, k, dim=-1, largest=True, sorted=True):
        if dim != -1 or not largest:
            return topk(values, k, dim=dim, largest=largest, sorted=sorted)
        order = torch.sort(values.flip(-1), dim=-1, descending=True, stable=True)
        indices = values.shape[-1] - 1 - order.indices[..., :k]
        return torch.return_types.topk((order.values[..., :k], indices))

    return stable_topk


@contextlib.contextmanager
def ties(defined: bool):
    original = torch.topk
    if defined:
        torch.topk = later_key_stays(original)
    try:
        yield
    finally:
        torch.topk = original


def torch_steps(model, batches, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    results = []
    for step, batch in enumerate(batches):
        tokens, labels = batch["tokens"].long(), batch["labels"].long()
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="mean"
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * learning_rate_factor(step, steps)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def load(folder: pathlib.Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", torch_dtype=torch.float32
    ).train()


def compare(program: str, folder: pathlib.Path, kind: str, steps: int, defined_ties: bool) -> float:
    sieve = Sieve(program, folder, kind, steps)
    run = folder / kind
    sieve.train(run)
    if kind == "dma":
        start = run / "checkpoint" / "step-0"
        randomise_gates(start)
        run = folder / f"{kind}-random"
        sieve.train(run, "--resume-from", start)
    first = sieve.export(run / "checkpoint" / "step-0", folder / f"{kind}-first")
    last = sieve.export(run / "checkpoint" / f"step-{steps}", folder / f"{kind}-last")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ours = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in ours] == list(range(1, steps + 1)), "one line a step"

    model = load(first)
    batches = [sieve.batch(step) for step in range(1, steps + 1)]
    rows, length = batches[0]["tokens"].shape
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    with ties(defined_ties):
        theirs = torch_steps(model, batches, steps)

    print(f"\n{kind}: {type(model).__name__}, {rows} rows of {length} tokens, {min(labels)} to {max(labels)} labels a step")
    print("step  loss (sieve)  loss (torch)  difference   norm (sieve)  norm (torch)")
    for line, (loss, norm) in zip(ours, theirs):
        print(
            f"{line['step']:4d}  {line['loss']:12.7f}  {loss:12.7f}  {line['loss'] - loss:+10.1e}  "
            f"{line['grad_norm']:13.6f} {norm:13.6f}"
        )
    largest = max(abs(line["loss"] - loss) for line, (loss, _) in zip(ours, theirs))
    trained = load(last).state_dict()
    moved = load(first).state_dict()
    weights = max((trained[name] - value).abs().max().item() for name, value in model.state_dict().items())
    travelled = max((trained[name] - value).abs().max().item() for name, value in moved.items())
    print(f"largest difference of a loss {largest:.1e}; of a final weight {weights:.1e}, where weights moved by up to {travelled:.1e}")
    return largest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--kind", choices=["mha", "dma"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-ties", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    kinds = [arguments.kind] if arguments.kind else ["mha", "dma"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        program, steps = arguments.sieve, arguments.steps
        largest = max(compare(program, folder, kind, steps, not arguments.torch_ties) for kind in kinds)
    if not largest <= TOLERANCE:
        sys.exit(f"a loss differs by {largest:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
