"""Rows of lab/rows that were noted by hand from what a command printed; README.md there says what they have."""

import decimal
import functools
import json

from run_tables import ROWS

FILES = ["results_noted", "benchmarks", "selectors", "published_noted", "papers", "scale"]


@functools.cache
def noted():
    """What is known of each noted table, and its rows; numbers keep the digits that were noted."""
    tables = {}
    for name in FILES:
        for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line, parse_float=decimal.Decimal)
            if "about" in row:
                tables[row["about"]] = row, []
            else:
                tables[row["table"]][1].append(row)
    return tables
