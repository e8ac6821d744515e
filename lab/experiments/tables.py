"""The tables of the pages, made from the rows of lab/rows.

    python3 lab/experiments/tables.py            writes every table behind its mark, `<!-- table NAME -->`, into the pages
    python3 lab/experiments/tables.py --check    names the lines that differ instead; ends with 1 where one does
    python3 lab/experiments/tables.py --print NAME

A table is either computed from runs (run_tables.py, selector_tables.py) or shows rows that were noted by hand from
what a command printed: lab/rows/README.md says what such a row has. Ratios, means and rates are computed here
from the row's numbers, never stored. In a table without a mark no cell may be a number alone, but for settings and
codes behind `<!-- settings -->`. Needs nothing but Python.
"""

import argparse
import functools
import itertools
import json
import pathlib
import re
import statistics
import sys

import choose_tables
import cpu_rivals
import load_tables
import papers
import provenance
import run_tables
import selector_tables
import shared
import speeds
from noted import noted
from run_tables import ROOT, ROWS

import board  # noqa: E402  (run_tables names its folder)
from layouts import table as layouts  # noqa: E402
from long import memory, table as long_prompts  # noqa: E402
from prose import BOOK  # noqa: E402  (memory names its folder)
from table4 import table as table4  # noqa: E402
from tiny8k import run as tiny8k  # noqa: E402

# race.md has a script of its own (lab/experiments/race/table.py).
PAGES = [page for page in BOOK if page != "lab/docs/race.md"]
ALL = [ROOT / page for page in (*BOOK, "docs/recipe.md")]
MARK = re.compile(r"<!-- table (\w+) -->")
SETTINGS = "<!-- settings -->"  # before a table of what was chosen, not measured
NUMBER = re.compile(r"[-+−]?[\d.,]+ ?%?")


def ratio(above, below, digits=2):
    return f"{float(above) / float(below):.{digits}f}"


def rate_of(row, columns):
    """TFLOP/s of causal attention; `columns` is of keys and values, None where the label has the width of both."""
    rows, tokens = row["tokens, width" if columns is None else "tokens"].partition(",")[0].split(" x ")
    keys, values = columns or [int(row["tokens, width"].partition(", ")[2])] * 2
    multiplied = keys + values if row["pass"] == "forward" else 3 * keys + 2 * values
    return f"{2 * multiplied * 16 * int(rows) * int(tokens) ** 2 / 2 / float(row['ours']) / 1e9:.0f}"


def over_nsa(row):
    ours = lambda: speeds.nsa_in_any_order(row["heads"], int(row["tokens"].replace(",", "")))[0]
    return "" if row["rival"].startswith("flash-msa") else ratio(row["ms"], ours())


def beside_free(row):
    free, fixed = (float(row[key]) for key in ("in any order", "ours, sums in a fixed order"))
    return f"{free:,.0f} ({100 * (free / fixed - 1):+.1f} %)"


def slower(row):
    free, fixed = row["any order"], row["fixed order"]
    return "-" if free == "-" else f"{100 * (float(free) / float(fixed) - 1):.1f} %"


# Cells that are computed from the other numbers of their row.
DERIVED = {
    ("attention", "TFLOP/s"): lambda row: rate_of(row, None),
    ("attention", "cuDNN / ours"): lambda row: ratio(row["cuDNN"], row["ours"]),
    ("mla", "TFLOP/s"): lambda row: rate_of(row, (192, 128)),
    ("mla", "cuDNN / ours"): lambda row: ratio(row["cuDNN"], row["ours"]),
    ("published_steps", "in any order"): beside_free,
    ("published_steps", "fixed order / transformers"):
        lambda row: ratio(row["ours, sums in a fixed order"], row["transformers"]),
    ("fixed_order_steps", "slower by"): slower,
    ("dma", "cuDNN / ours"): lambda row: speeds.span(speeds.over_dma(row)),
    ("nsa", "cuDNN / NSA"): lambda row: ratio(row["cuDNN dense, both"], row["forward"] + row["backward"]),
    ("nsa_rivals", "ms over NSA's here"): over_nsa,
    ("decode", "ratio"): lambda row: ratio(row["cuDNN's dense decoding"], row["microseconds"], 1),
    ("table2", "SDPA / DMA"): lambda row: ratio(row["SDPA under a mask"], row["DMA"]),
    ("gpu_steps", "ratio"): lambda row: ratio(row["ours, tokens/s"][0], row["rival, dense, bf16"]),
    ("cpu_training", "times as fast"): lambda row: ratio(row["ours, dense, tokens/s"], row["PyTorch, dense"]),
    ("serve_clients", "times as fast"):
        lambda row: ratio(row["`sieve serve`, tokens/s"], row["`generate_batch`, tokens/s"], 0),
    ("serve_structures", "any object / none"): lambda row: ratio(row["any object"], row["no structure"]),
    ("serve_structures", "schema / none"): lambda row: ratio(row["schema"], row["no structure"]),
    ("five_kinds", "mean"): lambda row: run_tables.mean(map(float, row["validation loss, seeds 0, 1, 2"]), 3),
}


