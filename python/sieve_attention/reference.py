"""The functions of sieve_attention by their definitions, in plain torch: any device, any float type, n x n memory.

For tests, for small sizes, and to read what a function computes. Nothing here calls a kernel of Sieve's.
"""

import math

import torch

from . import _dma


def seen(batch, tokens, window=None, documents=None, device=None):
    """Whether query i sees key j: [batch, 1, tokens, tokens]."""
    i = torch.arange(tokens, device=device)
    mask = i <= i[:, None]
    if window is not None:
        mask = mask & (i > i[:, None] - window)
    mask = mask.expand(batch, 1, -1, -1)
    if documents is not None:
        mask = mask & (i >= documents[0][:, None, :, None])
    return mask


def masked_attention(q, k, v, mask, bias=None, scale=None):
    """softmax(q . k * scale + bias) v where mask [batch, KV heads or 1, tokens, keys] is true; 0 where nothing is."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).repeat_interleave(group, 1)[:, :, None]
    if mask.shape[1] > 1:
        mask = mask.repeat_interleave(group, 1)
    # A row without a key would be NaN, in its gradient too.
    empty = ~mask.any(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(~(mask | empty), float("-inf")), -1).masked_fill(~mask, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def attention(q, k, v, *, window=None, scale=None, bias=None, documents=None):
    mask = seen(q.shape[0], q.shape[1], window, documents, q.device)
    return masked_attention(q, k, v, mask, bias, scale)


def kept_keys(rank, *, keep, local=0, documents=None):
    """Which keys each query keeps, [batch, KV heads, tokens, tokens]: query by query, from the definition."""
    batch, heads, tokens = rank.shape
    kept = torch.zeros(batch, heads, tokens, tokens, dtype=torch.bool, device=rank.device)
    for row in range(batch):
        for i in range(tokens):
            first = 0 if documents is None else int(documents[0][row, i])
            near = max(i + 1 - local, first)
            kept[row, :, i, near : i + 1] = True
            older = rank[row, :, first:near].flip(-1)
            # Of equal ranks the later key: a stable sort from the last key to the first.
            best = older.sort(dim=-1, descending=True, stable=True).indices[:, : keep - local]
            kept[row, :, i].scatter_(-1, near - 1 - best, True)
    return kept


def dma_scores(v, w_dt, a, *, slopes=None, documents=None):
    x = torch.einsum("bnc,hc->bhn", v.flatten(2), w_dt.to(v.dtype))
    z = a.to(v.dtype)[:, None] * torch.nn.functional.softplus(x)
    if slopes is None:
        return z
    position = torch.arange(v.shape[1], device=v.device)[None]
    position = position if documents is None else position - documents[0]
    return z + position[:, None].to(z.dtype) * torch.tensor(slopes, dtype=z.dtype, device=z.device)[:, None]


def dma_attention(q, k, v, w_dt, a, *, keep, scale=None, documents=None, rank=None, **form):
    """`form`: preset, bias, recency, local and slopes as of `sieve_attention.dma_attention`, and `periods`, a pair.

    `rank`, where it is given, chooses the keys: ties and rounding of another computation's scores.
    """
    slopes, linear, local = _dma.form("dma_attention", keep, v.shape[2], **form)
    z = dma_scores(v, w_dt, a, slopes=slopes or None, documents=documents)
    kept = kept_keys(z if rank is None else rank, keep=keep, local=local, documents=documents)
    return masked_attention(q, k, v, kept, z if linear else z.clamp(max=60.0).exp(), scale)


def nsa_mean_pool(k, v, stride, size):
    """Means of blocks of one document a row; a block that the row cuts is left at 0."""
    pooled = []
    for x in (k, v):
        slots = -(-x.shape[1] // stride)
        rows = [x[:, i * stride : i * stride + size] for i in range(slots)]
        pooled.append(torch.stack([r.mean(1) if r.shape[1] == size else torch.zeros_like(x[:, 0]) for r in rows], 1))
    return pooled


def nsa_branches(q, k, v, compressed_k, compressed_v, blocks, *, window, chosen=None, scale=None):
    """Outputs of the three branches for one document a row, and the chosen blocks [batch, KV heads, tokens, blocks]."""
    tokens, (batch, _, heads, _), kv_heads = q.shape[1], q.shape, k.shape[2]
    i = torch.arange(tokens, device=q.device)
    slots = compressed_k.shape[1]
    start = torch.arange(slots, device=q.device) * blocks.stride
    mask = (start + blocks.compressed - 1 <= i[:, None]).expand(batch, 1, -1, -1)
    coarse = masked_attention(q, compressed_k, compressed_v, mask, scale=scale)
    if chosen is None:
        logits = torch.einsum("bihd,bjhd->bhij", q, compressed_k.repeat_interleave(heads // kv_heads, 2))
        logits = logits * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
        logits = logits.masked_fill(~mask, float("-inf"))
        p = torch.softmax(logits, -1).nan_to_num(0.0).unflatten(1, (kv_heads, -1)).sum(2)
        block = torch.arange(-(-tokens // blocks.selected), device=q.device) * blocks.selected
        # Strides that a compressed block shares with a selected one.
        first = torch.maximum(start[:, None], block)
        last = torch.minimum(start[:, None] + blocks.compressed, block + blocks.selected)
        importance = p @ ((last - first).clamp(min=0) // blocks.stride).to(p.dtype)
        chosen = best_blocks(in_any_case(importance, blocks, True, 2), blocks)
    read = block_attention(q, k, v, chosen, blocks.selected, scale)
    return (coarse, read, attention(q, k, v, window=window, scale=scale)), chosen


def block_importance(q, k, blocks, rule, first, local, scale=None):
    """How much each query wants a block, [batch, choosers, tokens, blocks]; one document a row. Blocks that are chosen
    in any case have inf, later blocks -inf.

    A KV head chooses by "largest_probability", a query head else. q and k by "largest_score" are an indexer's.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, count = k.shape[2], -(-tokens // blocks.selected)
    i = torch.arange(tokens, device=q.device)
    pooled, _ = nsa_mean_pool(k, k, blocks.stride, blocks.compressed)
    start = torch.arange(pooled.shape[1], device=q.device) * blocks.stride
    logits = torch.einsum("bihd,bjhd->bhij", q, pooled.repeat_interleave(heads // kv_heads, 2))
    whole = start + blocks.compressed - 1 <= i[:, None]
    if rule == "mean_key":
        # A block that has not ended has no mean; it is the query's own, or later.
        importance = logits.masked_fill(~whole, 0.0)[..., :count]
    elif rule == "largest_score":
        scores = logits.masked_fill(~whole, float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, -tokens % blocks.selected), value=float("-inf"))
        importance = scores.unflatten(-1, (count, -1)).amax(-1)
    else:
        logits = logits * (1.0 / math.sqrt(width) if scale is None else scale)
        p = torch.softmax(logits.masked_fill(~whole, float("-inf")), -1).nan_to_num(0.0)
        p = p.unflatten(1, (kv_heads, -1)).sum(2)
        begin = torch.arange(count, device=q.device) * blocks.selected
        meets = (start[:, None] < begin + blocks.selected) & (start[:, None] + blocks.compressed > begin)
        importance = (p[..., None] * meets).amax(-2)
    return in_any_case(importance, blocks, first, local)


def in_any_case(importance, blocks, first, local):
    """inf for the first block, if `first`, and for the last `local` up to a query's own, -inf for later ones."""
    _, _, tokens, count = importance.shape
    block = torch.arange(count, device=importance.device)
    own = (torch.arange(tokens, device=importance.device) // blocks.selected)[:, None]
    forced = (block > own - local) | ((block == 0) & first)
    return importance.masked_fill(forced, float("inf")).masked_fill(block > own, float("-inf"))


def chosen_blocks(q, k, blocks, rule, first, local, scale=None):
    """Which blocks each query chooses, of the shape of `block_importance`."""
    return best_blocks(block_importance(q, k, blocks, rule, first, local, scale), blocks)


def best_blocks(importance, blocks):
    """Which blocks are the most important ones, of equal ones the later."""
    order = importance.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    best = importance.shape[-1] - 1 - order[..., : blocks.num_selected]
    later = importance == float("-inf")
    return torch.zeros_like(later).scatter_(-1, best, True) & ~later


def block_attention(q, k, v, chosen, size, scale=None):
    """Causal attention over chosen blocks, [batch, KV heads or heads, tokens, blocks] of `size` tokens."""
    if chosen.shape[1] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    i = torch.arange(q.shape[1], device=q.device)
    mask = chosen.repeat_interleave(size, -1)[..., : len(i)] & (i <= i[:, None])
    return masked_attention(q, k, v, mask, scale=scale)


def selected_mask(indices, *, block, counts=None, documents=None):
    """Of each query's indices, the first `counts` of them, those of its document's blocks up to its own: which keys it
    sees, [batch, choosers, tokens, keys], and the block of each key, counted from the query's first token.
    """
    batch, tokens, choosers, most = indices.shape
    last, position = -(-tokens // block), torch.arange(tokens, device=indices.device)
    given = (indices >= 0) & (indices < last)
    if counts is not None:
        given &= torch.arange(most, device=indices.device) < counts[..., None]
    # Whether a query has a block, [batch, choosers, tokens, blocks]; what is no block goes behind them.
    has = torch.zeros(batch, tokens, choosers, last + 1, dtype=torch.bool, device=indices.device)
    has = has.scatter_(-1, torch.where(given, indices, last).long(), True)[..., :last].transpose(1, 2)
    # The block of each key, counted from the query's first token: [batch, queries, keys].
    first = torch.zeros_like(position)[None] if documents is None else documents[0]
    of_key = (position - first[..., None]).div(block, rounding_mode="floor").clamp(min=0)
    of_key = of_key[:, None].expand(batch, choosers, tokens, tokens)
    mask = has.gather(-1, of_key) & seen(batch, tokens, documents=documents, device=indices.device)
    return mask, of_key


def selected_attention(q, k, v, indices, *, scale=None, **given):
    """Attention over the blocks that each query is given; `given` as of `selected_mask`."""
    mask, _ = selected_mask(indices, **given)
    if mask.shape[1] != k.shape[2]:
        k, v = (x.repeat_interleave(mask.shape[1] // k.shape[2], 2) for x in (k, v))
    return masked_attention(q, k, v, mask, scale=scale)


def selected_block_sums(q, k, indices, *, scale=None, **given):
    """The attention on the block of each index, summed over a chooser's heads, of the shape of `indices`."""
    mask, of_key = selected_mask(indices, **given)
    batch, tokens, choosers, most = indices.shape
    keys = torch.eye(tokens, dtype=q.dtype, device=q.device)[None, :, None].expand(batch, -1, choosers, -1)
    k = k.repeat_interleave(choosers // k.shape[2], 2)
    # Attention with a unit vector as each key's value: its probabilities.
    p = masked_attention(q, k, keys, mask, scale=scale).unflatten(2, (choosers, -1)).sum(3).transpose(1, 2)
    counts = given.get("counts")
    real = torch.arange(most, device=q.device) < (most if counts is None else counts[..., None])
    sums = [(p * (of_key == i.transpose(1, 2)[..., None])).sum(-1).transpose(1, 2) for i in indices.unbind(-1)]
    return torch.stack(sums, -1) * real
