"""Draws selectors as SVG, a panel a method.

    python3 lab/experiments/plot_selectors.py --out time.svg A.json B.json      of `sieve kernels bench --selectors --json`
    python3 lab/experiments/plot_selectors.py --out quality.svg C.json          of `sieve eval selectors --json`

Of the first: milliseconds against tokens on generated operands, for as many heads as most lengths have. Of the second: the
loss that a method adds against the time of a prompt of the longest length, with all other settings in grey behind it.
"""

import argparse
import json
import math
import pathlib

COLUMNS, WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 4, 230, 178, 46, 16, 30, 26
GREY, BLUE, RED = "#b8b8b8", "#1b6ca8", "#c0392b"


class Axes:
    """Two logarithmic axes; what lies outside is drawn at the edge."""

    def __init__(self, x, y, x_ticks, y_ticks):
        self.ranges, self.ticks = (x, y), (x_ticks, y_ticks)

    def at(self, *point):
        share = [math.log(min(max(v, a), b) / a) / math.log(b / a) for v, (a, b) in zip(point, self.ranges)]
        return LEFT + (WIDTH - LEFT - RIGHT) * share[0], TOP + (HEIGHT - TOP - BOTTOM) * (1 - share[1])

    def frame(self, title, below):
        """The lines of SVG with title, `below` it a line in grey, and the labels of both axes' ticks."""
        x_ticks, y_ticks = self.ticks
        out = [f'<text x="{LEFT}" y="13" font-weight="bold">{title}</text><text x="{LEFT}" y="25" fill="#555">{below}</text>']
        for value, text in y_ticks:
            (left, y), (right, _) = self.at(0, value), self.at(math.inf, value)
            out.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#e4e4e4"/><text x="{left - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value, text in x_ticks:
            x, y = self.at(value, 0)
            out.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{text}</text>')
        return out

    def line(self, points, colour, width=2, dash="", dots=0):
        points = [self.at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>'] if width else []
        marks = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        return out + [f'<path d="{marks}" stroke="{colour}" stroke-width="{2 * dots}" stroke-linecap="round"/>'] * bool(dots)


def legend(entries):
    out = []
    for n, (colour, dash, text) in enumerate(entries):
        y = TOP + 20 * n
        mark = f'<path d="M20 {y - 4}h18" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>' if colour else ""
        out.append(f'{mark}<text x="{44 if colour else 20}" y="{y}">{text}</text>')
    return out


def of_lengths(files):
    """Panels and words of the legend from `kernels bench --selectors`: ms against tokens, a panel a method, and from
    which length on the method is faster than dense attention."""
    rows = [row for file in files for row in file["selectors"] if row["operands"] == "generated"]
    heads = max({row["heads"] for row in rows}, key=[row["heads"] for row in rows].count)
    methods = {}
    for row in rows:
        if row["heads"] == heads:
            name = row["method"].replace(":stride=16", "").replace(",base.stride=16", "")
            methods.setdefault(name, {})[row["tokens"]] = row
    methods = {name: dict(sorted(by_length.items())) for name, by_length in methods.items()}
    dense = [(n, row["whole_ms"]) for n, row in methods.pop("dense").items()]
    lengths = sorted(n for n, _ in dense)
    y = [min(row["selection_ms"] or 1e9 for m in methods.values() for row in m.values()), max(ms for _, ms in dense)]
    ticks = [10.0**e for e in range(-1, 5) if y[0] <= 10.0**e <= y[1]]
    axes = Axes((lengths[0], lengths[-1]), y, [(n, f"{n // 1024}K") for n in lengths[::2]], [(t, f"{t:g}") for t in ticks])
    panels = []
    for name, by_length in methods.items():
        slower = [n for n, row in by_length.items() if row["whole_ms"] >= row["dense_ms"]]
        since = [n for n in lengths if n > max(slower, default=0)]
        says = f"faster than dense from {since[0] // 1024}K" if since else f"slower than dense at {lengths[-1] // 1024}K"
        panels.append([
            *axes.frame(name, says), *axes.line(dense, GREY),
            *axes.line([(n, row["selection_ms"]) for n, row in by_length.items() if row["selection_ms"]], RED, 1.5, "4 3"),
            *axes.line([(n, row["whole_ms"]) for n, row in by_length.items()], BLUE, dots=2),
        ])
    said = [(None, "", "milliseconds against tokens,"), (None, "", "both axes logarithmic"), (BLUE, "", "selection and attention"),
            (RED, "4 3", "selection alone"), (GREY, "", "dense attention")]
    return panels, said


def of_quality(files):
    """Panels and words of the legend from `eval selectors`: a method's added loss against a prompt's ms at the longest
    length, a dot a setting; each panel names the settings that move."""
    rows = [row for file in files for row in file["selectors"]]
    longest = max(row["num_tokens"] for row in rows)
    rows = [row for row in rows if row["num_tokens"] == longest]
    dense_ms, dense_loss = rows[0]["dense_prefill_ms"], rows[0]["dense_loss"]
    methods, kinds = {}, {}
    for row in rows:
        methods.setdefault(row["name"], []).append((row["prefill_ms"], row["loss"] - dense_loss, row["selector"].partition(":")[2]))
    for row in (row for file in files for row in file["trained"] if row["num_tokens"] == longest):
        name, _, settings = row["attention"].partition(", ")
        methods[f"trained {name}"] = [(row["prefill_ms"], row["loss"] - dense_loss, "")]
        kinds[f"trained {name}"] = settings.rpartition(", ")[0] or settings
    everything = [point[:2] for points in methods.values() for point in points]
    x = [0.9 * min(ms for ms, _ in everything), 1.1 * max(ms for ms, _ in everything)]
    axes = Axes(x, (1e-3, 1), [(ms, ms) for ms in (5, 10, 20, 50, 100, 200, 500) if x[0] <= ms <= x[1]],
                [(1, "1"), (0.1, "0.1"), (0.01, "0.01"), (1e-3, "≤ 0.001")])
    panels = []
    for name, points in methods.items():
        settings = [dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair) for *_, text in points]
        moved = [key for key in settings[0] if any(other.get(key) != settings[0][key] for other in settings)]
        values = [f"{key} {', '.join(setting[key] for setting in settings)}" for key in moved]
        says = ", ".join(values) or kinds.get(name, "")
        says = says if len(says) < 34 else says[:33] + "…"
        panels.append([
            *axes.frame(name, says), *axes.line([(dense_ms, 1e-3), (dense_ms, 1)], GREY, 1, "4 3"),
            *axes.line(everything, GREY, 0, dots=1.7), *axes.line([point[:2] for point in points], BLUE, dots=3),
        ])
    said = [(None, "", "nats per token more than dense"), (None, "", f"against ms of a prompt of {longest}"),
            (GREY, "4 3", "time of dense attention"), (None, "", "grey dots: all other settings")]
    return panels, said


def write(path, panels, said):
    panels = [*panels, legend(said)]
    height = HEIGHT * math.ceil(len(panels) / COLUMNS)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * COLUMNS} {height}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for n, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * (n % COLUMNS)} {HEIGHT * (n // COLUMNS)})">', *panel, "</g>"]
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    files = [json.loads(file.read_text()) for file in args.files]
    write(args.out, *(of_quality if "trained" in files[0] else of_lengths)(files))


if __name__ == "__main__":
    main()
