"""What every kind of attention computes, in plain torch: any device, any float type.

This is the project's one definition in Python. The package's functions on CPU tensors and their tests use it, so do the
tests that train beside PyTorch, and every export with `modeling_sieve.py` has a copy of this file. Nothing here calls a
kernel of Sieve's or imports another file of the package.

Functions of whole rows take [batch, tokens, heads, width] and n x n memory. Functions of a tile of queries, which choose
blocks, take [batch, heads, tokens, width]; `query` is the position of each, [batch or 1, tokens, 1].
"""

import math

import torch
from torch.nn import functional

# Arriving keys of one step of `expiry`.
BLOCK = 256


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


def band_mask(query, key, kv_heads, sinks, near, reach, bands):
    """True where a query sees a key under CoWindow (arXiv:2609.32704), [batch or 1, KV heads, tokens, keys].

    query: positions, [batch or 1, 1, tokens, 1]; key: positions, [keys]. The distances from `near` to `reach` are
    divided into `bands` of equal width, to a token, of which KV head h sees band h.
    """
    border = near + (reach - near) * torch.arange(bands + 1, device=query.device) // bands
    head = torch.arange(kv_heads, device=query.device)[:, None, None] % bands
    distance = query - key
    in_band = (distance >= border[head]) & (distance < border[head + 1])
    return (distance >= 0) & ((key < sinks) | (distance < near) | in_band)


def probabilities(q, k, mask, bias=None, scale=None, sinks=None):
    """softmax(q . k * scale + bias), [batch, heads, tokens, keys], where mask [batch, KV heads, heads or 1, tokens, keys]
    is true; 0 where nothing is. sinks [heads]: one more logit of each head, which takes its share and has no value.
    """
    group = q.shape[2] // k.shape[2]
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2))
    logits = logits * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).repeat_interleave(group, 1)[:, :, None]
    if mask.shape[1] not in (1, q.shape[2]):
        mask = mask.repeat_interleave(group, 1)
    # A row without a key would be NaN, in its gradient too.
    empty = ~mask.any(-1, keepdim=True)
    logits = logits.masked_fill(~(mask | empty), float("-inf"))
    if sinks is not None:
        sinks = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    return torch.softmax(logits, -1)[..., : k.shape[1]].masked_fill(~mask, 0.0)


def masked_attention(q, k, v, mask, bias=None, scale=None, sinks=None):
    """The values by `probabilities`, [batch, tokens, heads, width]."""
    p = probabilities(q, k, mask, bias, scale, sinks)
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


def attention(q, k, v, *, window=None, scale=None, bias=None, sinks=None, documents=None):
    mask = seen(q.shape[0], q.shape[1], window, documents, q.device)
    return masked_attention(q, k, v, mask, bias, scale, sinks)


def attention_lse(q, k, *, window=None, scale=None, bias=None, sinks=None, documents=None):
    """log(sum(exp(logits))) of each query of `attention`, [batch, heads, tokens]; -inf where nothing is seen."""
    mask, group = seen(q.shape[0], q.shape[1], window, documents, q.device), q.shape[2] // k.shape[2]
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2))
    logits = logits * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).repeat_interleave(group, 1)[:, :, None]
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return torch.logsumexp(logits, -1)


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


@torch.no_grad()
def expiry(rank, best, local):
    """`kept_keys` as one number a key: the query from which on it is not seen, [batch, KV heads, keys]; at most the
    number of keys.

    A query sees the last `local` keys, its own among them, and of the older ones the `best` with the largest
    (rank, index). A key that left never returns, so this one number a key is the whole mask.
    """
    n, device = rank.shape[-1], rank.device
    # When a key leaves the best, were it to arrive there at once; it arrives `local` queries later.
    expire = torch.full(rank.shape, n, device=device)
    kept = torch.arange(min(best, n), device=device).expand(*rank.shape[:2], -1)
    for start in range(best, n - local, BLOCK):
        stop = min(start + BLOCK, n - local)
        arriving = torch.arange(start, stop, device=device).expand(*rank.shape[:2], -1)
        index = torch.cat([kept, arriving], -1)
        # Best first, of equal ranks the later key: a stable sort from the last key to the first.
        ranks = rank.gather(2, index).flip(-1)
        order = index.shape[-1] - 1 - ranks.sort(dim=-1, descending=True, stable=True).indices
        places = torch.arange(order.shape[-1], device=device, dtype=torch.int32)
        place = torch.empty_like(order, dtype=torch.int32).scatter_(2, order, places.expand_as(order))
        place, leaving = place[..., kept.shape[-1] :], order[..., best:]
        # At an arrival a key has so many better ones before it as it has in the end, less those that arrive later.
        better = (place[..., None, :] < places[best:, None]).cumsum(-1, dtype=torch.int32)
        time = start + (places[best:, None] + better - better[..., -1:] < best).sum(-1)
        leaving = index.gather(2, leaving)
        expire.scatter_(2, leaving, torch.maximum(time, leaving))
        kept = index.gather(2, order[..., :best].sort(dim=-1).values)
    return (expire + local).clamp(max=n)


