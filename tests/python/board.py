"""The contest of docs/board.md: bits per byte on held-out crates after nine minutes on one GPU, from start to score.

    python3 tests/python/board.py --sieve target/release/sieve --text data/crates.jsonl --out OUT --devices cuda:0 cuda:1
    python3 tests/python/board.py --sieve target/release/sieve --text data/crates.jsonl --out OUT --tiny    (CPU, minutes)
    python3 tests/python/board.py --out docs --fill docs/board.md --draw docs/board.svg    (from docs/board.jsonl)

Run from the repository's root with a Python that has torch and transformers. A probe of --probe-steps steps measures
an entry's step and all else that it does, from which the steps of its runs follow. Of dense attention PyTorch scores the
probe's weights too: the two scores must agree. Probes and runs begin with empty caches of compiled kernels. A run that
takes longer than --minutes is void: it leaves no line, and the next takes fewer steps. OUT/board.jsonl gets a line for
each finished run; runs that have one are not repeated, and a run that was cut off begins again.
"""

import json
import pathlib
import shutil
import statistics
import sys
import time

from best_rates import KINDS as NAMES
from equal_time import best_rate
from learning_table import ROWS
from runs import (chart, curve, device_name, finished, metrics, named, on_devices, output_of, over_time, parsed,
                  parser_of, prepare, sets, steps_of, table_text, train)

RECIPE = "recipes/board_80m.toml"
PYTORCH = [sys.executable, "tests/gpu/rivals/board_torch.py"]
# Entry: its settings on top of RECIPE. The two hybrids are the best kinds of the longest runs in docs/results.md.
SIEVE = {
    **{kind: [*ROWS["8192"][NAMES[kind]], f"optimizer.lr={best_rate(kind, 8192)}"]
       for kind in ("dense", "window + slope, 1 of 4 dense", "DMA, 1 of 4 dense", "window + slope", "DMA")},
    "DMA, 1 of 4 dense, Muon": [*ROWS["8192"][NAMES["DMA, 1 of 4 dense"]], "optimizer.name=Muon", "optimizer.beta1=0.95",
                                "optimizer.lr=3e-3"],
}
ENTRIES = SIEVE | {"PyTorch, dense": [f"optimizer.lr={best_rate('dense', 8192)}"]}
DEFAULT = ["dense", "window + slope, 1 of 4 dense", "DMA, 1 of 4 dense", "PyTorch, dense"]
SEEDS = {8192: [0, 1, 2], 32768: [0]}  # by tokens of a row; a step has 32,768 tokens
TINY = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=4", "model.head_dim=32",
        "model.num_attention_heads=2", "model.num_key_value_heads=1", "tokenizer.train.vocab_size=512",
        "tokenizer.train.sample_bytes=1000000", "metrics.log_freq=2", "lr_scheduler.warmup_steps=10"]
KEY = ("entry", "length", "minutes", "seed")
MARGIN, TINY_MARGIN = 0.04, 0.6  # of the time: a GPU slows down as it warms up, and a CPU has other work
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-3}  # bits per byte between the two evaluations: f32, bf16


def succeeded(commands, name, runs):
    """Runs the commands in their order; the last one's output is the report in JSON. None where one of them failed."""
    with open(f"{name}.log", "a", encoding="utf-8") as log, open(f"{name}.eval.json", "w+", encoding="utf-8") as report:
        for command in commands:
            if runs.run(command, report if command == commands[-1] else log, log) != 0:
                return None
        report.seek(0)
        return json.load(report)


