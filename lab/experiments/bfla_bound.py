"""BFLA (Block-Filtered Long-Context Attention, lab/docs/papers.md) chooses blocks of keys for a prompt. Eq. 30 of its
section 6 bounds how far its output is from dense attention's. Does that hold on a trained model, and how tight is it?

    python3 lab/experiments/bfla_bound.py --sieve target/release/sieve     # measures and stores the row; half a minute

Queries, keys and values are those of checkpoints/tiny8k on LICENSE-APACHE, in f64, a head at a time; BFLA's blocks are
chosen by tests/golden/selectors/make_lists.py, which was written from the paper alone. Needs numpy.
"""

import argparse
import datetime
import json
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

import numpy as np

from papers_rows import rounded, store
from run_tables import ROOT

sys.path.insert(0, str(ROOT / "tests/golden/selectors"))

from make_lists import Call, bfla  # noqa: E402

TILE = 64
# Blocks of 64, groups of 16; ETA is too large for a block to be rescued by its number.
SETTINGS = {"b": TILE, "g": 16, "tile": TILE, "gamma": 0.9, "local": TILE, "eta": 10**9, "seed": 1}
COLUMNS = {"weights in the bound": "{}", "pairs": "{} %", "error over the output's norm, mean of heads": "{:.3f}",
           "bound over error: least": "{:,}", "median": "{:,}", "most": "{:,}"}


def operands(sieve):
    """q, k and v of checkpoints/tiny8k on LICENSE-APACHE, `[tokens, heads, width]`: captured in f32, widened to f64."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "qkv.safetensors")
        subprocess.run([sieve, "-q", "kernels", "capture", "--checkpoint", "checkpoints/tiny8k", "--text",
                        "LICENSE-APACHE", "--device", "cpu", "--out", out], cwd=ROOT, check=True)
        data = out.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    head = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    array_of = lambda entry: np.frombuffer(
        data[start:][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
    return [array_of(head[name]).astype(np.float64) for name in "qkv"]


def seen(lists, tokens):
    """Z of eq. 29: 1 where a query reads a key."""
    mask = np.zeros((tokens, tokens))
    for row, tiles in enumerate(lists):
        for tile in tiles:
            mask[row * TILE:(row + 1) * TILE, tile * TILE:(tile + 1) * TILE] = 1
    return np.tril(mask)


def of_head(q, k, v, z):
    """Norms of O and of its error, and eq. 30's bound on the error: by the weights of all pairs, as it is written, and
    by those of causal pairs alone."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    causal = np.tril(np.ones_like(z))
    # Both sums of a row have the same factor, which neither side of the bound sees.
    weights = np.exp(scores - np.where(causal > 0, scores, -np.inf).max(axis=1, keepdims=True))
    sums, kept = (weights * causal).sum(axis=1), (weights * z).sum(axis=1)
    dense, sparse = (weights * causal / sums[:, None]) @ v, (weights * z / kept[:, None]) @ v
    alpha = np.linalg.norm(sums / kept - 1) * np.linalg.norm(z) + np.linalg.norm(z - causal)
    bounds = [alpha * np.linalg.norm(part / sums[:, None]) * np.linalg.norm(v) for part in (weights, weights * causal)]
    return np.linalg.norm(dense), np.linalg.norm(sparse - dense), bounds


def main():
    """Stores and prints the bound over the true error, least, median and most of the heads: a row by the weights of all
    pairs, and one by those of causal pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", required=True, type=lambda path: shutil.which(path) or path)
    given = parser.parse_args()
    given.sieve = pathlib.Path(given.sieve).resolve()
    q, k, v = operands(given.sieve)
    tokens, group = len(q), q.shape[1] // k.shape[1]
    masks = [seen(lists, tokens) for lists in bfla(Call(q, k, 0, tokens), **SETTINGS)]
    heads = [of_head(q[:, head], k[:, head // group], v[:, head // group], masks[head // group])
             for head in range(q.shape[1])]
    version = subprocess.run([given.sieve, "--version"], capture_output=True, text=True, check=True).stdout
    same = {"pairs": rounded(100 * np.mean([mask.sum() for mask in masks]) / (tokens * (tokens + 1) / 2), 1),
            list(COLUMNS)[2]: rounded(statistics.mean(error / norm for norm, error, _ in heads), 3)}
    rows = []
    for at, weights in enumerate(("of all pairs, as written", "of causal pairs")):
        over = [bounds[at] / error for _, error, bounds in heads]
        shown = (round(float(f"{value:.2g}")) for value in (min(over), statistics.median(over), max(over)))
        rows.append({"table": "bfla_bound", list(COLUMNS)[0]: weights} | same | dict(zip(list(COLUMNS)[3:], shown)))
    store({"about": "bfla_bound", "card": "two CPU cores", "date": str(datetime.date.today()), "seeds": [0],
           "commit": version.partition("(")[2].strip(")\n"),
           "command": "python3 lab/experiments/bfla_bound.py --sieve SIEVE", "columns": COLUMNS}, rows)
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
