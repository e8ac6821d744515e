"""The functions of sieve_attention: exact sparse and dense causal attention with gradients, on bf16 CUDA tensors.

Shapes are FlashAttention's: q `[batch, tokens, heads, width]`, k and v `[batch, tokens, KV heads, width]`, any group
of heads that KV heads divide. q, k and v may be slices of one packed tensor; what the kernels cannot follow by strides
is copied. `documents` bounds what a token sees, for packed rows: None is one document a row, else `documents(...)`, or
the first token and the end of each token's document, two int32 `[batch, tokens]`, for rows with documents of their own.
Padding behind a row's tokens is seen by none of them; padding before them is documents of one token each.

`deterministic=True` takes backward kernels whose sums have a fixed order: two runs are equal to the bit.

A token has the same bits among a whole row's queries and as one step behind a cache, on an H100 or H200 with heads of
64 or 128 columns, in `attention` and `decode`, `selected_attention` and `decode` with `chosen`, `dma_attention` and
`dma_decode`. `same_bits=True` asks for it where it costs time, and refuses calls that have no such kernel. `nsa`,
`infllm_v2`, `moba`, `msa`, `expiring_attention`, `block_sparse` and latents have no step with a row's bits.

Every function raises SieveError for what no kernel does (another dtype, a CPU, lengths that differ); `supports`
returns the same sentence instead. There is no fallback; `on_cpu()` computes CPU tensors by the definitions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import _autograd, _axes, _dma, ops
from ._arguments import MOST_HEADS, check_bands, check_sinks, check_step_in_order, checked
from ._autograd import _by_chooser, _compressed, _read_chosen, _require_no_gradient, _scale, _tracks
from ._library import SieveError
from ._on_cpu import definition_of
from ._plans import refusal
from ._tiles import BlockMask, head_shares, places_of

# First token and end of each token's document; or cu_seqlens, from which every call makes these.
Documents = tuple[Tensor, Tensor] | Tensor


@checked
def documents(cu_seqlens: Tensor | Sequence[Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """First token and end of each token's document in packed rows.

    cu_seqlens: whole numbers `[documents + 1]`, from 0 to `tokens`, as FlashAttention's; of several rows a list of
    these, one a row. Returns `(start, end)`, int32 `[rows, tokens]`; make it once and pass it to every layer: in its
    place cu_seqlens itself, of one row, costs this each time. Other values are an error on a CPU; on a GPU, which is
    not waited for, they are changed to such a list, so that no kernel leaves its buffers.

    >>> start, end = sieve.documents(torch.tensor([0, 3, 5]), 5)
    >>> start.tolist(), end.tolist()
    ([[0, 0, 0, 3, 3]], [[3, 3, 3, 5, 5]])
    >>> sieve.documents([torch.tensor([0, 3, 5]), torch.tensor([0, 5])], 5)[0].shape
    torch.Size([2, 5])
    """
    if isinstance(cu_seqlens, Tensor):
        return _documents_of_row(cu_seqlens, tokens)
    starts, ends = zip(*(_documents_of_row(row, tokens) for row in cu_seqlens))
    return torch.cat(starts), torch.cat(ends)


def _documents_of_row(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """`documents` of one row, int32 `[1, tokens]`."""
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        dtype = str(cu_seqlens.dtype)[6:]
        raise SieveError(f"documents: cu_seqlens is {dtype}; it must be int32 or int64, the offsets of tokens")
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


def _bounds(given: Documents | None, x: Tensor, axis: int = 1) -> tuple[Tensor | None, Tensor | None]:
    """First tokens and ends of the documents of rows, whose tokens are that axis of x."""
    if given is None:
        return None, None
    return documents(given, x.shape[axis]) if isinstance(given, Tensor) else given


def _bounds_of_all(given: Documents) -> tuple[Tensor, Tensor]:
    """The same of a row that ends where the last document does; waits for the GPU where these are cu_seqlens."""
    return documents(given, int(given[-1])) if isinstance(given, Tensor) else given


class Bands(NamedTuple):
    """Keys that a query of `attention` sees beyond its window (CoWindow, arXiv:2609.32704): the `first` ones of its
    document, and a band of distances that each KV head has for itself.

    The distances from the window's end to before `reach` are divided into `number` bands of equal width, to a token. KV
    head h has band h; where there are fewer bands than heads, they begin again.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> sieve.attention(q, k, v, window=32, bands=sieve.Bands(first=2, reach=120, number=2)).shape
    torch.Size([1, 128, 4, 64])
    """

    first: int
    reach: int
    number: int


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
    bias: Tensor | None = None, sinks: Tensor | None = None, documents: Documents | None = None,
    deterministic: bool = False, return_lse: Literal[False] = False, bands: Bands | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
    bias: Tensor | None = None, sinks: Tensor | None = None, documents: Documents | None = None,
    deterministic: bool = False, return_lse: Literal[True], bands: Bands | None = None,
) -> tuple[Tensor, Tensor]: ...
# fmt: on
@checked
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None,
    bias: Tensor | None = None, sinks: Tensor | None = None, documents: Documents | None = None,
    deterministic: bool = False, return_lse: bool = False, bands: Bands | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention, dense or over the last `window` keys, tile by tile (arXiv:2307.08691, algorithms 1 and 2).

    q: bf16 `[batch, tokens, heads, width]`; k: `[batch, tokens, KV heads, width]`; v: as k, or narrower (MLA: keys of
    192, values of 128). Widths are multiples of 16 up to 256. bias: f32 `[batch, KV heads, tokens]`, added to every
    logit of its key, with a gradient; it must be finite: -inf gives NaN where a query sees no other key (-1e4 hides a
    key, `documents` and `select` leave it out). scale: the factor on `q . k`, `1 / sqrt(width)` without one. sinks: bf16
    or f32 `[heads]`, one more logit of each query head, whose value is zero (gpt-oss, arXiv:2508.10925), with a gradient.
    Returns `o`, bf16 `[batch, tokens, heads, width of v]`; a query that sees no key gets 0. return_lse: also the
    log-sum-exp of each query's logits, its sink's among them, f32 `[batch, heads, tokens]` without gradient. bands: the
    keys that a query sees beyond its window, `Bands(first, reach, number)`; there is no bias then. `decode` with
    `same_bits=True` has the bits of a token's row, where documents begin at multiples of 128 and there is no bias.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> sieve.attention(q, k, v, window=32, documents=torch.tensor([0, 50, 128])).shape
    torch.Size([1, 128, 4, 64])
    """
    if sinks is not None:
        check_sinks("attention", q, sinks, bias)
    if bands is not None:
        bands = check_bands("attention", window, bands, bias)
    start, end = (None, None) if documents is None else _bounds(documents, q)
    scale = _scale(scale, q)
    if not _tracks(q, k, v, bias, sinks):
        kept = ops.attention_forward(q, k, v, start, bias, sinks, scale, window, not return_lse, bands)
        return (kept[0], _autograd.with_base(kept[1], None if bias is None else kept[-1])) if return_lse else kept[0]
    return _autograd.Attention.apply(q, k, v, bias, sinks, start, end, scale, window, deterministic, return_lse, bands)


