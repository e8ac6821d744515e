"""Puts what lab/experiments/papers_gpu.sh and figure2.sh measured into lab/rows/papers.jsonl, from which papers.py
judges the claims of lab/docs/papers.md.

    python3 lab/experiments/papers_rows.py OUT [--card NAME]    a folder of either script; NAME where no file says it

A table of the same name is replaced. What a measurement lacks is said: its claims stay "not run". A table that is new
needs its mark, which is printed with its page; then `python3 lab/experiments/tables.py` writes the page.
"""

import argparse
import json
import pathlib
import sys

from papers import probes_share
from run_tables import ROOT, ROWS

FILE = ROWS / "papers.jsonl"
PAGES = {"selectors_alone": "lab/docs/selectors.md", "figure2": "lab/docs/papers.md"}
PARTS = ("trim", "topk", "permute", "far", "million", "more")
SELECTORS = {"method": "{}", "tokens": "{}", "dense, ms": "{:.2f}", "whole, ms": "{:.2f}", "selection, ms": "{:.2f}",
             "pairs, %": "{:.2f}", "of them probes, %": "{:.2f}", "mass, %": "{:.1f}"}
FIGURE = {"form": "{}", "task": "{}", "loss of": "{}", "steps": "{:,}", "answered, % at 512": "{:.0f}",
          "at 1024": "{:.0f}", "keys outside a window of as many, % in the layer with most": "{:.1f}"}


def rounded(value, digits=4):
    return round(value, digits)


def pairs(method):
    """Percent of the pairs that are read, and of these the probes'. A program before `probe_density` counted the mask's
    alone: MOMO's probes are then added by their number."""
    if "probe_density" in method:
        return rounded(100 * method["density"]), rounded(100 * method["probe_density"])
    probes = probes_share(method["tokens"]) if method["method"].startswith("momo") else 0.0
    return rounded(100 * (method["density"] + probes)), rounded(100 * probes)


def selectors(folder):
    """The rows of papers_gpu.sh, and the card; the first of several rows of the same method and length."""
    rows, card, lacks = {}, None, []
    for part in PARTS:
        path = folder / f"{part}.json"
        if not path.is_file():
            lacks.append(part)
            continue
        measured = json.loads(path.read_text(encoding="utf-8"))
        card = measured["device"]
        for method in measured["selectors"]:
            if method["method"] == "dense" or None in (method["whole_ms"], method["dense_ms"]):
                continue
            read, probes = pairs(method)
            rows.setdefault((method["method"], method["tokens"]), {
                "table": "selectors_alone", "method": f"`{method['method']}`", "tokens": f"{method['tokens']:,}",
                "dense, ms": rounded(method["dense_ms"]), "whole, ms": rounded(method["whole_ms"]),
                "selection, ms": rounded(method["selection_ms"] or 0.0), "pairs, %": read,
                "of them probes, %": probes, "mass, %": rounded(100 * method["mass"], 2)})
    return "selectors_alone", list(rows.values()), SELECTORS, card, lacks, "lab/experiments/papers_gpu.sh SIEVE OUT"


def figure2(folder):
    """The rows of figure2.sh: what is answered, and which keys are read by the layer that reads most far ones; dense
    attention chooses none."""
    rows, lacks = [], []
    for kind, form in (("paper", "as published"), ("slope", "with the slope"), ("dense", "dense")):
        path = folder / f"{kind}-ruler.json"
        if not path.is_file():
            lacks.append(kind)
            continue
        scores = json.loads(path.read_text(encoding="utf-8"))
        for task in scores["methods"][0]["tasks"]:
            attention = folder / f"{kind}-{task['task']}.json"
            if not attention.is_file():
                lacks.append(attention.name)
                continue
            layers = json.loads(attention.read_text(encoding="utf-8"))["layers"]
            score = {cell["length"]: 100 * cell["score"] for cell in task["lengths"]}
            far = [100 * (1 - layer["chosen"]["in_window"]) for layer in layers if layer["chosen"]]
            rows.append({"table": "figure2", "form": form, "task": task["task"], "loss of": "answers",
                         "steps": scores["step"], "answered, % at 512": rounded(score[512]),
                         "at 1024": rounded(score[1024]),
                         list(FIGURE)[-1]: rounded(max(far)) if far else "-"})
    return "figure2", rows, FIGURE, None, lacks, "lab/experiments/figure2.sh SIEVE OUT"


def store(about, rows):
    """Puts a table into FILE, in place of the one of the same name."""
    kept = [line for line in FILE.read_text(encoding="utf-8").splitlines()
            if about["about"] not in (json.loads(line).get("about"), json.loads(line).get("table"))]
    FILE.write_text("\n".join([*kept, *map(json.dumps, [about, *rows])]) + "\n", encoding="utf-8")


def main():
    """Stores the rows of a folder of either script, which its files tell apart, and prints what it lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--card", help="the device, where the files do not say it")
    arguments = parser.parse_args()
    ours = any((arguments.out / f"{part}.json").is_file() for part in PARTS)
    name, rows, columns, card, lacks, command = (selectors if ours else figure2)(arguments.out)
    card = arguments.card or card
    if not rows or not card:
        sys.exit(f"{arguments.out}: no rows" if not rows else f"{arguments.out}: no file says the card: give --card")
    program, date = (arguments.out / "program.txt").read_text(encoding="utf-8").split("\n")[:2]
    about = {"about": name, "card": card, "date": date, "commit": program.partition("(")[2].strip(")"), "seeds": [0],
             "command": command, "columns": columns}
    store(about, rows)
    print(f"{len(rows)} rows of {name}" + (f"; not there: {', '.join(lacks)}" if lacks else ""))
    if f"<!-- table {name} -->" not in (ROOT / PAGES[name]).read_text(encoding="utf-8"):
        print(f"put this line before an empty one into {PAGES[name]}: <!-- table {name} -->")
    print("then: python3 lab/experiments/tables.py")


if __name__ == "__main__":
    main()
