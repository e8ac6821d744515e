"""Shapes of an op's outputs where batch or length are symbols, so that one compiled graph serves many lengths.

A plan knows its outputs for numbers alone. `symbolic` has the sizes that follow from the rows and the tokens; all other
sizes, and which outputs there are, come from the plan of the numbers that torch traces with.
"""

import torch

# Of the lists of a selection: queries of a list, queries of a tile, entries that a list is padded to, and words that
# each of the three parts is padded to.
LIST_QUERIES, TILE_QUERIES, LIST_ENTRIES, WORDS = 1024, 64, 128, 64

# For each axis of an output, by its name: b rows, n tokens, p tokens padded to 64, s slots of compressed blocks; a dot
# is a size that depends on neither. Outputs of one name and several numbers of axes have a form for each.
FORMS = {
    **dict.fromkeys(["o", "o_low", "compressed_o", "selected_o", "window_o"], ["bn.."]),
    **dict.fromkeys(["lse", "compressed_lse", "selected_lse", "window_lse", "x", "z", "bias", "expire"], ["b.n"]),
    **dict.fromkeys(["dq", "dk", "dv", "dqkv", "block_indices", "block_sums", "d_selected", "d_window"], ["bn.."]),
    "base": ["b.p"],
    "compressed": [".bs.."],
    "d_compressed": [".bs..", "bn.."],
    "d_logits": ["bn.", "bn.."],
    "d_bias": ["b.n", "..", "."],
    "d_sinks": ["."],
    "dw_dt": [".."],
    "da": ["."],
}


# Inputs [rows, heads, tokens, ..].
HEADS_FIRST = ("rank", "bias", "lse", "base", "x", "z", "dz", "k_cache", "v_cache", "z_cache", "positions")


def _may_vary(name, count):
    """Axes of an input of so many axes whose sizes a graph may leave open: rows, tokens, compressed blocks, keys of a
    cache, words of a list. Heads and widths are numbers: a plan's kernels are compiled for them.
    """
    if count == 1:
        return (0,)
    return (1, 2) if count == 5 else (0, 2) if name in HEADS_FIRST else (0, 1)


def _up(x, step):
    return (x + (step - 1)) // step * step


def _words_of_lists(rows, tokens, keep):
    """Words of a selection's key lists, for rows * KV heads: a length a list, a range a tile, entries of 2 words."""
    blocks, tiles = (-(-tokens // size) for size in (LIST_QUERIES, TILE_QUERIES))
    capacity = _up(torch.sym_min(tokens, keep + LIST_QUERIES), LIST_ENTRIES)
    return sum(_up(rows * words, WORDS) for words in (blocks, 2 * tiles, 2 * blocks * capacity))


def symbolic(outputs, given, settings, batch, tokens):
    """Shapes of a plan's `outputs`, (name, shape, dtype) of one length, as functions of `batch` and `tokens`.

    given: shapes of the inputs by name. `int` and the comparisons guard the graph: other heads or widths, and lengths
    with other outputs, are traced anew.
    """
    for name, shape in given.items():
        for axis, size in enumerate(shape):
            if axis not in _may_vary(name, len(shape)):
                int(size)
    keep = settings.get("keep")
    if keep is not None:
        bool(keep < tokens)
    sizes = {"b": batch, "n": tokens, "p": _up(tokens, 64)}
    if "blocks" in settings:
        sizes["s"] = -(-tokens // settings["blocks"][1])
    shapes = []
    for name, shape, _ in outputs:
        if name == "lists":
            kv_heads = given["rank"][1] if "rank" in given else given["k"][2]
            shapes.append((_words_of_lists(batch * kv_heads, tokens, keep),))
            continue
        form = next(form for form in FORMS[name] if len(form) == len(shape))
        shapes.append(tuple(size if axis == "." else sizes[axis] for axis, size in zip(form, shape)))
    return shapes
