"""Where the numbers of a table come from: card, date, commit and command, and what of these was not kept.

A table that was noted by hand says it in its line `about`; of a file of runs lab/rows/runs.jsonl says what the
rows themselves do not. What cannot be had again stands in `not_kept`, and the table's head has SIGN on the page.
"""

import functools
import json
import pathlib

from noted import noted
from run_tables import ROWS

KEYS = ("card", "date", "commit", "command")
SIGN = "\u2020"
LEGEND = f"{SIGN} The commit of the measured program, or the command, was not kept"
# Other names that rows of runs have for a key.
NAMES = {"card": ("card", "device", "gpu", "cpu"), "commit": ("commit", "program")}


@functools.cache
def of_files():
    """The lines of runs.jsonl by the file that they are about."""
    return {line["of"]: line
            for line in map(json.loads, (ROWS / "runs.jsonl").read_text(encoding="utf-8").splitlines())}


def rows_of(file):
    """The rows of a file of runs; of a folder the first line of each file, which is about its run."""
    path = ROWS / file
    paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [pathlib.Path(f"{path}.jsonl")]
    lines = [path_of_rows.read_text(encoding="utf-8").splitlines() for path_of_rows in paths]
    rows = [json.loads(line) for each in lines for line in each]
    return [row for row in rows if row.get("kind") == "run"] if path.is_dir() else rows


def missing(file):
    """Keys that neither the rows of a file of runs nor its line have, and that are not said to be lost."""
    line, rows = of_files()[file], rows_of(file)
    in_rows = lambda key: all(any(name in row for name in NAMES.get(key, (key,))) for row in rows)
    return [key for key in KEYS if key not in line and key not in line.get("not_kept", []) and not in_rows(key)]


def tables_of_runs():
    """The table's name and the file of runs that it is made from."""
    return {table: file for file, line in of_files().items() for table in line["tables"]}


def not_kept(table):
    """What of KEYS is lost for a table; of one that is composed of other tables' rows nothing is said."""
    if table in noted():
        return noted()[table][0].get("not_kept", [])
    file = tables_of_runs().get(table)
    return of_files()[file].get("not_kept", []) if file else []
