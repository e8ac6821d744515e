"""The DMA paper's Table 4: tables and pictures of its smallest recipes run to their end, and of the race of kinds with
seeds that race.py runs over a tenth of the steps.

    python3 lab/experiments/table4/table.py            prints the table of lab/docs/results.md, "Table 4, 80M", and the race's
    python3 lab/experiments/table4/table.py FILE.svg   also draws held-out loss over tokens
    python3 lab/experiments/table4/table.py --draw FILE.svg   the race's, a band over seeds, beside the long runs
    python3 lab/experiments/table4/table.py --section  the race's section of lab/docs/results.md, its prose to be written

A run to its end is NAME.jsonl beside this script: a line "run" (recipe, commit, card, command), then the run's own lines
of steps (thinned) and validations. A run of the race is a line of lab/rows/table4.jsonl. Needs nothing but
Python.
"""

import argparse
import collections
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "lab/experiments"))

from runs import finished, round_numbers, table_text  # noqa: E402

COLUMNS = ["recipe", "held-out loss", "perplexity", "bits per byte", "tokens/s", "minutes", "steps", "card", "commit"]
ROWS = ROOT / "lab/rows/table4.jsonl"
KEY = ("size", "kind", "seed", "steps")
NAMES = {"mha": "dense (MHA)", "swa": "window (SWA)", "mla": "MLA", "nsa": "NSA", "dma_paper": "DMA as published",
         "dma": "DMA, the recipe's form"}
COLOURS = ["#1f6fb4", "#c4571a", "#2f8a4c", "#8a4fb0", "#7a6a00", "#555555", "#b03a7a", "#40a0a0"]
Series = collections.namedtuple("Series", "name curves dots")  # curves: a seed each, as (tokens, loss)


