"""What scripts that train many models share: arguments, runs on several devices up to a deadline, one JSON line a
finished run, tables, and panels of curves as SVG. A call that was cut off resumes: runs whose line is there are not
repeated.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import queue
import statistics
import subprocess
import threading
import time

COLOURS = ["#1b6ca8", "#c0392b", "#e08a1e", "#7d3c98", "#2e8b57", "#7f8c8d", "#000000", "#999900", "#b03a7a", "#f0b070",
           "#555599", "#40a0a0"]
STOPPING = 30  # seconds that a training has for its last step and its checkpoint
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 330, 300, 56, 34, 46


class Unfinished(Exception):
    """A run was cut off at the deadline, or a command of it failed: its log says why."""


class Runs:
    """Programs started on one device, with its kernel cache, none of them beyond the deadline."""

    def __init__(self, device, arguments):
        self.device, self.deadline = device, arguments.deadline
        self.environment = dict(os.environ, XDG_CACHE_HOME=str(arguments.out / f"cache-{device.replace(':', '-')}"))

    def run(self, command, output, log):
        """The exit code, or None where the deadline came first. A training that is stopped then writes a checkpoint
        after the step under way, so that the next call repeats no step."""
        command = [*command, "--device", self.device]
        with subprocess.Popen(command, stdout=output, stderr=log, env=self.environment) as process:
            try:
                return process.wait(max(self.deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                log.write("stopped at the deadline\n")
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOPPING)
            finally:
                process.kill()
        return None


def on_devices(jobs, arguments, work):
    """Calls `work(job, runs)` for the jobs in their order, one at a time on each device; returns those not begun when
    the deadline came."""
    waiting = queue.Queue()
    for job in jobs:
        waiting.put(job)

    def serve(device):
        """Takes jobs from the queue for one device until it is empty or the deadline
        comes; an unfinished job is not repeated."""
        runs = Runs(device, arguments)
        while time.monotonic() < arguments.deadline:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(Unfinished):
                work(job, runs)

    threads = [threading.Thread(target=serve, args=(device,)) for device in arguments.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(waiting.queue)


def parser_of(doc, lines, reads_text=True):
    """A parser with the arguments of every script here; `lines` is the name of its file of finished runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if reads_text:
        parser.add_argument("--text", type=pathlib.Path, help="crates.jsonl")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--sieve", help="the program; without it nothing is trained")
    parser.add_argument("--out", required=True, type=pathlib.Path, help=f"folder of the runs and of {lines}")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this time; the next call resumes")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="one run at a time each: cuda:0 cuda:1 …, or cpu")
    parser.add_argument("--draw", type=pathlib.Path, help="an SVG of what is finished")
    return parser


def parsed(parser):
    """The arguments, with the deadline and the folder, which exists, and with absolute paths."""
    arguments = parser.parse_args()
    if arguments.sieve and "text" in arguments:
        if not arguments.text:
            parser.error("--sieve needs --text")
        arguments.text = arguments.text.resolve()
    if arguments.draw and not arguments.draw.parent.is_dir():
        parser.error(f"--draw {arguments.draw}: its folder does not exist")
    arguments.deadline = time.monotonic() + arguments.seconds
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def json_lines(path):
    """The values in a file of JSON lines, none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(path, *rows):
    """Adds a JSON line a row."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def finished(path, key):
    """The lines of a file of finished runs, by the values of the names in `key`, which are a job."""
    return {tuple(row[name] for name in key): row for row in json_lines(path)}


