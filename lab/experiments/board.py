"""The contest of lab/docs/board.md: bits per byte on held-out crates after nine minutes on one GPU, from start to score.

    python3 lab/experiments/board.py --sieve target/release/sieve --text data/crates.jsonl --out OUT --devices cuda:0 cuda:1
    python3 lab/experiments/board.py --sieve target/release/sieve --text data/crates.jsonl --out OUT --tiny    (CPU, minutes)
    python3 lab/experiments/board.py --out lab/rows --fill lab/docs/board.md --draw lab/docs/board.svg --front README.md docs/front.svg

The last one reads lab/rows/board.jsonl alone; --front is README's table and picture. Run from the repository's root with a
Python that has torch and transformers. A probe of --probe-steps steps measures
an entry's step and all else that it does, from which the steps of its runs follow. Of dense attention PyTorch scores the
probe's weights too: the two scores must agree. Probes and runs begin with empty caches of compiled kernels. A run that
takes longer than --minutes is void: it leaves no line, and the next takes fewer steps. OUT/board.jsonl gets a line for
each finished run; runs that have one are not repeated, and a run that was cut off begins again.
"""

import json
import math
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

RECIPE = "lab/recipes/board_80m.toml"
PYTORCH = [sys.executable, "lab/rivals/board_torch.py"]
# What of a hybrid's lead is the slope, and what the sparse layers: each differs from an entry in one of the two.
CONTROLS = ("dense + slope", "dense + slope, 1 of 4 without", "window, 1 of 4 dense")
# Entry: its settings on top of RECIPE. The two hybrids are the best kinds of the longest runs in lab/docs/results.md.
SIEVE = {
    **{kind: [*ROWS["8192"][NAMES[kind]], f"optimizer.lr={best_rate(kind, 8192)}"]
       for kind in ("dense", "window + slope, 1 of 4 dense", "DMA, 1 of 4 dense", "window + slope", "DMA",
                    "CoWindow, 1 of 4 dense", *CONTROLS)},
    "DMA, 1 of 4 dense, Muon": [*ROWS["8192"][NAMES["DMA, 1 of 4 dense"]], "optimizer.name=Muon", "optimizer.beta1=0.95",
                                "optimizer.lr=3e-3"],
}
ENTRIES = SIEVE | {"PyTorch, dense": [f"optimizer.lr={best_rate('dense', 8192)}"]}
DEFAULT = ["dense", "window + slope, 1 of 4 dense", "DMA, 1 of 4 dense", "PyTorch, dense"]
SEEDS = {8192: [0, 1, 2], 32768: [0, 1, 2]}  # by tokens of a row; a step has 32,768 tokens
TINY = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=4", "model.head_dim=32",
        "model.num_attention_heads=2", "model.num_key_value_heads=1", "tokenizer.train.vocab_size=512",
        "tokenizer.train.sample_bytes=1000000", "metrics.log_freq=2", "lr_scheduler.warmup_steps=10"]
KEY = ("entry", "length", "minutes", "seed")
MARK = "<!-- table board -->\n"  # before the page's table, for lab/experiments/tables.py
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
    return sorted(groups.items(), key=lambda group: (group[0][0], mean(group[1], "bits_per_byte")))


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
    values_of = lambda length, values: {
        entry: values(entry, runs) for (rows_of, entry), runs in groups if rows_of == length}
    panels = []
    for length in lengths:
        scores = values_of(length, lambda entry, runs: [(entry, [row["bits_per_byte"] for row in runs])])
        losses = values_of(length, lambda _, runs: over_time(runs[0], runs[0]["seconds"] / 60))
        panels += [(f"training loss (nats), rows of {length}", losses, "linear", "minutes of training"),
                   (f"bits per byte after {minutes:g} min", scores, list(scores), "a dot a seed", "{:.3f}")]
    return chart(panels, list(dict.fromkeys(entry for (_, entry), _ in groups)))


# README's entries: their names in the picture and in the table, their colours on a light and on a dark page. Muon's
# entry is not among them: no run of dense attention has that optimizer.
FRONT = {
    "PyTorch, dense": ("dense, in PyTorch", "dense in compiled PyTorch", "#57606a", "#9198a1"),
    "dense": ("dense", "dense", "#0969da", "#58a6ff"),
    "window + slope, 1 of 4 dense": ("windows with slope", "windows with DMA's slope, one layer in four dense",
                                     "#bc4c00", "#f0883e"),
    "DMA, 1 of 4 dense": ("DMA", "dynamic mask (DMA), one layer in four dense", "#8250df", "#bc8cff"),
    "dense + slope": ("dense with slope", "dense, with DMA's slope", "#1a7f37", "#3fb950"),
}
FRONT_LENGTH = 8192  # tokens of a row: every entry has most seeds there
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 830, 430, 52, 262, 64, 52


def front_runs(rows, minutes):
    """The runs of README's entries, the best entry first."""
    return {entry: runs for (length, entry), runs in by_entry(rows, minutes) if length == FRONT_LENGTH and entry in FRONT}


