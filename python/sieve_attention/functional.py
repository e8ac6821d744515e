"""The functions of sieve_attention: exact sparse and dense causal attention with gradients, on bf16 CUDA tensors.

Shapes are FlashAttention's: q `[batch, tokens, heads, width]`, k and v `[batch, tokens, KV heads, width]`, any group
of heads that KV heads divide. q, k and v may be slices of one packed tensor; what the kernels cannot follow by strides
is copied. `documents` bounds what a token sees, for packed rows: None is one document a row, else `documents(...)`.

`deterministic=True` takes backward kernels whose sums have a fixed order: two runs are equal to the bit.

Every function raises SieveError for what no kernel does (another dtype, a CPU, lengths that differ); `supports`
returns the same sentence instead. There is no fallback; `on_cpu()` computes CPU tensors by the definitions.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import _dma, ops
from ._arguments import MOST_HEADS, check_sinks, checked
from ._library import SieveError
from ._tiles import BlockMask, head_shares, places_of

# The exponential of a larger rank counts as this one's (ARCHITECTURE.md: it would own the softmax).
MOST_RANK = 60.0


@checked
def documents(cu_seqlens, tokens):
    """First token and end of each token's document in one packed row.

    cu_seqlens: int32 `[documents + 1]`, from 0 to `tokens`, as FlashAttention's. Returns `(start, end)`, int32
    `[1, tokens]`; make it once and pass it to every layer. Other values are an error on a CPU; on a GPU, which is not
    waited for, they are changed to such a list, so that no kernel leaves its buffers.
    """
    cu_seqlens = cu_seqlens.to(torch.int32)
    if type(cu_seqlens) is torch.Tensor and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        values = cu_seqlens.tolist()
        if values[:1] != [0] or values[-1] != tokens or values != sorted(values):
            shown = f"{values[:8]}{'...' if len(values) > 8 else ''}"
            raise SieveError(f"documents: cu_seqlens is {shown}; it must ascend from 0 to the {tokens} tokens")
    else:
        inner = cu_seqlens[1:-1].clamp(0, tokens).cummax(0).values
        cu_seqlens = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tokens)])
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], position, right=True)
    return cu_seqlens[document][None], cu_seqlens[document + 1][None]


def _once(backward):
    """`once_differentiable` where gradients are differentiated. Elsewhere its guard is 4 us for nothing."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *gradients):
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, start, end, scale, window, deterministic):
        o, lse, *kept = ops.attention_forward(q, k, v, start, bias, sinks, scale, window)
        # With a bias: o_low where the kernel keeps it, and base.
        kept = [*[None] * (2 - len(kept)), *kept]
        ctx.save_for_backward(q, k, v, start, end, bias, sinks, o, lse, *kept)
        ctx.settings = scale, window, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
        sinks = ctx.saved_tensors[6]
        gradients = ops.attention_backward(*ctx.saved_tensors, d_o, *ctx.settings)
        if sinks is not None:
            # There is no bias then.
            gradients = [*gradients[:3], None, gradients[3].to(sinks.dtype)]
        return (*gradients, *[None] * (10 - len(gradients)))


class _DmaAttention(torch.autograd.Function):
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


class _Dma(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_dt, a, start, end, slopes, linear, scale, keep, local, deterministic):
        given = q, k, v, w_dt.float(), a.float(), start, end
        o, lse, *kept = ops.dma_forward(*given, scale, keep, local, slopes, linear)
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
        return (dq, dk, dv + dv_of_scores, d_w.to(w_dt.dtype), d_a.to(a.dtype), *[None] * 8)


class _DmaScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, w_dt, a, start, slopes):
        x, z = ops.dma_scores(v, w_dt, a, start, slopes)
        ctx.save_for_backward(v, w_dt, a, x)
        return z

    @staticmethod
    @_once
    def backward(ctx, dz):
        return (*ops.dma_scores_backward(*ctx.saved_tensors, dz), None, None)


class _NsaMeanPool(torch.autograd.Function):
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


class _NsaCompressed(torch.autograd.Function):
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


class _NsaSelected(torch.autograd.Function):
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


