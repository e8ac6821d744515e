"""Trains the rows of docs/results.md, one process a GPU, goes on where it was cut off, and prints the table.

    python3 tests/python/learning_table.py --sieve target/release/sieve --text data/crates.jsonl --out OUT [--sets 8192 2048 recall]

Run from the repository's root. The text is that of tests/python/crates.lock (make_corpus.py --from). A run that has its last
validation is not run again; one that was cut off goes on from its last checkpoint. Needs nothing but Python.
"""

import argparse
import json
import os
import pathlib
import queue
import random
import statistics
import subprocess
import threading

from needle_corpus import document

SLOPE = ["attention.bias=linear", "attention.recency=slope"]
PUBLISHED = ["attention.bias=exp", "attention.recency=none", "attention.local_window_size=0"]
LONG = ["training.seq_len=8192", "training.local_batch_size=4"]


def dma(window, local, *settings):
    return [f"attention.keep_window_size={window}", f"attention.local_window_size={local}", *settings]


def window(size):
    return ["attention.kind=swa", f"attention.sliding_window={size}"]


# Set, then name of the row: settings on top of code_80m.toml, or of quickstart.toml for the set "recall".
ROWS = {
    "8192": {
        "dense": ["attention.kind=mha"],
        "window 1024": window(1024),
        "window 1024 + slope": dma(1024, 1024, *SLOPE),
        "DMA 1024, slope, r 128": dma(1024, 128, *SLOPE),
        "DMA 1024, slope, r 0": dma(1024, 0, *SLOPE),
        "DMA 1024, slope, r 512": dma(1024, 512, *SLOPE),
        "DMA 1024, slope, r 128, periods to 1024": dma(1024, 128, *SLOPE, "attention.longest_period=1024"),
        "DMA 1024, slope, r 128, periods to 65536": dma(1024, 128, *SLOPE, "attention.longest_period=65536"),
        "DMA 1024, slope, r 128, periods 256 to 16384":
            dma(1024, 128, *SLOPE, "attention.shortest_period=256", "attention.longest_period=16384"),
        "DMA 1024, linear, no recency, r 512": dma(1024, 512, "attention.bias=linear", "attention.recency=none"),
        "DMA 512, slope, r 128": dma(512, 128, *SLOPE),
        "DMA 2048, slope, r 128": dma(2048, 128, *SLOPE),
        "DMA 1024 as published": dma(1024, 0, *PUBLISHED),
        "DMA 1024, slope, r 128, 1 of 4 dense": dma(1024, 128, *SLOPE, 'model.layer_types=["dma","dma","dma","mha"]'),
        "window 1024 + slope, 1 of 4 dense": dma(1024, 1024, *SLOPE, 'model.layer_types=["dma","dma","dma","mha"]'),
        "window 1024, 1 of 4 dense": [*window(1024), 'model.layer_types=["swa","swa","swa","mha"]'],
    },
    "2048": {
        "dense": ["attention.kind=mha"],
        "window 1024": window(1024),
        "window 512": window(512),
        "window 512 + slope": dma(512, 512, *SLOPE),
        "DMA 512, slope, r 64": dma(512, 64, *SLOPE),
        "DMA 512, slope, r 0": dma(512, 0, *SLOPE),
        "DMA 1024 as published": dma(1024, 0, *PUBLISHED),
        "DMA 512 as published": dma(512, 0, *PUBLISHED),
    },
    "recall": {
        "dense": ["attention.kind=mha"],
        "window 128": window(128),
        "window 128 + slope": dma(128, 128, *SLOPE),
        "DMA 128, slope, r 32": dma(128, 32, *SLOPE),
        "DMA 128, slope, r 32, periods to 4096": dma(128, 32, *SLOPE, "attention.longest_period=4096"),
        "DMA 128, exp, r 32": dma(128, 32, *PUBLISHED[:2]),
        "DMA 128, linear, r 32": dma(128, 32, "attention.bias=linear", "attention.recency=none"),
        "DMA 128 as published": dma(128, 0, *PUBLISHED),
    },
}