class Selection(NamedTuple):
    """The keys that each query keeps: query i sees key j exactly where `j <= i < expire[j]`.

    expire: int32 `[batch, KV heads, tokens]`. lists: the same as the attention kernels read it, int32 in a row; None
    where every key is kept.
    """

    expire: Tensor
    lists: Tensor | None
    documents: Documents | None


@checked
def select(rank: Tensor, *, keep: int, local: int = 0, documents: Documents | None = None) -> Selection:
    """The `keep` keys that each query keeps: the last `local` ones and the best-ranked older ones, ties to the later.

    rank: f32 `[batch, KV heads, tokens]`, any numbers but NaN: a score of one's own, or `dma_scores`. Exact to the bit,
    O(tokens) memory, no gradient: give `expiring_attention` a bias that depends on the ranking to train it. Fewer than
    2^22 tokens. A key that has left never returns, as a key's rank is the same for every query (arXiv:2508.02124).

    >>> sieve.select(torch.tensor([[[5.0, 1.0, 3.0, 2.0, 4.0]]]), keep=2).expire.tolist()
    [[[5, 2, 4, 3, 5]]]
    """
    start, end = _bounds(documents, rank, 2)
    rank = rank.detach() if rank.requires_grad else rank
    expire, *lists = ops.dma_select(rank, start, end, keep, local)
    return Selection(expire, lists[0] if lists else None, documents)


@checked
def expiring_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, selection: Selection, *, scale: float | None = None,
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Attention over the keys of a `Selection`, with gradients to q, k, v and bias: exact token-level sparsity.

    Shapes as in `attention`; bias: f32 `[batch, KV heads, tokens]`, added to every logit of its key, or None. Keys that
    no query sees get a gradient of exactly 0. No step has a row's bits.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> rank = v.norm(dim=-1).transpose(1, 2).contiguous()          # [batch, KV heads, tokens]
    >>> sieve.expiring_attention(q, k, v, rank, sieve.select(rank, keep=32, local=8)).shape
    torch.Size([1, 128, 4, 64])
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
    return _autograd.DmaAttention.apply(q, k, v, bias, selection.lists, scale, deterministic)


