"""The functions of sieve_attention on CPU tensors, by their definitions (definitions.py): any float type, with
gradients, tokens x tokens memory. `on_cpu()` turns them on.

bf16 and f16 are computed in f32, and the result is rounded once. Only what the definitions lack is here: caches that
are written in place, lists of blocks, packed rows.
"""

import contextlib
import functools
import warnings
from types import TracebackType

import torch
from torch.autograd.function import once_differentiable

from . import _dma, _library, _plans, definitions
from ._library import SieveError

_is_on, _is_strict = False, True
_said_that_limits_are_unknown = False


def on_cpu(on: bool = True, *, strict: bool = True) -> "_restored":
    """Computes every function on CPU tensors by its definition, in plain torch, with gradients; a GPU's tensors still
    go to the kernels. For machines without a GPU: it takes tokens x tokens memory, and is meant for small sizes.

    What the kernels of a GPU refuse is refused here too, in the same words, so that code which runs here runs there:
    the GPU is this machine's, or an H100. f32 and f64 alone are free, as more exact forms of bf16. With strict=False
    the definitions take what torch takes.

    It holds from the call on, or in a `with` block. `on_cpu(False)` refuses CPU tensors again, as without it.

    >>> import torch, sieve_attention as sieve
    >>> with sieve.on_cpu():
    ...     q = torch.randn(1, 32, 4, 64)
    ...     sieve.attention(q, q, q, window=8).shape
    torch.Size([1, 32, 4, 64])
    """
    global _is_on, _is_strict, _said_that_limits_are_unknown
    before, (_is_on, _is_strict) = (_is_on, _is_strict), (on, strict)
    if on and strict and _library.missing and not _said_that_limits_are_unknown:
        _said_that_limits_are_unknown = True
        what = "no GPU's limits are checked: the library of kernels, which knows them, is not there"
        warnings.warn(f"sieve_attention.on_cpu: {what} ({_library.missing})", stacklevel=2)
    return _restored(before)


class _restored(contextlib.AbstractContextManager[None]):
    """Sets what was before, at the end of a `with` block."""

    def __init__(self, before: tuple[bool, bool]) -> None:
        self.before = before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _is_on, _is_strict
        _is_on, _is_strict = self.before


def asks_a_gpu():
    """Whether definitions refuse what kernels do."""
    return _is_on and _is_strict and not _library.missing


def takes_all() -> bool:
    """Whether definitions take what no kernel does."""
    return _is_on and not asks_a_gpu()


# What kernels take as bf16 alone, and a definition in more bits.
BF16 = {"q", "k", "v", "compressed_k", "compressed_v", "gates", "index_q", "index_k", "k_cache", "v_cache", "latents"}
_answers = {}
MOST_ANSWERS = 4096


def as_on_a_gpu(function, name, given):
    """The arguments of a definition that is about to run, by name; refused where a GPU's kernels refuse them."""
    if not asks_a_gpu() or torch._C._len_torch_dispatch_stack():
        return given
    asked = {argument: _plans.without_values(x, _type_of(name, argument, x)) for argument, x in given.items()}
    asked.pop("validate", None)
    # Not a dict of names: these are in the order of the call.
    key = function, torch.is_grad_enabled(), _library.Op.emulator is None, _plans.key_of(asked)
    if key not in _answers:
        if len(_answers) >= MOST_ANSWERS:
            _answers.clear()
        _answers[key] = _plans.refusal(function, (), asked, "cuda")
    if _answers[key]:
        raise SieveError(_answers[key])
    if isinstance(given.get("documents"), (tuple, list)):
        _check_documents(name, *given["documents"])
    return {argument: _once(x) for argument, x in given.items()}


def _check_documents(name, start, end):
    """Refuses pairs, `[batch, tokens]`, that are no documents one behind another up to the row's end. Kernels read
    both, and of values that do not agree a part alone; on a GPU nothing waits to look at them.
    """
    index = torch.arange(start.shape[1], device=start.device)
    begins = start == index
    before = torch.nn.functional.pad(start[:, :-1], (1, 0), value=-1)
    # The first token of the next document; behind the last one the row's end.
    following = torch.nn.functional.pad(torch.where(begins, index, len(index))[:, 1:], (0, 1), value=len(index))
    following = following.flip(1).cummin(1).values.flip(1)
    wrong = ~(begins | (start == before)) | (end != following)
    if wrong.any():
        row, at = (int(x) for x in wrong.nonzero()[0])
        what = f"token {at} of row {row} is in the document from {int(start[row, at])} to {int(end[row, at])}"
        raise SieveError(
            f"{name}: documents: {what}; they must lie one behind another, from 0 to the {len(index)} tokens, with one "
            "pair for all tokens of each\n"
            "  hint: documents(cu_seqlens, tokens) makes them; an end is behind its last token"
        )


