"""The runs of the paper's smallest recipes to their end: a table and a picture from their stored lines.

    python3 experiments/table4/table.py            prints the table of docs/results.md, "Table 4, 80M"
    python3 experiments/table4/table.py FILE.svg   also draws held-out loss over tokens

A run is FOLDER/NAME.jsonl beside this script: a line "run" (recipe, commit, card, command), then the run's own lines of
steps (thinned) and validations.
"""

import json
import math
import pathlib
import sys

COLUMNS = ["recipe", "held-out loss", "perplexity", "bits per byte", "tokens/s", "minutes", "steps", "card", "commit"]


def runs():
    for path in sorted(pathlib.Path(__file__).parent.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        head = next(line for line in lines if line["kind"] == "run")
        yield head, [line for line in lines if line["kind"] == "validation"], [
            line for line in lines if line["kind"] == "step"]


def table(found):
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for head, validations, steps in found:
        last = validations[-1]
        if last["step"] != head["steps"]:
            raise SystemExit(f"{head['recipe']}: the last validation is of step {last['step']}, not {head['steps']}")
        speed = tokens_per_step(steps) * head["steps"] / head["seconds"]
        cells = [head["recipe"].removesuffix(".toml"), f"{last['loss']:.4f}", f"{last['perplexity']:.3f}",
                 f"{last['bits_per_byte']:.4f}", f"{speed:,.0f}", f"{head['seconds'] / 60:.1f}", f"{head['steps']:,}",
                 f"{head['cards']} x {head['card']}", head["commit"][:8]]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def picture(found):
    """Held-out loss over billions of tokens, without step 0."""
    width, height, left, top, right = 640, 360, 60, 20, 150
    curves = [(head["recipe"].removesuffix(".toml"),
               [(line["step"] * tokens_per_step(steps) / 1e9, line["loss"]) for line in validations if line["step"]])
              for head, validations, steps in found]
    points = [point for _, curve in curves for point in curve]
    most_x = max(x for x, _ in points)
    low, high = math.floor(min(y for _, y in points) * 10) / 10, math.ceil(max(y for _, y in points) * 10) / 10
    place = lambda x, y: (left + x / most_x * (width - left - right), top + (high - y) / (high - low) * (height - top - 50))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for tick in range(round(low * 10), round(high * 10) + 1, 2):
        _, y = place(0, tick / 10)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick / 10:.1f}</text>')
    for at in range(0, int(most_x * 4) + 1):
        x, _ = place(at / 4, low)
        parts.append(f'<text x="{x:.1f}" y="{height - 32}" text-anchor="middle">{at / 4:g}</text>')
    # A name stands where its curve ends, the lowest loss first, and at least a line above the name before it.
    above = height
    for at, (name, curve) in enumerate(sorted(curves, key=lambda named: named[1][-1][1])):
        colour = ["#1f6fb4", "#c4571a", "#2f8a4c", "#8a4fb0", "#7a6a00", "#555555"][at % 6]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        x, y = place(*curve[-1])
        above = y = min(y, above - 15)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{name} {curve[-1][1]:.3f}</text>')
    parts.append(f'<text x="{left}" y="{height - 10}">held-out loss (nats a token) over billions of training tokens</text></svg>')
    return "\n".join(parts) + "\n"


def tokens_per_step(steps):
    """Of any stored line: lines of steps are thinned, and may end before the run does."""
    return steps[-1]["tokens_seen"] / steps[-1]["step"]


if __name__ == "__main__":
    found = list(runs())
    print(table(found))
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(picture(found))