def content_scores(v, w_dt, a):
    """DMA's scores of keys by their values [batch, tokens, KV heads * width]: [batch, KV heads, tokens]."""
    return (a * functional.softplus(functional.linear(v, w_dt))).transpose(1, 2)


def dma_scores(v, w_dt, a, *, slopes=None, documents=None):
    """Ranks of the keys: their scores, and in each KV head `slopes` times the position in the document."""
    z = content_scores(v.flatten(2), w_dt.to(v.dtype), a.to(v.dtype))
    if slopes is None:
        return z
    position = torch.arange(v.shape[1], device=v.device)[None]
    position = position if documents is None else position - documents[0]
    return z + position[:, None].to(z.dtype) * torch.tensor(slopes, dtype=z.dtype, device=z.device)[:, None]


def dma_bias(rank, linear):
    """What DMA adds to the logits of a key of this rank."""
    return rank if linear else torch.exp(rank.clamp(max=60.0))


def dma_attention(q, k, v, w_dt, a, *, keep, local, slopes, linear, scale=None, documents=None, rank=None):
    """`slopes`: a number for each KV head, or none of them without recency; `linear`: whether the bias is the rank.

    `rank`, where it is given, chooses the keys: ties and rounding of another computation's scores.
    """
    z = dma_scores(v, w_dt, a, slopes=slopes or None, documents=documents)
    kept = kept_keys(z if rank is None else rank, keep=keep, local=local, documents=documents)
    return masked_attention(q, k, v, kept, dma_bias(z, linear), scale)


def nsa_mean_pool(k, v, stride, size):
    """Means of blocks of one document a row; a block that the row cuts is left at 0."""
    pooled = []
    for x in (k, v):
        slots = -(-x.shape[1] // stride)
        rows = [x[:, i * stride : i * stride + size] for i in range(slots)]
        pooled.append(torch.stack([r.mean(1) if r.shape[1] == size else torch.zeros_like(x[:, 0]) for r in rows], 1))
    return pooled


def means_of(x, size, stride):
    """Means of `size` tokens each, one every `stride`, [batch, heads, slots, width], of x [batch, heads, tokens, width];
    of a short row one slot that no query sees.
    """
    short = max(size - x.shape[2], 0)
    return functional.pad(x, (0, 0, 0, short)).unfold(2, size, stride).mean(-1)


def slot_scores(q, k):
    """q . k of a tile of queries with the slots [batch, KV heads, slots, width], [batch, KV heads, group, tokens, slots]."""
    return q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].transpose(3, 4)


def slot_probabilities(scores, query, size, stride):
    """Softmax of scaled `slot_scores` over the slots that end at the query or before it; 0 where none does."""
    last = torch.arange(scores.shape[-1], device=scores.device) * stride + size - 1
    scores = scores.masked_fill(~(last <= query)[:, None, None], float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0)


