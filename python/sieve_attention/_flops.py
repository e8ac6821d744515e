"""FLOPs of attention over given or chosen blocks, for torch.utils.flop_counter.FlopCounterMode."""

import torch
from torch.utils.flop_counter import register_flop_formula


def _flops(q, count, block, multiplications):
    """FLOPs of as many GEMMs over the keys that queries see, if each query's blocks are `count` before its end."""
    batch, tokens, heads, width = q
    keys = count * block
    dense = min(tokens, keys)
    pairs = dense * (dense + 1) // 2 + (tokens - dense) * keys
    return 2 * multiplications * batch * heads * width * pairs


@register_flop_formula(torch.ops.sieve.selected_forward)
def _selected_forward(q, k, v, indices, counts, start, end, scale, block, only_o=False, block_sums=False, **_):
    return _flops(q, indices[3], block, 2)


@register_flop_formula(torch.ops.sieve.nsa_selected_forward)
def _nsa_selected_forward(q, k, v, indices, start, end, scale, blocks, **_):
    return _flops(q, indices[3], blocks[2], 2)


@register_flop_formula(torch.ops.sieve.nsa_selected_backward)
def _nsa_selected_backward(q, k, v, indices, start, end, o, lse, d_o, scale, blocks, *_, **__):
    """As PyTorch counts its own backward pass: the scores again, and four gradients."""
    return _flops(q, indices[3], blocks[2], 5)


def _flops_of_tiles(q, words, block, multiplications):
    """FLOPs of as many GEMMs over the listed tiles, which are counted whole."""
    _, tokens, heads, width = q
    query, key = block
    # Words: one, a start for each tile of queries and the end of the last, the listed tiles, one.
    tiles = words[0] - 3 - heads * -(-tokens // query)
    return 2 * multiplications * width * tiles * query * key


@register_flop_formula(torch.ops.sieve.block_sparse)
def _block_sparse(q, k, v, words, scale, block, **_):
    return _flops_of_tiles(q, words, block, 2)


@register_flop_formula(torch.ops.sieve.block_sparse_backward)
def _block_sparse_backward(q, k, v, words, lists, o, lse, d_o, scale, block, *_, **__):
    return _flops_of_tiles(q, words, block, 5)