def cell(name, row, column, form):
    """The text of a cell: computed by DERIVED, or the stored value in its column's format, a list as one text."""
    if (name, column) in DERIVED:
        return DERIVED[name, column](row)
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return form.format(*value) if form.count("{") > 1 else ", ".join(form.format(part) for part in value)
    return form.format(value)


def of_noted(name):
    """Head and lines of a table that was noted by hand; in the columns `once` a
    label equal to the one above is left out."""
    about, rows = noted()[name]
    columns = about["columns"]
    lines = [[cell(name, row, column, form) for column, form in columns.items()] for row in rows]
    for column in about.get("once", []):  # is left out where it is that of the row above
        at = list(columns).index(column)
        labels = [line[at] for line in lines]
        for line, label, above in zip(lines[1:], labels[1:], labels):
            line[at] = "" if label == above else label
    return ["" if column == "row" else column for column in columns], lines


def of_board(made_by):
    """A table that board.py makes of its nine-minute runs."""
    head, _, *lines = (split(line) for line in made_by(
        board.finished(ROWS / "board.jsonl", board.KEY), 9.0).splitlines())
    return head, lines


def board_times():
    """How many times as many tokens the kinds without dense layers train on as each other entry, in rows of 32,768."""
    tokens_of = {entry: statistics.mean(row["tokens"] for row in rows) for (length, entry), rows in board.by_entry(
        board.finished(ROWS / "board.jsonl", board.KEY), 9.0) if length == 32768}
    sparse = statistics.mean([tokens_of["DMA"], tokens_of["window + slope"]])
    others = {"a hybrid": "DMA, 1 of 4 dense", "dense attention": "dense", "PyTorch": "PyTorch, dense"}
    return ["than", "times as many"], [[name, ratio(sparse, tokens_of[entry], 1)] for name, entry in others.items()]


def board_passes():
    """How often the entries read the training tokens, and tokens a parameter besides the embedding."""
    lines = []
    for (length, entry), rows in board.by_entry(board.finished(ROWS / "board.jsonl", board.KEY), 9.0):
        tokens = statistics.mean(row["tokens"] for row in rows)
        lines.append([f"{length:,}", entry, f"{tokens / shared.TRAINING_TOKENS:.1f}", f"{tokens / shared.PARAMETERS:.1f}"])
    return ["rows of", "entry", "times the training tokens", "tokens a parameter"], lines


def table_4():
    head, _, *lines = (split(line) for line in table4.table(list(table4.runs())).splitlines())
    return head, lines


def long(what):
    """The dense model of 2K to 128K under every fast method: lab/experiments/long."""
    return long_prompts.table(long_prompts.stored(), what)


def advice():
    """What to take, of the rows of docs/selectors.md and of whole selectors in lab/docs/selectors.md."""
    quality = {row["attention"]: row for row in noted()["quality"][1]}
    name = lambda row: row["method (selection alone, 128K)"].partition("` (")[0].strip("`")
    whole = {name(row): row["512K"] for row in noted()["whole_selectors"][1]}
    dense = quality["dense (loss 3.2034)"]["prompt, ms"]
    lines = []
    wishes = {"a long prompt faster at little loss": ("a_shape", "xattention:tau=0.7", "meanpool:tau=0.7"),
              "faster still, with some loss": ("block_sparse:topk=64", "block_sparse:topk=32")}
    for want, methods in wishes.items():
        for method in methods:
            row = quality[f"`{method}`"]
            lines.append([want if method == methods[0] else "", f"`{method}`", ratio(dense, row["prompt, ms"], 1),
                          f"{row['loss − dense']:+}"])
    for method in ("block_sparse", "bfla", "streamingllm"):
        _, times, _, mass = whole[method]
        lines.append(["half a million tokens, most left out" if method == "block_sparse" else "", f"`{method}`",
                      f"{times}, only attention", f"keeps {mass} % of the mass"])
    kept = quality["`oracle_topk:k=16`"]
    return ["you want", "take", "times as fast", "loss added in nats, or what else"], lines + [
        ["fewer keys read while generating", "`quest`", "-", "ranks needles as dense attention does"],
        ["a cache that does not grow", "`snapkv`, `h2o`", "-", "retrieve less than half of the needles"],
        ["what blocks could do at best", "`oracle_topk`", "slow: it reads every score",
         f"{kept['loss − dense']:+} at {kept['density']} % of the pairs"]]