class _Nsa(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *rest):
        *compressed, gates, bias, start, end, scale, blocks, window, deterministic = rest
        compressed = _compressed(*compressed)
        o, *kept = ops.nsa_forward(q, k, v, compressed, gates, bias, start, end, scale, blocks, window)
        ctx.save_for_backward(q, k, v, compressed, gates, bias, start, end, *kept)
        ctx.settings = scale, blocks, window, deterministic
        return o

    @staticmethod
    @_once
    def backward(ctx, d_o):
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


class _Chosen(torch.autograd.Function):
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


class _Selected(torch.autograd.Function):
    """As `_Chosen`, over blocks that the caller gives."""

    @staticmethod
    def forward(ctx, q, k, v, indices, counts, start, end, scale, block, block_sums, deterministic):
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


class _BlockSparse(torch.autograd.Function):
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


@checked
def attention(q, k, v, *, window=None, scale=None, bias=None, sinks=None, documents=None, deterministic=False):
    """Causal attention, dense or over the last `window` keys, tile by tile (arXiv:2307.08691, algorithms 1 and 2).

    q: bf16 `[batch, tokens, heads, width]`; k: `[batch, tokens, KV heads, width]`; v: as k, or narrower (MLA: keys of
    192, values of 128). Widths are multiples of 16 up to 256. bias: f32 `[batch, KV heads, tokens]`, added to every
    logit of its key, with a gradient; it must be finite: -inf gives NaN where a query sees no other key (-1e4 hides a
    key, `documents` and `select` leave it out). scale: the factor on `q . k`, `1 / sqrt(width)` without one. sinks: bf16
    or f32 `[heads]`, one more logit of each query head, whose value is zero (gpt-oss, arXiv:2508.10925), with a gradient.
    Returns `o`, bf16 `[batch, tokens, heads, width of v]`; a query that sees no key gets 0.
    """
    if sinks is not None:
        check_sinks("attention", q, sinks, bias)
    start, end = documents or (None, None)
    scale = _scale(scale, q)
    if not _tracks(q, k, v, bias, sinks):
        return ops.attention_forward(q, k, v, start, bias, sinks, scale, window, True)[0]
    return _Attention.apply(q, k, v, bias, sinks, start, end, scale, window, deterministic)


class Selection(NamedTuple):
    """The keys that each query keeps: query i sees key j exactly where `j <= i < expire[j]`.

    expire: int32 `[batch, KV heads, tokens]`. lists: the same as the attention kernels read it, int32 in a row; None
    where every key is kept.
    """

    expire: torch.Tensor
    lists: torch.Tensor | None
    documents: tuple | None


@checked
def select(rank, *, keep, local=0, documents=None):
    """The `keep` keys that each query keeps: the last `local` ones and the best-ranked older ones, ties to the later.

    rank: f32 `[batch, KV heads, tokens]`, any numbers but NaN: a score of one's own, or `dma_scores`. Exact to the bit,
    O(tokens) memory, no gradient: give `expiring_attention` a bias that depends on the ranking to train it. Fewer than
    2^22 tokens. A key that has left never returns, as a key's rank is the same for every query (arXiv:2508.02124).
    """
    start, end = documents or (None, None)
    rank = rank.detach() if rank.requires_grad else rank
    expire, *lists = ops.dma_select(rank, start, end, keep, local)
    return Selection(expire, lists[0] if lists else None, documents)


@checked
def expiring_attention(q, k, v, bias, selection, *, scale=None, deterministic=False):
    """Attention over the keys of a `Selection`, with gradients to q, k, v and bias: exact token-level sparsity.

    Shapes as in `attention`; bias: f32 `[batch, KV heads, tokens]`, added to every logit of its key, or None. Keys that
    no query sees get a gradient of exactly 0.
    """
    scale = _scale(scale, q)
    wanted = (k.shape[0], k.shape[2], k.shape[1])
    if bias is None:
        bias = torch.zeros(wanted, dtype=torch.float32, device=q.device)
    for name, shape in (("selection", selection.expire.shape), ("bias", bias.shape)):
        if shape != wanted:
            sizes = f"{name} is {list(shape)}, and with this k must be {list(wanted)}, [batch, KV heads, tokens]"
            raise SieveError(f"expiring_attention: {sizes}")
    if selection.lists is None:
        return attention(q, k, v, scale=scale, bias=bias, documents=selection.documents, deterministic=deterministic)
    if not _tracks(q, k, v, bias):
        return ops.dma_attention_forward(q, k, v, bias, selection.lists, scale, True)[0]
    return _DmaAttention.apply(q, k, v, bias, selection.lists, scale, deterministic)


