"""Computes the attention of a file of `sieve kernels run block_sparse` from its operands and its mask's arrays.

    python3 masked_attention.py FILE...

For each file one line: the largest error of o and of lse, and the share of the causal pairs that the mask keeps. The
standard library alone; meant for some hundred tokens.
"""

import array
import json
import math
import struct
import sys


def read(path):
    """Tensors as (shape, values) by name, and the metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        body = file.read()
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        data = body[begin:end]
        if info["dtype"] == "BF16":
            words = array.array("H", data)
            values = array.array("f", struct.pack(f"<{len(words)}I", *(word << 16 for word in words)))
        else:
            values = array.array({"F32": "f", "I32": "i"}[info["dtype"]], data)
        tensors[name] = (info["shape"], values)
    return tensors, header["__metadata__"]


def kept(tensors, meta, heads, n):
    """The keys that each query of each head reads: sets by (head, row)."""
    size = {name: int(meta[name]) for name in ("query_tile", "query_offset", "key_tile", "query_tiles",
                                               "heads_per_list", "heads_per_order")}
    values = {name: tensors[name][1] if name in tensors else None
              for name in ("row_ptr", "tile_idx", "col_ptr", "col_idx", "key_order", "query_order", "windows")}
    dense = set()
    for rows in meta["dense_rows"].split():
        first, end = rows.split("..")
        dense.update(range(int(first), int(end)))
    keys = {}
    for head in range(heads):
        list_of = head // size["heads_per_list"]
        order = list_of * size["heads_per_list"] // size["heads_per_order"] * n
        for tile in range(size["query_tiles"]):
            at = list_of * size["query_tiles"] + tile
            slots = range(n)
            if values["row_ptr"] is not None:
                slots = []
                for i in range(values["row_ptr"][at], values["row_ptr"][at + 1]):
                    first = values["tile_idx"][i] * size["key_tile"]
                    slots += range(first, min(first + size["key_tile"], n))
                if values["col_ptr"] is not None:
                    slots += values["col_idx"][values["col_ptr"][at]:values["col_ptr"][at + 1]]
            listed = [values["key_order"][order + slot] if values["key_order"] else slot for slot in slots]
            assert len(set(listed)) == len(listed), "a key stands twice in a list"
            end = min((tile + 1) * size["query_tile"] - size["query_offset"], n)
            for slot in range(max((tile * size["query_tile"]) - size["query_offset"], 0), end):
                row = values["query_order"][head * n + slot] if values["query_order"] else slot
                if row in dense:
                    visible = range(row + 1)
                elif values["windows"]:
                    init, local = values["windows"][2 * list_of:2 * list_of + 2]
                    visible = [key for key in listed if key <= row and (key < init or key + local > row)]
                else:
                    visible = [key for key in listed if key <= row]
                assert (head, row) not in keys, "a query stands in two tiles"
                keys[head, row] = visible
    assert len(keys) == heads * n, "a query stands in no tile"
    return keys


def check(path):
    tensors, meta = read(path)
    _, n, heads, width = tensors["q"][0]
    kv_heads = tensors["k"][0][2]
    scale = float(meta["scale"])

    def row(name, token, head, num_heads):
        at = (token * num_heads + head) * width
        return tensors[name][1][at:at + width]

    worst, pairs = [0.0, 0.0], 0
    for (head, token), keys in kept(tensors, meta, heads, n).items():
        kv_head = head * kv_heads // heads
        pairs += len(keys)
        query = row("q", token, head, heads)
        logits = [scale * sum(map(float.__mul__, query, row("k", key, kv_head, kv_heads))) for key in keys]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        total = sum(weights)
        o = [0.0] * width
        for weight, key in zip(weights, keys):
            value = row("v", key, kv_head, kv_heads)
            for c in range(width):
                o[c] += weight / total * value[c]
        stored = row("o", token, head, heads)
        worst[0] = max(worst[0], max(abs(a - b) for a, b in zip(o, stored)))
        lse = tensors["lse"][1][head * n + token]
        worst[1] = max(worst[1], abs(top + math.log(total) - lse))
    return worst, pairs / (heads * n * (n + 1) / 2)


if __name__ == "__main__":
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    for path in sys.argv[1:]:
        (o, lse), density = check(path)
        print(f"{path} {o:.1e} {lse:.1e} {density:.4f}")
