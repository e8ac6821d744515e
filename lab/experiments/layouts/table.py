"""The race of layouts: tables and a picture from the lines of lab/rows/layouts.jsonl (layouts.py).

    python3 lab/experiments/layouts/table.py                   prints the tables
    python3 lab/experiments/layouts/table.py --draw FILE.svg   losses of all seeds, over time, far back; ranks of needles
    python3 lab/experiments/layouts/table.py --section         the sections of the two pages, their prose to be written

The table of docs/choose.md is made of it; lab/notes/experiments.md has the others. The picture is of the race with the
longest runs. Needles stand in the picture, RULER's tasks in the lines alone. Needs nothing but Python.
"""

import argparse
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "lab/experiments"))

from runs import chart, json_lines, over_time, table_text  # noqa: E402

ROWS = ROOT / "lab/rows/layouts.jsonl"
# The table's distance of words; the picture has all.
FAR = "4096"


def stored(path=ROWS):
    return json_lines(path)


def races(lines):
    """The lines of each race: those of equal seconds of training a run, the shortest runs first."""
    by_seconds = {}
    for row in lines:
        by_seconds.setdefault(row["run_seconds"], []).append(row)
    return [by_seconds[seconds] for seconds in sorted(by_seconds)]


def runs_of(lines):
    """The lines of whole runs by layout, the lowest mean loss first."""
    by_layout = {}
    for row in lines:
        if row["phase"] == "run":
            by_layout.setdefault(row["layout"], []).append(row)
    return dict(sorted(by_layout.items(), key=lambda pair: statistics.mean(row["loss"] for row in pair[1])))


def mean(values, digits=3):
    numbers = [value for value in values if value is not None]
    return f"{statistics.mean(numbers):.{digits}f}" if numbers else "-"


def far(rows, tokens):
    return [(row["far"] or {}).get(tokens) for row in rows]


def learning(lines_of_all):
    """Loss of all seeds, on words last used far back, and what the time was enough for."""
    by_layout = runs_of(lines_of_all)
    head = ["layout", "held-out loss, mean", "least", "most", f"words last used > {int(FAR):,} tokens back", "tokens/s",
            "tokens", "seconds", "learning rate", "seeds"]
    lines = []
    for layout, rows in by_layout.items():
        losses = [row["loss"] for row in rows]
        speed, tokens = (statistics.mean(row[name] for row in rows) for name in ("tokens_per_second", "tokens"))
        lines.append([layout, mean(losses), f"{min(losses):.3f}", f"{max(losses):.3f}",
                      mean(far(rows, FAR)), f"{round(speed, -3):,.0f}", f"{tokens / 1e6:.1f}M",
                      mean([row["seconds"] for row in rows], 0), f"{rows[0]['rate']:g}", str(len(rows))])
    return head, lines


def rates(lines_of_all):
    """Losses of the runs that chose the rates, so that one at the border of those tried is seen."""
    tried = [row for row in lines_of_all if row["phase"] == "rate"]
    values = sorted({row["rate"] for row in tried})
    loss = {(row["layout"], row["rate"]): f"{row['loss']:.3f}" for row in tried}
    head = [f"held-out loss after {tried[0]['steps']:,} steps in rows of {tried[0]['rate_row']:,} at",
            *(f"{value:g}" for value in values)]
    layouts = dict.fromkeys(row["layout"] for row in tried)
    return head, [[layout, *(loss.get((layout, value), "-") for value in values)] for layout in layouts]


# The tables of the pages, and the others that the program prints: each one's race, and what it has of it.
TABLES = {"layouts": lambda lines: learning(races(lines)[-1])}
PRINTED = TABLES | {
    "layouts_rates": lambda lines: rates(races(lines)[-1]),
    "layouts_two_minutes": lambda lines: learning(races(lines)[0]),
    "layouts_two_minutes_rates": lambda lines: rates(races(lines)[0])}


def drawn(by_layout):
    """Held-out losses, training loss over time of the first seed, words used far back, ranks of needles by length."""
    seconds = statistics.median(row["seconds"] for rows in by_layout.values() for row in rows)
    row = next(iter(by_layout.values()))[0]["row"]
    backs = {layout: [(int(distance), [loss for loss in far(rows, distance) if loss])
                      for distance in rows[0]["far"] or {}] for layout, rows in by_layout.items()}
    ranks = {layout: [(int(distance), [row["needles"][distance][2] for row in rows if row["needles"]])
                      for distance in rows[0]["needles"] or {}] for layout, rows in by_layout.items()}
    panels = [
        (f"held-out loss after {seconds:.0f} s, rows of {row:,}",
         {layout: [(layout, [run["loss"] for run in rows])] for layout, rows in by_layout.items()}, list(by_layout),
         "a dot a seed"),
        ("training loss",
         {layout: over_time(rows[0], rows[0]["seconds"]) for layout, rows in by_layout.items()}, "linear",
         "seconds of training"),
        ("held-out loss, words used far back", backs, None, "last used more than so many tokens back"),
        ("mean rank of a needle's number, of 11", ranks, None, "tokens of the text")]
    return chart(panels, list(by_layout))


SECTION = """## Which layout
```
SECONDS_RUN=300 lab/experiments/layouts/run.sh SIEVE TEXT.jsonl OUT     # four GPUs of one host, half an hour
```
WHAT THE NUMBERS SAY.

<!-- table layouts -->
{layouts}

![Losses of the layouts](layouts.svg)

{layouts_rates}
"""


def main():
    """Prints both tables, with --section as a section of the page, and draws the newest race's runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, default=ROWS, help="other lines than the stored ones")
    parser.add_argument("--draw", type=pathlib.Path)
    parser.add_argument("--section", action="store_true")
    args = parser.parse_args()
    lines = stored(args.rows)
    if not runs_of(lines):
        parser.error(f"{args.rows} has no line of a run")
    texts = {name: table_text(*table(lines)) for name, table in PRINTED.items()}
    print(SECTION.format(**texts) if args.section else "\n\n".join(texts.values()))
    if args.draw:
        args.draw.write_text(drawn(runs_of(races(lines)[-1])), encoding="utf-8")


if __name__ == "__main__":
    main()