@checked
def dma_scores(
    v: Tensor, w_dt: Tensor, a: Tensor, *, slopes: Sequence[float] | None = None, documents: Documents | None = None
) -> Tensor:
    """Scores of DMA's keys, f32 `[batch, KV heads, tokens]`: `a * softplus(w_dt . v)`, with gradients.

    v: bf16 `[batch, tokens, KV heads, width]`, at most 32 KV heads; w_dt: `[KV heads, KV heads * width]`, the weight of
    a linear layer; a: `[KV heads]`. slopes: a number for each KV head, times its token's position in the document, is
    added, so that recent keys rank higher: `dma_slopes` has those of `dma_attention`. Without slopes these are the
    scores of arXiv:2508.02124, eq. 3.

    >>> v, w_dt, a = torch.randn(1, 128, 2, 64), torch.randn(2, 2 * 64), torch.ones(2)
    >>> sieve.dma_scores(v, w_dt, a, slopes=sieve.dma_slopes(32, 2)).shape
    torch.Size([1, 2, 128])
    """
    start, _ = _bounds(documents, v)
    return _autograd.DmaScores.apply(v, w_dt.float(), a.float(), start, tuple(slopes or ()))


@checked
def dma_slopes(
    keep: int, kv_heads: int, *, shortest_period: float | None = None, longest_period: float | None = None
) -> tuple[float, ...]:
    """The slopes of `dma_attention`, a tuple of one number for each KV head: 1 / period, periods spaced geometrically
    from `shortest_period` (64 tokens) to `longest_period` (four times `keep`).

    >>> [round(1 / slope) for slope in sieve.dma_slopes(1024, 4)]
    [64, 256, 1024, 4096]
    """
    if not 0 < kv_heads <= MOST_HEADS:
        raise SieveError(f"{kv_heads} KV heads")
    return _dma.slopes_of(keep, kv_heads, shortest_period=shortest_period, longest_period=longest_period)


@checked
def dma_attention(
    q: Tensor, k: Tensor, v: Tensor, w_dt: Tensor, a: Tensor, *, keep: int, preset: Literal["paper"] | None = None,
    bias: Literal["exp", "linear"] | None = None, recency: Literal["slope", "none"] | None = None,
    local: int | None = None, shortest_period: float | None = None, longest_period: float | None = None,
    slopes: Sequence[float] | None = None, scale: float | None = None, documents: Documents | None = None,
    deterministic: bool = False, same_bits: bool = False,
) -> Tensor:  # fmt: skip
    """Dynamic mask attention (after arXiv:2508.02124), exact: each query sees the `keep` best-ranked keys before it.

    The arguments and their defaults are the keys of a recipe's `[attention]` of kind "dma" (docs/recipe.md); `keep` is
    `keep_window_size` there, `local` is `local_window_size`. The rank of a key is its score (`dma_scores`) and, with
    `recency="slope"` (the default, but with `bias="exp"`), its position times the KV head's slope: `dma_slopes` of the
    periods, or `slopes` of your own, one for each KV head. The bias of its logits is the rank itself (`"linear"`, the
    default with slopes) or `exp(min(rank, 60))` (`"exp"`, without). The last `local` keys, an eighth of `keep` by
    default, are kept whatever their rank. `preset="paper"` is the published form: no recency, `local=0`, `bias="exp"`.
    Other arguments as in `attention`. same_bits: a token's row has the bits of `dma_decode` with same_bits, as keys are
    added by epochs of 128 tokens; for `keep` up to 2048, and documents that begin at multiples of 128.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> sieve.dma_attention(q, k, v, torch.randn(2, 2 * 64), torch.ones(2), keep=32).shape
    torch.Size([1, 128, 4, 64])
    """
    periods = shortest_period, longest_period
    form = _dma.form(
        "dma_attention", keep, v.shape[2], preset=preset, bias=bias, recency=recency, local=local, periods=periods,
        slopes=slopes,
    )  # fmt: skip
    (start, end), scale = _bounds(documents, q), _scale(scale, q)
    if _tracks(q, k, v, w_dt, a):
        settings = form.slopes, form.linear, scale, keep, form.local, deterministic, same_bits
        return _autograd.Dma.apply(q, k, v, w_dt, a, start, end, *settings)
    given = q, k, v, w_dt.float(), a.float(), start, end
    return ops.dma_forward(*given, scale, keep, form.local, form.slopes, form.linear, True, same_bits)[0]


@dataclass(frozen=True)
class NsaBlocks:
    """Block sizes of NSA in tokens (arXiv:2502.11089): l, d, l' and n. The stride divides both sizes."""

    compressed: int = 32
    stride: int = 16
    selected: int = 64
    num_selected: int = 16

    def sizes(self) -> tuple[int, int, int, int]:
        """The four in this order, as the operators take them."""
        return self.compressed, self.stride, self.selected, self.num_selected


