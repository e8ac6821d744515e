"""Figure 5 of the DMA paper (arXiv:2508.02124, section 5.2): MQAR accuracy by length, width and kind of attention.

    python3 tests/python/mqar_figure.py --sieve target/release/sieve --out OUT --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 tests/python/mqar_figure.py --out OUT --draw docs/mqar.svg

Run from the repository's root. Each run trains recipes/mqar_mha.toml with one kind of attention on samples of LENGTH
tokens with LENGTH / 16 pairs, and easier kinds of samples beside them, then `sieve eval mqar` asks 200 unseen samples.
A window, DMA's slots and what NSA reads are a quarter of the length. OUT/mqar.jsonl gets a line for each finished run;
runs that have one are not repeated, so a call that was cut off resumes. A device named twice takes two runs at a time.
The table has the mean over the seeds, and every seed. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import threading
import time

from learning_table import on_devices

LENGTHS, WIDTHS = [64, 256, 1024, 2048], [64, 128, 256]
RATES = {64: 3e-3, 128: 2e-3, 256: 1e-3}
VOCABULARY = 8192
COLOURS = ["#1b6ca8", "#c0392b", "#e08a1e", "#7d3c98", "#2e8b57", "#7f8c8d", "#000000"]


def dma(kept, local, bias, recency):
    return [f"attention.keep_window_size={kept}", f"attention.local_window_size={local}", f"attention.bias={bias}",
            f"attention.recency={recency}", "attention.kind=dma"]


def nsa(kept):
    """A quarter of the keys: half of them in the window, half in chosen blocks of eight and the compressed ones."""
    block = 8 if kept < 128 else 32
    return ["attention.kind=nsa", f"attention.compress_block_size={block}", f"attention.compress_stride={block // 2}",
            "attention.compress=mlp", "attention.compress_hidden_size=64", f"attention.select_block_size={block}",
            f"attention.num_selected_blocks={max(kept // 2 // block, 3)}", f"attention.window_size={kept // 2}",
            "attention.shared_kv=true"]


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
}


def settings(kind, length, width, seed, steps):
    """Keys of one run. Two thirds of the rows hold easier samples: shorter ones, or of a small vocabulary."""
    lengths = [size for size in (64, 256, 1024, 2048) if size <= length]
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
        f"model.num_attention_heads={heads}", f"model.num_key_value_heads={heads}", f"model.head_dim=64",
        f"model.initializer_range={0.1 if width == 64 else 0.06}", f"optimizer.lr={RATES[width]}",
        f"training.steps={steps}", f"lr_scheduler.warmup_steps={max(steps // 40, 1)}", f"checkpoint.interval={steps}", f"validation.interval={steps}",
        f"training.seed={seed}", *KINDS[kind](length // 4, width),
    ]


def finished(out):
    path = out / "mqar.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["kind"], row["length"], row["width"], row["seed"]): row for row in rows}


def run(job, runs, arguments, out):
    """The line of one run, or None: at the deadline, or where a command failed (its log says why)."""
    kind, length, width, seed = job
    folder = out / f"{kind.replace(' ', '-')}-{length}-{width}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # cut off before
    began = time.monotonic()
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        command = [arguments.sieve, "train", "--recipe", "recipes/mqar_mha.toml", "--out", str(folder)]
        steps = arguments.steps[LENGTHS.index(length)]
        command += [part for key in settings(kind, length, width, seed, steps) for part in ("--set", key)]
        if runs.run(command, log, log) != 0:
            return None
        seconds = time.monotonic() - began
        report = pathlib.Path(f"{folder}.eval.json")
        command = [arguments.sieve, "eval", "mqar", "--checkpoint", str(folder), "--kinds", f"{length}:{length // 16}",
                   "--samples", "200", "--json"]
        with open(report, "w", encoding="utf-8") as output:
            if runs.run(command, output, log) != 0:
                return None
    answers = json.loads(report.read_text())
    return {"kind": kind, "length": length, "width": width, "seed": seed, "steps": steps, "seconds": round(seconds, 1),
            "accuracy": answers["kinds"][0]["accuracy"]}


def by_cell(rows):
    cells = {}
    for kind, length, width, seed in sorted(rows, key=lambda key: key[3]):
        cells.setdefault((kind, length, width), []).append(rows[kind, length, width, seed]["accuracy"])
    return cells


def table(rows):
    cells = by_cell(rows)
    print("| length, pairs | width | " + " | ".join(KINDS) + " |\n|---|---|" + "---|" * len(KINDS))
    for length in LENGTHS:
        for width in WIDTHS:
            found = [cells.get((kind, length, width), []) for kind in KINDS]
            texts = [f"{100 * statistics.mean(x):.1f} ({', '.join(f'{100 * y:.1f}' for y in x)})" if x else ""
                     for x in found]
            print(f"| {length}, {length // 16} | {width} | " + " | ".join(texts) + " |")


def drawn(rows):
    """One panel a width: accuracy over length, a line a kind, a dot a seed."""
    panel, height, left, top, bottom = 300, 270, 52, 34, 46
    cells, parts = by_cell(rows), []
    for number, width in enumerate(WIDTHS):
        at = number * panel
        across = lambda length: at + left + 10 + LENGTHS.index(length) * (panel - left - 40) / (len(LENGTHS) - 1)
        up = lambda accuracy: height - bottom - accuracy * (height - top - bottom)
        parts.append(f'<text x="{at + panel / 2}" y="18" text-anchor="middle" font-weight="bold">width {width}</text>')
        for tick in (0, 0.25, 0.5, 0.75, 1):
            parts.append(f'<line x1="{at + left}" x2="{at + panel - 18}" y1="{up(tick)}" y2="{up(tick)}" stroke="#ddd"/>')
            parts.append(f'<text x="{at + left - 6}" y="{up(tick) + 4}" text-anchor="end">{100 * tick:.0f} %</text>')
        for length in LENGTHS:
            parts.append(f'<text x="{across(length)}" y="{height - bottom + 16}" text-anchor="middle">{length}</text>')
        label = f'<text x="{at + panel / 2 + 10}" y="{height - bottom + 32}" text-anchor="middle">tokens of a sample</text>'
        parts.append(label)
        for kind, colour in zip(KINDS, COLOURS):
            points = [(length, cells[kind, length, width]) for length in LENGTHS if (kind, length, width) in cells]
            line = " ".join(f"{across(length):.1f},{up(statistics.mean(found)):.1f}" for length, found in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            aside = 3 * (list(KINDS).index(kind) - 3)
            parts += [f'<circle cx="{across(length) + aside:.1f}" cy="{up(one):.1f}" r="2.5" fill="{colour}"/>'
                      for length, found in points for one in found]
    for number, (kind, colour) in enumerate(zip(KINDS, COLOURS)):
        x = 20 + number * 125
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="{height + 2}" y2="{height + 2}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 23}" y="{height + 6}">{kind}</text>')
    size = f'width="{panel * len(WIDTHS)}" height="{height + 20}" viewBox="0 0 {panel * len(WIDTHS)} {height + 20}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", help="the program; without it nothing is trained")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the runs and of mqar.jsonl")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", nargs=4, type=int, default=[6000] * 4, help="of 8192 tokens, for each of the lengths")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this time; the next call resumes")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="one run at a time each: cuda:0 cuda:1 …, or cpu")
    parser.add_argument("--draw", type=pathlib.Path, help="an SVG of what is finished")
    arguments = parser.parse_args()
    arguments.deadline = time.monotonic() + arguments.seconds
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows, lock = finished(out), threading.Lock()
    jobs = [(kind, length, width, seed) for length in arguments.lengths for seed in arguments.seeds
            for width in arguments.widths for kind in arguments.kinds]

    def work(job, runs):
        row = run(job, runs, arguments, out)
        with lock:
            print(row or f"{job}: not finished, see its log", flush=True)
            if row:
                rows[job] = row
                with open(out / "mqar.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

    if arguments.sieve:
        on_devices([job for job in jobs if job not in rows], arguments, out, work)
    table(rows)
    missing = [job for job in jobs if job not in rows]
    if missing:
        print(f"{len(missing)} of {len(jobs)} runs not finished")
    if arguments.draw:
        arguments.draw.write_text(drawn(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