def _type_of(name, argument, x):
    """The type that a tensor of a definition counts as; None for its own."""
    if not isinstance(x, torch.Tensor):
        return None
    is_bf16 = argument in BF16 or (name == "decode" and argument == "sinks")
    if is_bf16 and x.dtype in (torch.float32, torch.float64):
        return torch.bfloat16
    return torch.float32 if x.dtype == torch.float64 else None


class _Once(torch.autograd.Function):
    """The identity, with the limits of the kernels' gradients: no second ones, no forward mode, no torch.func."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x):
        return d_x


def _once(x):
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    is_tracked = torch.is_grad_enabled() and x.requires_grad
    return _Once.apply(x) if is_tracked or is_transformed or _has_tangent(x) else x


def _has_tangent(x):
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def definition_of(name, first):
    """The definition of a function whose first argument this is; None where its kernels are meant."""
    if not _is_on or not isinstance(first, torch.Tensor) or first.device.type != "cpu":
        return None
    return DEFINITIONS.get(name)


def is_served(device):
    """Whether tensors on this device are computed: by kernels, or by definitions."""
    return torch.device(device).type == "cuda" or _library.Op.emulator is not None or _is_on


DEFINITIONS = {}


def _defines(function):
    DEFINITIONS[function.__name__] = function
    return function


def _wide(*tensors):
    """f32 in place of types with fewer bits."""
    narrow = torch.bfloat16, torch.float16
    return [x.float() if x is not None and x.dtype in narrow else x for x in tensors]


def _documents(documents, rows, tokens):
    """(row, first token, end) of each document of the rows, in order."""
    if documents is None:
        return [(row, 0, tokens) for row in range(rows)]
    ranges = []
    for row in range(rows):
        starts = documents[0][row % len(documents[0])].unique_consecutive().tolist()
        ranges += [(row, *bounds) for bounds in zip(starts, [*starts[1:], tokens])]
    return ranges


def _per_document(function, documents, *tensors, by_slot=(), stride=1, size=1):
    """`function` of each document of each row by itself, side by side again; tensors `[batch, tokens, ..]`.

    `by_slot`: tensors `[batch, slots, ..]` of compressed blocks; a document's begin at slot
    `ceil(first token / stride)`.
    """
    rows, tokens = tensors[0].shape[:2]
    parts = []
    for row, start, end in _documents(documents, rows, tokens):
        slot = -(-start // stride)
        whole = max((end - start - size) // stride + 1, 0)
        blocks = [x[row : row + 1, slot : slot + whole] for x in by_slot]
        parts.append(function(*[x[row : row + 1, start:end] for x in tensors], *blocks))
    return torch.cat([x.flatten(0, 1) for x in parts]).unflatten(0, (rows, tokens))


def _listed(chosen, count):
    """Chosen blocks, bools `[batch, choosers, tokens, blocks]`, as int32 `[batch, tokens, choosers, count]`, -1 last."""
    order = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    listed = torch.where(chosen.gather(-1, order), order, -1).to(torch.int32)
    short = max(count - listed.shape[-1], 0)
    return torch.nn.functional.pad(listed, (0, short), value=-1)[..., :count].transpose(1, 2).contiguous()


def _marked(indices, blocks):
    """Lists of blocks `[batch, tokens, choosers, ..]`, -1 for none, as bools `[batch, choosers, tokens, blocks]`."""
    slots = indices.transpose(1, 2).long()
    marked = torch.zeros(*slots.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    return marked.scatter_(-1, torch.where(slots < 0, blocks, slots), True)[..., :blocks]


def _check_sinks(name, q, sinks, other):
    from ._arguments import check_sinks

    if sinks is not None:
        check_sinks(name, q, sinks, other)


def _check_local(local, keep):
    if local > keep:
        raise SieveError(f"local {local} is not supported (supported: at most keep, {keep})")


def _check_bands(name, window, bands, other):
    from ._arguments import check_bands

    return check_bands(name, window, bands, other)


def _mask_of_bands(q, k, window, bands, documents):
    """Whether a query sees a key, `[batch, KV heads, tokens, tokens]`."""
    (first, reach, count), place = bands, torch.arange(q.shape[1], device=q.device)
    start = place[:1] if documents is None else documents[0][:, None, :, None]
    in_bands = definitions.band_mask(place[:, None] - start, place - start, k.shape[2], first, window, reach, count)
    return definitions.seen(q.shape[0], q.shape[1], None, documents, q.device) & in_bands


def _lse_under(mask, q, k, scale, sinks):
    """log(sum(exp(logits))) of each query under a mask, `[batch, heads, tokens]`, without gradient."""
    group = q.shape[2] // k.shape[2]
    logits = torch.einsum("bihd,bjhd->bhij", q.detach(), k.detach().repeat_interleave(group, 2))
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~mask.repeat_interleave(group, 1), float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.detach().to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return torch.logsumexp(logits, -1).float()


@_defines
def attention(
    q, k, v, *, window=None, scale=None, bias=None, sinks=None, documents=None, deterministic=False, return_lse=False,
    bands=None,
):  # fmt: skip
    """Dense or windowed attention; the log-sum-exps of `return_lse` have no gradient."""
    _check_sinks("attention", q, sinks, bias)
    if bands is not None:
        mask = _mask_of_bands(q, k, window, _check_bands("attention", window, bands, bias), documents)
        wide = _wide(q, k, v)
        o = definitions.masked_attention(*wide, mask, None, scale, sinks).to(q.dtype)
        return (o, _lse_under(mask, *wide[:2], scale, sinks)) if return_lse else o
    settings = {"window": window, "scale": scale, "bias": bias, "sinks": sinks, "documents": documents}
    wide = _wide(q, k, v)
    o = definitions.attention(*wide, **settings).to(q.dtype)
    return (o, definitions.attention_lse(*(x.detach() for x in wide[:2]), **settings).float()) if return_lse else o


@_defines
def select(rank, *, keep, local=0, documents=None):
    """The kept keys query by query, as `expire`: the first query that no longer keeps a key. The kernels' lists
    are made only where a GPU's limits count.
    """
    from .functional import Selection

    _check_local(local, keep)
    kept = definitions.kept_keys(rank.detach(), keep=keep, local=local, documents=documents)
    # A key that has left never returns, so its queries are those from its own on.
    position = torch.arange(rank.shape[2], device=rank.device)
    lists = _plans.lists_of(rank, keep, local, documents) if asks_a_gpu() else None
    return Selection((position + kept.sum(2)).to(torch.int32), lists, documents)


@_defines
def expiring_attention(q, k, v, bias, selection, *, scale=None, deterministic=False):
    """Attention under a mask of tokens x tokens, made from `selection.expire`; the kernels' lists are not read."""
    wanted = (k.shape[0], k.shape[2], k.shape[1])
    for name, x in (("selection", selection.expire), ("bias", bias)):
        if x is not None and x.shape != wanted:
            sizes = f"{list(x.shape)}, and with this k must be {list(wanted)}"
            raise SieveError(f"{name} is {sizes}, [batch, KV heads, tokens]")
    i = torch.arange(q.shape[1], device=q.device)
    visible = (i <= i[:, None]) & (i[:, None] < selection.expire[:, :, None, :])
    return definitions.masked_attention(*_wide(q, k, v), visible, bias, scale).to(q.dtype)


