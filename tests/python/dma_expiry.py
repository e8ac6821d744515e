"""From which query on DMA does not see a key, by the definitions that exports have.

usage: dma_expiry.py RANKS OUT

RANKS has "rank", float32 [rows, keys], and "rows", int32 [rows, 3]: how many keys a row has, keeps and always sees.
OUT gets "expire", int32 [rows, keys], 0 past a row's end. Each row is checked query by query.
"""

import importlib
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SOURCE = Path(__file__).parents[2] / "crates/sieve-hf/src/export/modeling_sieve.py"
DEFINITIONS = Path(__file__).parents[2] / "python/sieve_attention/definitions.py"


def exported(name, source=SOURCE):
    """A file of an export as a module: "definitions", or "modeling_sieve", which imports the definitions beside it."""
    package = types.ModuleType("exported")
    package.__path__ = [str(source.parent), str(DEFINITIONS.parent)]
    sys.modules["exported"] = package
    return importlib.import_module(f"exported.{name}")


def main() -> None:
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    definitions = exported("definitions")
    # Several steps of the selection in each row.
    definitions.BLOCK = 16
    given = load_file(sys.argv[1])
    expire = torch.zeros(given["rank"].shape, dtype=torch.int32)
    for row, (length, keep, local) in enumerate(given["rows"].tolist()):
        rank = given["rank"][row, :length]
        expires = definitions.expiry(rank[None, None], keep - local, local)[0, 0]
        for query in range(length):
            older = sorted(range(max(query + 1 - local, 0)), key=lambda key: (float(rank[key]), key), reverse=True)
            visible = set(older[: keep - local]) | set(range(max(query + 1 - local, 0), query + 1))
            assert visible == {key for key in range(query + 1) if expires[key] > query}, (row, query)
        expire[row, :length] = expires
    save_file({"expire": expire}, sys.argv[2])


if __name__ == "__main__":
    main()
