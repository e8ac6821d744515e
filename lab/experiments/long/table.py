"""The scores of one long model: a table and a picture from what score.sh wrote.

    python3 lab/experiments/long/table.py rows OUT CARD COMMIT >> lab/experiments/long/rows.jsonl  one line a number, from OUT/*.json
    … rows OUT CARD COMMIT random                                                           of rest.sh: no loss, no needles
    python3 lab/experiments/long/table.py [FILE.svg]                                            tables, and picture, of rows.jsonl

A line of rows.jsonl is a method at a length: milliseconds to the first token under it and dense, the share of pairs of
queries and keys that it reads, the loss it adds (nats), needles found of asked under it and dense; or null where a command
failed, with its words. Of two lines of a method and length the later one counts.
"""

import json
import math
import pathlib
import sys

SLOW = 0.125  # a method that takes more than eight times dense attention's time everywhere is named, not drawn
HERE = pathlib.Path(__file__).parent


def needles(folder, method):
    """Found and asked by length, under the method and dense; empty where the command failed."""
    try:
        methods = json.loads((folder / f"needle-{method}.json").read_text())["methods"]
    except (OSError, ValueError):
        return {}
    counts = {}
    for which, name in enumerate(["dense", "method"][-len(methods):] if len(methods) > 1 else ["dense"]):
        for cell in methods[which]["cells"]:
            row = counts.setdefault(cell["length"], {}).setdefault(name, [0, 0])
            row[0] += cell["num_found"]
            row[1] += cell["num_needles"]
    return counts


def rows(folder, card, commit, weights="trained"):
    """The rows of what score.sh wrote to `folder`, a failed command as its last line of text. `weights`: of "random"
    ones loss and recall say nothing and are left out."""
    commands = sorted(path.with_suffix("") for path in [*folder.glob("time-*.txt"), *folder.glob("stream-*.txt")])
    for path in commands:
        kind, method, *at = path.stem.split("-")
        hidden = needles(folder, method)
        head = {"method": method, "kind": kind, "card": card, "commit": commit, "weights": weights}
        try:
            measured = json.loads(path.with_suffix(".json").read_text())["selectors"][0]
        except (OSError, ValueError, LookupError):
            words = path.with_suffix(".txt").read_text().strip().splitlines()
            yield head | {"length": int(at[0]) if at else None, "failed": words[-1] if words else "not reached"}
            continue
        length, trained = measured["num_tokens"], weights == "trained"
        times = {name: measured[name] for name in ("prefill_ms", "dense_prefill_ms", "density")}
        yield head | times | {
            "length": length, "selector": measured["selector"], "recall": measured["recall"] if trained else None,
            "loss_added": measured["loss"] - measured["dense_loss"] if trained else None,
            "windows": measured["num_windows"],
            "needles": hidden.get(length, {}).get("method"), "dense_needles": hidden.get(length, {}).get("dense")}
        if kind == "stream":  # needles of a decode method lie in texts of all lengths, whose prompts were dense
            yield from (head | {"length": other, "needles": counts["method"], "dense_needles": counts["dense"]}
                        for other, counts in sorted(hidden.items()) if other != length)


def dense_needles(rows_of_all):
    """Needles found and asked by length, without a method: those of any method's row, which are the same."""
    return {row["length"]: row["dense_needles"] for row in rows_of_all if row.get("dense_needles")}


def stored():
    """The lines of rows.jsonl, of each method and length the last one in the place of the first; one of random weights
    takes the place of a failed line alone, as it has no loss."""
    newest = {}
    for row in map(json.loads, (HERE / "rows.jsonl").read_text().splitlines()):
        key = row["kind"], row["method"], row["length"]
        if key not in newest or "failed" in newest[key] or row.get("weights") != "random":
            newest[key] = row
    return list(newest.values())


CELLS = {
    "time": lambda row: f"{row['dense_prefill_ms'] / row['prefill_ms']:.2f}",
    "density": lambda row: f"{row['density']:.2f}",
    "loss": lambda row: "" if row["loss_added"] is None else f"{row['loss_added']:+.3f}",
    "needles": lambda row: "{} of {}".format(*row["needles"]) if row["needles"] else "",
}


def table(rows_of_all, what):
    """Head and lines: one number a method and length, by CELLS; `dense` is the first line where it has a number."""
    timed = [row for row in rows_of_all if row["kind"] == "time"]
    lengths = sorted({row["length"] for row in timed})
    lines = []
    if what == "needles":
        dense = dense_needles(rows_of_all)
        lines.append(["dense", *("{} of {}".format(*dense[length]) if length in dense else "" for length in lengths)])
    if what == "time":
        times = {length: [row["dense_prefill_ms"] for row in timed if row["length"] == length and "failed" not in row]
                 for length in lengths}
        lines.append(["dense, ms", *(f"{min(times[length]):.1f} to {max(times[length]):.1f}" for length in lengths)])
    for method in dict.fromkeys(row["method"] for row in timed):
        own = [row for row in timed if row["method"] == method]
        cells = {row["length"]: CELLS[what](row) for row in own if "failed" not in row}
        if any(cells.values()):
            cells |= {row["length"]: row["failed"] for row in own if "failed" in row}
            line = [cells.get(length, "") for length in lengths]
            lines.append([f"`{method}`", *line])
    return ["method", *(f"{length:,} tokens" for length in lengths)], lines