@checked
def dma_scores(v, w_dt, a, *, slopes=None, documents=None):
    """Scores of DMA's keys, f32 `[batch, KV heads, tokens]`: `a * softplus(w_dt . v)`, with gradients.

    v: bf16 `[batch, tokens, KV heads, width]`, at most 32 KV heads; w_dt: `[KV heads, KV heads * width]`, the weight of
    a linear layer; a: `[KV heads]`. slopes: a number for each KV head, times its token's position in the document, is
    added, so that recent keys rank higher: `dma_slopes` has those of `dma_attention`. Without slopes these are the
    scores of arXiv:2508.02124, eq. 3.
    """
    start = None if documents is None else documents[0]
    return _DmaScores.apply(v, w_dt.float(), a.float(), start, tuple(slopes or ()))


@checked
def dma_slopes(keep, kv_heads, *, shortest_period=None, longest_period=None):
    """The slopes of `dma_attention`, a tuple of one number for each KV head: 1 / period, periods spaced geometrically
    from `shortest_period` (64 tokens) to `longest_period` (four times `keep`)."""
    if not 0 < kv_heads <= MOST_HEADS:
        raise SieveError(f"{kv_heads} KV heads")
    return _dma.slopes_of(keep, kv_heads, shortest_period=shortest_period, longest_period=longest_period)


@checked
def dma_attention(
    q, k, v, w_dt, a, *, keep, preset=None, bias=None, recency=None, local=None, shortest_period=None,
    longest_period=None, slopes=None, scale=None, documents=None, deterministic=False,
):  # fmt: skip
    """Dynamic mask attention (after arXiv:2508.02124), exact: each query sees the `keep` best-ranked keys before it.

    The arguments and their defaults are the keys of a recipe's `[attention]` of kind "dma" (docs/recipe.md); `keep` is
    `keep_window_size` there, `local` is `local_window_size`. The rank of a key is its score (`dma_scores`) and, with
    `recency="slope"` (the default, but with `bias="exp"`), its position times the KV head's slope: `dma_slopes` of the
    periods, or `slopes` of your own, one for each KV head. The bias of its logits is the rank itself (`"linear"`, the
    default with slopes) or `exp(min(rank, 60))` (`"exp"`, without). The last `local` keys, an eighth of `keep` by
    default, are kept whatever their rank. `preset="paper"` is the published form: no recency, `local=0`, `bias="exp"`.
    Other arguments as in `attention`.
    """
    periods = shortest_period, longest_period
    slopes, linear, local = _dma.form(
        "dma_attention", keep, v.shape[2], preset=preset, bias=bias, recency=recency, local=local, periods=periods,
        slopes=slopes,
    )  # fmt: skip
    (start, end), scale = documents or (None, None), _scale(scale, q)
    given = q, k, v, w_dt, a
    if _tracks(*given):
        return _Dma.apply(*given, start, end, slopes, linear, scale, keep, local, deterministic)
    given = q, k, v, w_dt.float(), a.float(), start, end
    return ops.dma_forward(*given, scale, keep, local, slopes, linear, True)[0]


@dataclass(frozen=True)
class NsaBlocks:
    """Block sizes of NSA in tokens (arXiv:2502.11089): l, d, l' and n. The stride divides both sizes."""

    compressed: int = 32
    stride: int = 16
    selected: int = 64
    num_selected: int = 16

    def sizes(self):
        return self.compressed, self.stride, self.selected, self.num_selected


@checked
def nsa_mean_pool(k, v, *, blocks=NsaBlocks(), documents=None):
    """Means of keys and of values over each compressed block: two of `[batch, tokens / stride, KV heads, width]`."""
    start, end = documents or (None, None)
    if _tracks(k, v):
        pooled = _NsaMeanPool.apply(k, v, start, end, blocks.sizes())
    else:
        pooled = ops.nsa_mean_pool(k, v, start, end, blocks.sizes())[0]
    return pooled.unbind(0)