def runs():
    for path in sorted(pathlib.Path(__file__).parent.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        head = next(line for line in lines if line["kind"] == "run")
        yield head, [line for line in lines if line["kind"] == "validation"], [
            line for line in lines if line["kind"] == "step"]


def table(logs):
    """The Markdown table of runs to their end; `logs`: of each its head, validations
    and logged steps, as `runs` yields them."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for head, validations, steps in logs:
        last = validations[-1]
        if last["step"] != head["steps"]:
            raise SystemExit(f"{head['recipe']}: the last validation is of step {last['step']}, not {head['steps']}")
        speed = tokens_per_step(steps) * head["steps"] / head["seconds"]
        cells = [head["recipe"].removesuffix(".toml"), f"{last['loss']:.4f}", f"{last['perplexity']:.3f}",
                 f"{last['bits_per_byte']:.4f}", f"{speed:,.0f}", f"{head['seconds'] / 60:.1f}", f"{head['steps']:,}",
                 f"{head['cards']} x {head['card']}", head["commit"][:8]]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def long_losses():
    """Held-out losses of the runs to their end, by recipe and step."""
    return {head["recipe"]: {line["step"]: line["loss"] for line in validations} for head, validations, _ in runs()}


def stored(path=ROWS):
    return list(finished(path, KEY).values())


def races(rows):
    """The lines of each race, of runs of one size and as many steps: by kind, the lowest mean loss first."""
    by_race = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_race.setdefault((row["size"], row["steps"]), {}).setdefault(row["kind"], []).append(row)
    mean = lambda pair: statistics.mean(row["loss"] for row in pair[1])  # noqa: E731
    return {key: dict(sorted(kinds.items(), key=mean)) for key, kinds in sorted(by_race.items())}


def is_try(kinds):
    """Whether these lines are of a --try, which scores nothing."""
    return not any("ppl" in row for rows in kinds.values() for row in rows)


def name_of(kind):
    plain, _, heads = kind.partition("/kv")
    return NAMES.get(plain, plain) + (f", {heads} KV heads" if heads else "")


def losses(kinds):
    """Head and lines of a race: held-out loss of all seeds, and the runs to their end on either side of its steps. A
    row is apart from the one above where each of its seeds has a higher loss than each seed there. Speeds are of runs
    that had their GPU alone: a line's "beside" says what else ran there."""
    (steps,) = {row["steps"] for rows in kinds.values() for row in rows}
    beside = [step for step in (steps // 1000 * 1000, steps // 1000 * 1000 + 1000) if step]
    head = ["kind", "held-out loss, mean", "least", "most", "seeds", "beside the row above", "perplexity",
            "bits per byte", "tokens/s", "parameters", *(f"run to its end, step {step:,}" for step in beside)]
    lines, long, above = [], long_losses(), None
    for kind, rows in kinds.items():
        last_losses = [row["loss"] for row in rows]
        least, most = min(last_losses), max(last_losses)
        mean = lambda name: statistics.mean(row[name] for row in rows)  # noqa: E731
        apart = "" if above is None else "one seed" if len(rows) == 1 else "apart" if least > above else "overlaps"
        own = [row for row in rows if "beside" not in row] or rows
        speed = statistics.mean(list(row["tokens_per_second"].values())[0] for row in own)
        ends = [long.get(rows[0]["recipe"], {}).get(step) if "/" not in kind else None for step in beside]
        lines.append([name_of(kind), f"{statistics.mean(last_losses):.4f}", f"{least:.4f}", f"{most:.4f}",
                      ", ".join(str(row["seed"]) for row in rows), apart, f"{mean('perplexity'):.3f}",
                      f"{mean('bits_per_byte'):.4f}", f"{round(speed, -3):,.0f}", f"{rows[0]['parameters'] / 1e6:.1f}M",
                      *("-" if loss is None else f"{loss:.4f}" for loss in ends)])
        above = most
    return head, lines


def score_table(kinds):
    """Head and lines of a race's scores, over all seeds that have them: `eval ppl`, needles, RULER."""
    kinds = {kind: [row for row in rows if "ppl" in row] for kind, rows in kinds.items()}
    kinds = {kind: rows for kind, rows in kinds.items() if rows}
    tasks = list(next(iter(kinds.values()))[0]["ruler"])
    head = ["kind", "loss by `eval ppl`", "needles in held-out text", "needles in made-up prose", *tasks]

    def share(rows, name):
        counts = [count for row in rows for count in row[name].values()]
        return f"{100 * sum(right for right, _, _ in counts) / sum(whole for _, whole, _ in counts):.0f} %"

    def ruler(rows, task):
        return f"{statistics.mean(score for row in rows for score, _ in row['ruler'][task].values()):.2f}"

    lines = [[name_of(kind), f"{statistics.mean(row['ppl']['loss'] for row in rows):.4f}", share(rows, "needles"),
              share(rows, "needles_prose"), *(ruler(rows, task) for task in tasks)] for kind, rows in kinds.items()]
    return head, lines


def tries(kinds):
    """Head and lines of a --try: held-out loss, speed by the rows' length where nothing else ran on the GPU, memory."""
    lengths = list(next(iter(kinds.values()))[0]["tokens_per_second"])
    head = ["kind", "held-out loss", *(f"tokens/s, rows of {int(length):,}" for length in lengths), "memory, GiB",
            "steps", "card"]
    speed = lambda row, length: "-" if "beside" in row else f"{row['tokens_per_second'][length]:,}"  # noqa: E731
    lines = [[name_of(kind), f"{row['loss']:.4f}", *(speed(row, length) for length in lengths),
              f"{row['memory_gib']:.1f}", str(row["steps"]), row["card"]] for kind, (row, *_) in kinds.items()]
    return head, lines


def main_race():
    """The race that lab/docs/results.md shows: the stored one of the smallest size over the most steps."""
    by_race = {key: kinds for key, kinds in races(stored()).items() if not is_try(kinds)}
    return by_race[max(by_race, key=lambda key: (key[0] == "80m", key[1]))] if by_race else None


def main_try():
    return next((kinds for kinds in races(stored()).values() if is_try(kinds)), None)


# The tables of lab/docs/results.md that have lines.
TABLES = {"table4_race": (main_race, losses), "table4_scores": (main_race, score_table),
          "table4_try": (main_try, tries)}


def tables():
    """What makes each table that has stored lines, by the name on the page."""
    return {name: lambda rows=rows, made=made: made(rows()) for name, (rows, made) in TABLES.items() if rows()}


def texts(by_race):
    """All tables of these races in Markdown, each behind the size and the steps."""
    parts = []
    for (size, steps), kinds in by_race.items():
        made = [tries] if is_try(kinds) else [losses, score_table]
        parts += [f"{size}, {steps:,} steps", *(table_text(*make(kinds)) for make in made)]
    return parts


def tokens_per_step(steps):
    """Of any stored line: lines of steps are thinned, and may end before the run does."""
    return steps[-1]["tokens_seen"] / steps[-1]["step"]


def picture_of_long(logs):
    """Held-out loss over billions of tokens, without step 0."""
    series = [Series(head["recipe"].removesuffix(".toml"), [
        [(line["step"] * tokens_per_step(steps) / 1e9, line["loss"]) for line in validations if line["step"]]], [])
        for head, validations, steps in logs]
    most = max(x for entry in series for x, _ in entry.curves[0])
    ticks = [tick / 4 for tick in range(int(most * 4) + 1)]
    return picture(series, ticks, "held-out loss (nats a token) over billions of training tokens")


def picture_of_race(kinds):
    """Held-out loss over millions of tokens, without the first fifth of the steps; dots are the runs to their end."""
    long, series = long_losses(), []
    for kind, rows in kinds.items():
        steps = rows[0]["steps"]
        a_step = rows[0]["tokens"] / steps / 1e6
        place = lambda points: [(step * a_step, loss) for step, loss in points if 5 * step >= steps]  # noqa: E731
        dots = [] if "/" in kind else [(step, loss) for step, loss in long.get(rows[0]["recipe"], {}).items()
                                       if step <= 1.2 * steps]
        series.append(Series(name_of(kind), [place(row["validations"]) for row in rows], place(dots)))
    most = max(x for entry in series for curve in [*entry.curves, entry.dots] for x, _ in curve)
    words = "held-out loss over millions of tokens; line: mean, band: all seeds; circles: runs to their end"
    return picture(series, round_numbers(0, most), words, right=250)


def picture(series, ticks, words, right=150):
    """Series by their means, each with a band over its seeds, and dots; `right` of the picture is for their names."""
    width, height, left, top = 490 + right, 360, 60, 20
    points = [point for entry in series for curve in [*entry.curves, entry.dots] for point in curve]
    most_x = max(x for x, _ in points)
    low, high = math.floor(min(y for _, y in points) * 10) / 10, math.ceil(max(y for _, y in points) * 10) / 10
    place = lambda x, y: (left + x / most_x * (width - left - right), top + (high - y) / (high - low) * (height - top - 50))
    line = lambda points: " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for tick in range(round(low * 10), round(high * 10) + 1, 2):
        _, y = place(0, tick / 10)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick / 10:.1f}</text>')
    for tick in ticks:
        x, _ = place(tick, low)
        parts.append(f'<text x="{x:.1f}" y="{height - 32}" text-anchor="middle">{tick:g}</text>')
    means = [[(xs[0], statistics.mean(ys)) for xs, ys in (zip(*at) for at in zip(*entry.curves))] for entry in series]
    # A name stands where its curve ends, the lowest loss first, and at least a line above the name before it.
    above = height
    for at, (entry, mean) in enumerate(sorted(zip(series, means), key=lambda pair: pair[1][-1][1])):
        colour = COLOURS[at % len(COLOURS)]
        if len(entry.curves) > 1:
            low_edge, high_edge = ([edge(together) for together in zip(*entry.curves)] for edge in (min, max))
            parts.append(f'<polygon points="{line(low_edge + high_edge[::-1])}" fill="{colour}" fill-opacity="0.2"/>')
        x, y = place(most_x, mean[-1][1])
        above = y = min(y, above - 15)
        parts.append(f'<polyline points="{line(mean)}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{entry.name} {mean[-1][1]:.3f}</text>')
        for x, y in (place(*dot) for dot in entry.dots):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(f'<text x="{left}" y="{height - 10}">{words}</text></svg>')
    return "\n".join(parts) + "\n"


SECTION = """## Table 4 in small, with seeds
```
python3 lab/experiments/table4/race.py --sieve target/release/sieve --text data/text --out OUT --devices cuda:0 cuda:1
python3 lab/experiments/table4/table.py --draw lab/docs/table4_race.svg
```
WHAT THE NUMBERS SAY.

<!-- table table4_race -->
{table4_race}

![held-out loss over training tokens, a band over seeds](table4_race.svg)

<!-- table table4_scores -->
{table4_scores}
"""
TRY = """
**50 steps of 1.7B** show what a run costs, not what a kind learns (`race.py --try`): 25 steps in rows of 2,048 and 25 of
8,192, each of 32,768 tokens, one seed.

<!-- table table4_try -->
{table4_try}
"""


def main():
    """Prints the tables, or the section of the page around them, and draws the pictures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", nargs="?", type=pathlib.Path, help="a picture of the runs to their end")
    parser.add_argument("--draw", type=pathlib.Path, help="a picture of the race")
    parser.add_argument("--section", action="store_true", help="print the race's section of lab/docs/results.md")
    args = parser.parse_args()
    made = {name: table_text(*make()) for name, make in tables().items()}
    race = main_race()
    if (args.draw or args.section) and not race:
        parser.error(f"{ROWS} has no line of a race: lab/experiments/table4/race.py makes it")
    if args.section:
        print((SECTION + (TRY if "table4_try" in made else "")).format(**made))
    else:
        print("\n\n".join([table(list(runs())), *made.values()]))
    if args.svg:
        args.svg.write_text(picture_of_long(list(runs())))
    if args.draw:
        args.draw.write_text(picture_of_race(race))


if __name__ == "__main__":
    main()
