"""attn_implementation="sieve" in Hugging Face transformers, and Doge without its n x n masks."""

import inspect
import math
import sys
import warnings
import weakref
from typing import Any

import torch

from . import _autograd, _axes, functional
from ._library import SieveError
from ._on_cpu import is_served


def register(name: str = "sieve") -> None:
    """Adds the attention and its mask to transformers: `from_pretrained(..., attn_implementation=name)`.

    Dense causal models and sliding windows, padding on either side, packed rows by position_ids or cu_seq_lens_q. One
    token a row behind a cache without padding is read by the decode kernels; other queries behind a cache, and models
    that pass a mask of their own, are computed by torch's SDPA under that mask. MSA layers (MiniMax M3) read the blocks that their indexer chose.
    In eager mode a token's attention has the bits of whole rows where `decode` has them and the cache has the row's
    first token: not under torch.compile, and not behind the cache of a window that has dropped keys.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    warn_without_gpu(name)
    AttentionInterface.register(name, attention_forward)
    # Without a mask function transformers drops padding in silence.
    AttentionMaskInterface.register(name, attention_mask)


def warn_without_gpu(name: str = "sieve") -> None:
    """Says on a machine without a GPU, once, that models with this attention will be refused there."""
    if not torch.cuda.is_available() and not is_served("cpu"):
        what = f'attn_implementation="{name}" has no kernels on this machine: it has no CUDA GPU'
        warnings.warn(f"{what}\n  hint: sieve_attention.on_cpu() computes by the definitions, slowly", stacklevel=3)


def attention_mask(**call: Any) -> torch.Tensor | None:
    """None or `[batch, tokens]` for whole rows. Behind a cache, one query a row without padding: how many keys it sees,
    int32 `[batch]`; other queries: bools `[batch, 1, queries, keys]`.

    The first pass into a cache of fixed size has as many keys as the cache has places; its mask is as long as the
    prompt.
    """
    from transformers.masking_utils import causal_mask_function, flash_attention_mask, sdpa_mask

    # transformers 4 has the queries' positions in place of their number and offset.
    queries = call["q_length"] if "q_length" in call else len(call["cache_position"])
    padding = call.get("attention_mask")
    offset = call.get("q_offset")
    is_whole = queries == call["kv_length"] or (isinstance(offset, int) and offset == 0)
    if is_whole and not _has_kernel(call, queries):
        return sdpa_mask(**{**call, "allow_is_causal_skip": False})
    if queries == call["kv_length"]:
        return flash_attention_mask(**call)
    if is_whole:
        whole = torch.ones(call["batch_size"], queries, dtype=torch.bool, device=call.get("device"))
        return whole if padding is None else padding[:, :queries].bool()
    # Where skips are allowed, nothing was added to the causal mask but a window or chunks.
    is_causal = call.get("allow_is_causal_skip", False) or call["mask_function"] is causal_mask_function
    config = call.get("config")
    is_causal = is_causal and getattr(config, "model_type", None) != "doge"  # its steps are transformers' own
    chunk = getattr(config, "attention_chunk_size", None)
    is_traced = torch.compiler.is_compiling()
    if queries == 1 and "cache_position" in call:
        offset = call["cache_position"][0]
    if queries == 1 and is_causal and offset is not None and (chunk is None or call.get("local_size") != chunk):
        if padding is None or (not is_traced and bool(padding.all())):
            length = offset + 1 - call.get("kv_offset", 0)
            lengths = length * torch.ones(call["batch_size"], device=call.get("device"))
            return lengths.clamp(max=call["kv_length"]).to(torch.int32)
    return sdpa_mask(**{**call, "allow_is_causal_skip": False})


# What kernels know by other arguments of the same call: windows, and the documents of packed rows.
_KNOWN_MASKS = "causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"


def _has_kernel(call: dict[str, Any], queries: int) -> bool:
    """Whether a whole row's mask is causal, but for what the kernels learn by other arguments."""
    config = call.get("config")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and call.get("local_size") == chunk and queries > chunk:
        return False
    if getattr(config, "model_type", None) == "doge":
        # Its own forward adds scores to the mask, which must be there; patch_doge's reads padding and documents.
        doge = sys.modules.get("transformers.models.doge.modeling_doge")
        is_patched = getattr(getattr(doge, "DogeAttention", None), "forward", None)
        return getattr(is_patched, "is_sieve", False) and getattr(config, "sliding_window", None) is None
    # Where skips are allowed, nothing was added to the causal mask but a window or chunks.
    return call.get("allow_is_causal_skip", False) or _is_known(call["mask_function"])


