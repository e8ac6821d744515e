"""Thirty training steps of Sieve repeated by PyTorch, from the same weights and batches.

usage, from the repository's root; NAME is mha, dma or one of those that plain_models.py has:
    train_parity.py [--sieve target/release/sieve] [--kind NAME] [--steps 30] [--muon] [--keep DIR]

Sieve trains a small model on this repository's Rust files, one document a row, and writes its weights before the first step.
`sieve data batch` hands over the tokens and labels of each step; then PyTorch takes the same steps on the CPU: AdamW
with decay on tensors of rank 2, gradient clipping, and the warm-up, stay, decay schedule, each written again here. With
--muon both train the matrices of the blocks with Muon (mha and dma alone).

mha, dma   transformers' Qwen3 and Doge in float32, from what `sieve export` writes. For DMA the gates A and the weights
           W_dt are replaced by random ones first, so that the mask is no sliding window.
others     plain_models.py in float64, from the checkpoint itself. Sieve writes a checkpoint after every step: from its
           weights before a step PyTorch computes the gradient of each tensor, and Sieve's comes out of the first
           moments before and after.

Doge keeps the keys that torch.topk returns, and torch.topk promises no order among equal scores. Equal tokens have equal
scores in the first layer, so ties are the rule in real text. Here, as in Sieve, the later key stays; --torch-ties leaves the
choice to torch.topk.

Prints the losses of every step and the largest differences; exit code 1 when a loss differs by more than 1e-3, of others
than mha and dma by more than 1e-5, or one of their gradients by more than 1e-3 of its norm (5e-2 in steps in which two blocks
are equally important to f32's last digits).
"""

import argparse
import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import torch
import transformers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
from kinds import of_blocks_alone
from plain_models import PlainModel
from runs import metrics, steps_of
from safetensors.torch import load_file, save_file

# Of a loss: mha and dma in float32, the others in float64.
TOLERANCE, PLAIN_TOLERANCE = 1e-3, 1e-5
# Of a gradient's norm; and where a choice of blocks hangs on less than f32 holds: one query may read another block.
GRADIENT_TOLERANCE = {"clear": 1e-3, "near tie": 5e-2}
NEAR_TIE = 4e-7
BETA1, MAX_NORM = 0.9, 0.8
INDEX_LOSS_WEIGHT = 0.5
ATTENTION = {
    "mha": 'kind = "mha"',
    "dma": 'kind = "dma"\nkeep_window_size = 24\npreset = "paper"',
    "mla": 'kind = "mla"\nkv_lora_rank = 32\nqk_rope_head_dim = 8',
    "nsa": """kind = "nsa"
compress = "mlp"
compress_hidden_size = 24
compress_block_size = 8
compress_stride = 4
select_block_size = 8
num_selected_blocks = 4
window_size = 16""",
    "infllm_v2": """kind = "infllm_v2"
compress_block_size = 8
compress_stride = 4
select_block_size = 8
num_selected_blocks = 4
num_local_blocks = 2""",
    **{kind: f'kind = "{kind}"\nselect_block_size = 8\nnum_selected_blocks = 3' for kind in of_blocks_alone()},
    "msa": f"""kind = "msa"
select_block_size = 8
num_selected_blocks = 3
index_loss_weight = {INDEX_LOSS_WEIGHT}""",
}
ATTENTION["msa_qsa"] = ATTENTION["msa"] + '\nindexer = "qsa"'
ATTENTION["msa_shared"] = ATTENTION["msa"]

# Kinds that plain_models.py has.
PLAIN = ("mla", "nsa", "infllm_v2", *of_blocks_alone(), "msa", "msa_qsa", "msa_shared")

RECIPE = """
[model]
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = {kv_heads}
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 96
residual_scale = {residual_scale}
{layers}
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
name = "{optimizer}"
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
keep_latest_k = 0
interval = {interval}
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

    def __init__(self, program: str, folder: pathlib.Path, kind: str, steps: int, optimizer: str = "AdamW") -> None:
        """Writes the recipe of `kind` to `folder`, with a checkpoint after every step for what plain_models.py has."""
        self.program, self.folder = program, folder
        self.recipe = folder / f"{kind}.toml"
        self.recipe.write_text(
            RECIPE.format(
                attention=ATTENTION[kind],
                folder=folder,
                optimizer=optimizer,
                steps=steps,
                # Doge always has residual scales, and trains them.
                residual_scale="true" if kind == "dma" else "false",
                # The indexer of the first layer learns the attention of all three.
                layers='layer_types = ["sparse", "shared", "shared"]' if kind == "msa_shared" else "",
                kv_heads=4 if kind == "mla" else 2,
                interval=1 if kind in PLAIN else steps,
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
    """In a `with` block torch.topk keeps the later of equal keys; where ties are not `defined` it stays torch's own."""
    original = torch.topk
    if defined:
        torch.topk = later_key_stays(original)
    try:
        yield
    finally:
        torch.topk = original