@checked
def nsa_compressed(
    q, compressed_k, compressed_v, *, blocks=NsaBlocks(), scale=None, documents=None, deterministic=False
):
    """NSA's compressed branch, and the blocks that its attention chooses for the selected one.

    compressed_k, compressed_v: bf16 `[batch, ceil(tokens / stride), KV heads, width]`, the block that starts at token
    `i * stride` in place i (`nsa_mean_pool`, or a network of one's own); blocks that a document's end cuts are not
    read. Returns o, 0 where no block is whole yet, and int32 `[batch, tokens, KV heads, num_selected]`: blocks of each
    query, counted from its document's first token, then -1. The choice has no gradient.
    """
    start, end = documents or (None, None)
    compressed = _compressed(compressed_k, compressed_v)
    return _NsaCompressed.apply(q, compressed, start, end, _scale(scale, q), blocks.sizes(), deterministic)


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


@checked
def nsa_selected(q, k, v, indices, *, blocks=NsaBlocks(), scale=None, documents=None, deterministic=False):
    """NSA's selected branch: attention over the blocks that each query chose, as `nsa_compressed` returns them."""
    start, end = documents or (None, None)
    return _NsaSelected.apply(q, k, v, indices, start, end, _scale(scale, q), blocks.sizes(), deterministic)


@checked
def nsa(
    q, k, v, compressed_k, compressed_v, gates, *, gate_bias=None, blocks=NsaBlocks(), window=512, scale=None,
    documents=None, deterministic=False
):  # fmt: skip
    """Native sparse attention (arXiv:2502.11089): compressed, selected and window branches, weighted by their gates.

    compressed_k, compressed_v as in `nsa_compressed`. gates: bf16 `[batch, tokens, heads, 3]`, logits of the branches
    in that order: a branch counts `sigmoid(gates + gate_bias)`; gate_bias: f32 `[heads, 3]`, 0 without one. Widths 64
    and 128, groups of 1 to 64 heads. scale, documents, deterministic as in `attention`.
    """
    (start, end), scale, sizes = documents or (None, None), _scale(scale, q), blocks.sizes()
    given = q, k, v, compressed_k, compressed_v, gates, gate_bias
    if _tracks(*given):
        return _Nsa.apply(*given, start, end, scale, sizes, window, deterministic)
    compressed = _compressed(compressed_k, compressed_v)
    return ops.nsa_forward(q, k, v, compressed, gates, gate_bias, start, end, scale, sizes, window, True)[0]


def _of_chosen(q, k, v, choice, settings, index_q=None, index_k=None):
    """Attention over the blocks that each query chooses: by q and k, or by queries and keys for this alone."""
    scale, documents, deterministic = settings
    (start, end), scale = documents or (None, None), _scale(scale, q)
    given = q, k, v, index_q, index_k, start, end, scale, choice
    return _Chosen.apply(*given, deterministic) if _tracks(q, k, v) else _read_chosen(*given, True)[0]


def _read_chosen(q, k, v, index_q, index_k, start, end, scale, choice, only_o=False):
    """o, lse, the chosen blocks and their sizes, or o alone; blocks over 64 tokens are read in pieces."""
    (_, _, size, count), rule, *_ = choice
    if rule == "mean_key":
        index_q, index_k = q, k
        k, v = _by_chooser(k, v, q)
    if size <= 64 or size % 64:
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
    if group < 2 or group * kv_heads != choosers:
        # The plan refuses numbers of heads that do not divide.
        return k, v
    return [torch.cat((x,) * group, 3).view(*x.shape[:2], choosers, x.shape[3]) for x in (k, v)]


def _by_kv_head(gradients, k):
    """Gradients of what `_by_chooser` returns as those of what it was given."""
    heads = k.shape[2]
    return [x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3) for x in gradients]


@checked
def infllm_v2(q, k, v, *, blocks=NsaBlocks(num_selected=64), local=32, scale=None, documents=None, deterministic=False):
    """InfLLM-V2 (arXiv:2509.24663, section 3.2): each group of heads reads the blocks that its pooled keys choose.

    Of the `num_selected` blocks the document's first and the last `local` up to the query's own are chosen in any case,
    the others by the largest probability of an overlapping mean of keys, summed over the group. Shapes, widths and
    settings as in `nsa`; no gradient through the choice.
    """
    choice = blocks.sizes(), "largest_probability", True, local
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic))