def attempt(job, folder, recipe, runs, arguments):
    """Trains and evaluates in an empty folder, with empty caches of kernels: the line of the run, or None where a command
    failed. `recipe` is the recipe with its settings, as both programs take them."""
    entry, length, _, _ = job
    for name in (folder, f"{folder}.cache"):
        shutil.rmtree(name, ignore_errors=True)
    for name in ("XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        runs.environment[name] = f"{folder}.cache/{name}"
    score = ["eval", "ppl", "--checkpoint", folder, "--recipe-validation", "--stride", str(length), "--json"]
    of_sieve = [[arguments.sieve, "train", *recipe, "--out", folder], [arguments.sieve, *score]]
    started = time.monotonic()
    report = succeeded(of_sieve if entry in SIEVE else [[*PYTORCH, *recipe, "--out", folder]], folder, runs)
    seconds = time.monotonic() - started
    shutil.rmtree(f"{folder}.cache", ignore_errors=True)
    if report is None:
        return None
    speed = statistics.median(line["tokens_per_second"] for line in steps_of(metrics(pathlib.Path(folder)))[-5:])
    return dict(zip(KEY, job), tokens_per_second=round(speed), seconds=round(seconds, 1), bits_per_byte=report["bits_per_byte"],
                num_tokens=report["num_tokens"], num_bytes=report["num_bytes"],
                program=report.get("program", arguments.version), device=arguments.names[runs.device])


def inputs(job, arguments):
    """The folder of a run, its tokens a step, and its recipe with `steps` steps."""
    entry, length, minutes, seed = job
    rows = max(arguments.step_tokens // length, 1)
    settings = [*common(arguments), *ENTRIES[entry], f"training.seq_len={length}", f"training.local_batch_size={rows}",
                f"training.seed={seed}", f"model.max_position_embeddings={max(length, 8192)}", *arguments.set]
    recipe = lambda steps: ["--recipe", RECIPE, *sets([*settings, f"training.steps={steps}"])]
    return f"{plan(job, arguments).with_suffix('')}-{seed}", rows * length, recipe


def plan(job, arguments):
    """The file that holds the steps of an entry's runs, whatever their seed."""
    entry, length, minutes, _ = job
    return arguments.out / named(entry, length, f"{60 * minutes:.0f}s.steps")


def probe(job, runs, arguments):
    """Writes the steps that an entry's time allows, unless a command failed or the two evaluations differ."""
    remark = lambda reason: print(f"{job[0]}, rows of {job[1]}: {reason}", flush=True)
    folder, step_tokens, recipe = inputs(job, arguments)
    folder += "-probe"
    row = attempt(job, folder, recipe(arguments.probe_steps), runs, arguments)
    if row is None:
        return remark(f"the probe failed, see {folder}.log")
    if job[0] == "dense":  # the same weights, scored by the PyTorch entry's evaluation
        export = [arguments.sieve, "export", "--checkpoint", folder, "--out", f"{folder}/export"]
        _, _, recipe = inputs(("PyTorch, dense", *job[1:]), arguments)
        command = [*PYTORCH, *recipe(arguments.probe_steps), "--out", folder, "--weights", f"{folder}/export"]
        output_of(export)
        theirs = succeeded([command], f"{folder}-pytorch", runs)
        if theirs is None:
            return remark(f"the evaluation by PyTorch failed, see {folder}-pytorch.log")
        apart = abs(theirs["bits_per_byte"] - row["bits_per_byte"])
        remark(f"the scores of Sieve and PyTorch for the same weights are {apart:.2g} bits per byte apart")
        if not apart <= TOLERANCE[runs.device.split(":")[0]]:
            return None
    shutil.rmtree(folder)
    step, limit = step_tokens / row["tokens_per_second"], 60 * arguments.minutes
    rest = row["seconds"] - arguments.probe_steps * step  # start, compilation, checkpoint, evaluation
    steps = int((limit * (1 - arguments.margin) - rest) / step)
    remark(f"{1000 * step:.1f} ms a step and {rest:.1f} s besides, so {steps} steps")
    if steps < arguments.probe_steps:
        return remark(f"fewer than the {arguments.probe_steps} of its probe: raise --minutes")
    plan(job, arguments).write_text(str(steps))


def run(job, runs, arguments):
    """The line of one run, or None."""
    folder, step_tokens, recipe = inputs(job, arguments)
    steps, limit = int(plan(job, arguments).read_text()), 60 * arguments.minutes
    row = attempt(job, folder, recipe(steps), runs, arguments)
    if row is None:
        return None
    shutil.rmtree(f"{folder}/checkpoint", ignore_errors=True)
    if row["seconds"] > limit:
        plan(job, arguments).write_text(str(int(steps * (1 - arguments.margin) * limit / row["seconds"])))
        return print(f"{job}: void, it took {row['seconds']} s; from now on its entry takes fewer steps", flush=True)
    losses = curve(steps_of(metrics(pathlib.Path(folder))), step_tokens / row["tokens_per_second"])
    return row | {"steps": steps, "tokens": steps * step_tokens, "curve": losses}


def common(arguments):
    """Settings of every run, before an entry's own: no dense layers, the text, and where its tokens are."""
    return ['model.layer_types=["sparse"]', f'data.paths=["{arguments.text}"]', f'data.cache_dir="{arguments.out / "tokens"}"']


def mean(runs, key):
    return statistics.mean(row[key] for row in runs)


def by_entry(rows, minutes):
    """((length, entry), runs) of the runs of so many minutes: by length, then by the mean score, best first."""
    groups = {}
    for row in sorted(rows.values(), key=lambda row: row["seed"]):
        if row["minutes"] == minutes:
            groups.setdefault((row["length"], row["entry"]), []).append(row)
    return sorted(groups.items(), key=lambda one: (one[0][0], mean(one[1], "bits_per_byte")))


def table(rows, minutes):
    head = ["rows of", "entry", "bits per byte, a number a seed", "mean", "tokens/s", "tokens", "seconds", "GPU"]
    lines = [[f"{length}", entry, ", ".join(f"{row['bits_per_byte']:.4f}" for row in runs),
              f"{mean(runs, 'bits_per_byte'):.4f}", f"{mean(runs, 'tokens_per_second'):,.0f}",
              f"{mean(runs, 'tokens') / 1e6:.1f}M", f"{max(row['seconds'] for row in runs):.0f}", runs[0]["device"]]
             for (length, entry), runs in by_entry(rows, minutes)]
    return table_text(head, lines) + "\n"


def drawn(rows, minutes):
    """For each length the training loss over minutes (the first seed) and the scores."""
    groups = by_entry(rows, minutes)
    lengths = sorted({length for (length, _), _ in groups})
    of = lambda length, values: {entry: values(entry, runs) for (rows_of, entry), runs in groups if rows_of == length}
    panels = []
    for length in lengths:
        scores = of(length, lambda entry, runs: [(entry, [row["bits_per_byte"] for row in runs])])
        losses = of(length, lambda _, runs: over_time(runs[0], runs[0]["seconds"] / 60))
        panels += [(f"training loss (nats), rows of {length}", losses, "linear", "minutes of training"),
                   (f"bits per byte after {minutes:g} min", scores, list(scores), "a dot a seed", "{:.3f}")]
    return chart(panels, list(dict.fromkeys(entry for (_, entry), _ in groups)))


def main():
    parser = parser_of(__doc__, "board.jsonl")
    parser.add_argument("--entries", nargs="+", default=DEFAULT, choices=list(ENTRIES))
    parser.add_argument("--lengths", nargs="+", type=int, help="rows of these lengths alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="of a run, from start to score")
    parser.add_argument("--probe-steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, a minute a run at most: tries the script")
    parser.add_argument("--fill", type=pathlib.Path, help="a page; what follows its last heading becomes the table")
    arguments = parsed(parser)
    arguments.step_tokens, arguments.margin, seeds = 32768, MARGIN, SEEDS
    if arguments.tiny:
        arguments.minutes, arguments.devices, arguments.probe_steps, arguments.margin = 1.0, ["cpu"], 10, TINY_MARGIN
        arguments.step_tokens, seeds, arguments.set = 512, {128: [0], 256: [0]}, TINY + arguments.set
    if others := set(arguments.lengths or seeds) - set(seeds):
        parser.error(f"--lengths {', '.join(map(str, sorted(others)))}: the board has rows of {', '.join(map(str, seeds))}")
    if arguments.tiny and arguments.sieve:
        text, arguments.text = arguments.text, arguments.out / "tiny.jsonl"
        if not arguments.text.exists():
            with open(text, encoding="utf-8") as file, open(arguments.text, "w", encoding="utf-8") as begun:
                begun.writelines(json.dumps({"text": json.loads(line)["text"][:2000]}) + "\n" for line in file)
    if arguments.fill and not arguments.fill.is_file():
        parser.error(f"--fill {arguments.fill}: there is no such page")
    path = arguments.out / "board.jsonl"
    rows = finished(path, KEY)
    if arguments.sieve:
        arguments.names = {device: device_name(device) for device in arguments.devices}
        arguments.version = output_of([arguments.sieve, "--version"])
        prepare(arguments, RECIPE, [*common(arguments), *arguments.set])
        jobs = [(entry, length, arguments.minutes, seed) for length in arguments.lengths or seeds
                for seed in seeds[length] for entry in arguments.entries]
        unknown = {plan(job, arguments): job for job in jobs if job not in rows and not plan(job, arguments).exists()}
        on_devices(unknown.values(), arguments, lambda job, runs: probe(job, runs, arguments))
        # No run begins that cannot end before the deadline.
        has_time = lambda: arguments.deadline - time.monotonic() > 60 * arguments.minutes
        wanted = lambda rows: [job for job in jobs if has_time() and job not in rows and plan(job, arguments).exists()]
        train(wanted, run, arguments, path, rows)
    texts = {(row["num_tokens"], row["num_bytes"]) for row in rows.values() if row["minutes"] == arguments.minutes}
    if len(texts) > 1:
        sys.exit(f"{path}: runs were scored on different texts (tokens, bytes): {sorted(texts)}")
    if not any(row["minutes"] == arguments.minutes for row in rows.values()):
        sys.exit(f"{path} has no finished run of {arguments.minutes:g} minutes: no table, page or picture is written")
    print(table(rows, arguments.minutes))
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments.minutes), encoding="utf-8")
    if arguments.fill:
        page = arguments.fill.read_text(encoding="utf-8")
        heading = page.index("\n", page.rindex("\n## ") + 1)
        arguments.fill.write_text(page[:heading + 1] + table(rows, arguments.minutes), encoding="utf-8")


if __name__ == "__main__":
    main()