def output_of(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def device_name(device):
    """Of "cuda:1" the name of that GPU, as nvidia-smi prints it; "cpu" as it is."""
    if device == "cpu":
        return device
    return output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", device.partition(":")[2] or "0"])


def succeed(command):
    """Runs a command without which nothing can begin; ends this program where it fails, since it prints why."""
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def sets(settings):
    """The words of a command line that set these keys of a recipe."""
    return [word for setting in settings for word in ("--set", setting)]


def prepare(arguments, recipe, settings):
    """Tokenises the text of a recipe with these settings, once before all runs."""
    succeed([arguments.sieve, "data", "prepare", "--recipe", recipe, *sets(settings)])


def metrics(folder):
    """The lines of a run's metrics.jsonl, or none."""
    return json_lines(folder / "metrics.jsonl")


def steps_of(lines):
    return [line for line in lines if line["kind"] == "step"]


def validations_of(lines):
    return [line for line in lines if line["kind"] == "validation"]


def scores(lines):
    """What the last validation of a run measured, as in the lines of finished runs."""
    last = validations_of(lines)[-1]
    # Tokens without text have no bits per byte.
    return {name: None if last[name] is None else round(last[name], 4) for name in ("loss", "bits_per_byte")}


def saved_steps(folder):
    """The steps of a run's checkpoints, ascending."""
    names = [path.name.removeprefix("step-") for path in folder.glob("checkpoint/step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def curve(steps, seconds_a_step, value=lambda line: line["loss"]):
    """A number of the logged steps as at most 24 means over equal parts of the run, each with the seconds of training so
    far."""
    size = -(-len(steps) // 24)
    parts = [steps[at:at + size] for at in range(0, len(steps), size)]
    return [[round(statistics.mean(line["step"] for line in part) * seconds_a_step, 1),
             round(statistics.mean(map(value, part)), 4)] for part in parts]


def over_time(row, last):
    """The curve of a row as a series of `panel`, without the first steps' high losses; x ends at `last`."""
    return [(last * seconds / row["seconds"], [value]) for seconds, value in row["curve"][2:]]


def named(*parts):
    """The name of a run's files, from its kind and the numbers that tell it from other runs."""
    return "-".join(map(str, parts)).replace(" ", "-").replace(",", "")


def num_steps(settings):
    return int([key.split("=")[1] for key in settings if key.startswith("training.steps=")][-1])


def trained(folder, recipe, settings, runs, arguments, steps=None):
    """Trains in `folder`, from its last checkpoint where an earlier call was cut off, up to the validation after the
    last step, number `steps`, which stands in the settings unless the recipe has stages. Returns the metrics."""
    steps = steps or num_steps(settings)
    done = lambda: any(line["step"] == steps for line in validations_of(metrics(folder)))
    command = [arguments.sieve, "train", "--recipe", recipe, "--out", str(folder), *sets(settings)]
    command += ["--resume"] if (folder / "config.toml").exists() else []
    if not done():
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            runs.run(command, log, log)
    if not done():
        raise Unfinished
    return metrics(folder)


def evaluated(folder, words, runs, arguments, name="eval"):
    """The report of `sieve eval` with these words on a trained run, kept in FOLDER.NAME.json, where an earlier call's
    is read again."""
    path = pathlib.Path(f"{folder}.{name}.json")
    if not path.exists():
        unfinished = path.with_suffix(".part")
        command = [arguments.sieve, "-q", "eval", *map(str, words), "--checkpoint", str(folder), "--json"]
        with open(unfinished, "w", encoding="utf-8") as output, open(f"{folder}.log", "a", encoding="utf-8") as log:
            if runs.run(command, output, log) != 0:
                raise Unfinished
        unfinished.rename(path)
    return json.loads(path.read_text())


def words_of_far(length, far):
    """Words of `sieve eval` for the loss on held-out text, read half a row of `length` apart so that most predictions
    see much: by position, and on words last used more than each of `far` tokens back."""
    return ["ppl", "--recipe-validation", "--by-position", "--far", *far, "--stride", str(length // 2)]


def far_losses(report):
    """The loss on words last used more than N tokens back, by N as text."""
    return {str(part["more_than"]): round(part["far"]["loss"], 4) for part in report["by_word"]["again"]
            if part["far"]["num_tokens"]}


def train_missing(jobs, run, arguments, path, rows):
    """Trains the jobs that have no line yet, in their order; see `train`."""
    train(lambda rows: [job for job in jobs if job not in rows], run, arguments, path, rows)


def train(wanted, run, arguments, path, rows):
    """Trains until `wanted(rows)`, the jobs that can begin now, best first, is empty or the deadline comes.
    `run(job, runs, arguments)` returns the line of a finished run, or None, or raises `Unfinished`."""
    running, failed, lock = set(), set(), threading.Lock()

    def work(_, runs):
        """A device's loop: runs the best of the jobs that can begin now, adds its line to `rows` and the file, and
        begins again. It waits where only a run of another device can bring further jobs."""
        while time.monotonic() < arguments.deadline:
            with lock:
                jobs = [job for job in wanted(rows) if job not in running | failed]
                if not jobs and not running:
                    return
                running.update(jobs[:1])
            if not jobs:  # what another device runs decides what comes next
                time.sleep(0.2)
                continue
            try:
                row = run(jobs[0], runs, arguments)
            except Unfinished:
                row = None
            with lock:
                running.remove(jobs[0])
                print(row or f"{jobs[0]}: not finished, see its log", flush=True)
                if row is None:
                    failed.add(jobs[0])
                    continue
                rows[jobs[0]] = row
                append(path, row)

    on_devices(arguments.devices, arguments, work)


def table_text(head, rows):
    """A table of Markdown from texts."""
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def round_numbers(low, high):
    """Two to six multiples of 1, 2 or 5 times a power of ten between two values."""
    size = 10 ** math.floor(math.log10(max(high - low, 1e-9) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if high - low <= 5 * size * factor)
    return [step * count for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def panel(at, title, series, names, columns=None, below="", number="{:.2f}"):
    """One set of axes: `series[name]` is a list of (x, values), drawn as a line through the means and a dot a value.
    `columns` are the values of x at equal distances, "linear" is an axis of numbers; without either x is logarithmic."""
    drawn_series = {name: points for name, points in series.items() if points}
    values = [value for points in drawn_series.values() for _, ys in points for value in ys]
    low, high = (min(values), max(values)) if values else (0, 1)
    up = lambda y: TOP + (high - y) / max(high - low, 1e-9) * (HEIGHT - TOP - BOTTOM)
    given = columns if isinstance(columns, list) else [x for points in drawn_series.values() for x, _ in points]
    scale = columns.index if isinstance(columns, list) else float if columns else math.log
    xs = [scale(x) for x in given] or [0, 1]
    share = lambda x: (scale(x) - min(xs)) / max(max(xs) - min(xs), 1e-9)
    across = lambda x: at + LEFT + 14 + share(x) * (PANEL - LEFT - 42)
    parts = [f'<text x="{at + LEFT}" y="18" font-weight="bold">{title}</text>']
    for y in round_numbers(low, high):
        parts.append(f'<line x1="{at + LEFT}" x2="{at + PANEL - 14}" y1="{up(y):.1f}" y2="{up(y):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{at + LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{number.format(y)}</text>')
    marked = round_numbers(min(xs), max(xs)) if columns == "linear" else columns or sorted(set(given))
    # Names as columns need no label: the legend has their colours. Of near numbers one is written.
    last = -math.inf
    for x in marked if not isinstance(marked[0] if marked else "", str) else []:
        if across(x) - last > 34:
            last, label = across(x), f"{x:.0f}" if x >= 1000 else f"{x:.3g}"
            parts.append(f'<text x="{last:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{at + (PANEL + LEFT) / 2}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">{below}</text>')
    for name, points in drawn_series.items():
        colour = COLOURS[names.index(name) % len(COLOURS)]
        line = " ".join(f"{across(x):.1f},{up(statistics.mean(ys)):.1f}" for x, ys in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>'
                  for x, ys in points for y in ys]
    return "\n".join(parts)


def chart(panels, names):
    """An SVG of panels, each the arguments of `panel` behind its place, two a row so that a page of text shows their
    letters at full size, and a legend at the right."""
    if not any(points for _, series, *_ in panels for points in series.values()):
        raise SystemExit("no finished run to draw: the picture is left as it is")
    rows = -(-len(panels) // 2)
    place = lambda number: f'<g transform="translate(0 {number // 2 * HEIGHT})">'
    parts = [f"{place(number)}{panel(number % 2 * PANEL, *given_panel[:2], names, *given_panel[2:])}</g>"
             for number, given_panel in enumerate(panels)]
    legend = min(len(panels), 2) * PANEL + 10
    for number, name in enumerate(names):
        y, colour = TOP + 10 + 18 * number, COLOURS[number % len(COLOURS)]
        parts.append(f'<line x1="{legend}" x2="{legend + 18}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
                     f'<text x="{legend + 24}" y="{y + 4}">{name}</text>')
    return svg(legend + 210, max(rows * HEIGHT, TOP + 18 * len(names)), parts)


def svg(width, height, parts, more=""):
    """A picture of these parts on white; `more` are further attributes of all of them."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="11"{more}>')
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
