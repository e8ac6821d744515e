"""From which query on DMA does not see a key, by the exported modeling_sieve.py.

usage: dma_expiry.py RANKS OUT

RANKS has "rank", float32 [rows, keys], and "rows", int32 [rows, 3]: how many keys a row has, keeps and always sees.
OUT gets "expire", int32 [rows, keys], 0 past a row's end. Each row is checked against its definition, query by query.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SOURCE = Path(__file__).parents[2] / "crates/sieve-hf/src/export/modeling_sieve.py"


def modeling_of(source):
    """A modeling_sieve.py as a module."""
    spec = importlib.util.spec_from_file_location("modeling_sieve", source)
    modeling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modeling)
    return modeling


def main() -> None:
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    modeling = modeling_of(SOURCE)
    # Several steps of the selection in each row.
    modeling.BLOCK = 16
    given = load_file(sys.argv[1])
    expire = torch.zeros(given["rank"].shape, dtype=torch.int32)
    for row, (length, keep, local) in enumerate(given["rows"].tolist()):
        rank = given["rank"][row, :length]
        found = modeling.expiry(rank[None, None], keep - local, local)[0, 0]
        for query in range(length):
            older = sorted(range(max(query + 1 - local, 0)), key=lambda key: (float(rank[key]), key), reverse=True)
            seen = set(older[: keep - local]) | set(range(max(query + 1 - local, 0), query + 1))
            assert seen == {key for key in range(query + 1) if found[key] > query}, (row, query)
        expire[row, :length] = found
    save_file({"expire": expire}, sys.argv[2])


if __name__ == "__main__":
    main()
