"""The scores of one long model: a table and a picture from what score.sh wrote.

    python3 experiments/long/table.py rows OUT CARD COMMIT >> experiments/long/rows.jsonl   one line a number, from OUT/*.json
    python3 experiments/long/table.py [FILE.svg]                                            table, and picture, of rows.jsonl

A line of rows.jsonl is a method at a length: milliseconds to the first token under it and dense, the share of pairs of
queries and keys that it reads, the loss it adds (nats), needles found of asked under it and dense; or null where a command
failed, with its words.
"""

import json
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


def needles(folder, method):
    """Found and asked by length, under the method and dense; empty where the command failed."""
    try:
        methods = json.loads((folder / f"needle-{method}.json").read_text())["methods"]
    except (OSError, ValueError):
        return {}
    found = {}
    for which, name in enumerate(["dense", "method"][-len(methods):] if len(methods) > 1 else ["dense"]):
        for cell in methods[which]["cells"]:
            row = found.setdefault(cell["length"], {}).setdefault(name, [0, 0])
            row[0] += cell["num_found"]
            row[1] += cell["num_needles"]
    return found


def rows(folder, card, commit):
    for path in sorted([*folder.glob("time-*.json"), *folder.glob("stream-*.json")]):
        kind, method, *at = path.stem.split("-")
        hidden = needles(folder, method)
        head = {"method": method, "kind": kind, "card": card, "commit": commit}
        try:
            found = json.loads(path.read_text())["selectors"][0]
        except (ValueError, LookupError):
            words = path.with_suffix(".txt").read_text().strip().splitlines()
            yield head | {"length": int(at[0]) if at else None, "failed": words[-1] if words else "no output"}
            continue
        length = found["num_tokens"]
        yield head | {
            "length": length, "selector": found["selector"], "prefill_ms": found["prefill_ms"],
            "dense_prefill_ms": found["dense_prefill_ms"], "density": found["density"], "recall": found["recall"],
            "loss_added": found["loss"] - found["dense_loss"], "windows": found["num_windows"],
            "needles": hidden.get(length, {}).get("method"), "dense_needles": hidden.get(length, {}).get("dense")}


def cell(row):
    if "failed" in row:
        return "failed"
    words = f"{row['dense_prefill_ms'] / row['prefill_ms']:.2f}, {row['density']:.2f}, {row['loss_added']:+.3f}"
    return words + (f", {row['needles'][0]}/{row['needles'][1]}" if row["needles"] else "")


def table(found):
    timed = [row for row in found if row["kind"] == "time"]
    lengths = sorted({row["length"] for row in timed})
    print("| method | " + " | ".join(f"{length:,}" for length in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    for method in dict.fromkeys(row["method"] for row in timed):
        cells = {row["length"]: cell(row) for row in timed if row["method"] == method}
        print(f"| `{method}` | " + " | ".join(cells.get(length, "") for length in lengths) + " |")


def picture(found):
    """How many times sooner than dense the first token comes, over the length of the prompt, both on log scales."""
    timed = [row for row in found if row["kind"] == "time" and "failed" not in row]
    curves = {}
    for row in timed:
        curves.setdefault(row["method"], []).append((row["length"], row["dense_prefill_ms"] / row["prefill_ms"]))
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
    colours = ["#1f6fb4", "#c4571a", "#2f8a4c", "#8a4fb0", "#7a6a00", "#555555", "#b0305c", "#00808a"]
    last = -20.0
    for at, (name, curve) in enumerate(sorted(curves.items(), key=lambda item: -sorted(item[1])[-1][1])):
        curve.sort()
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        x, y = place(*curve[-1])
        last = max(y, last + 15)  # labels do not lie on one another
        colour = colours[at % len(colours)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{x + 6:.1f}" y="{last + 4:.1f}" fill="{colour}">{name} {curve[-1][1]:.2f}</text>')
    parts.append('<text x="60" y="365">dense time over the method\'s, to the first token, by tokens of the prompt</text></svg>')
    return "\n".join(parts) + "\n"


def main():
    if sys.argv[1:2] == ["rows"]:
        for row in rows(pathlib.Path(sys.argv[2]), *sys.argv[3:5]):
            print(json.dumps(row))
        return
    found = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    table(found)
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text(picture(found))


if __name__ == "__main__":
    main()