def indexed_loss(model, batch):
    """Cross-entropy, and the indexers' loss, the mean over tokens besides padding: a row's first document."""
    tokens, labels = batch["tokens"].long(), batch["labels"].long()
    loss, divergence, count = 0.0, 0.0, 0
    for row, starts in enumerate(batch["doc_start"].tolist()):
        end = next((start for start in starts if start > 0), len(starts))
        logits, targets = model(tokens[row : row + 1, :end])[0], labels[row, :end]
        loss += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        divergence, count = divergence + model.divergence(), count + end
    loss = loss / (labels != -100).sum()
    return loss, loss + INDEX_LOSS_WEIGHT * divergence / count


def mean_loss(model, batch):
    """What is logged, and what gradients are of."""
    if hasattr(getattr(getattr(model, "layers", [None])[0], "self_attn", None), "indexer"):
        return indexed_loss(model, batch)
    tokens, labels = batch["tokens"].long(), batch["labels"].long()
    logits = model(tokens) if isinstance(model, PlainModel) else model(tokens, use_cache=False).logits
    logits, labels = logits.flatten(0, 1), labels.flatten()
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")
    return loss, loss


class Muon:
    """Muon with decay 0.1 (arXiv:2502.16982): orthogonalised Nesterov momentum at AdamW's root mean square."""

    def __init__(self, matrices):
        self.momenta = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Decays each matrix and moves it by its gradients' momentum, made orthogonal in five iterations."""
        for matrix, momentum in self.momenta:
            momentum.mul_(BETA1).add_(matrix.grad)
            update = matrix.grad + BETA1 * momentum
            tall = update.shape[0] > update.shape[1]
            x = (update.T if tall else update) / update.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
            x = (x.T if tall else x) * 0.2 * max(matrix.shape) ** 0.5
            matrix.mul_(1 - lr * 0.1).sub_(x, alpha=lr)


def torch_steps(model, batches, steps: int, with_muon: bool = False) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    named = [(with_muon and "layers." in name and p.ndim == 2 and min(p.shape) >= 32, p) for name, p in model.named_parameters()]
    muon = Muon([p for is_matrix, p in named if is_matrix])
    decayed = [p for is_matrix, p in named if p.ndim >= 2 and not is_matrix]
    others = [p for _, p in named if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(BETA1, 0.95), eps=1e-8)
    results = []
    for step, batch in enumerate(batches):
        loss, total = mean_loss(model, batch)
        model.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * learning_rate_factor(step, steps)
        optimizer.step()
        muon.step(1e-3 * learning_rate_factor(step, steps))
        results.append((loss.item(), norm.item()))
    return results


def load(folder: pathlib.Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", torch_dtype=torch.float32
    ).train()


def largest_loss_difference(run: pathlib.Path, theirs: list[tuple[float, float]]) -> float:
    """Prints both losses and gradient norms step by step, `theirs` as `torch_steps` returns them;
    returns the largest difference of a loss."""
    ours = steps_of(metrics(run))
    assert [line["step"] for line in ours] == list(range(1, len(theirs) + 1)), "one line a step"
    print("step  loss (sieve)  loss (torch)  difference   norm (sieve)  norm (torch)")
    for line, (loss, norm) in zip(ours, theirs):
        print(
            f"{line['step']:4d}  {line['loss']:12.7f}  {loss:12.7f}  {line['loss'] - loss:+10.1e}  "
            f"{line['grad_norm']:13.6f} {norm:13.6f}"
        )
    return max(abs(line["loss"] - loss) for line, (loss, _) in zip(ours, theirs))