def _is_known(mask: Any) -> bool:
    """Whether a mask function of transformers is made of `_KNOWN_MASKS` alone, all of which must hold."""
    name = mask.__qualname__.split(".")[0]
    if name == "and_masks":
        return all(map(_is_known, inspect.getclosurevars(mask).nonlocals["mask_functions"]))
    if name == "remap_positions_for_packed_sequence":
        return _is_known(inspect.getclosurevars(mask).nonlocals["mask_function"])
    return name in _KNOWN_MASKS


@_axes.known
def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: query `[batch, heads, tokens, width]`; attention_mask as the function of this name.

    block_indices of MiniMax M3 (arXiv:2606.13392), `[batch, (choosers,) tokens, blocks]` in any order, -1 for none, are
    the blocks of `module.indexer.block_size` keys that each query sees. s_aux of gpt-oss, `[heads]`, are sinks.
    """
    for setting in ("softcap", "sinks", "position_bias"):
        if kwargs.get(setting) is not None:
            raise SieveError(f"attention: {setting} has no kernel\n  hint: attn_implementation='sdpa'")
    if dropout:
        raise SieveError(f"attention: dropout {dropout} has no kernel\n  hint: attention_dropout=0 in the config")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise SieveError("attention: a model that reads both ways has no kernel\n  hint: attn_implementation='sdpa'")
    if attention_mask is not None and attention_mask.dim() not in (1, 2, 4):
        shape = list(attention_mask.shape)
        expected = "None, [batch], [batch, tokens] or [batch, 1, queries, keys]"
        raise SieveError(f"attention: the mask is {shape}; it must be {expected}")
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    chosen, block, sinks = kwargs.get("block_indices"), None, kwargs.get("s_aux")
    if chosen is not None and sinks is not None:
        raise SieveError("attention: block_indices with s_aux have no kernel\n  hint: attn_implementation='eager'")
    if chosen is not None:
        chosen, block = _chosen_blocks(module, chosen, query, key, sliding_window)
    if attention_mask is not None and attention_mask.dim() == 1:
        # The decode kernels read a query's own block with the others.
        has_own = chosen is None or getattr(module.indexer, "local_blocks", 0) > 0
        if has_own and not _autograd._tracks(query, key, value, sinks):
            q, settings = query.transpose(1, 2), {"window": sliding_window, "scale": scaling}
            settings["sinks"] = None if sinks is None else sinks.to(query.dtype)  # under autocast they are f32
            # torch.compile traces no operator that returns a list and writes to its inputs.
            may_write = not torch.compiler.is_compiling() and key.is_contiguous() and value.is_contiguous()
            if chosen is None and may_write:
                # decode has a whole row's bits where it gets the token's key and value, which it writes where they are.
                *at, before = _once(module, attention_mask, _last_of)
                k, v = (x[at[0], :, at[1]][:, None].contiguous() for x in (key, value))
                return functional.decode(q, k, v, key, value, before, **settings), None
            if chosen is not None:
                # There the length is without the query's own key.
                attention_mask = attention_mask - 1
                settings = {"scale": scaling, "chosen": chosen[:, :, 0].contiguous(), "block": block}
            return functional.decode(q, None, None, key, value, attention_mask, **settings), None
        # The decode kernels have no gradient.
        index, lengths = torch.arange(key.shape[2], device=key.device), attention_mask[:, None]
        begin = 0 if sliding_window is None else lengths - sliding_window
        attention_mask = ((index < lengths) & (index >= begin))[:, None, None]
    if attention_mask is not None and attention_mask.dim() == 2:
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    has_own_mask = attention_mask is not None and attention_mask.dim() == 4
    if query.shape[2] != key.shape[2] or has_own_mask:
        if attention_mask is None:
            raise SieveError("attention: queries behind a cache come without a mask\n  hint: call register() first")
        if is_added := attention_mask.is_floating_point():
            # A kernel of SDPA on a GPU gives NaN where the mask has another type than the queries.
            attention_mask = attention_mask.to(query.dtype)
        if chosen is not None:
            in_blocks = _keys_of(chosen, block, query, key)
            attention_mask = attention_mask.where(in_blocks, -math.inf) if is_added else attention_mask & in_blocks
        if sinks is not None:
            key, value, attention_mask = _with_sinks(query, key, value, attention_mask, sinks)
        o = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return o.transpose(1, 2), None
    bounds = row_documents(module, attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if chosen is not None:
        _require_blocks_from_0(module, attention_mask, bounds)
        chosen, sizes = _autograd._in_pieces(chosen.transpose(1, 2), block)
        k, v = _autograd._by_chooser(k, v, chosen)
        blocks = functional.NsaBlocks(*sizes)
        return functional.nsa_selected(q, k, v, chosen.contiguous(), blocks=blocks, scale=scaling), None
    return functional.attention(q, k, v, window=sliding_window, scale=scaling, sinks=sinks, documents=bounds), None


def _with_sinks(query, key, value, mask, sinks):
    """Keys, values and added mask `[batch, heads, queries, keys + 1]` with a last key of zeros, whose bias is the sink."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    mask = mask.expand(query.shape[0], query.shape[1], *mask.shape[2:])
    sinks = sinks.to(mask.dtype)[:, None, None].expand(*mask.shape[:3], 1)
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return key, value, torch.cat([mask, sinks], -1)