def restated_numbers(path):
    """The documents of the set "recall", as JSON lines."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(12_000):
            file.write(json.dumps({"text": document(draw, draw.randrange(20, 60))}) + "\n")


def base(kind, arguments, out):
    """Recipe and settings that the rows of a set share."""
    text = out / "facts.jsonl" if kind == "recall" else arguments.text
    settings = [f'data.paths=["{text}"]', "data.format=jsonl", f'data.cache_dir="{out / ("data-" + kind)}"']
    if kind != "recall":
        return "recipes/code_80m.toml", settings + (LONG if kind == "8192" else []) + [f"training.steps={arguments.steps}"]
    steps = arguments.steps * 5 // 2
    return "recipes/quickstart.toml", settings + [
        "tokenizer.train.vocab_size=512", "model.max_position_embeddings=1024", "training.seq_len=1024",
        "training.local_batch_size=16", f"training.steps={steps}", "optimizer.lr=2e-3", f"validation.interval={max(steps // 4, 1)}",
    ]


def metrics(folder):
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []


def line(kind, name, folder):
    rows = metrics(folder)
    checks = [row for row in rows if row["kind"] == "validation"]
    steps = [row for row in rows if row["kind"] == "step"]
    if not checks or not steps:
        return f"{kind:7} {name:42} no metrics, see {folder}.log"
    mask = steps[-1].get("attention") or {}
    losses = " ".join(f"{row['step']}:{row['loss']:.4f}" for row in checks[1:])
    speed = statistics.median(row["tokens_per_second"] for row in steps)
    return (f"{kind:7} {name:42} {losses}  {checks[-1]['bits_per_byte']:.3f} bits per byte, {speed:,.0f} tokens/s, "
            f"density {mask.get('density', 1):.3f}, never seen {100 * mask.get('never_active', 0):.1f} %")


def train(job, device, arguments, out):
    kind, name, seed = job
    folder = out / f"{kind}-{name.replace(' ', '-').replace(',', '')}-{seed}"
    recipe, settings = base(kind, arguments, out)
    settings = settings + [f"training.seed={seed}"] + ROWS[kind][name]
    done = [row["step"] for row in metrics(folder) if row["kind"] == "validation"]
    wanted = int(next(value.split("=")[1] for value in settings if value.startswith("training.steps=")))
    if wanted not in done:
        command = [arguments.sieve, "train", "--recipe", recipe, "--out", str(folder), "--device", device]
        command += [part for setting in settings for part in ("--set", setting)]
        command += ["--resume"] if (folder / "checkpoint").exists() else []
        environment = dict(os.environ, XDG_CACHE_HOME=str(out / f"cache-{device.replace(':', '-')}"))
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
    return line(kind, f"{name}, seed {seed}", folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", required=True, help="the program")
    parser.add_argument("--text", required=True, type=pathlib.Path, help="crates.jsonl")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the runs")
    parser.add_argument("--sets", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1600, help="steps of the 80M runs; restated numbers take 2.5 times as many")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="one process each: cuda:0 cuda:1 …, or cpu")
    arguments = parser.parse_args()
    arguments.text = arguments.text.resolve()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if "recall" in arguments.sets and not (out / "facts.jsonl").exists():
        restated_numbers(out / "facts.jsonl")
    for kind in arguments.sets:  # tokenised once, before the runs share it
        recipe, settings = base(kind, arguments, out)
        subprocess.run([arguments.sieve, "data", "prepare", "--recipe", recipe]
                       + [part for setting in settings for part in ("--set", setting)], check=True)
    jobs = queue.Queue()
    for kind in arguments.sets:
        for seed in arguments.seeds:
            for name in ROWS[kind]:
                jobs.put((kind, name, seed))

    def work(device):
        while True:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                return
            print(train(job, device, arguments, out), flush=True)

    threads = [threading.Thread(target=work, args=(device,)) for device in arguments.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
