"""What torch differentiates: each function of the package as a torch.autograd.Function over the operators, and how
keys, blocks and means are laid out for them.
"""

import functools
import math

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import ops
from ._library import SieveError

# The exponential of a larger rank counts as this one's (ARCHITECTURE.md: it would own the softmax).
MOST_RANK = 60.0


def _once(backward):
    """`once_differentiable` where gradients are differentiated. Elsewhere its guard is 4 us for nothing."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *gradients):
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, start, end, scale, window, deterministic, return_lse, bands=None):
        """o `[batch, tokens, heads, width of v]`, and with return_lse also the log-sum-exps `[batch, heads, tokens]`.
        start, end: int32 `[batch, tokens]`, bounds of each token's document, or None for one document a row.
        """
        o, lse, *kept = ops.attention_forward(q, k, v, start, bias, sinks, scale, window, False, bands)
        # With a bias: o_low where the kernel keeps it, and base.
        kept = [*[None] * (2 - len(kept)), *kept]
        ctx.save_for_backward(q, k, v, start, end, bias, sinks, o, lse, *kept)
        ctx.settings = scale, window, deterministic, bands
        if not return_lse:
            return o
        lse = with_base(lse, None if bias is None else kept[1])
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @_once
    def backward(ctx, d_o, *_):
        """Gradients of q, k, v, and of bias or sinks where they are given; log-sum-exps pass none on."""
        sinks = ctx.saved_tensors[6]
        gradients = ops.attention_backward(*ctx.saved_tensors, d_o, *ctx.settings)
        if sinks is not None:
            # There is no bias then.
            gradients = [*gradients[:3], None, gradients[3].to(sinks.dtype)]
        return (*gradients, *[None] * (12 - len(gradients)))


class DmaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, lists, scale, deterministic):
        o, lse, *kept = ops.dma_attention_forward(q, k, v, bias, lists, scale)
        kept = [*[None] * (2 - len(kept)), *kept]
        ctx.save_for_backward(q, k, v, bias, lists, o, lse, *kept)
        ctx.settings = scale, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        return (*ops.dma_attention_backward(*ctx.saved_tensors, d_o, *ctx.settings), *[None] * 3)


class Dma(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_dt, a, start, end, slopes, linear, scale, keep, local, deterministic, same_bits):
        """o of attention over the keys of `Selection.lists`; bias: f32 `[batch, KV heads, tokens]`."""
        given = q, k, v, w_dt.float(), a.float(), start, end
        o, lse, *kept = ops.dma_forward(*given, scale, keep, local, slopes, linear, False, same_bits)
        # Where keys leave, the lists of those that stay come last.
        kept, lists = (kept[:-1], kept[-1:]) if keep < k.shape[1] else (kept, [])
        kept, bias = (kept, None) if linear else (kept[:-1], kept[-1])
        *kept, x, z = kept
        kept = [*[None] * (2 - len(kept)), *kept]
        ctx.save_for_backward(q, k, v, z if linear else bias, o, lse, *kept, start, end, w_dt, a, x, z, *lists)
        ctx.settings = linear, scale, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        """Gradients of q, k, v and bias; those of keys that no query sees are 0."""
        q, k, v, bias, o, lse, o_low, base, start, end, w_dt, a, x, z, *lists = ctx.saved_tensors
        linear, *settings = ctx.settings
        kept = o, lse, o_low, base, d_o
        if lists:
            dq, dk, dv, dz = ops.dma_attention_backward(q, k, v, bias, *lists, *kept, *settings)
        else:
            scale, deterministic = settings
            given = q, k, v, start, end, bias, None
            dq, dk, dv, dz = ops.attention_backward(*given, *kept, scale, None, deterministic)
        if not linear:
            dz = torch.where(z <= MOST_RANK, dz * bias, 0.0)
        dv_of_scores, d_w, d_a = ops.dma_scores_backward(v, w_dt.float(), a.float(), x, dz)
        return (dq, dk, dv + dv_of_scores, d_w.to(w_dt.dtype), d_a.to(a.dtype), *[None] * 9)


class DmaScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, w_dt, a, start, slopes):
        x, z = ops.dma_scores(v, w_dt, a, start, slopes)
        ctx.save_for_backward(v, w_dt, a, x)
        return z

    @staticmethod
    @_once
    def backward(ctx, dz):
        return (*ops.dma_scores_backward(*ctx.saved_tensors, dz), None, None)


class NsaMeanPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, start, end, blocks):
        ctx.save_for_backward(k, start, end)
        ctx.blocks = blocks
        return ops.nsa_mean_pool(k, v, start, end, blocks)[0]

    @staticmethod
    @_once
    def backward(ctx, d_compressed):
        k, start, end = ctx.saved_tensors
        (dqkv,) = ops.nsa_mean_pool_backward(k, start, end, d_compressed, ctx.blocks)
        heads = k.shape[2]
        return dqkv[:, :, heads : 2 * heads], dqkv[:, :, 2 * heads :], None, None, None


class NsaCompressed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, compressed, start, end, scale, blocks, deterministic):
        o, lse, indices = ops.nsa_compressed_forward(q, compressed, start, end, scale, blocks)
        ctx.save_for_backward(q, compressed, start, end, o, lse)
        ctx.settings = scale, blocks, deterministic
        ctx.mark_non_differentiable(indices)
        return o, indices

    @staticmethod
    @_once
    def backward(ctx, d_o, _):
        dqkv, d_compressed = ops.nsa_compressed_backward(*ctx.saved_tensors, d_o, *ctx.settings)
        heads = ctx.saved_tensors[0].shape[2]
        return (dqkv[:, :, :heads], d_compressed, *[None] * 5)


class NsaSelected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, indices, start, end, scale, blocks, deterministic):
        o, lse = ops.nsa_selected_forward(q, k, v, indices, start, end, scale, blocks)
        ctx.save_for_backward(q, k, v, indices, start, end, o, lse)
        ctx.settings = scale, blocks, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        return (*ops.nsa_selected_backward(*ctx.saved_tensors, d_o, *ctx.settings), *[None] * 6)


class Nsa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *rest):
        """o of NSA's three branches under their gates; `rest`: compressed keys and values, logits of the gates, their
        bias or None, bounds of documents and the settings. Each branch's own output is kept for the backward pass.
        """
        *compressed, gates, bias, start, end, scale, blocks, window, deterministic = rest
        compressed = _compressed(*compressed)
        o, *kept = ops.nsa_forward(q, k, v, compressed, gates, bias, start, end, scale, blocks, window)
        ctx.save_for_backward(q, k, v, compressed, gates, bias, start, end, *kept)
        ctx.settings = scale, blocks, window, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        """Gradients through the gates into each branch: of q the sum of all three, of k and v the sum of two, as the
        compressed branch has keys and values of its own.
        """
        q, k, v, compressed, gates, bias, start, end, *kept = ctx.saved_tensors
        coarse, coarse_lse, indices, chosen, chosen_lse, near, near_lse = kept
        scale, blocks, window, deterministic = ctx.settings
        gradients = ops.nsa_gates_backward(coarse, chosen, near, gates, bias, d_o)
        d_coarse, d_chosen, d_near, d_gates, d_bias = gradients
        of_chosen = ops.nsa_selected_backward(
            q, k, v, indices, start, end, chosen, chosen_lse, d_chosen, scale, blocks, deterministic
        )
        of_near = ops.attention_backward(
            q, k, v, start, end, None, None, near, near_lse, None, None, d_near, scale, window, deterministic
        )
        of_coarse, d_compressed = ops.nsa_compressed_backward(
            q, compressed, start, end, coarse, coarse_lse, d_coarse, scale, blocks, deterministic
        )
        dq, dk, dv = (x + y for x, y in zip(of_near, of_chosen))
        d_bias = None if bias is None else d_bias
        return (dq + of_coarse[:, :, : q.shape[2]], dk, dv, *d_compressed.unbind(0), d_gates, d_bias, *[None] * 6)


def _chosen_gradients(ctx, d_o):
    """dq, dk, dv over chosen blocks. A function, as torch.compile of 2.11 follows no call of another class's backward."""
    q, k, v, indices, *rest = ctx.saved_tensors
    if indices.shape[2] == k.shape[2]:
        return ops.nsa_selected_backward(q, k, v, indices, *rest, d_o, *ctx.settings)
    dq, *d_kv = ops.nsa_selected_backward(q, *_by_chooser(k, v, indices), indices, *rest, d_o, *ctx.settings)
    return (dq, *_by_kv_head(d_kv, k))


class Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index_q, index_k, start, end, scale, choice, deterministic):
        o, lse, indices, blocks = _read_chosen(q, k, v, index_q, index_k, start, end, scale, choice)
        ctx.save_for_backward(q, k, v, indices, start, end, o, lse)
        ctx.settings = scale, blocks, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        return (*_chosen_gradients(ctx, d_o), *[None] * 7)


class Selected(torch.autograd.Function):
    """As `Chosen`, over blocks that the caller gives."""

    @staticmethod
    def forward(ctx, q, k, v, indices, counts, start, end, scale, block, block_sums, deterministic):
        """o over the blocks that each query chooses, by index_q and index_k or, where these are None, by q and k; the
        choice has no gradient, so the chosen blocks are kept.
        """
        given = indices, counts, start, end, scale, block, False, block_sums
        o, lse, chosen, *sums = ops.selected_forward(q, *_by_chooser(k, v, indices), *given)
        ctx.save_for_backward(q, k, v, chosen, start, end, o, lse)
        size = min(block, 64)
        ctx.settings = scale, (size, size, size, chosen.shape[3]), deterministic
        if not sums:
            return o
        ctx.mark_non_differentiable(*sums)
        return o, *sums

    @staticmethod
    @_once
    def backward(ctx, d_o, *_):
        return (*_chosen_gradients(ctx, d_o), *[None] * 8)


class BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, words, tile_lists, block, scale, deterministic, shares):
        o, lse = ops.block_sparse(q, k, v, words, scale, (block, block))
        ctx.save_for_backward(q, k, v, words, tile_lists, o, lse)
        ctx.settings = scale, (block, block), deterministic, shares
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        return (*ops.block_sparse_backward(*ctx.saved_tensors, d_o, *ctx.settings), *[None] * 6)


def with_base(lse, base):
    """Log-sum-exps of logits from those of the kernels, which leave the largest bias that a query sees, `base`, out."""
    if base is None:
        return lse
    return lse + base[..., : lse.shape[2]].repeat_interleave(lse.shape[1] // base.shape[1], 1)


def _tracks(*tensors):
    """Whether a backward pass may follow; a tensor may be None.

    Under forward-mode AD too: autograd.Function then refuses tensors with tangents, which the kernels would drop.
    """
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return forward_ad._current_level >= 0


def _require_no_gradient(name, *tensors):
    if _tracks(*tensors):
        raise SieveError(f"{name}: has no gradient\n  hint: call it under torch.no_grad()")


def _scale(scale, q):
    # The library refuses a width of 0.
    return 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale


def _compressed(k, v):
    """Compressed keys, then values, as kernels read them: a copy unless they lie so, as `nsa_mean_pool` makes them."""
    if k.shape != v.shape:
        raise SieveError(f"nsa: compressed_k is {list(k.shape)}, and compressed_v {list(v.shape)}; they must be equal")
    if not torch.compiler.is_compiling() and type(k) is type(v) is torch.Tensor and not _tracks(k, v):
        is_one = k.is_contiguous() and v.is_contiguous() and k.shape == v.shape and k.dtype == v.dtype
        if is_one and v.data_ptr() - k.data_ptr() == k.numel() * k.element_size() and k.numel():
            if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
                return k.as_strided((2, *k.shape), (k.numel(), *k.stride()))
    return torch.stack((k, v))


def _read_chosen(q, k, v, index_q, index_k, start, end, scale, choice, only_o=False):
    """o, lse, the chosen blocks and their sizes, or o alone; blocks over 64 tokens are read in pieces."""
    (_, _, size, count), rule, *_ = choice
    if rule == "mean_key":
        if not k.shape[2]:
            heads = f"number of q/k/v heads {q.shape[2]}/{k.shape[2]}/{v.shape[2]}"
            raise SieveError(f"{heads} is not supported (supported: as many k as v heads, dividing the q heads)")
        index_q, index_k = q, k
        k, v = _by_chooser(k, v, q)
    if size > 64 and size % 64:
        raise SieveError(f"block {size} is not supported (supported: up to 64, and multiples of 64)")
    if size <= 64:
        forward = ops.chosen_forward(q, k, v, index_q, index_k, start, end, scale, *choice, only_o)
        return *forward, (size, size, size, count)
    by = (q, k) if index_q is None else (index_q, index_k)
    (chosen,) = ops.choose_blocks(*by, start, end, scale, *choice)
    chosen, blocks = _in_pieces(chosen, size, start)
    o, lse = ops.nsa_selected_forward(q, k, v, chosen, start, end, scale, blocks)
    return o, lse, chosen, blocks


def _in_pieces(chosen, size, start=None):
    """Blocks over 64 tokens as pieces of 64, which the kernels read, and sizes as NsaBlocks has them.

    chosen: int32 `[batch, tokens, choosers, blocks]`, ascending, then -1.
    """
    pieces, size = (1, size) if size <= 64 or size % 64 else (size // 64, 64)
    # Of a query's own block, the last one it chose, the pieces behind its own hold no key for it.
    position = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device)
    own = (position if start is None else position - start) // size
    piece = torch.arange(pieces, dtype=torch.int32, device=chosen.device)
    chosen = torch.add(piece, chosen.unsqueeze(-1), alpha=pieces).flatten(-2)
    # Pieces of no block are below 0 and become -1.
    chosen = torch.where(chosen > own[..., None, None], -1, chosen).clamp_(min=-1)
    return chosen, (size, size, size, chosen.shape[3])


def _by_chooser(k, v, chooser):
    """Keys and values of each head that chooses, `chooser` a tensor `[batch, tokens, choosers, ..]`."""
    choosers, kv_heads = chooser.shape[2], k.shape[2]
    group = choosers // max(kv_heads, 1)
    if group < 2 or group * kv_heads != choosers or k.shape[:3] != v.shape[:3]:
        # The plan refuses numbers of heads that do not divide, and values that are not those of the keys.
        return k, v
    return [torch.cat((x,) * group, 3).view(*x.shape[:2], choosers, x.shape[3]) for x in (k, v)]


def _by_kv_head(gradients, k):
    """Gradients of what `_by_chooser` returns as those of what it was given."""
    heads = k.shape[2]
    return [x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3) for x in gradients]