def overlapping(p, size, stride, select, end):
    """Of each block of `select` keys up to key `end` the slots that overlap it, by the last dimension of p; 0 where none."""
    before, step = size // stride - 1, select // stride
    return functional.pad(p, (before, -(-end // select) * step - p.shape[-1])).unfold(-1, before + step, step)


def nsa_importance(p, size, stride, select, end):
    """NSA's importance of blocks, [batch, KV heads, tokens, blocks], by `slot_probabilities` (arXiv:2502.11089, eq. 9)."""
    near = overlapping(p.sum(2), size, stride, select, end)
    # The number of strides that each compressed block shares with the block.
    place, most = torch.arange(1, near.shape[-1] + 1, device=p.device), min(size, select) // stride
    shared = torch.minimum(place, place.flip(0)).clamp(max=most)
    return (near * shared).sum(-1)


def infllm_importance(p, size, stride, select, end):
    """InfLLM-V2's: the largest of the group's summed `slot_probabilities` (arXiv:2509.24663)."""
    return overlapping(p.sum(2), size, stride, select, end).amax(-1)


def moba_importance(scores, select, end):
    """MoBA's, of each query head: `slot_scores` with the blocks' mean keys (arXiv:2502.13189, eq. 6)."""
    return functional.pad(scores.flatten(1, 2), (0, -(-end // select) - scores.shape[-1]))


def msa_importance(index_q, index_k, query, select, end):
    """MSA's: the largest score of an indexer's query with the keys of the block (arXiv:2606.13392)."""
    later = (torch.arange(end, device=index_q.device) > query)[:, None]
    scores = (index_q @ index_k[:, :, :end].transpose(2, 3)).masked_fill(later, -math.inf)
    return functional.pad(scores, (0, -end % select), value=-math.inf).unflatten(3, (-1, select)).amax(-1)


def qsa_scores(index_q, block_k):
    """QSA's indexer: positive scores with one key a complete block, summed over its heads, [batch, 1, tokens, blocks]."""
    return (index_q @ block_k.transpose(2, 3)).relu().sum(1, keepdim=True)


def indices(at, count, device):
    """`count` indices of each row from `at` on, a number or [batch]: [batch or 1, count]."""
    return (at[:, None] if torch.is_tensor(at) else at) + torch.arange(count, device=device)[None]


def along(index, x):
    """Indices [batch, (heads,) tokens] in the shape that gather and scatter want for dimension 2 of x."""
    index = index[:, None] if index.dim() == 2 else index
    index = index[(...,) + (None,) * (x.dim() - 3)]
    return index.expand(x.shape[0], x.shape[1], -1, *x.shape[3:])


def first_true(x, count):
    """Indices of the true ones in their order, [..., count]; false ones where there are fewer."""
    return x.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]


def in_any_case(importance, own, first, local):
    """inf for the `first` blocks, and for the last `local` up to a query's own, -inf for later ones.

    own: the number of each query's own block, [batch or 1, 1, tokens, 1].
    """
    block = torch.arange(importance.shape[-1], device=importance.device)
    forced = (block > own - local) | (block < first)
    return importance.masked_fill(forced, float("inf")).masked_fill(block > own, float("-inf"))


def best_blocks(importance, count):
    """Which blocks are the `count` most important ones, of equal ones the later; none of importance -inf."""
    # A stable sort of the blocks from the last to the first.
    order = importance.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    best = importance.shape[-1] - 1 - order[..., :count]
    later = importance == float("-inf")
    return torch.zeros_like(later).scatter_(-1, best, True) & ~later


def nsa_branches(q, k, v, compressed_k, compressed_v, blocks, *, window, chosen=None, scale=None):
    """Outputs of the three branches for one document a row, and the chosen blocks [batch, KV heads, tokens, blocks]."""
    tokens, batch, scale = q.shape[1], q.shape[0], 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    i = torch.arange(tokens, device=q.device)
    start = torch.arange(compressed_k.shape[1], device=q.device) * blocks.stride
    mask = (start + blocks.compressed - 1 <= i[:, None]).expand(batch, 1, -1, -1)
    coarse = masked_attention(q, compressed_k, compressed_v, mask, scale=scale)
    if chosen is None:
        logits = slot_scores(q.transpose(1, 2), compressed_k.transpose(1, 2)) * scale
        p = slot_probabilities(logits, i[None, :, None], blocks.compressed, blocks.stride)
        importance = nsa_importance(p, blocks.compressed, blocks.stride, blocks.selected, tokens)
        own = (i // blocks.selected)[:, None]
        chosen = best_blocks(in_any_case(importance, own, 1, 2), blocks.num_selected)
    read = block_attention(q, k, v, chosen, blocks.selected, scale)
    return (coarse, read, attention(q, k, v, window=window, scale=scale)), chosen


def block_importance(q, k, blocks, rule, first, local, scale=None):
    """How much each query wants a block, [batch, choosers, tokens, blocks]; one document a row. Blocks that are chosen
    in any case have inf, later blocks -inf.

    A KV head chooses by "largest_probability", a query head else. q and k by "largest_score" are an indexer's.
    """
    q, k, tokens = q.transpose(1, 2), k.transpose(1, 2), q.shape[1]
    i, sizes = torch.arange(tokens, device=q.device), (blocks.compressed, blocks.stride, blocks.selected)
    if rule == "largest_score":
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        importance = msa_importance(q, k, i[None, :, None], blocks.selected, tokens)
    else:
        scores = slot_scores(q, means_of(k, *sizes[:2]))
        if rule == "mean_key":
            importance = moba_importance(scores, blocks.selected, tokens)
        else:
            scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
            importance = infllm_importance(slot_probabilities(scores, i[None, :, None], *sizes[:2]), *sizes, tokens)
    return in_any_case(importance, (i // blocks.selected)[:, None], int(first), local)


def chosen_blocks(q, k, blocks, rule, first, local, scale=None):
    """Which blocks each query chooses, of the shape of `block_importance`."""
    return best_blocks(block_importance(q, k, blocks, rule, first, local, scale), blocks.num_selected)


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