@checked
def moba(q, k, v, *, block=512, num_selected=3, scale=None, documents=None, deterministic=False):
    """MoBA (arXiv:2502.13189, eq. 5, 6): each query head reads its own block and those whose mean key scores highest.

    num_selected counts the query's own block. Shapes, widths and settings as in `nsa`; no gradient through the choice.
    """
    choice = (block, block, block, num_selected), "mean_key", False, 1
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic))


@checked
def msa(
    q, k, v, index_q, index_k, *, block=128, num_selected=16, local=1, scale=None, documents=None, deterministic=False
):
    """MSA (arXiv:2606.13392): each group of heads reads the blocks in which its index query finds the best key.

    index_q: bf16 `[batch, tokens, KV heads, width]`, index_k: `[batch, tokens, 1, width]`, or a head for each KV head;
    they choose and get no gradient. Of the num_selected blocks the last `local` up to the query's own are read in any
    case. Shapes, widths and settings as in `nsa`.
    """
    choice = (1, 1, block, num_selected), "largest_score", False, local
    if index_q.shape[2] != k.shape[2]:
        raise SieveError(f"msa: index_q has {index_q.shape[2]} heads; it must have one for each KV head, {k.shape[2]}")
    by = [x.detach() if x.requires_grad else x for x in (index_q, index_k)]
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic), *by)


@checked
def selected_attention(
    q, k, v, indices, *, block=64, counts=None, scale=None, documents=None, window=None, causal=True,
    block_sums=False, deterministic=True, validate=False,
):  # fmt: skip
    """Causal attention of each query over the blocks of keys that `indices` gives it, with gradients to q, k and v.

    indices: int32 or int64 `[batch, tokens, choosers, blocks]`, in any order, counted from the document's first token:
    block b has the keys from `b * block` on. Choosers are the KV heads, the query heads, or a number between that the
    former divide and that divides the latter. -1, blocks after the query's own and a block given before are none.
    counts: int32 `[batch, tokens, choosers]`, how many of its indices a query has, the first ones; without it all.
    block: 16, 32, 64 or 128 tokens. A query without a block gets 0 and no gradient; keys that no query has are not
    read, and their gradients are exactly 0. window and causal=False have no kernel. validate: whether an index or count
    that would count as none is an error that names its place; that waits for the GPU. Widths, groups and other
    arguments as in `nsa`.

    With block_sums also f32 `[batch, tokens, choosers, blocks]` without gradient, what an indexer's loss compares its
    probabilities with: the attention on each index's block, summed over the chooser's heads. It is 0 where an index
    counts as none, but a block given twice has it at each place.
    """
    (start, end), scale = documents or (None, None), _scale(scale, q)
    check_selected(q, indices, counts, start, block, window, causal, validate)
    if indices.dtype == torch.int64:
        # Numbers that 32 bits do not hold are blocks after every query's own, or none.
        indices = indices.clamp(-1, 2**31 - 1).to(torch.int32)
    given = indices, counts, start, end, scale, block
    if _tracks(q, k, v):
        return _Selected.apply(q, k, v, *given, block_sums, deterministic)
    o, *sums = ops.selected_forward(q, *_by_chooser(k, v, indices), *given, True, block_sums)
    return (o, *sums) if sums else o