@checked
def nsa_mean_pool(
    k: Tensor, v: Tensor, *, blocks: NsaBlocks = NsaBlocks(), documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """Means of keys and of values over each compressed block: two of `[batch, tokens / stride, KV heads, width]`.

    >>> k, v = torch.randn(2, 1, 128, 2, 64)
    >>> [x.shape[1] for x in sieve.nsa_mean_pool(k, v)]
    [8, 8]
    """
    start, end = _bounds(documents, k)
    if _tracks(k, v):
        pooled = _autograd.NsaMeanPool.apply(k, v, start, end, blocks.sizes())
    else:
        pooled = ops.nsa_mean_pool(k, v, start, end, blocks.sizes())[0]
    return pooled.unbind(0)


@checked
def nsa_compressed(
    q: Tensor, compressed_k: Tensor, compressed_v: Tensor, *, blocks: NsaBlocks = NsaBlocks(),
    scale: float | None = None, documents: Documents | None = None, deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """NSA's compressed branch, and the blocks that its attention chooses for the selected one.

    compressed_k, compressed_v: bf16 `[batch, ceil(tokens / stride), KV heads, width]`, the block that starts at token
    `i * stride` in place i (`nsa_mean_pool`, or a network of one's own); blocks that a document's end cuts are not
    read. Returns o, 0 where no block is whole yet, and int32 `[batch, tokens, KV heads, num_selected]`: blocks of each
    query, counted from its document's first token, then -1. The choice has no gradient.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> o, indices = sieve.nsa_compressed(q, *sieve.nsa_mean_pool(k, v))
    >>> indices[0, 127, 0, :3].tolist()                             # blocks of 64 tokens: both, then none
    [0, 1, -1]
    """
    start, end = _bounds(documents, q)
    compressed = _compressed(compressed_k, compressed_v)
    return _autograd.NsaCompressed.apply(q, compressed, start, end, _scale(scale, q), blocks.sizes(), deterministic)


@checked
def nsa_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, blocks: NsaBlocks = NsaBlocks(), scale: float | None = None,
    documents: Documents | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """NSA's selected branch: attention over the blocks that each query chose, as `nsa_compressed` returns them.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> o, indices = sieve.nsa_compressed(q, *sieve.nsa_mean_pool(k, v))
    >>> sieve.nsa_selected(q, k, v, indices).shape
    torch.Size([1, 128, 4, 64])
    """
    start, end = _bounds(documents, q)
    return _autograd.NsaSelected.apply(q, k, v, indices, start, end, _scale(scale, q), blocks.sizes(), deterministic)


@checked
def nsa(
    q: Tensor, k: Tensor, v: Tensor, compressed_k: Tensor, compressed_v: Tensor, gates: Tensor, *,
    gate_bias: Tensor | None = None, blocks: NsaBlocks = NsaBlocks(), window: int = 512, scale: float | None = None,
    documents: Documents | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Native sparse attention (arXiv:2502.11089): compressed, selected and window branches, weighted by their gates.

    compressed_k, compressed_v as in `nsa_compressed`. gates: bf16 `[batch, tokens, heads, 3]`, logits of the branches
    in that order: a branch counts `sigmoid(gates + gate_bias)`; gate_bias: f32 `[heads, 3]`, 0 without one. Widths 64
    and 128, groups of 1 to 64 heads. scale, documents, deterministic as in `attention`. No step has a row's bits.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> gates = torch.randn(1, 128, 4, 3)
    >>> sieve.nsa(q, k, v, *sieve.nsa_mean_pool(k, v), gates, window=32).shape
    torch.Size([1, 128, 4, 64])
    """
    (start, end), scale, sizes = _bounds(documents, q), _scale(scale, q), blocks.sizes()
    given = q, k, v, compressed_k, compressed_v, gates, gate_bias
    if _tracks(*given):
        return _autograd.Nsa.apply(*given, start, end, scale, sizes, window, deterministic)
    compressed = _compressed(compressed_k, compressed_v)
    return ops.nsa_forward(q, k, v, compressed, gates, gate_bias, start, end, scale, sizes, window, True)[0]


def _of_chosen(
    q: Tensor, k: Tensor, v: Tensor, choice: tuple[Any, ...], settings: tuple[Any, ...],
    index_q: Tensor | None = None, index_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over the blocks that each query chooses: by q and k, or by queries and keys for this alone."""
    scale, documents, deterministic = settings
    (start, end), scale = _bounds(documents, q), _scale(scale, q)
    given = q, k, v, index_q, index_k, start, end, scale, choice
    return _autograd.Chosen.apply(*given, deterministic) if _tracks(q, k, v) else _read_chosen(*given, True)[0]


@checked
def infllm_v2(
    q: Tensor, k: Tensor, v: Tensor, *, blocks: NsaBlocks = NsaBlocks(num_selected=64), local: int = 32,
    scale: float | None = None, documents: Documents | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """InfLLM-V2 (arXiv:2509.24663, section 3.2): each group of heads reads the blocks that its pooled keys choose.

    Of the `num_selected` blocks the document's first and the last `local` up to the query's own are chosen in any case,
    the others by the largest probability of an overlapping mean of keys, summed over the group. Shapes, widths and
    settings as in `nsa`; no gradient through the choice. No step has a row's bits.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> sieve.infllm_v2(q, k, v, blocks=sieve.NsaBlocks(32, 16, 32, 3), local=1).shape
    torch.Size([1, 128, 4, 64])
    """
    choice = blocks.sizes(), "largest_probability", True, local
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic))


@checked
def moba(
    q: Tensor, k: Tensor, v: Tensor, *, block: int = 512, num_selected: int = 3, scale: float | None = None,
    documents: Documents | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """MoBA (arXiv:2502.13189, eq. 5, 6): each query head reads its own block and those whose mean key scores highest.

    num_selected counts the query's own block. Shapes, widths and settings as in `nsa`; no gradient through the choice.
    No step has a row's bits.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> sieve.moba(q, k, v, block=32, num_selected=2).shape
    torch.Size([1, 128, 4, 64])
    """
    choice = (block, block, block, num_selected), "mean_key", False, 1
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic))


@checked
def msa(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, *, block: int = 128, num_selected: int = 16,
    local: int = 1, scale: float | None = None, documents: Documents | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """MSA (arXiv:2606.13392): each group of heads reads the blocks in which its index query finds the best key.

    index_q: bf16 `[batch, tokens, KV heads, width]`, index_k: `[batch, tokens, 1, width]`, or a head for each KV head;
    they choose and get no gradient. Of the num_selected blocks the last `local` up to the query's own are read in any
    case. Shapes, widths and settings as in `nsa`. No step has a row's bits.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> index_q, index_k = torch.randn(1, 128, 2, 64), torch.randn(1, 128, 1, 64)
    >>> sieve.msa(q, k, v, index_q, index_k, block=32, num_selected=2).shape
    torch.Size([1, 128, 4, 64])
    """
    choice = (1, 1, block, num_selected), "largest_score", False, local
    if index_q.shape[2] != k.shape[2]:
        raise SieveError(f"msa: index_q has {index_q.shape[2]} heads; it must have one for each KV head, {k.shape[2]}")
    by = [x.detach() if x.requires_grad else x for x in (index_q, index_k)]
    return _of_chosen(q, k, v, choice, (scale, documents, deterministic), *by)


# fmt: off
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: int = 64, counts: Tensor | None = None,
    scale: float | None = None, documents: Documents | None = None, window: None = None, causal: bool = True,
    block_sums: Literal[False] = False, deterministic: bool = True, validate: bool = False,
) -> Tensor: ...
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: int = 64, counts: Tensor | None = None,
    scale: float | None = None, documents: Documents | None = None, window: None = None, causal: bool = True,
    block_sums: Literal[True], deterministic: bool = True, validate: bool = False,
) -> tuple[Tensor, Tensor]: ...
# fmt: on
@checked
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: int = 64, counts: Tensor | None = None,
    scale: float | None = None, documents: Documents | None = None, window: None = None, causal: bool = True,
    block_sums: bool = False, deterministic: bool = True, validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of each query over the blocks of keys that `indices` gives it, with gradients to q, k and v.

    indices: int32 or int64 `[batch, tokens, choosers, blocks]`, in any order, counted from the document's first token:
    block b has the keys from `b * block` on. Choosers are the KV heads, the query heads, or a number between that the
    former divide and that divides the latter. -1, blocks after the query's own and a block given before are none.
    counts: int32 `[batch, tokens, choosers]`, how many of its indices a query has, the first ones; without it all.
    block: 16, 32, 64 or 128 tokens. A query without a block gets 0 and no gradient; keys that no query has are not
    read, and their gradients are exactly 0. window and causal=False have no kernel. validate: whether an index or count
    that would count as none is an error that names its place; that waits for the GPU. Widths, groups and other
    arguments as in `nsa`. `decode` with `chosen` and `same_bits=True` has the bits of a token's row.

    With block_sums also f32 `[batch, tokens, choosers, blocks]` without gradient, what an indexer's loss compares its
    probabilities with: the attention on each index's block, summed over the chooser's heads. It is 0 where an index
    counts as none, but a block given twice has it at each place.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> indices = torch.zeros(1, 128, 2, 1, dtype=torch.int32)      # all read the first block
    >>> o, sums = sieve.selected_attention(q, k, v, indices, block=32, block_sums=True)
    >>> sums[0, 40].flatten().tolist()                              # two heads of each KV head
    [2.0, 2.0]
    """
    (start, end), scale = _bounds(documents, q), _scale(scale, q)
    check_selected(q, indices, counts, start, block, window, causal, validate)
    if indices.dtype == torch.int64:
        # Numbers that 32 bits do not hold are blocks after every query's own, or none.
        indices = indices.clamp(-1, 2**31 - 1).to(torch.int32)
    given = indices, counts, start, end, scale, block
    if _tracks(q, k, v):
        return _autograd.Selected.apply(q, k, v, *given, block_sums, deterministic)
    o, *sums = ops.selected_forward(q, *_by_chooser(k, v, indices), *given, True, block_sums)
    return (o, sums[0]) if sums else o


def check_selected(
    q: Tensor, indices: Tensor, counts: Tensor | None, start: Tensor | None, block: int, window: int | None,
    causal: bool, validate: bool,
) -> None:  # fmt: skip
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


def _refuse_first(name: str, values: Tensor, wrong: Tensor, why: str) -> None:
    place = wrong.flatten().int().argmax()
    if wrong.flatten()[place]:
        at = [int(x) for x in torch.unravel_index(place, wrong.shape)]
        raise SieveError(f"selected_attention: {name}{at} is {int(values[tuple(at)])}: {why}")


@checked
def block_mask(mask: Tensor, block: int = 128, documents: Documents | None = None) -> BlockMask:
    """Lists of key blocks from a mask `[heads, query blocks, key blocks]`, for `block_sparse`. Waits for the GPU.

    Blocks after a query's own are left out; inside a query's own block keys after the query stay unseen. With
    `documents`, as of `attention`, each of them begins at a block: the mask has the blocks of the first document, its
    last one perhaps not full, then those of the second, and so on. Blocks of another document are left out.

    >>> sieve.block_mask(torch.ones(4, 2, 2), 64).shape             # heads, query blocks, key blocks
    (4, 2, 2)
    """
    if block not in (64, 128):
        raise SieveError(f"block_mask: block is {block}; it must be 64 or 128")
    _, queries, keys = mask.shape
    size = torch.arange(queries, device=mask.device)
    kept = mask.bool() & (torch.arange(keys, device=mask.device) <= size[:, None])
    places = None
    if documents is not None:
        places, document = places_of(_bounds_of_all(documents), block)
        if len(document) != queries or queries != keys:
            raise SieveError(
                f"block_mask: the mask has {queries} x {keys} blocks; the documents have {len(document)} of {block}"
            )
        kept &= document == document[:, None]
        if torch.equal(places, torch.arange(len(places), device=places.device)):
            places = None
    starts = kept.sum(-1).flatten().cumsum(0)
    tiles = kept.nonzero()[:, 2]
    if len(tiles) <= len(mask) * queries:
        _axes.warn_of_mask(mask, queries > 2 and not bool(kept.tril(-1).any()))
    words = torch.cat([starts.new_zeros(2), starts, tiles, tiles.new_zeros(1)]).to(torch.int32)
    return BlockMask(words, block, tuple(mask.shape), places)


@checked
def block_sparse(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None, deterministic: bool = False
) -> Tensor:
    """Causal attention over chosen blocks of keys: `mask` is `block_mask(bools, 64 or 128)`.

    As in arXiv:2205.14135, section 3.3, with a mask for each query head, and gradients to q, k and v. One row: q
    `[1, tokens, heads, width]`; a query that sees no key gets 0 and no gradient, and so does a key that no query sees.
    The backward pass goes over tiles of 128 keys and 64 queries: blocks of 64 keys that lie in one tile cost it as much
    together as one alone. Documents that do not end at a block cost copies of q, k, v and the output.

    >>> q, k, v = (torch.randn(1, 128, heads, 64) for heads in (4, 2, 2))
    >>> mask = sieve.block_mask(torch.eye(2).expand(4, -1, -1), 64)  # each block sees itself
    >>> torch.allclose(sieve.block_sparse(q, k, v, mask)[:, :64], sieve.attention(q, k, v)[:, :64], atol=1e-5)
    True
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
    return _autograd.BlockSparse.apply(q, k, v, mask.words, lists, mask.block, scale, deterministic, shares)