@_defines
def dma_scores(v, w_dt, a, *, slopes=None, documents=None):
    v, w_dt, a = _wide(v, w_dt, a)
    return definitions.dma_scores(v, w_dt, a, slopes=slopes or None, documents=documents)


@_defines
def dma_attention(
    q, k, v, w_dt, a, *, keep, preset=None, bias=None, recency=None, local=None, shortest_period=None,
    longest_period=None, slopes=None, scale=None, documents=None, deterministic=False, same_bits=False,
):  # fmt: skip
    """DMA in the form that the arguments say, with the kernels' defaults."""
    _check_local(local or 0, keep)
    given = {"preset": preset, "bias": bias, "recency": recency, "local": local, "slopes": slopes}
    periods = shortest_period, longest_period
    form = _dma.form("dma_attention", keep, v.shape[2], periods=periods, **given)._asdict()
    settings = {"keep": keep, "scale": scale, "documents": documents}
    return definitions.dma_attention(*_wide(q, k, v, w_dt, a), **settings, **form).to(q.dtype)


@_defines
def nsa_mean_pool(k, v, *, blocks=None, documents=None):
    """Means of each document's whole blocks, placed as by the kernels; a place without a whole block is 0."""
    (rows, tokens, *sizes), stride = k.shape, blocks.stride
    both = torch.stack(_wide(k, v))
    pooled = both.new_zeros(2, rows, -(-tokens // stride), *sizes)
    for row, start, end in _documents(documents, rows, tokens):
        of_document = definitions.nsa_mean_pool(*both[:, row : row + 1, start:end], stride, blocks.compressed)
        whole, slot = max((end - start - blocks.compressed) // stride + 1, 0), -(-start // stride)
        pooled[:, row, slot : slot + whole] = torch.cat(of_document)[:, :whole]
    return tuple(x.to(k.dtype) for x in pooled)


def _by_slot(compressed, blocks):
    return {"by_slot": _wide(*compressed), "stride": blocks.stride, "size": blocks.compressed}


@_defines
def nsa_compressed(
    q, compressed_k, compressed_v, *, blocks=None, scale=None, documents=None, deterministic=False
):  # fmt: skip
    """NSA's compressed branch, and the blocks that it chooses, int32 `[batch, tokens, KV heads, num_selected]`."""
    heads = q.shape[2]

    def compressed(q, k, v):
        # The other branches are of no account: any keys of the right shape do.
        keys = q[:, :, : k.shape[2]]
        (coarse, *_), chosen = definitions.nsa_branches(q, keys, keys, k, v, blocks, window=1, scale=scale)
        listed = _listed(chosen, blocks.num_selected).to(q.dtype)
        # Side by side, so that both are put together again: numbers of blocks are whole in f32.
        return torch.cat([coarse.flatten(2), listed.flatten(2)], 2)

    settings = _by_slot((compressed_k, compressed_v), blocks)
    joined = _per_document(compressed, documents, *_wide(q), **settings)
    width = heads * compressed_v.shape[3]
    indices = joined[..., width:].detach().to(torch.int32).unflatten(2, (compressed_k.shape[2], -1))
    return joined[..., :width].unflatten(2, (heads, -1)).to(q.dtype), indices


@_defines
def nsa_selected(q, k, v, indices, *, blocks=None, scale=None, documents=None, deterministic=False):
    """NSA's selected branch; indices count blocks from the first token of the query's document."""
    size = blocks.selected

    def selected(q, k, v, indices):
        chosen = _marked(indices, -(-q.shape[1] // size))
        return definitions.block_attention(q, k, v, chosen, size, scale)

    return _per_document(selected, documents, *_wide(q, k, v), indices).to(q.dtype)


@_defines
def nsa(
    q, k, v, compressed_k, compressed_v, gates, *, gate_bias=None, blocks=None, window=512, scale=None, documents=None,
    deterministic=False
):  # fmt: skip
    """The sum of NSA's three branches, each times the sigmoid of its gate, document by document."""

    def of_document(q, k, v, weights, compressed_k, compressed_v):
        given = q, k, v, compressed_k, compressed_v, blocks
        branches, _ = definitions.nsa_branches(*given, window=window, scale=scale)
        return sum(weights[..., n, None] * o for n, o in enumerate(branches))

    logits, added = _wide(gates, gate_bias)
    weights = (logits if added is None else logits + added).sigmoid()
    settings = _by_slot((compressed_k, compressed_v), blocks)
    return _per_document(of_document, documents, *_wide(q, k, v), weights, **settings).to(q.dtype)


def _chosen(q, k, v, by, blocks, choice, scale, documents):
    """Attention over the blocks that each query chooses by the queries and keys `by`; the choice has no gradient."""

    def of_document(q, k, v, *by):
        chosen = definitions.chosen_blocks(*by, blocks, *choice, scale)
        return definitions.block_attention(q, k, v, chosen, blocks.selected, scale)

    by = [x.detach() for x in by]
    return _per_document(of_document, documents, *_wide(q, k, v, *by)).to(q.dtype)


@_defines
def selected_attention(
    q, k, v, indices, *, block=64, counts=None, scale=None, documents=None, window=None, causal=True,
    block_sums=False, deterministic=True, validate=False,
):  # fmt: skip
    """Attention over the listed blocks, after the kernels' own checks of the
    arguments; block sums, f32, have no gradient.
    """
    from .functional import check_selected

    check_selected(q, indices, counts, documents and documents[0], block, window, causal, validate)
    given = {"block": block, "counts": counts, "documents": documents, "scale": scale}
    wide = _wide(q, k, v)
    o = definitions.selected_attention(*wide, indices, **given).to(q.dtype)
    if not block_sums:
        return o
    return o, definitions.selected_block_sums(*(x.detach() for x in wide[:2]), indices, **given).float()


@_defines
def infllm_v2(q, k, v, *, blocks=None, local=32, scale=None, documents=None, deterministic=False):
    return _chosen(q, k, v, (q, k), blocks, ("largest_probability", True, local), scale, documents)


@_defines
def moba(q, k, v, *, block=512, num_selected=3, scale=None, documents=None, deterministic=False):
    from .functional import NsaBlocks

    blocks = NsaBlocks(block, block, block, num_selected)
    return _chosen(q, k, v, (q, k), blocks, ("mean_key", False, 1), scale, documents)


@_defines
def msa(
    q, k, v, index_q, index_k, *, block=128, num_selected=16, local=1, scale=None, documents=None, deterministic=False
):
    """Attention over the blocks in which an indexer, one query head for each KV head,
    finds its best tokens; it gets no gradient.
    """
    from .functional import NsaBlocks

    if index_q.shape[2] != k.shape[2]:
        raise SieveError(f"msa: index_q has {index_q.shape[2]} heads; it must have one for each KV head, {k.shape[2]}")
    index_k = index_k.expand(-1, -1, index_q.shape[2], -1) if index_k.shape[2] == 1 else index_k
    blocks = NsaBlocks(1, 1, block, num_selected)
    return _chosen(q, k, v, (index_q, index_k), blocks, ("largest_score", False, local), scale, documents)


@_defines
def block_sparse(q, k, v, mask, *, scale=None, deterministic=False):
    """Attention under a mask of blocks, read from the lists of the `BlockMask`: one row, or packed documents."""
    if mask.places is not None:
        return mask.over_documents(functools.partial(block_sparse, scale=scale), q, k, v)
    heads, queries, keys = mask.shape
    starts, tiles = mask.words[1 : 2 + heads * queries].long(), mask.words[2 + heads * queries : -1].long()
    kept = torch.zeros(heads * queries, keys, dtype=torch.bool, device=q.device)
    kept[torch.arange(heads * queries).repeat_interleave(starts.diff()), tiles] = True
    kept = kept.view(1, heads, queries, keys).repeat_interleave(mask.block, 2)[:, :, : q.shape[1]]
    if q.shape[:1] + q.shape[2:3] != (1, heads) or -(-q.shape[1] // mask.block) != queries:
        raise SieveError(f"the mask is {list(mask.shape)} of blocks of {mask.block}, and q {list(q.shape)}")
    return definitions.block_attention(*_wide(q, k, v), kept, mask.block, scale).to(q.dtype)


def _of_cache(q, k_cache, v_cache, visible, bias=None, scale=None, sinks=None):
    """One query a row over the places that are `visible`, bools `[batch, 1 or choosers, places]`; others may hold anything."""
    k, v = _wide(k_cache, v_cache)
    if (choosers := visible.shape[1]) > 1:
        if choosers % k.shape[1] or q.shape[2] % choosers:
            sizes = f"{q.shape[2]} heads, and {k.shape[1]} KV heads must divide them"
            raise SieveError(f"{choosers} choosers; they must divide {sizes}")
        k, v = (x.repeat_interleave(choosers // k.shape[1], 1) for x in (k, v))
    k, v = (x.masked_fill(~visible[..., None], 0.0).transpose(1, 2) for x in (k, v))
    return definitions.masked_attention(*_wide(q), k, v, visible[:, :, None], bias, scale, sinks).to(q.dtype)


@_defines
def decode(
    q, k, v, k_cache, v_cache, length, *, window=None, scale=None, sinks=None, chosen=None, block=None, bands=None,
    same_bits=False,
):  # fmt: skip
    """One new token a row by the definition, its key and value, where given, at place `length` of
    the caches; several new tokens one by one.
    """
    if (chosen is None) != (block is None):
        raise SieveError("chosen is given together with block")
    _check_sinks("decode", q, sinks, chosen)
    if q.shape[1] > 1:
        from .functional import _decode_several

        return _decode_several(q, k, v, k_cache, v_cache, length, window, scale, sinks, chosen, bands)
    if bands is not None:
        bands = _check_bands("decode", window, bands, chosen)
    row, length = torch.arange(len(q)), length.long()
    if k is not None and bool((length >= k_cache.shape[2]).any()):
        most = f"the caches hold {k_cache.shape[2]} keys"
        raise SieveError(f"length is {length.tolist()}, and {most}: a new token has no place")
    if k is not None:
        k_cache[row, :, length], v_cache[row, :, length] = k[:, 0].to(k_cache.dtype), v[:, 0].to(v_cache.dtype)
    count = (length if k is None and chosen is None else length + 1)[:, None]
    place = torch.arange(k_cache.shape[2], device=q.device)
    visible = place < count
    if bands is not None:
        (first, reach, bands_count), query = bands, count[:, :, None, None] - 1
        in_bands = definitions.band_mask(query, place, k_cache.shape[1], first, window, reach, bands_count)
        visible = visible[:, None] & in_bands[:, :, 0]
    else:
        visible = (visible if window is None else visible & (place >= count - window))[:, None]
    if chosen is not None:
        marked = _marked(chosen[:, None], -(-len(place) // block))[:, :, 0]
        visible = visible & marked.repeat_interleave(block, -1)[..., : len(place)]
    return _of_cache(q, k_cache, v_cache, visible, scale=scale, sinks=sinks)


@_defines
def dma_decode(
    q, k, v, z, k_cache, v_cache, z_cache, positions, length, *, preset=None, bias=None, local=None, scale=None,
    same_bits=False,
):  # fmt: skip
    """One new token a row: in a full cache it takes the place of the key that DMA drops, or is itself dropped."""
    (rows, kv_heads, keep, _), length = k_cache.shape, length.long()
    _, linear, local = _dma.form("dma_decode", keep, kv_heads, preset=preset, bias=bias, local=local)
    place = torch.arange(keep)
    for row in range(rows):
        now = int(length[row])
        for head in range(kv_heads):
            at = now
            if now >= keep:
                # Of all but the last keys the one of the least rank leaves, of equal ones the earliest; it may be the
                # token itself.
                older = positions[row, head] <= now - local
                pairs = [(float(z_cache[row, head, n]), int(positions[row, head, n]), n) for n in place[older].tolist()]
                pairs += [(float(z[row, head]), now, None)] if local == 0 else []
                at = min(pairs, key=lambda pair: pair[:2])[2]
            if at is not None:
                k_cache[row, head, at], v_cache[row, head, at] = k[row, 0, head], v[row, 0, head]
                z_cache[row, head, at], positions[row, head, at] = z[row, head], now
    visible = (place < (length + 1)[:, None])[:, None].expand(-1, kv_heads, -1)
    rank = z_cache.masked_fill(~visible, 0.0)
    return _of_cache(q, k_cache, v_cache, visible, rank if linear else rank.clamp(max=60.0).exp(), scale)


@_defines
def mla_decode(q, latents, rank, *, scale, key_scale=None, length=None):
    """Attention of the last `q.shape[1]` tokens over latents, which are the keys and, in their first `rank` columns,
    the values of all heads; length: tokens before the first query, None where the queries are the last tokens.
    """
    wide, memory = _wide(q, latents)
    tokens, new = latents.shape[1], q.shape[1]
    first = torch.full((len(q),), tokens - new) if length is None else length.long()
    place, query = torch.arange(tokens), torch.arange(new)
    visible = place <= (first[:, None] + query)[..., None]
    memory = memory.masked_fill(~visible.any(1)[..., None], 0.0)
    logits = torch.einsum("bihc,bjc->bhij", wide, memory) * scale
    if key_scale is not None:
        logits = logits * key_scale.transpose(1, 2)[:, :, None]
    p = torch.softmax(logits.masked_fill(~visible[:, None], float("-inf")), -1)
    return torch.einsum("bhij,bjc->bihc", p, memory[..., :rank]).to(q.dtype)