COMPUTED = run_tables.TABLES | selector_tables.TABLES | papers.TABLES | choose_tables.TABLES | {
    "board": functools.partial(of_board, board.table), "board_front": functools.partial(of_board, board.front_table),
    "board_times": board_times, "board_passes": board_passes, "table4": table_4, "speed": speeds.table, "advice": advice} | {
    f"long_{what}": functools.partial(long, what) for what in long_prompts.CELLS} | {
    "cpu_rivals": cpu_rivals.table, **load_tables.TABLES,
    "tiny8k_needles": lambda: tiny8k.needle_table(tiny8k.json_lines(tiny8k.ROWS)),
    "tiny8k_loss": lambda: tiny8k.loss_table(tiny8k.json_lines(tiny8k.ROWS)),
    "long_memory": memory.table, "long_streams": lambda: long_prompts.streams(long_prompts.stored())} | {
    name: functools.partial(of_rows, layouts.stored()) for name, of_rows in layouts.TABLES.items() if layouts.stored()
} | table4.tables()


def made(name):
    """The lines of a table in Markdown."""
    head, lines = COMPUTED[name]() if name in COMPUTED else of_noted(name)
    if provenance.not_kept(name):
        head = [f"{head[0]} {provenance.SIGN}".strip(), *head[1:]]
    texts = ["| " + " | ".join(row) + " |" for row in (head, *lines)]
    return [re.sub(r"\|(?:  \|)+", lambda cells: cells[0].replace("  ", " "), text) for text in
            [texts[0], "|" + "---|" * len(head), *texts[1:]]]


def split(line):
    return [cell_text.strip() for cell_text in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables_of(lines):
    """(first line, end, name) of each table of a page; of one without a mark the name is None, of settings it is "" """
    at = 0
    while at < len(lines):
        mark = MARK.fullmatch(lines[at - 1]) if at else None
        if mark or lines[at].startswith("|"):
            end = at
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield at, end, mark[1] if mark else "" if at and lines[at - 1] == SETTINGS else None
            at = end
        at += 1


def filled(page):
    """The page with its tables made anew, where it differs from that, and the numbers that have no row."""
    lines = page.read_text(encoding="utf-8").splitlines()
    different, unknown, out, after = [], [], [], 0
    for begin, end, name in tables_of(lines):
        stored = lines[begin:end]
        wanted = made(name) if name else stored
        out += lines[after:begin] + wanted
        after = end
        different += [f"{page.name}, table {name}:\n  the page has  {old}\n  the rows give {new}"
                      for old, new in itertools.zip_longest(stored, wanted, fillvalue="") if old != new]
        if name is None:
            unknown += [f"{page.name}:{begin + number}: a number without a stored row: {number_text}"
                        for number, line in enumerate(stored[2:], 3)
                        for number_text in split(line) if NUMBER.fullmatch(number_text)]
    text = "\n".join(out + lines[after:]) + "\n"
    if any(f" {provenance.SIGN} |" in line for line in out) and provenance.LEGEND not in re.sub(r"\s+", " ", text):
        unknown.append(f"{page.name}: a table has {provenance.SIGN}, and no sentence begins '{provenance.LEGEND}'")
    return text, different, unknown


def main():
    """Fills the tables of all pages from the rows, or with --check names what differs; ends with 1 on any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--print", metavar="NAME", help="print one table", choices=sorted({*COMPUTED, *noted()}))
    parser.add_argument("--pages", type=pathlib.Path, nargs="+", default=[ROOT / page for page in PAGES])
    arguments = parser.parse_args()
    if arguments.print:
        print("\n".join(made(arguments.print)))
        return
    faults, count = [], 0
    for page in arguments.pages:
        text, different, unknown = filled(page)
        count += len(MARK.findall(text))
        faults += unknown
        if arguments.check:
            faults += different
        else:
            page.write_text(text, encoding="utf-8")
    faults += shared.faults((str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in ALL)
    print("\n".join(faults) or f"{count} tables are those of their rows, and sentences say the same numbers")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