def check_selected(q, indices, counts, start, block, window, causal, validate):
    """Refuses masks that no kernel has; with `validate` also the first index that counts as none without being -1, and
    a count that is no number of indices.
    """
    if window is not None or causal is not True:
        got = f"window is {window}" if window is not None else f"causal is {causal}"
        raise SieveError(
            f"selected_attention: {got}, which has no kernel; they must be window=None and causal=True\n"
            "  hint: give indices without the blocks that a query is not to see"
        )
    if not validate:
        return
    if torch.compiler.is_compiling():
        raise SieveError("selected_attention: validate looks at values, which torch.compile does not have")
    batch, tokens, choosers, most = indices.shape
    if (batch, tokens) != (q.shape[0], q.shape[1]):
        # The plan refuses these sizes.
        return
    slot = torch.arange(most, device=indices.device)
    given = torch.ones_like(indices, dtype=torch.bool)
    if counts is not None and counts.shape == indices.shape[:3]:
        _refuse_first("counts", counts, (counts < 0) | (counts > most), f"it must be from 0 to {most}, the indices")
        given = slot < counts[..., None]
    position = torch.arange(tokens, device=indices.device)
    own = ((position - (0 if start is None else start)) // block).expand(batch, tokens)[..., None, None]
    _refuse_first("indices", indices, given & (indices < -1), "it must be a block, or -1 for none")
    _refuse_first("indices", indices, given & (indices > own), "a block after the query's own")
    blocks, order = torch.where(given, indices, -1).sort(dim=-1, stable=True)
    again = torch.nn.functional.pad((blocks[..., 1:] == blocks[..., :-1]) & (blocks[..., 1:] >= 0), (1, 0))
    _refuse_first("indices", indices, torch.zeros_like(given).scatter_(-1, order, again), "a block given before")


def _refuse_first(name, values, wrong, why):
    place = wrong.flatten().int().argmax()
    if wrong.flatten()[place]:
        at = [int(x) for x in torch.unravel_index(place, wrong.shape)]
        raise SieveError(f"selected_attention: {name}{at} is {int(values[tuple(at)])}: {why}")


@checked
def block_mask(mask, block=128, documents=None):
    """Lists of key blocks from a mask `[heads, query blocks, key blocks]`, for `block_sparse`. Waits for the GPU.

    Blocks after a query's own are left out; inside a query's own block keys after the query stay unseen. With
    `documents`, as of `attention`, each of them begins at a block: the mask has the blocks of the first document, its
    last one perhaps not full, then those of the second, and so on. Blocks of another document are left out.
    """
    if block not in (64, 128):
        raise SieveError(f"block_mask: block is {block}; it must be 64 or 128")
    _, queries, keys = mask.shape
    size = torch.arange(queries, device=mask.device)
    kept = mask.bool() & (torch.arange(keys, device=mask.device) <= size[:, None])
    places = None
    if documents is not None:
        places, document = places_of(documents, block)
        if len(document) != queries or queries != keys:
            raise SieveError(
                f"block_mask: the mask has {queries} x {keys} blocks; the documents have {len(document)} of {block}"
            )
        kept &= document == document[:, None]
        if torch.equal(places, torch.arange(len(places), device=places.device)):
            places = None
    starts = kept.sum(-1).flatten().cumsum(0)
    tiles = kept.nonzero()[:, 2]
    words = torch.cat([starts.new_zeros(2), starts, tiles, tiles.new_zeros(1)]).to(torch.int32)
    return BlockMask(words, block, tuple(mask.shape), places)


@checked
def block_sparse(q, k, v, mask, *, scale=None, deterministic=False):
    """Causal attention over chosen blocks of keys: `mask` is `block_mask(bools, 64 or 128)`.

    As in arXiv:2205.14135, section 3.3, with a mask for each query head, and gradients to q, k and v. One row: q
    `[1, tokens, heads, width]`; a query that sees no key gets 0 and no gradient, and so does a key that no query sees.
    The backward pass goes over tiles of 128 keys and 64 queries: blocks of 64 keys that lie in one tile cost it as much
    together as one alone. Documents that do not end at a block cost copies of q, k, v and the output.
    """
    if len(q) != 1:
        raise SieveError(f"block_sparse: q has {len(q)} rows, and must have one\n  hint: call it for each row")
    if mask.places is not None:
        attend = functools.partial(block_sparse, scale=scale, deterministic=deterministic)
        return mask.over_documents(attend, q, k, v)
    blocks = -(-q.shape[1] // mask.block)
    if mask.shape != (q.shape[2], blocks, blocks):
        wanted = f"{q.shape[2]} query heads, {blocks} x {blocks} blocks of {mask.block}"
        raise SieveError(f"block_sparse: the mask is {list(mask.shape)}; these tensors need {wanted}")
    scale = _scale(scale, q)
    if not _tracks(q, k, v):
        return ops.block_sparse(q, k, v, mask.words, scale, (mask.block, mask.block))[0]
    kv_heads = k.shape[2]
    lists, shares = mask.words, 1
    # The plan refuses numbers of heads that do not divide.
    if kv_heads and q.shape[2] % kv_heads == 0:
        lists, shares = mask.by_keys(kv_heads, deterministic), head_shares(q.shape[2] // kv_heads)
    return _BlockSparse.apply(q, k, v, mask.words, lists, mask.block, scale, deterministic, shares)


@checked
def decode(q, k, v, k_cache, v_cache, length, *, window=None, scale=None, sinks=None, chosen=None, block=None):
    """One new token a row against its cache, which gets the token's key and value: the row of `attention` for it.

    Keys are divided among thread blocks, whose results are joined by their log-sum-exps (arXiv:2307.08691, section 2).

    q, k, v: `[batch, 1, heads, width]`; k_cache, v_cache: bf16 `[batch, KV heads, capacity, width]`, written in place;
    length: int32 `[batch]`, keys of each row in the cache before this token, below the capacity.

    Without k and v the cache holds the token's key already and is not written: `length` counts the keys that the query
    sees. Or the query sees, of the keys up to its own, those of the blocks of `block` keys in `chosen`, int32
    `[batch, choosers, blocks]`: in ascending order, its own block last, then -1; choosers divide the heads, and KV
    heads the choosers; `length` counts the tokens before. A capacity that grows from call to call, as in a cache
    of transformers, costs nothing. sinks: as `attention` has them, bf16 alone. No gradient.
    """
    _require_no_gradient("decode", q, k, v, k_cache, v_cache, sinks)
    if sinks is not None:
        check_sinks("decode", q, sinks, chosen)
    if (k is None) != (v is None):
        raise SieveError("decode: of k and v one is None; pass both, or neither")
    if k is not None and (chosen is not None or block is not None):
        hint = "write k and v to the caches and pass None for them"
        raise SieveError(f"decode: with k and v, chosen and block have no kernel\n  hint: {hint}")
    if chosen is not None and window is not None:
        raise SieveError("decode: chosen and window together have no kernel; pass one of them")
    if k is None:
        return ops.cached_decode(q, k_cache, v_cache, length, chosen, sinks, _scale(scale, q), window, block)[0]
    return ops.attention_decode(q, k, v, k_cache, v_cache, length, sinks, _scale(scale, q), window)[0]


@checked
def dma_decode(
    q, k, v, z, k_cache, v_cache, z_cache, positions, length, *, preset=None, bias=None, local=None, scale=None
):
    """One new token a row against the keys that DMA keeps (arXiv:2508.02124): the row of `dma_attention` for it, with
    the same `preset`, `bias` and `local` and their defaults.

    z: f32 `[batch, KV heads]`, the token's rank: `dma_scores`, with its position times `dma_slopes` unless the form has
    no recency. Caches of `keep` places, written in place: k_cache, v_cache bf16
    `[batch, KV heads, keep, width]`, z_cache f32 and positions int32 `[batch, KV heads, keep]`. length: int32
    `[batch]`, tokens of each row before this one. No gradient.
    """
    _require_no_gradient("dma_decode", q, k, v, z)
    caches = (k_cache, v_cache, z_cache, positions)
    _dma.check_names("dma_decode", preset=preset, bias=bias)
    keep, kv_heads = k_cache.shape[2], k_cache.shape[1]
    _, linear, local = _dma.form("dma_decode", keep, kv_heads, preset=preset, bias=bias, local=local)
    return ops.dma_decode(q, k, v, z, *caches, length, _scale(scale, q), local, linear)[0]


@checked
def mla_decode(q, latents, rank, *, scale, key_scale=None, length=None):
    """The last tokens of each row over its latents, MLA with the up-projections folded into q and out of the result.

    arXiv:2405.04434, section 2.1.2.

    q: bf16 `[batch, new, heads, width]`; latents: bf16 `[batch, tokens, width]`, whose first `rank` columns are values
    too; key_scale: f32 `[batch, tokens, heads]`, a factor on `q . k`. length: int32 `[batch]`, tokens of each row
    before the new ones, where the latents have room behind them. Returns `[batch, new, heads, rank]`. No gradient.
    """
    _require_no_gradient("mla_decode", q, latents, key_scale)
    return ops.mla_decode(q, latents, key_scale, length, scale, rank)[0]


def supports(function, *args, **kwargs):
    """Whether `function(*args, **kwargs)` has kernels: `(True, "")` or `(False, why not)`. Runs nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        try:
            function(*[fake(x) for x in args], **{name: fake(x) for name, x in kwargs.items()})
        except SieveError as error:
            return False, str(error)
    return True, ""
