"""Names of axes, and a warning where tensors look as if two of their axes were exchanged."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# The axes of an argument, by its name or by function and name; a tensor with another number of them is refused.
AXES = {
    **dict.fromkeys(["q", "gates"], "[batch, tokens, heads, {last}]"),
    **dict.fromkeys(["k", "v", "index_q"], "[batch, tokens, KV heads, {last}]"),
    "index_k": "[batch, tokens, 1 or KV heads, {last}]",
    **dict.fromkeys(["compressed_k", "compressed_v"], "[batch, ceil(tokens / stride), KV heads, {last}]"),
    **dict.fromkeys(["k_cache", "v_cache"], "[batch, KV heads, capacity, {last}]"),
    **dict.fromkeys(["bias", "rank", "selection"], "[batch, KV heads, tokens]"),
    **dict.fromkeys(["z_cache", "positions"], "[batch, KV heads, keep]"),
    "indices": "[batch, tokens, choosers, blocks]",
    "counts": "[batch, tokens, choosers]",
    "chosen": "[batch, choosers, blocks]",
    "latents": "[batch, tokens, width]",
    "key_scale": "[batch, tokens, heads]",
    "block_mask.mask": "[heads, query blocks, key blocks]",
    "w_dt": "[KV heads, KV heads * width]",
    "gate_bias": "[heads, 3]",
    **dict.fromkeys(["dma_decode.z"], "[batch, KV heads]"),
    "a": "[KV heads]",
    "sinks": "[heads]",
    "length": "[batch]",
    "cu_seqlens": "[documents + 1]",
}
# More heads than models have, of queries and of keys: a row of one token with more is a row of as many tokens.
MOST_LIKELY_HEADS, MOST_LIKELY_KV_HEADS = 128, 32

# What was warned of, each of its calls by its tensor's name and shape.
_said = set()
_depth = 0


def axes_of(function, argument):
    """Names of an argument's axes, empty for one that has none."""
    axes = AXES.get(f"{function}.{argument}") or AXES.get(argument, "")
    return axes.format(last="3" if argument == "gates" else "width")


F = TypeVar("F", bound=Callable[..., Any])


def known(function: F) -> F:
    """Whose tensors come from a layer that knows their axes: short rows of many heads are no mistake there."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        """Calls the layer's function with warnings about axes off, also in the functions that it calls."""
        global _depth
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1

    return run


def hint_for(tensors):
    """What to do with q, k and v that fit each other as [batch, heads, tokens, width]; empty where they do not."""
    qkv = [tensors.get(name) for name in "qkv"]
    qkv = [x for x in qkv if isinstance(x, torch.Tensor) and x.dim() == 4]
    if len(qkv) < 2:
        return ""
    (heads, tokens), (kv_heads, kv_tokens) = (qkv[at].shape[1:3] for at in (0, -1))
    if tokens != kv_tokens or not kv_heads or heads == kv_heads or heads % kv_heads:
        return ""
    return "\n  hint: of tensors [batch, heads, tokens, width] pass .transpose(1, 2)"


def warn(tensors):
    """Warns, once a shape, of whole rows that have fewer tokens than heads where nothing else says which axis is which, and of
    ranks and caches in which the axes of tokens and of KV heads look exchanged. tensors: by name, None for absent ones.
    """
    if _depth:  # inside a layer, whose own axes are known
        return
    given = {name: x for name, x in tensors.items() if x is not None and not isinstance(x, (int, float, str))}
    caches = [name for name in ("k_cache", "v_cache", "z_cache") if name in given]
    if caches:
        _, heads, places = given[caches[0]].shape[:3]
        _say(caches[0], given[caches[0]], "KV heads", heads, "places", places)
    elif "rank" in given:
        _, heads, tokens = given["rank"].shape
        _say("rank", given["rank"], "KV heads", heads, "tokens", tokens)
    elif "latents" not in given:
        _warn_of_rows(given)
    elif "key_scale" not in given:
        # MLA's latents have no axis of heads. Where key_scale is given, it names their number.
        warn_of_steps(given["q"])


def _warn_of_rows(given):
    """Warns by the sizes of q, or else of k, where only the order of their axes tells
    tokens from heads; `given`: tensors by name.
    """
    # These have one of the two axes alone.
    decided = ("sinks", "w_dt", "doc_start", "documents", "selection", "lists", "words", "mask", "o", "dz")
    rows = [given[name] for name in ("q", "k", "v") if name in given and given[name].dim() == 4]
    if not rows or any(name in given for name in decided) or len({x.shape[2] for x in rows}) > 1:
        return
    # Tensors that were transposed on the way here have their heads before their tokens in memory.
    if any(x.shape[1] > 1 and x.stride(2) > x.stride(1) for x in rows):
        return
    _say("q" if "q" in given else "k", rows[0], "heads", rows[0].shape[2], "tokens", rows[0].shape[1])


def _say(name, x, heads_named, heads, tokens_named, tokens):
    likely = MOST_LIKELY_HEADS if name == "q" else MOST_LIKELY_KV_HEADS
    if 1 < tokens < heads or (tokens == 1 and heads > likely):
        _warn_once(name, x, heads_named, heads, tokens_named, tokens)


def warn_of_steps(q):
    """Warns, once a shape, of several new tokens of one head a row, as of one new token of several heads."""
    if q.dim() == 4 and q.shape[1] > 1 and q.shape[2] == 1 and not _depth:
        _warn_once("q of a step", q, "heads", 1, "tokens", q.shape[1])


def _warn_once(name, x, heads_named, heads, tokens_named, tokens):
    """Warns of the tensor `name`, x, whose axes of heads and tokens have these names and sizes, unless it did."""
    if (name, tuple(x.shape)) in _said:
        return
    _said.add((name, tuple(x.shape)))
    what = (
        f"{name} is {list(x.shape)}, {axes_of('', name.split()[0])}: {heads} {heads_named} and {tokens} {tokens_named}"
    )
    cure = "if these are exchanged, pass .transpose(1, 2) of it and of its companions; if not, ignore this warning"
    warnings.warn(f"sieve_attention: {what}\n  hint: {cure}", stacklevel=_callers_level())


def warn_of_mask(mask, on_diagonal):
    """Warns once of a mask of blocks that has none before the diagonal and some behind it, as a transposed one."""
    if "mask" not in _said and not _depth and on_diagonal and bool(mask.bool().triu(1).any()):
        _said.add("mask")
        sees_past = "sees an earlier block of keys, and some would see later ones"
        what = f"no query block of the mask {list(mask.shape)} {sees_past}"
        cure = f"a mask is {AXES['block_mask.mask']}; if these are exchanged, pass .transpose(1, 2)"
        warnings.warn(f"sieve_attention: {what}\n  hint: {cure}", stacklevel=_callers_level())


def _callers_level():
    """How many calls above its own the first one outside of this package is, for `warnings.warn` one call below."""
    folder, frame, level = os.path.dirname(__file__), sys._getframe(1), 1
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == folder:
        frame, level = frame.f_back, level + 1
    return level
