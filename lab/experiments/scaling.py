"""Figure 4 of the DMA paper (arXiv:2508.02124, section 5.1): loss against parameters and FLOPs, a line a kind of attention.

    python3 lab/experiments/make_corpus.py --from lab/experiments/crates_scaling.lock --out data/scaling.jsonl
    python3 lab/experiments/scaling.py --sieve target/release/sieve --text data/scaling.jsonl --out OUT \\
      --devices cuda:0 cuda:0 cuda:0 cuda:0 cuda:1 cuda:1 cuda:1 cuda:1
    python3 lab/experiments/scaling.py --out lab/rows --draw lab/docs/scaling.svg

Run from the repository's root. A run trains one kind at one size (millions of parameters besides the embedding, the same
for all kinds to 1 %: the feed-forward layers give up what a kind's attention takes) with 20 tokens a parameter, or fewer
where --max-tokens ends it (marked *), in rows of 2048, with windows and DMA's slots of 512. The text has 926 crates, 109M
tokens in this vocabulary, so that 20M parameters see it 3.7 times. The learning rate is the size's, times what the kind
wanted in lab/rows/rates.jsonl. OUT/scaling.jsonl gets a line for each finished run; runs that have one are not repeated. A
device named twice takes two runs at a time. The slope is nats by which the loss falls when parameters double, from a line
through the sizes that were trained in full. Needs nothing but Python.
"""

import json
import math
import shutil
import statistics
import subprocess

from learning_table import INFLLM_V2, MSA, NSA, OF_BLOCKS_ALONE, PUBLISHED, SLOPE, dma, window
from runs import chart, finished, named, parsed, parser_of, prepare, scores, sets, table_text, train_missing, trained

# Size in millions: layers, width, heads of 64, rate.
SIZES = {2: (4, 192, 3, 4e-3), 5: (6, 256, 4, 3e-3), 10: (8, 320, 5, 2e-3), 20: (10, 384, 6, 2e-3),
         80: (12, 768, 12, 1.5e-3)}
HALF = ["attention.num_selected_blocks=8"]


def of_attention(settings):
    return [setting for setting in settings if setting.startswith("attention.")]


# Kind: settings, and its best learning rate over dense attention's.
KINDS = {
    "dense": (["attention.kind=mha"], 1),
    "window": (window(512), 1),
    "window + slope": (dma(512, 512, *SLOPE), 1),
    "DMA as published": (dma(512, 0, *PUBLISHED), 1),
    "DMA": (dma(512, 64, *SLOPE), 1),
    "MLA": (["attention.kind=mla", "attention.qk_rope_head_dim=32", "attention.qk_norm=true"], 0.25),
    "NSA": (of_attention(NSA) + HALF + ["attention.compress_hidden_size=32", "attention.window_size=256"], 0.5),
    "InfLLM-V2": (INFLLM_V2 + HALF + ["attention.num_local_blocks=4"], 0.5),
    **{kind: (settings + HALF, 1) for kind, settings in OF_BLOCKS_ALONE.items()},
    "MSA": (of_attention(MSA) + HALF, 2),
}
KEY = ("kind", "size", "seed")


def shape(kind, size, intermediate):
    """Keys of the model."""
    layers, width, heads, _ = SIZES[size]
    keys = [f"model.num_hidden_layers={layers}", f"model.hidden_size={width}", f"model.num_attention_heads={heads}",
            f"model.num_key_value_heads={heads}", "model.head_dim=64", f"model.intermediate_size={intermediate}",
            'model.layer_types=["sparse"]', *KINDS[kind][0]]
    return keys + ([f"attention.kv_lora_rank={width // 2}"] if kind == "MLA" else [])


def plan(arguments, keys):
    command = [arguments.sieve, "plan", "--recipe", "lab/recipes/code_80m.toml", "--json"]
    done = subprocess.run(command + sets(keys), capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.decode()}")
    return json.loads(done.stdout)


def model(kind, size, arguments):
    """Keys of the model whose parameters besides the embedding are as near to dense attention's as the width of the
    feed-forward layers, a multiple of 8, allows."""
    layers, width, _, _ = SIZES[size]
    wanted = plan(arguments, shape("dense", size, 3 * width))["num_non_embedding"]
    parameters = plan(arguments, shape(kind, size, 3 * width))["num_non_embedding"]
    intermediate = 3 * width + round((wanted - parameters) / (3 * width * layers) / 8) * 8
    if intermediate < width:
        raise SystemExit(f"{kind} at {size}M leaves {intermediate} for the feed-forward layers")
    return shape(kind, size, intermediate)