def gradient_differences(model, checkpoint, batches) -> list[tuple[str, int, str, float]]:
    """Kind of step, step, tensor, and the difference of its clipped gradient as a share of its norm; each from Sieve's
    own weights before the step."""
    apart, before = [], {}
    for step, batch in enumerate(batches):
        weights = load_file(checkpoint(step) / "model.safetensors")
        model.load_state_dict({name: value.double() for name, value in weights.items()})
        model.zero_grad()
        mean_loss(model, batch)[1].backward()
        kind = "near tie" if model.narrowest_choice() < NEAR_TIE else "clear"
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        moments = load_file(checkpoint(step + 1) / "optimizer.safetensors")
        after = {name: moments[f"{name}.exp_avg"].double() for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            theirs = (after[name] - BETA1 * before.get(name, 0.0)) / (1 - BETA1)
            assert theirs.shape == parameter.grad.shape, name
            # QSA's scores may all be below 0, and then no indexer has a gradient.
            norm = parameter.grad.norm().item() or 1e-4
            difference = (theirs - parameter.grad).norm().item() / norm
            apart.append((kind, step + 1, name, difference))
        before = after
    return apart


def compare_plain(program: str, folder: pathlib.Path, kind: str, steps: int) -> list[str]:
    """Losses, gradients and final weights beside those of plain_models.py; what is out of tolerance, in words."""
    sieve, run = Sieve(program, folder, kind, steps), folder / kind
    sieve.train(run)
    checkpoint = lambda step: run / "checkpoint" / f"step-{step}"
    config = tomllib.loads((checkpoint(steps) / "config.toml").read_text())
    weights = load_file(checkpoint(0) / "model.safetensors")
    norms = ", norms of whole queries and keys" if "layers.0.self_attn.q_norm.weight" in weights else ""
    print(f"\n{kind}: plain PyTorch in float64{norms}")
    batches = [sieve.batch(step) for step in range(1, steps + 1)]
    model = PlainModel(config["model"], config["attention"], weights)
    loss = largest_loss_difference(run, torch_steps(model, batches, steps))
    last = load_file(checkpoint(steps) / "model.safetensors")
    drift = max((last[name].double() - value).abs().max().item() for name, value in model.state_dict().items())
    apart = gradient_differences(model, checkpoint, batches)
    print(f"largest difference of a loss {loss:.1e}; of a final weight {drift:.1e}")
    for of_step in GRADIENT_TOLERANCE:
        of_kind = [(difference, step, name) for kind_of, step, name, difference in apart if kind_of == of_step]
        if of_kind:
            difference, step, name = max(of_kind)
            count = len({step for _, step, _ in of_kind})
            where = f"{name}, step {step}; {count} steps: {of_step}"
            print(f"largest difference of a gradient {difference:.1e} of its norm ({where})")
    told = [f"{kind}: a loss differs by {loss:.1e}"] if not loss <= PLAIN_TOLERANCE else []
    return told + [
        f"{kind}: the gradient of {name} in step {step} differs by {difference:.1e} of its norm"
        for of_step, step, name, difference in apart
        if not difference <= GRADIENT_TOLERANCE[of_step]
    ]


def compare(program: str, folder: pathlib.Path, kind: str, steps: int, defined_ties: bool, muon: bool) -> list[str]:
    """Trains with Sieve, repeats it in PyTorch and returns what is out of tolerance, in words. defined_ties: the later
    of equal keys stays, as in Sieve; muon: matrices of blocks by Muon."""
    if kind in PLAIN:
        return compare_plain(program, folder, kind, steps)
    sieve = Sieve(program, folder, kind, steps, "Muon" if muon else "AdamW")
    run = folder / kind
    sieve.train(run)
    if kind == "dma":
        start = run / "checkpoint" / "step-0"
        randomise_gates(start)
        run = folder / f"{kind}-random"
        sieve.train(run, "--resume-from", start)
    first = sieve.export(run / "checkpoint" / "step-0", folder / f"{kind}-first")
    last = sieve.export(run / "checkpoint" / f"step-{steps}", folder / f"{kind}-last")

    model = load(first)
    batches = [sieve.batch(step) for step in range(1, steps + 1)]
    rows, length = batches[0]["tokens"].shape
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    with ties(defined_ties):
        theirs = torch_steps(model, batches, steps, muon)

    print(f"\n{kind}: {type(model).__name__}, {rows} rows of {length} tokens, {min(labels)} to {max(labels)} labels a step")
    largest = largest_loss_difference(run, theirs)
    trained = load(last).state_dict()
    moved = lambda other: max((trained[name] - x).abs().max().item() for name, x in other.state_dict().items())
    weights, travelled = moved(model), moved(load(first))
    print(f"largest difference of a loss {largest:.1e}; of a final weight {weights:.1e}, where weights moved by up to {travelled:.1e}")
    return [f"{kind}: a loss differs by {largest:.1e}"] if not largest <= TOLERANCE else []


def main() -> None:
    """Compares one kind, or all of them, and ends with what is out of tolerance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--kind", choices=list(ATTENTION))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--muon", action="store_true", help="mha and dma with optimizer.name = Muon")
    parser.add_argument("--torch-ties", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    kinds = [arguments.kind] if arguments.kind else [kind for kind in ATTENTION if not (arguments.muon and kind in PLAIN)]
    if arguments.muon and any(kind in PLAIN for kind in kinds):
        parser.error("--muon is for --kind mha and dma")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        program, steps = arguments.sieve, arguments.steps
        told = [words for kind in kinds for words in compare(program, folder, kind, steps, not arguments.torch_ties, arguments.muon)]
    if told:
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
