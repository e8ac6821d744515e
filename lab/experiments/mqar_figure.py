"""Figure 5 of the DMA paper (arXiv:2508.02124, section 5.2): MQAR accuracy by length, width and kind of attention.

    python3 lab/experiments/mqar_figure.py --sieve target/release/sieve --out OUT --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 lab/experiments/mqar_figure.py --out OUT --draw lab/docs/mqar.svg

Run from the repository's root. Each run trains lab/recipes/mqar_mha.toml with one kind of attention on samples of LENGTH
tokens with LENGTH / 16 pairs, and easier kinds of samples beside them, then `sieve eval mqar` asks 200 unseen samples.
A window, DMA's slots and what NSA, MSA (without its warm-up) and other kinds of chosen blocks read are a quarter of the
length.
OUT/mqar.jsonl gets a line for each finished run; runs that have one are not repeated, so a call that was cut off
resumes. A device named twice takes two runs at a time. The table has the mean over the seeds, and every seed.

    python3 lab/experiments/mqar_figure.py --sieve target/release/sieve --out OUT --hard 12000 --seeds 0 1 2 \\
      --kinds "DMA as published" --devices cuda:0 cuda:0 cuda:0

trains the hard form instead: 2048 tokens, 512 pairs, recipes/mqar_hard_*.toml, whose learning rate decays over the
steps of --hard. After each eighth of them `sieve eval mqar` asks 100 unseen samples, and OUT/mqar_hard.jsonl gets a
line; a run that answers 99 % ends there. Needs nothing but Python.
"""

import json
import pathlib
import shutil
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
import kinds  # noqa: E402
from runs import (Unfinished, chart, evaluated, finished, named, parsed, parser_of, saved_steps, sets, table_text,
                  train, train_missing, trained)

LENGTHS, WIDTHS = [64, 256, 1024, 2048], [64, 128, 256]
RATES = {64: 3e-3, 128: 2e-3, 256: 1e-3}
VOCABULARY = 8192
KEY, HARD_KEY = ("kind", "length", "width", "seed"), ("kind", "seed", "steps", "step")


def dma(kept, local, bias, recency):
    return [f"attention.keep_window_size={kept}", f"attention.local_window_size={local}", f"attention.bias={bias}",
            f"attention.recency={recency}", "attention.kind=dma"]


def block_size(kept):
    return 8 if kept < 128 else 32


def nsa(kept):
    """A quarter of the keys: half of them in the window, half in chosen blocks of eight and the compressed ones."""
    block = block_size(kept)
    return ["attention.kind=nsa", f"attention.compress_block_size={block}", f"attention.compress_stride={block // 2}",
            "attention.compress=mlp", "attention.compress_hidden_size=64", f"attention.select_block_size={block}",
            f"attention.num_selected_blocks={max(kept // 2 // block, 3)}", f"attention.window_size={kept // 2}",
            "attention.shared_kv=true"]


def blocks(kind, kept, *settings):
    """A quarter of the keys in blocks of the same size as NSA's."""
    block = block_size(kept)
    return [f"attention.kind={kind}", f"attention.select_block_size={block}",
            f"attention.num_selected_blocks={kept // block}", *settings]


def infllm_v2(kept):
    block = block_size(kept)
    return blocks("infllm_v2", kept, f"attention.compress_block_size={block}",
                  f"attention.compress_stride={block // 2}", f"attention.num_local_blocks={kept // block // 2}")