@checked
def decode(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, length: Tensor, *,
    window: int | None = None, scale: float | None = None, sinks: Tensor | None = None, chosen: Tensor | None = None,
    block: int | None = None, bands: Bands | None = None, same_bits: bool = False,
) -> Tensor:  # fmt: skip
    """New tokens of each row against its cache, which gets their keys and values: the rows of `attention` for them.

    One token a row is one call of the kernels; several, as those that a draft proposes, are as many calls.

    Keys are divided among thread blocks, whose results are joined by their log-sum-exps (arXiv:2307.08691, section 2).

    q, k, v: `[batch, new tokens, heads, width]`; k_cache, v_cache: bf16 `[batch, KV heads, capacity, width]`, written
    in place; length: int32 `[batch]`, keys of each row in the cache before the new tokens, for which it has places.

    Without k and v the cache holds the tokens' keys already and is not written: `length` counts the keys that the
    last query sees. Or one query a row sees, of the keys up to its own, those of the blocks of `block` keys in
    `chosen`, int32 `[batch, choosers, blocks]`: any blocks in ascending order, then -1; those behind its own are not
    read, and without a block o is 0. Choosers divide the heads, and KV heads the choosers; `length` counts the tokens
    before.
    sinks: as `attention` has them, bf16 alone. bands: as `attention` has them, with k and v alone; the cache then holds
    all keys of a row up to its reach. No gradient.
    A capacity that grows from call to call, as in a cache of transformers, costs nothing.

    same_bits: each token has the bits of its row of `attention`, or with `chosen` of `selected_attention`, in any batch
    and behind any number of keys, for a price; places count from the row's first token. It is for an H100 or H200, with
    keys and values of 64 or of 128 columns; other calls are refused. With k and v a cache may have the token's key
    already and gets it again. Without them it is for `chosen` alone: any ascending blocks of 16, 32, 64 or 128 tokens,
    then -1, and a chooser for each KV head; other GPUs take that, too, and were not tried. Without same_bits a call with
    k and v has these bits on that GPU and in these widths up to 4,096 places of the caches, or keys of the window; any
    other call has other last bits.

    >>> k_cache, v_cache = torch.zeros(2, 1, 2, 16, 64)
    >>> q, k, v = (torch.randn(1, 3, heads, 64) for heads in (4, 2, 2))
    >>> sieve.decode(q, k, v, k_cache, v_cache, torch.zeros(1, dtype=torch.int32)).shape
    torch.Size([1, 3, 4, 64])
    """
    _require_no_gradient("decode", q, k, v, k_cache, v_cache, sinks)
    if sinks is not None:
        check_sinks("decode", q, sinks, chosen)
    if (k is None) != (v is None):
        raise SieveError("decode: of k and v one is None; pass both, or neither")
    if bands is not None:
        bands = check_bands("decode", window, bands, chosen)
        if k is None:
            raise SieveError("decode: bands without k and v have no kernel\n  hint: pass the token's k and v")
    if k is not None and (chosen is not None or block is not None):
        hint = "write k and v to the caches and pass None for them"
        raise SieveError(f"decode: with k and v, chosen and block have no kernel\n  hint: {hint}")
    if chosen is not None and window is not None:
        raise SieveError("decode: chosen and window together have no kernel; pass one of them")
    if same_bits:
        check_step_in_order(k, k_cache, chosen, block)
    if q.shape[1] > 1:
        return _decode_several(q, k, v, k_cache, v_cache, length, window, scale, sinks, chosen, bands, same_bits)
    if same_bits and chosen is not None and block is not None:
        return ops.selected_decode(q.contiguous(), k_cache, v_cache, length, chosen, _scale(scale, q), block)[0]
    if k is None or v is None:
        return ops.cached_decode(q, k_cache, v_cache, length, chosen, sinks, _scale(scale, q), window, block)[0]
    given = q, k, v, k_cache, v_cache, length, sinks
    return ops.attention_decode(*given, _scale(scale, q), window, bands, same_bits)[0]