def front_table(rows, minutes):
    head = [f"attention, rows of {FRONT_LENGTH} tokens", "bits per byte, mean", "least", "most", "seeds", "tokens/s"]
    scores = lambda runs: [row["bits_per_byte"] for row in runs]
    lines = [[FRONT[entry][1], f"{mean(runs, 'bits_per_byte'):.3f}", f"{min(scores(runs)):.3f}", f"{max(scores(runs)):.3f}", f"{len(runs)}",
              f"{round(mean(runs, 'tokens_per_second'), -3):,.0f}"] for entry, runs in front_runs(rows, minutes).items()]
    return table_text(head, lines)


def front(rows, minutes):
    """Training loss over minutes, both logarithmic: a line a mean of an entry's seeds, a band between their least and
    largest, at the end its name and its mean score."""
    groups = front_runs(rows, minutes)
    curves = {entry: [[(seconds / 60, loss) for seconds, loss in run["curve"]] for run in runs]
              for entry, runs in groups.items()}
    points = [point for runs in curves.values() for run in runs for point in run]
    ends = [[function(math.log(point[axis]) for point in points) for function in (min, max)] for axis in (0, 1)]
    place = lambda value, low, high, start, stop: start + (stop - start) * (math.log(value) - low) / (high - low)
    x = lambda minute: place(minute, *ends[0], LEFT, WIDTH - RIGHT)
    y = lambda loss: place(loss, *ends[1], HEIGHT - BOTTOM, TOP)
    line = lambda points: " ".join(f"{x(minute):.1f},{y(loss):.1f}" for minute, loss in points)
    style = lambda colour_of: " ".join(
        f".c{number} {{ --c: {colour_of(entry)}; }}" for number, entry in enumerate(FRONT.values()))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
             'font-family="system-ui, sans-serif" font-size="15">',
             "<style>text { fill: var(--ink); } .name, .band { fill: var(--c); } .band { fill-opacity: 0.22; }",
             "path { fill: none; stroke: var(--c); } svg { --page: #ffffff; --ink: #1f2328; --rule: #d8dee4; }",
             style(lambda entry: entry[2]), "@media (prefers-color-scheme: dark) {",
             f"svg {{ --page: #0d1117; --ink: #e6edf3; --rule: #30363d; }} {style(lambda entry: entry[3])} }}</style>",
             '<rect width="100%" height="100%" fill="var(--page)"/>',
             f'<text x="{LEFT - 40}" y="24" font-size="17" font-weight="600">Training loss (nats a token) on one H200, '
             "85M parameters, rows of 8192 tokens</text>"]
    for loss in (0.7, 1, 2, 3, 4, 5):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="var(--rule)"/>'
                     f'<text x="{LEFT - 10}" y="{y(loss) + 5:.1f}" text-anchor="end">{loss}</text>')
    for minute in (0.25, 0.5, 1, 2, 4, 8):
        parts.append(f'<text x="{x(minute):.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{minute:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">minutes of training; '
                 "line: mean of an entry's seeds, band: all of them</text>")
    # Names keep a line's height between them, from the best score upwards.
    below = HEIGHT - BOTTOM + 22
    for number, entry in sorted(enumerate(FRONT), key=lambda numbered: mean(groups[numbered[1]], "bits_per_byte")):
        together = [list(zip(*step)) for step in zip(*curves[entry])]  # of each point: the seeds' minutes, their losses
        at = [statistics.mean(seconds) for seconds, _ in together]
        low, high, middle = ([(minute, edge(losses)) for minute, (_, losses) in zip(at, together)]
                             for edge in (min, max, statistics.mean))
        below = min(y(middle[-1][1]) + 5, below - 22)
        parts.append(f'<g class="c{number}"><polygon class="band" points="{line(low + high[::-1])}"/>'
                     f'<path d="M {line(middle)}" stroke-width="2.5"/>'
                     f'<text class="name" x="{WIDTH - RIGHT + 12}" y="{below:.1f}" font-weight="600">'
                     f'{mean(groups[entry], "bits_per_byte"):.3f}  {FRONT[entry][0]}</text></g>')
    parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{below - 26:.1f}">held-out bits per byte</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    """With --sieve probes each entry's speed and trains it within --minutes; then prints the table, and writes
    the pages and pictures that are asked for."""
    parser = parser_of(__doc__, "board.jsonl")
    parser.add_argument("--entries", nargs="+", default=DEFAULT, choices=list(ENTRIES))
    parser.add_argument("--lengths", nargs="+", type=int, help="rows of these lengths alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="of a run, from start to score")
    parser.add_argument("--probe-steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, a minute a run at most: tries the script")
    parser.add_argument("--front", nargs=2, type=pathlib.Path, metavar=("PAGE", "SVG"),
                        help="README, whose first table is filled, and its picture: runs in rows of 8192")
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
    if arguments.front:
        page, picture = arguments.front
        picture.write_text(front(rows, arguments.minutes), encoding="utf-8")
        text = page.read_text(encoding="utf-8")
        begin = text.index("\n|") + 1
        text = text[:begin] + front_table(rows, arguments.minutes) + text[text.index("\n\n", begin):]
        page.write_text(text, encoding="utf-8")
    if arguments.fill:
        page = arguments.fill.read_text(encoding="utf-8")
        heading = page.index("\n", page.rindex("\n## ") + 1)
        arguments.fill.write_text(page[:heading + 1] + MARK + table(rows, arguments.minutes), encoding="utf-8")


if __name__ == "__main__":
    main()
