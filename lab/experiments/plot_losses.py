"""Draws training losses of several runs from their metrics.jsonl, a panel a group, as SVG.

    python lab/experiments/plot_losses.py --out losses.svg "2048 tokens: dense=A/metrics.jsonl,window 512=B/metrics.jsonl" "8192 tokens: ..."

Lines are averages of what was logged in 50 steps, in 10 of a run shorter than 800; dots are validation losses, as the
legend says. A line of several files (NAME=A+B) is their mean. With --speed each panel gets another one beside it: the
last validation loss of each file against its tokens/s, the upper quartile of what was logged. With --attention the
panels show, over the steps of one group, the loss and what was logged of the attention: of DMA the overlap with a
window of as many keys, the age that 95 % of the kept keys are below and the share of keys that no query sees, of MSA
the KL, recall and entropy of its indexers.
"""

import argparse
import json
import math
import pathlib

from runs import chart, steps_of, validations_of

COLOURS = ["#1b6ca8", "#c0392b", "#2e8b57", "#b8860b", "#7d3c98", "#555555"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 448, 320, 58, 34, 40
LETTER = 6.2  # pixels of a letter, at most, on the average of a name


def rows_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def mean(files):
    """Points of the same step, in as many files as have it."""
    by_step = {}
    for step, loss in (point for points in files for point in points):
        by_step.setdefault(step, []).append(loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(by_step.items())]


def read(paths):
    points, checks = zip(*(read_one(path) for path in paths.split("+")))
    return mean(points), mean(checks)


def read_one(path):
    """Of one metrics.jsonl the training losses, means over 50 steps (10 of a run shorter than 800), and the validation
    losses but the one before training, both as (step, loss)."""
    rows = rows_of(path)
    steps = [(row["step"], row["loss"]) for row in steps_of(rows)]
    checks = [(row["step"], row["loss"]) for row in validations_of(rows) if row["step"] > 0]
    bins, size = {}, 50 if steps[-1][0] >= 800 else 10
    for step, loss in steps:
        bins.setdefault((step - 1) // size, []).append((step, loss))
    return [tuple(sum(x) / len(x) for x in zip(*rows)) for _, rows in sorted(bins.items())], checks


def axes(at, title, below, xs, ys, x_ticks, y_tick, form, margin):
    """Functions that place a value between the bounds `xs` and a loss between `ys`, and the axes, with a line every
    `y_tick`."""
    (left, right), (low, high), middle = xs, ys, (TOP + HEIGHT - BOTTOM) / 2
    x = lambda value: at + LEFT + (WIDTH - LEFT - margin) * (value - left) / (right - left)
    y = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - min(loss, high)) / (high - low)
    out = [f'<text x="{at + LEFT}" y="20" font-size="13">{title}</text>',
           f'<text x="{at + 16}" y="{middle}" text-anchor="middle" transform="rotate(-90 {at + 16} {middle})">'
           'loss, nats per token</text>']
    for tick in [low + y_tick * i for i in range(round((high - low) / y_tick) + 1)]:
        out.append(f'<path d="M{x(left):.1f} {y(tick):.1f}H{x(right):.1f}" stroke="#ddd"/>'
                   f'<text x="{x(left) - 6:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{form.format(tick)}</text>')
    for tick in x_ticks:
        out.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    out.append(f'<text x="{x((left + right) / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{below}</text>')
    return x, y, out


def panel(at, title, lines):
    """One set of axes for the points and validations of each name; losses above 6 are cut off."""
    last = max(step for series in lines.values() for points in series for step, _ in points)
    losses = [loss for points, checks in lines.values() for _, loss in points[2:] + checks]
    low, high = math.floor(min(losses) * 2) / 2, min(6.0, math.ceil(max(losses) * 2) / 2)
    ticks = range(0, int(last) + 1, 400 if 800 <= last < 3000 else int(last) // 600 * 100 or 100)
    x, y, out = axes(at, title, "step", (0, last), (low, high), ticks, 0.5, "{:g}", margin=20)
    legend = x(last) - 30 - LETTER * max(map(len, [*lines, "validation"]))
    for number, (name, (points, checks)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points if loss <= high)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3" fill="{colour}"/>' for step, loss in checks if loss <= high]
        at_y = TOP + 14 + 16 * number
        out.append(f'<path d="M{legend:.1f} {at_y - 4}h18" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{legend + 24:.1f}" y="{at_y}">{name}</text>')
    if any(checks for _, checks in lines.values()):
        at_y = TOP + 14 + 16 * len(lines)
        out.append(f'<circle cx="{legend + 9:.1f}" cy="{at_y - 4}" r="3" fill="#777"/>'
                   f'<text x="{legend + 24:.1f}" y="{at_y}">validation</text>')
    return out


def speed(at, title, runs):
    """Loss at the end against speed, a dot a file."""
    dots = []
    for number, (name, paths) in enumerate(runs):
        for path in paths.split("+"):
            rows = rows_of(path)
            rates = sorted(row["tokens_per_second"] for row in steps_of(rows))
            dots.append((number, name, rates[len(rates) * 3 // 4] / 1000, validations_of(rows)[-1]["loss"]))
    (left, right), (low, high) = ((min(v), max(v)) for v in ([d[2] for d in dots], [d[3] for d in dots]))
    left, right = math.floor(left / 100) * 100, math.ceil(right / 100) * 100
    low, high = math.floor(low * 5 - 0.1) / 5, math.ceil(high * 5 + 0.1) / 5
    title, ticks = f"{title}: loss and speed", range(left, right + 1, 100)
    x, y, out = axes(at, title, "thousand tokens a second", (left, right), (low, high), ticks, 0.2, "{:.1f}", margin=24)
    for number, name, rate, loss in dots:
        out.append(f'<circle cx="{x(rate):.1f}" cy="{y(loss):.1f}" r="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
    for number, name in dict.fromkeys(dot[:2] for dot in dots):
        own_dots = [dot for dot in dots if dot[0] == number]
        ys = [y(dot[3]) for dot in own_dots]
        at_y = max(ys) + 16 if number % 3 == 2 else min(ys) - 9  # names beside each other do not collide
        out.append(f'<text x="{x(own_dots[0][2]):.1f}" y="{at_y:.1f}" text-anchor="middle">{name}</text>')
    return out


def of_attention(runs):
    """Panels of statistics of the attention by step, a line a run."""
    steps = {name: steps_of(rows_of(path)) for name, path in runs}
    panels = {
        "overlap with an equally long window, %": ("beyond_window", lambda share: 100 - 100 * share),
        "age that 95 % are below, tokens": ("late_key_age", float),
        "keys that no query sees, %": ("never_active", lambda share: 100 * share),
        "KL of the indexers, nats": ("index_kl", float),
        "recall of the indexers, %": ("index_recall", lambda share: 100 * share),
        "entropy of the indexers, nats": ("index_entropy", float),
    }
    curves = lambda key, shown: {name: [(row["step"], [shown(row["attention"][key])]) for row in rows
                                        if key in (row["attention"] or {})] for name, rows in steps.items()}
    panel_lines = {title: curves(*panel) for title, panel in panels.items()}
    has_values = lambda lines: any(value for points in lines.values() for _, values in points for value in values)
    panel_lines = {title: lines for title, lines in panel_lines.items() if has_values(lines)}
    losses = {name: [(row["step"], [row["loss"]]) for row in rows] for name, rows in steps.items()}
    panel_lines["training loss, nats"] = losses
    return chart([(title, lines, "linear", "step", "{:g}") for title, lines in panel_lines.items()], list(steps))


def main():
    """Writes a picture of a panel for each argument TITLE: NAME=FILE,…; with
    --attention one of the single argument's runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--speed", action="store_true", help="a panel of loss against tokens/s beside each")
    parser.add_argument("--attention", action="store_true", help="statistics of DMA or MSA beside the loss")
    parser.add_argument("panels", nargs="+")
    args = parser.parse_args()
    if args.attention and (args.speed or len(args.panels) > 1):
        parser.error("--attention takes one group of runs, without --speed")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(args.panels) * (1 + args.speed)} {HEIGHT}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for number, text in enumerate(args.panels):
        title, colon, runs = text.partition(":")
        if not colon or any("=" not in run for run in runs.split(",")):
            parser.error(f"{text!r}: a panel is TITLE: NAME=FILE,NAME=FILE…")
        at, runs = WIDTH * number * (1 + args.speed), [run.strip().split("=", 1) for run in runs.split(",")]
        if args.attention:
            args.out.write_text(of_attention(runs))
            return
        parts += panel(at, title.strip(), {name: read(path) for name, path in runs})
        parts += speed(at + WIDTH, title.strip(), runs) if args.speed else []
    args.out.write_text("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