def _decode_several(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, length: Tensor,
    window: int | None, scale: float | None, sinks: Tensor | None, chosen: Tensor | None, bands: Bands | None,
    same_bits: bool = False,
) -> Tensor:  # fmt: skip
    """`decode` token by token."""
    _axes.warn_of_steps(q)
    if chosen is not None:
        raise SieveError(f"decode: chosen with {q.shape[1]} new tokens has no kernel\n  hint: one token a call")
    given = [k, v] if k is not None and v is not None else []
    for name, x in zip(("k", "v"), given):
        if x.shape[:2] != q.shape[:2]:
            raise SieveError(f"decode: {name} is {list(x.shape)}, and q has {list(q.shape[:2])} rows and new tokens")
    o = []
    for at in range(q.shape[1]):
        # Without k and v the last query sees `length` keys, each before it one less.
        before = length + (at if given else at + 1 - q.shape[1])
        k_now, v_now = (x[:, at : at + 1] for x in given) if given else (None, None)
        given_now = q[:, at : at + 1], k_now, v_now, k_cache, v_cache, before
        o.append(decode(*given_now, window=window, scale=scale, sinks=sinks, bands=bands, same_bits=same_bits))
    return torch.cat(o, 1)


@checked
def dma_decode(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, k_cache: Tensor, v_cache: Tensor, z_cache: Tensor, positions: Tensor,
    length: Tensor, *, preset: Literal["paper"] | None = None, bias: Literal["exp", "linear"] | None = None,
    local: int | None = None, scale: float | None = None, same_bits: bool = False,
) -> Tensor:  # fmt: skip
    """One new token a row against the keys that DMA keeps (arXiv:2508.02124): the row of `dma_attention` for it, with
    the same `preset`, `bias` and `local` and their defaults. With `same_bits=True` here and there it has that row's
    bits, on an H100 or H200, with keys and values of 64 or of 128 columns and `keep` up to 2048, for a price; others
    are refused. Without it the last bits differ.

    z: f32 `[batch, KV heads]`, the token's rank: `dma_scores`, with its position times `dma_slopes` unless the form has
    no recency. Caches of `keep` places, written in place: k_cache, v_cache bf16
    `[batch, KV heads, keep, width]`, z_cache f32 and positions int32 `[batch, KV heads, keep]`. length: int32
    `[batch]`, tokens of each row before this one. No gradient.

    >>> caches = *torch.zeros(2, 1, 2, 8, 64), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8, dtype=torch.int32)
    >>> q, k, v = (torch.randn(1, 1, heads, 64) for heads in (4, 2, 2))
    >>> sieve.dma_decode(q, k, v, torch.randn(1, 2), *caches, torch.zeros(1, dtype=torch.int32)).shape
    torch.Size([1, 1, 4, 64])
    """
    _require_no_gradient("dma_decode", q, k, v, z)
    caches = (k_cache, v_cache, z_cache, positions)
    _dma.check_names("dma_decode", preset=preset, bias=bias)
    keep, kv_heads = k_cache.shape[2], k_cache.shape[1]
    form = _dma.form("dma_decode", keep, kv_heads, preset=preset, bias=bias, local=local)
    return ops.dma_decode(q, k, v, z, *caches, length, _scale(scale, q), form.local, form.linear, same_bits)[0]