def streams(rows_of_all):
    """Head and lines of the decode methods: a prompt as a stream, and needles behind dense prompts."""
    rows = [row for row in rows_of_all if row["kind"] == "stream"]
    lengths = sorted({row["length"] for row in rows})
    read = [row for row in rows if "density" in row]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["length"]: row for row in rows if row["method"] == method}
        as_stream = next((row for row in read if row["method"] == method), None)
        numbers = [f"{as_stream['density']:.2f}", CELLS["loss"](as_stream)] if as_stream else ["", ""]
        cells = [CELLS["needles"](own[length]) if own.get(length, {}).get("needles") else "" for length in lengths]
        lines.append([f"`{method}`", *numbers, *cells])
    return ["method", "pairs read", "loss added", *(f"needles, {length:,} tokens" for length in lengths)], lines


def picture(rows_of_all):
    """How many times sooner than dense the first token comes, over the length of the prompt, both on log scales."""
    timed = [row for row in rows_of_all if row["kind"] == "time" and "failed" not in row]
    curves = {}
    for row in timed:
        curves.setdefault(row["method"], []).append((row["length"], row["dense_prefill_ms"] / row["prefill_ms"]))
    slow = sorted(name for name, curve in curves.items() if max(y for _, y in curve) < SLOW)
    curves = {name: curve for name, curve in curves.items() if name not in slow}
    low, high = math.log2(min(y for c in curves.values() for _, y in c)), math.log2(max(y for c in curves.values() for _, y in c))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    left_x, right_x = (math.log2(edge(row["length"] for row in timed)) for edge in (min, max))
    place = lambda x, y: (60 + (math.log2(x) - left_x) / max(right_x - left_x, 1) * 500,  # noqa: E731
                          20 + (high - math.log2(y)) / (high - low) * 300)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 380" font-family="sans-serif" font-size="13">',
             '<rect width="700" height="380" fill="white"/>']
    for tick in range(low, high + 1):
        _, y = place(2**left_x, 2.0**tick)
        parts.append(f'<line x1="60" x2="560" y1="{y:.1f}" y2="{y:.1f}" stroke="{"#777" if tick == 0 else "#ddd"}"/>'
                     f'<text x="52" y="{y + 4:.1f}" text-anchor="end">{2.0**tick:g}</text>')
    for length in sorted({row["length"] for row in timed}):
        x, _ = place(length, 1.0)
        parts.append(f'<text x="{x:.1f}" y="340" text-anchor="middle">{length:,}</text>')
    colours = ["#1f6fb4", "#c4571a", "#2f8a4c", "#8a4fb0", "#7a6a00", "#555555", "#b0305c", "#00808a", "#8c564b", "#000000"]
    last, labels = -20.0, []
    for at, (name, curve) in enumerate(sorted(curves.items(), key=lambda item: -sorted(item[1])[-1][1])):
        curve.sort()
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        x, y = place(*curve[-1])
        if curve[-1][0] == max(row["length"] for row in timed):
            y = last = max(y, last + 15)  # labels do not lie on one another
        else:
            x, y = x - 80, y - 12  # a curve that ends early is named above its end
        colour = colours[at % len(colours)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        labels.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}" stroke="white" stroke-width="4" '
                      f'paint-order="stroke">{name} {curve[-1][1]:.2f}</text>')
    parts += labels  # above all curves, each with a white edge
    parts.append('<text x="60" y="365">dense time over the method\'s, to the first token, by tokens of the prompt'
                 f'{"; below " + format(SLOW, "g") + ": " + ", ".join(slow) if slow else ""}</text></svg>')
    return "\n".join(parts) + "\n"


def main():
    """Prints the rows of a folder, or else the stored rows as tables, and draws them where a file is named."""
    if sys.argv[1:2] == ["rows"]:
        for row in rows(pathlib.Path(sys.argv[2]), *sys.argv[3:6]):
            print(json.dumps(row))
        return
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    rows_of_all = stored()
    for what in CELLS:
        head, lines = table(rows_of_all, what)
        for line in [[what, *head[1:]], ["---"] * len(head), *lines]:
            print("| " + " | ".join(line) + " |")
        print()
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text(picture(rows_of_all))


if __name__ == "__main__":
    main()
