"""Decoding steps of exported models, which modeling_sieve.py calls: one token a row behind its caches.

A cache gives the tensors [batch, heads, tokens, ...] that are in use, each the beginning of a longer one; rows counts
the tokens before the call.
"""

import torch

from . import functional


def before(rows, batch, new=0):
    """Tokens of each row before the call and `new` of its own, int32 [batch], made once a call."""
    name = f"length {new}"
    if name not in rows.tables:
        first = rows.first + new
        on = {"dtype": torch.int32, "device": rows.positions.device}
        rows.tables[name] = first.to(torch.int32) if torch.is_tensor(first) else torch.full((batch,), first, **on)
    return rows.tables[name]


def last(x, rows):
    """What a cache, [batch, heads, tokens, width], holds of the call's token, [batch, 1, heads, width]."""
    row = torch.arange(len(x), device=x.device) if torch.is_tensor(rows.first) else slice(None)
    return x[row, :, rows.first][:, None].contiguous()


def whole(x):
    """What a cache holds, [batch, heads, capacity, width], of the part [batch, heads, tokens, width] in use."""
    return x.as_strided((*x.shape[:2], x.stride(1) // x.shape[3], x.shape[3]), x.stride())


def attention(q, k, v, rows, *, chosen=None, block=None, num_blocks=None, **settings):
    """Attention of one query a row, [batch, heads, 1, width], over the keys of a cache, its own among them.

    chosen: bools `[batch, choosers, 1, key blocks]`, true for at most `num_blocks` blocks of `block` keys: only these
    are read.
    """
    new = None, None
    if chosen is None and not torch.compiler.is_compiling():
        # decode has a whole row's bits where it gets the token's key and value, which it writes where they are. Under
        # torch.compile it cannot: no operator is traced that returns a list and writes to its inputs.
        new = last(k, rows), last(v, rows)
    elif chosen is not None:
        chosen = chosen[:, :, 0]
        order = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :num_blocks]
        chosen = torch.where(chosen.gather(2, order), order, -1).to(torch.int32)
        if num_blocks > chosen.shape[2]:
            chosen = torch.nn.functional.pad(chosen, (0, num_blocks - chosen.shape[2]), value=-1)
    length = before(rows, len(q), int(chosen is None and new[0] is None))
    given = q.transpose(1, 2), *new, whole(k), whole(v), length
    return functional.decode(*given, chosen=chosen, block=block, **settings).transpose(1, 2)


def latent_attention(q, memory, inverse, rank, rows, scale):
    """The same over latents, `memory` [batch, 1, tokens, width]; inverse [batch, heads, tokens, 1]: factors on q . k."""
    factors = None if inverse is None else whole(inverse)[..., 0].transpose(1, 2)
    settings = {"scale": scale, "key_scale": factors, "length": before(rows, len(q))}
    return functional.mla_decode(q.transpose(1, 2), whole(memory)[:, 0], rank, **settings).transpose(1, 2)


def dma_attention(q, new, kept, rows, config, scale):
    """The same over the keys that DMA keeps. The new token, `new`, takes the place of the one that leaves.

    new and kept: "k", "v", "rank" [batch, KV heads, tokens (, width)], kept with "position" too. Afterwards kept has
    room for keep_window_size keys, in no order; places that no row uses have the largest positions.
    """
    keep = config.keep_window_size
    for name, x in kept.items():
        if x.shape[2] < keep:
            kept[name] = x.new_full((*x.shape[:2], keep, *x.shape[3:]), 2**31 - 1 if name == "position" else 0)
            kept[name][:, :, : x.shape[2]] = x
        kept[name] = kept[name].contiguous()
    token = (x.transpose(1, 2) for x in (q, new["k"], new["v"]))
    caches = (kept[name] for name in ("k", "v", "rank", "position"))
    settings = {"local": config.local_window_size, "bias": config.bias, "scale": scale}
    given = new["rank"][:, :, 0], *caches, before(rows, len(q))
    return functional.dma_decode(*token, *given, **settings).transpose(1, 2)