def _chosen_blocks(module, chosen, query, key, window):
    """Blocks of each query, int32 `[batch, choosers, queries, blocks]`, ascending, then -1, and keys of a block."""
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if block is None:
        raise SieveError("attention: block_indices come without module.indexer.block_size, the keys of a block")
    if window is not None:
        raise SieveError(f"attention: block_indices with a window of {window} keys have no kernel")
    if chosen.dim() == 3:
        chosen = chosen[:, None].expand(-1, key.shape[1], -1, -1)
    (batch, heads, queries, _), kv_heads, shape = query.shape, key.shape[1], list(chosen.shape)
    choosers = shape[1] if len(shape) == 4 else 0
    if not choosers or shape[::2] != [batch, queries] or choosers % kv_heads or heads % choosers:
        expected = f"[{batch}, choosers, {queries}, blocks], choosers a multiple of {kv_heads} that divides {heads}"
        raise SieveError(f"attention: block_indices are {shape}; they must be {expected}")
    none = torch.iinfo(torch.int32).max
    chosen = chosen.to(torch.int32).masked_fill(chosen < 0, none).sort(-1).values
    return chosen.masked_fill(chosen == none, -1), block


def _keys_of(chosen, block, query, key):
    """Whether a key is in a block that the query chose: `[batch, heads, queries, keys]`."""
    num_blocks = -(-key.shape[2] // block)
    # -1 marks one more block, which is cut off.
    marked = chosen.new_zeros((*chosen.shape[:3], num_blocks + 1), dtype=torch.bool)
    marked = marked.scatter_(-1, torch.where(chosen < 0, num_blocks, chosen).long(), True)[..., :num_blocks]
    return marked.repeat_interleave(block, -1)[..., : key.shape[2]].repeat_interleave(
        query.shape[1] // chosen.shape[1], 1
    )


def _require_blocks_from_0(module, attention_mask, bounds):
    """Refuses rows with a document that begins behind token 0, from where transformers counts the blocks of all."""
    if bounds is None:
        return
    if torch.compiler.is_compiling() or (bounds[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        problem = "block_indices have no kernel under torch.compile or a capture, where rows may be packed or padded"
        raise SieveError(f"attention: {problem}\n  hint: attn_implementation='sdpa'")
    # Padding on the right is documents of one token each, which nothing reads.
    later = (lambda start: bool(start.any())) if attention_mask is None else lambda _: not attention_mask[:, 0].all()
    if _once(module, bounds[0], later):
        problem = "block_indices of packed rows, or of rows with padding on the left, have no kernel"
        raise SieveError(f"attention: {problem}\n  hint: pad on the right, or attn_implementation='sdpa'")


_known = {}


def row_documents(module, attention_mask, cu_seqlens, position_ids, query):
    """Bounds of each token's document, or None for one a row: padding is documents of one token."""
    batch, tokens = query.shape[0], query.shape[2]
    if attention_mask is not None:
        return _once(module, attention_mask, _of_padding)
    if batch == 1 and cu_seqlens is not None:
        return _once(module, cu_seqlens, lambda x: functional.documents(x, tokens))
    if position_ids is not None and position_ids.shape == (batch, tokens):
        return _once(module, position_ids, _of_positions)
    return None


def _once(module, x, make):
    """`make(x)`, made for the first layer of a forward pass and used by the later ones."""
    if torch.compiler.is_compiling():
        return make(x)
    key, layer = id(x), getattr(module, "layer_idx", None)
    reference, version, config, last, made = _known.get(key) or (None,) * 5
    is_known = reference is not None and reference() is x
    if x.is_inference():
        # Such a tensor does not count its changes. Within one pass of a model, in which layers come in ascending
        # order, it has none.
        in_one_pass = layer is not None and last is not None and layer > last
        is_known = is_known and in_one_pass and config is getattr(module, "config", None)
    else:
        is_known = is_known and version == x._version
    if not is_known:
        reference, made = weakref.ref(x, lambda _: _known.pop(key, None)), make(x)
    _known[key] = reference, None if x.is_inference() else x._version, getattr(module, "config", None), layer, made
    return made


def _last_of(lengths):
    """Of keys that queries see, `[batch]`: rows and places of the last ones, and how many are before it, int32."""
    before = lengths - 1
    return torch.arange(len(before), device=before.device), before.long(), before


def _of_padding(mask):
    """Bounds of documents from a padding mask `[batch, tokens]`: a row's real tokens are
    one document, each padding token is one.
    """
    real, index = mask.bool(), torch.arange(mask.shape[1], device=mask.device)
    first = real.int().argmax(1, keepdim=True)
    last = first + real.sum(1, keepdim=True)
    is_traced = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if not is_traced and not torch.equal(real, (index >= first) & (index < last)):
        raise SieveError("attention: padding between a row's tokens has no kernel\n  hint: attn_implementation='sdpa'")
    start = torch.where(real, first, index)
    end = torch.where(real, last, index + 1)
    return start.to(torch.int32), end.to(torch.int32)


def _of_positions(positions):
    """Bounds of documents from positions `[batch, tokens]`: a position of 0 begins one."""
    tokens = positions.shape[1]
    index = torch.arange(tokens, device=positions.device)
    begins = torch.where(positions == 0, index, tokens)
    # The first token of the next document: the least beginning behind each token.
    behind = torch.cat([begins[:, 1:], begins.new_full((len(begins), 1), tokens)], 1).flip(1).cummin(1).values.flip(1)
    start = torch.where(positions == 0, index, 0).cummax(1).values
    return start.to(torch.int32), behind.to(torch.int32)


def patch_doge() -> None:
    """Doge (arXiv:2508.02124) by exact kernels: models with attn_implementation="sieve" build no n x n mask.

    The rank of a key and its bias are as in transformers: `exp(A * softplus(dt_proj(v)))`, chosen query by query, ties
    to the later key. A step behind a cache is transformers' own.
    """
    from transformers.models.doge import modeling_doge as doge

    register()
    own = doge.DogeAttention.forward
    if getattr(own, "is_sieve", False):
        return

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, *, cache=None, **kwargs
    ):
        """Doge's attention by `expiring_attention`; transformers' own by another implementation or behind a cache."""
        # The cache is the argument `cache` of transformers 5.24, `past_key_values` of earlier ones.
        cache = past_key_values if cache is None else cache
        given = self, hidden_states, position_embeddings, attention_mask, cache
        if self.config._attn_implementation != "sieve":
            return own(*given, **kwargs)
        has_own_mask = attention_mask is not None and attention_mask.dim() == 4  # a window, which this has no kernel for
        if has_own_mask or (cache is not None and cache.get_seq_length(self.layer_idx)):
            return _doge_step(own, self.config, given, kwargs)
        if self.training and self.attention_dropout:
            raise SieveError("Doge: attention_dropout has no kernel\n  hint: set attention_dropout to 0 in the config")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape)
        q, k = doge.apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            cache.update(k, v.transpose(1, 2), self.layer_idx)
        bias = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(v.flatten(2)))).transpose(1, 2).float()
        bounds = row_documents(self, attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), q)
        selection = functional.select(bias, keep=self.keep_window_size, documents=bounds)
        o = functional.expiring_attention(q.transpose(1, 2), k.transpose(1, 2), v, bias, selection, scale=self.scaling)
        return self.o_proj(o.flatten(2)), None

    forward.is_sieve, forward.own = True, own
    doge.DogeAttention.forward = forward


def _doge_step(own, config, given, kwargs):
    """Transformers' forward by SDPA."""
    name, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        return own(*given, **kwargs)
    finally:
        config._attn_implementation = name
