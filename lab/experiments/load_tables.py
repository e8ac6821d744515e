"""Tables of `sieve serve` under load, from lab/rows/load.jsonl, the rows that serve_load.py and lab/rivals/serve/load.py
write, each with card, date and commit."""

import json

from run_tables import ROWS

SIZES = {"80m": "80M", "1p7b": "1.7B"}


def rows(*cells):
    """The rows of these cells, by size, kind and program as they were measured."""
    lines = (ROWS / "load.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["cell"] in cells]


def name(row):
    """Model and program of a row."""
    program = "" if row["program"] == "sieve" else f", {row['program']}"
    return f"{SIZES[row['size']]} {row['kind']}{program}"


def milliseconds(seconds):
    return "-" if seconds is None else f"{1000 * seconds:,.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def load():
    """Clients that ask again and again, and requests at half of the rate that they reach."""
    lines = []
    half = {(name(row), row["sampling"]): row for row in rows("0.5 of full")}
    for full in rows("full"):
        at_half = half.get((name(full), full["sampling"]), {})
        ratio = at_half.get("over_alone_median")
        lines.append([
            name(full), full["sampling"], f"{full['tokens_per_second']:,.0f}",
            f"{at_half['requests_per_second']:.1f}" if at_half else "-",
            *(milliseconds(at_half.get(key)) for key in ("first_median", "first_99")),
            "-" if ratio is None else f"{ratio:.2f}",
            *(milliseconds(at_half.get(key)) for key in ("gap_median", "gap_99", "gap_longest"))])
    return ["model", "sampling", "64 clients, tokens/s", "requests/s", "first token, median, ms", "99th", "over alone",
            "gap, median, ms", "99th", "longest"], lines


def texts():
    """Texts of 32,000 tokens that are decoded together, and the longest prompt alone."""
    alone = {name(row): row["again"] for row in rows("lone")}
    together = rows("texts")
    dense = {row["size"]: row["tokens_per_second"] for row in together if row["kind"] == "mha"}
    return ["model", "16 texts, tokens/s", "over dense", "1,000 tokens alone, ms", "8,000", "32,000"], [
        [name(row), f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second'] / dense[row['size']]:.2f}",
         *(milliseconds(alone.get(name(row), {}).get(tokens)) for tokens in ("1000", "8000", "32000"))] for row in together]


TABLES = {"serve_load": load, "serve_texts": texts}