def settings(kind, size, seed, arguments):
    """All keys of a run."""
    keys = model(kind, size, arguments) + arguments.set
    tokens = min(20 * plan(arguments, keys)["num_non_embedding"], arguments.max_tokens)
    rows = 8 if size < 10 else 16  # of 2048 tokens: small models want small steps
    steps = max(tokens // (rows * 2048), 2)
    rate = SIZES[size][3] * KINDS[kind][1]
    return keys + [
        "training.seq_len=2048", f"training.local_batch_size={rows}", f"training.steps={steps}", f"training.seed={seed}",
        f"optimizer.lr={rate}", f"lr_scheduler.warmup_steps={max(min(steps // 20, 200), 1)}",
        f"checkpoint.interval={max(steps // 4, 1)}", "checkpoint.keep_latest_k=1", f"validation.interval={steps}",
        "metrics.log_freq=50", "generation.max_new_tokens=1",
    ]


def text(arguments):
    cache = arguments.out / f"{arguments.text.stem}-{arguments.vocabulary}"
    return [f'data.paths=["{arguments.text}"]', f'data.cache_dir="{cache}"',
            f"tokenizer.train={{ vocab_size = {arguments.vocabulary}, sample_bytes = 40_000_000 }}"]


def run(job, runs, arguments):
    """The line of one run."""
    kind, size, seed = job
    folder = arguments.out / named(*job)
    keys = settings(kind, size, seed, arguments) + text(arguments)
    lines = trained(folder, "lab/recipes/code_80m.toml", keys, runs, arguments)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    ahead = plan(arguments, keys)
    return {**dict(zip(KEY, job)), **scores(lines), "parameters": ahead["num_non_embedding"],
            "tokens": ahead["num_tokens"], "flops": ahead["total_flops"]}


def cells(rows):
    """The runs of each kind and size."""
    by_cell = {}
    for (kind, size, _), row in sorted(rows.items(), key=lambda pair: pair[0][1:]):
        by_cell.setdefault((kind, size), []).append(row)
    return by_cell


def is_full(row):
    return row["tokens"] > 19.9 * row["parameters"]


def slope(points):
    """Slope of a line through points of log2 parameters and loss, and its standard error, which two points do not have."""
    xs, ys = [math.log2(x) for x, _ in points], [y for _, y in points]
    spread = sum((x - statistics.mean(xs)) ** 2 for x in xs)
    if spread == 0:
        return ""
    slope = sum((x - statistics.mean(xs)) * y for x, y in zip(xs, ys)) / spread
    left = [y - statistics.mean(ys) - slope * (x - statistics.mean(xs)) for x, y in zip(xs, ys)]
    error = f" ± {math.sqrt(sum(e * e for e in left) / (len(xs) - 2) / spread):.3f}" if len(xs) > 2 else ""
    return f"{slope:.3f}{error}"


def print_table(rows, arguments):
    """Prints a line a kind: losses of all seeds by size, and the slope over runs of
    20 tokens a parameter. `rows`: by `KEY`."""
    by_cell = cells(rows)
    lines = []
    for kind in arguments.kinds:
        runs = [by_cell.get((kind, size), []) for size in SIZES]
        losses = [", ".join(f"{row['loss']:.3f}{'' if is_full(row) else '*'}" for row in seeds) for seeds in runs]
        full = [(row["parameters"], row["loss"]) for seeds in runs for row in seeds if is_full(row)]
        lines.append([kind, *losses, slope(full) if full else ""])
    print(table_text(["attention", *(f"{size}M" for size in SIZES), "nats a doubling"], lines))
    print("\n* under-trained: fewer than 20 tokens a parameter; not in the slope")


def drawn(rows, arguments):
    """Loss over parameters and over FLOPs, a dot a seed, and its distance to dense attention's mean, where the published
    DMA would hide the other kinds."""
    by_cell = cells(rows)

    def lines(name, unit, loss=lambda row, size: row["loss"], kinds=arguments.kinds):
        runs = {kind: {size: by_cell[kind, size] for size in SIZES if (kind, size) in by_cell} for kind in kinds}
        return {kind: [(statistics.mean(row[name] for row in seeds) / unit, [loss(row, size) for row in seeds])
                       for size, seeds in sizes.items()] for kind, sizes in runs.items()}

    def behind(row, size):
        return row["loss"] - statistics.mean(dense["loss"] for dense in by_cell["dense", size])

    words = "millions of parameters besides the embedding"
    panels = [("validation loss, nats", lines("parameters", 1e6), None, words),
              ("validation loss, nats", lines("flops", 1e15), None, "PFLOPs of training")]
    near = [kind for kind in arguments.kinds if kind != "DMA as published"]
    if all(("dense", size) in by_cell for _, size in by_cell):
        panels.append(("nats behind dense attention", lines("parameters", 1e6, behind, near), None, words))
    return chart(panels, arguments.kinds)


def main():
    """Trains the runs without a line, the largest sizes first, then prints the table and draws the figure."""
    parser = parser_of(__doc__, "scaling.jsonl")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--max-tokens", type=int, default=434_000_000, help="four epochs of that text in this vocabulary")
    parser.add_argument("--vocabulary", type=int, default=4096)
    arguments = parsed(parser)
    path = arguments.out / "scaling.jsonl"
    rows = finished(path, KEY)
    if arguments.sieve:
        prepare(arguments, "lab/recipes/code_80m.toml", text(arguments) + ["training.seq_len=2048"])
        # The long runs first, so that none of them is alone at the end.
        jobs = [(kind, size, seed) for seed in arguments.seeds for size in sorted(arguments.sizes, reverse=True)
                for kind in arguments.kinds]
        train_missing(jobs, run, arguments, path, rows)
    print_table(rows, arguments)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