# Name, then settings for a quarter of the length and a width.
KINDS = {
    "dense": lambda kept, width: ["attention.kind=mha"],
    "window": lambda kept, width: ["attention.kind=swa", f"attention.sliding_window={kept}"],
    "window + slope": lambda kept, width: dma(kept, kept, "linear", "slope"),
    "MLA": lambda kept, width: ["attention.kind=mla", f"attention.kv_lora_rank={width // 2}",
                                "attention.qk_rope_head_dim=16", "attention.qk_norm=true"],
    "NSA": lambda kept, width: nsa(kept),
    "DMA as published": lambda kept, width: dma(kept, 0, "exp", "none"),
    "DMA": lambda kept, width: dma(kept, kept // 8, "linear", "slope"),
    "InfLLM-V2": lambda kept, width: infllm_v2(kept),
    **{kinds.label(kind): lambda kept, width, kind=kind: blocks(kind, kept) for kind in kinds.of_blocks_alone()},
    "MSA": lambda kept, width: blocks("msa", kept),
}


# Kind of the hard form: the end of the name of its recipe, then settings.
HARD = {"dense": ["mha"], "window": ["swa"], "CoWindow": ["cowa"], "NSA": ["nsa"], "DMA as published": ["dma"],
        "InfLLM-V2": ["infllm_v2"],
        **{kinds.label(kind): [kind] for kind in kinds.of_blocks_alone()},
        "MSA": ["msa"], "MSA, 4 local blocks": ["msa", "attention.num_local_blocks=4"],
        # A query of each KV head reads 512 keys, as those of the other sparse kinds do: 4, 16, and a band of 492.
        "CoWindow, 512 keys": ["cowa", "attention.sink_tokens=4", "attention.near_window=16"]}


def settings(kind, length, width, seed, steps):
    """Keys of one run. Two thirds of the rows hold easier samples: shorter ones, or of a small vocabulary."""
    lengths = [size for size in LENGTHS if size <= length]
    seq_lens, vocab_sizes = [16, 16, 64, *lengths], [64, VOCABULARY, 256, *[VOCABULARY] * len(lengths)]
    pairs = [2, 2, *(size // 16 for size in seq_lens[2:])]
    # Rows of each kind of samples: an eighth for the short ones, three eighths or more for the longest.
    shares = [1, 1, 1, *[1] * (len(lengths) - 1), 3]
    samples = [share * 64_000_000 // size for share, size in zip(shares, seq_lens)]
    row = max(256, length)
    mqar = {"vocab_size": VOCABULARY, "vocab_sizes": vocab_sizes, "seq_lens": seq_lens, "num_pairs": pairs,
            "num_samples": samples, "num_test_samples": 200}
    inline = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in mqar.items()) + "}"
    heads = width // 64  # heads of 64: the kernels of NSA take 64 and 128
    return [
        f"data.mqar={inline}", f"training.seq_len={row}", f"training.local_batch_size={8192 // row}",
        f"model.max_position_embeddings={row}", f"model.hidden_size={width}", f"model.intermediate_size={3 * width}",
        f"model.num_attention_heads={heads}", f"model.num_key_value_heads={heads}", "model.head_dim=64",
        f"model.initializer_range={0.1 if width == 64 else 0.06}", f"optimizer.lr={RATES[width]}",
        f"training.steps={steps}", f"lr_scheduler.warmup_steps={max(steps // 40, 1)}", f"checkpoint.interval={steps}",
        f"validation.interval={steps}", f"training.seed={seed}", *KINDS[kind](length // 4, width),
    ]


def next_parts(rows, arguments):
    """The next eighth of each run of the hard form that has steps left and does not answer 99 % yet."""
    jobs = []
    for seed in arguments.seeds:
        for kind in [kind for kind in arguments.kinds if kind in HARD]:
            answered = of_run(rows, kind, seed, arguments.hard)
            step = max(answered, default=0)
            if step < arguments.hard and max(answered.values(), default=0) < 0.99:
                jobs.append((kind, seed, arguments.hard, min(step + max(arguments.hard // 8, 1), arguments.hard)))
    return jobs


def of_run(rows, kind, seed, steps):
    """Share of right answers by step."""
    return {key[3]: row["accuracy"] for key, row in sorted(rows.items()) if key[:3] == (kind, seed, steps)}


def run_part(job, runs, arguments):
    """Trains a run of the hard form up to a step and evaluates that checkpoint; returns its row: the names of HARD_KEY,
    and the share of right answers."""
    kind, seed, steps, step = job
    recipe, *of_kind = HARD[kind]
    folder = arguments.out / named("hard", kind, steps, seed)
    saved = max(saved_steps(folder), default=0)
    if not saved:
        shutil.rmtree(folder, ignore_errors=True)
    keys = [f"training.steps={steps}", f"training.seed={seed}", "training.deterministic=false",
            f"checkpoint.interval={steps}", f"validation.interval={steps}", *of_kind, *arguments.set]
    with open(f"{folder}.log", "a", encoding="utf-8") as log, open(f"{folder}.json", "w+", encoding="utf-8") as report:
        command = [arguments.sieve, "train", "--recipe", f"recipes/mqar_hard_{recipe}.toml", "--out", str(folder),
                   "--resume=auto", "--stop-after", str(step - saved), *sets(keys)]
        if saved < step and runs.run(command, log, log) != 0:
            raise Unfinished
        command = [arguments.sieve, "eval", "mqar", "--checkpoint", str(folder / f"checkpoint/step-{step}"), "--kinds",
                   "2048:512", "--samples", str(arguments.samples), "--json"]
        if runs.run(command, report, log) != 0:
            raise Unfinished
        report.seek(0)
        accuracy = json.load(report)["kinds"][0]["accuracy"]
    return {**dict(zip(HARD_KEY, job)), "accuracy": accuracy}


def print_hard_table(rows):
    """Prints a line a run of the hard form: right answers by step, and the step
    that reached 99 %. `rows`: by `HARD_KEY`."""
    lines = []
    for kind, seed, steps in sorted({key[:3] for key in rows}):
        answered = of_run(rows, kind, seed, steps)
        reached = [f"step {step}" for step, share in answered.items() if share >= 0.99] or ["not reached"]
        shares = ", ".join(f"{step}: {100 * share:.1f}" for step, share in answered.items())
        lines.append([kind, f"{seed}", f"{shares} (of {steps})", reached[0]])
    print(table_text(["attention", "seed", "share of right answers in %, by step", "99 %"], lines))


def run(job, runs, arguments):
    """The line of one run."""
    kind, length, width, seed = job
    folder, steps = arguments.out / named(*job), arguments.steps[LENGTHS.index(length)]
    keys = settings(kind, length, width, seed, steps) + arguments.set
    trained(folder, "lab/recipes/mqar_mha.toml", keys, runs, arguments)
    report = evaluated(folder, ["mqar", "--kinds", f"{length}:{length // 16}", "--samples", "200"], runs, arguments)
    return {**dict(zip(KEY, job)), "steps": steps, "accuracy": report["kinds"][0]["accuracy"]}


def by_cell(rows):
    cells = {}
    for kind, length, width, seed in sorted(rows, key=lambda key: key[3]):
        cells.setdefault((kind, length, width), []).append(rows[kind, length, width, seed]["accuracy"])
    return cells


def print_table(rows):
    """Prints a line a length and width: each kind's mean of right answers in %, and each seed's. `rows`: by `KEY`."""
    cells = by_cell(rows)
    lines = []
    for length in LENGTHS:
        for width in WIDTHS:
            shares = [cells.get((kind, length, width), []) for kind in KINDS]
            texts = [f"{100 * statistics.mean(x):.1f} ({', '.join(f'{100 * y:.1f}' for y in x)})" if x else ""
                     for x in shares]
            lines.append([f"{length}, {length // 16}", f"{width}", *texts])
    print(table_text(["length, pairs", "width", *KINDS], lines))


def drawn(rows):
    """One panel a width: accuracy over length, a line a kind, a dot a seed."""
    cells = by_cell(rows)
    return chart([
        (f"width {width}: accuracy in %", {
            kind: [(length, [100 * share for share in cells[kind, length, width]]) for length in LENGTHS
                   if (kind, length, width) in cells] for kind in KINDS}, LENGTHS, "tokens of a sample", "{:.0f}")
        for width in WIDTHS], list(KINDS))


def main():
    """Trains the runs of the figure, or of the hard form with --hard, that have no
    line yet, and prints all lines as a table."""
    parser = parser_of(__doc__, "mqar.jsonl", reads_text=False)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS | HARD))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", nargs=4, type=int, default=[6000] * 4, help="of 8192 tokens, for each of the lengths")
    parser.add_argument("--hard", type=int, metavar="STEPS", help="train and print the hard form, so many steps")
    parser.add_argument("--samples", type=int, default=100, help="of the hard form that are asked")
    arguments = parsed(parser)
    if arguments.hard:
        unknown = [kind for kind in arguments.kinds if kind not in HARD]
        if unknown and arguments.kinds != list(KINDS):
            parser.error(f"--hard: no recipe of {', '.join(unknown)}; there are {', '.join(HARD)}")
        path = arguments.out / "mqar_hard.jsonl"
        rows = finished(path, HARD_KEY)
        if arguments.sieve:
            train(lambda rows: next_parts(rows, arguments), run_part, arguments, path, rows)
        print_hard_table(rows)
        return
    if unknown := [kind for kind in arguments.kinds if kind not in KINDS]:
        parser.error(f"--kinds: {', '.join(unknown)} is of --hard alone")
    path = arguments.out / "mqar.jsonl"
    rows = finished(path, KEY)
    jobs = [(kind, length, width, seed) for length in arguments.lengths for seed in arguments.seeds
            for width in arguments.widths for kind in arguments.kinds]
    if arguments.sieve:
        train_missing(jobs, run, arguments, path, rows)
    print_table(rows)
    missing = [job for job in jobs if job not in rows]
    if missing:
        print(f"{len(missing)} of {len(jobs)} runs not finished")
    if arguments.draw:
        arguments.draw.write_text(drawn(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