@checked
def mla_decode(
    q: Tensor, latents: Tensor, rank: int, *, scale: float, key_scale: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The last tokens of each row over its latents, MLA with the up-projections folded into q and out of the result.

    arXiv:2405.04434, section 2.1.2.

    q: bf16 `[batch, new, heads, width]`; latents: bf16 `[batch, tokens, width]`, whose first `rank` columns are values
    too; key_scale: f32 `[batch, tokens, heads]`, a factor on `q . k`. length: int32 `[batch]`, tokens of each row
    before the new ones, where the latents have room behind them. Returns `[batch, new, heads, rank]`. No gradient.
    Its last bits are not those of `attention` over the keys and values that latents stand for.

    >>> q, latents = torch.randn(1, 1, 16, 64 + 32), torch.randn(1, 128, 64 + 32)
    >>> sieve.mla_decode(q, latents, 64, scale=0.1).shape
    torch.Size([1, 1, 16, 64])
    """
    _require_no_gradient("mla_decode", q, latents, key_scale)
    return ops.mla_decode(q, latents, key_scale, length, scale, rank)[0]


def supports(
    function: str | Callable[..., Any], *args: Any, device: str | torch.device | None = None, arch: str | None = None,
    **kwargs: Any,
) -> tuple[bool, str]:  # fmt: skip
    """Whether `function(*args, **kwargs)` has kernels: `(True, "")` or `(False, why not)`. Runs nothing.

    function: one of the package's, its name, or a layer. Shapes and types count, values do not: tensors on the device
    "meta" are answered, too, and need no memory. device="cuda" asks as if the tensors, and a layer's weights, were on a
    GPU: the one of this machine, or an H100 where there is none. arch="sm_80" asks of an A100 in its place, "sm_86",
    "sm_89", "sm_90a", "sm_100a" and "sm_120a" of an RTX 3090, L40S, H100, B200 and RTX 5090. f32 tensors are asked as
    they are: the kernels take bf16.

    >>> import torch, sieve_attention as sieve
    >>> q = torch.randn(1, 256, 4, 60, dtype=torch.bfloat16)
    >>> sieve.supports("attention", q, q, q, device="cuda")[0]
    False
    """
    named = {name: x for name, x in globals().items() if hasattr(x, "is_checked")}
    if isinstance(function, str) and function not in named:
        raise SieveError(f'supports: there is no function "{function}"; there are {", ".join(sorted(named))}')
    call: Any = named[function] if isinstance(function, str) else function
    first = args[0] if args else next(iter(kwargs.values()), None)
    if device is None and isinstance(call, torch.nn.Module) and definition_of("attention", first):
        raise SieveError('supports: a layer is not asked by definitions\n  hint: device="cuda" asks the kernels')
    device = "cuda" if arch is not None and device is None else device
    if device is None and hasattr(call, "is_checked") and definition_of(call.__name__, first):
        try:
            call.arguments_of_definition(args, kwargs)
        except SieveError as error:
            return False, str(error)
        return True, ""
    refused_why = refusal(call, args, kwargs, device, arch)
    return not refused_why, refused_why
