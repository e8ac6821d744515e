"""attn_implementation="sieve" in Hugging Face transformers, and Doge without its n x n masks."""

import weakref

import torch

from . import functional
from ._library import SieveError


def register(name="sieve"):
    """Adds the attention and its mask to transformers: `from_pretrained(..., attn_implementation=name)`.

    Dense causal models and sliding windows, padding on either side, packed rows by position_ids or cu_seq_lens_q. A
    step behind a cache (more keys than queries) is computed by torch's SDPA.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(name, attention_forward)
    # Without a mask function transformers drops padding in silence.
    AttentionMaskInterface.register(name, flash_attention_mask)


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, is_causal=None, **kwargs
):
    """As transformers calls it: query `[batch, heads, tokens, width]`; attention_mask None or `[batch, tokens]`."""
    for setting in ("softcap", "s_aux", "sinks"):
        if kwargs.get(setting) is not None:
            raise SieveError(f"attention: {setting} has no kernel\n  hint: attn_implementation='sdpa'")
    if dropout:
        raise SieveError(f"attention: dropout {dropout} has no kernel\n  hint: attention_dropout=0 in the config")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise SieveError("attention: a model that reads both ways has no kernel\n  hint: attn_implementation='sdpa'")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise SieveError(f"attention: the mask is {list(attention_mask.shape)}; it must be None or [batch, tokens]")
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if query.shape[2] != key.shape[2]:
        return _behind_cache(query, key, value, attention_mask, scaling, sliding_window, kwargs.get("cache_position"))
    bounds = row_documents(attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return functional.attention(q, k, v, window=sliding_window, scale=scaling, documents=bounds), None


def _behind_cache(q, k, v, attention_mask, scale, window, positions):
    """Queries at the end of their keys."""
    keys = torch.arange(k.shape[2], device=q.device)
    at = (keys[-q.shape[2] :] if positions is None else positions)[:, None]
    mask = keys <= at
    if window is not None:
        mask = mask & (keys > at - window)
    if attention_mask is not None:
        real = attention_mask[:, None, None, :].bool()
        # A padded query sees itself, so that no row is empty.
        mask = mask & real | (keys == at)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return o.transpose(1, 2), None


_known = {}


def row_documents(attention_mask, cu_seqlens, position_ids, query):
    """Bounds of each token's document, or None for one a row: padding is documents of one token."""
    batch, tokens = query.shape[0], query.shape[2]
    if attention_mask is not None:
        return _once(attention_mask, _of_padding)
    if batch == 1 and cu_seqlens is not None:
        return _once(cu_seqlens, lambda x: functional.documents(x, tokens))
    if batch == 1 and position_ids is not None and position_ids.shape == (1, tokens):
        return _once(position_ids, _of_positions)
    return None


def _once(x, make):
    """`make(x)`, made for the first layer and used by all."""
    if torch.compiler.is_compiling():
        return make(x)
    kept = _known.get(id(x))
    if kept is None or kept[0]() is not x or kept[1] != x._version:
        key = id(x)
        kept = (weakref.ref(x, lambda _: _known.pop(key, None)), x._version, make(x))
        _known[key] = kept
    return kept[2]


def _of_padding(mask):
    real, index = mask.bool(), torch.arange(mask.shape[1], device=mask.device)
    first = real.int().argmax(1, keepdim=True)
    start = torch.where(real, first, index)
    end = torch.where(real, first + real.sum(1, keepdim=True), index + 1)
    return start.to(torch.int32), end.to(torch.int32)


def _of_positions(positions):
    tokens = positions.shape[1]
    index = torch.arange(tokens, device=positions.device)
    begins = torch.where(positions == 0, index, tokens)
    # The first token of the next document: the least beginning behind each token.
    behind = torch.cat([begins[:, 1:], begins.new_full((1, 1), tokens)], 1).flip(1).cummin(1).values.flip(1)
    start = torch.where(positions == 0, index, 0).cummax(1).values
    return start.to(torch.int32), behind.to(torch.int32)


def patch_doge():
    """Doge (arXiv:2508.02124) by exact kernels: models with attn_implementation="sieve" build no n x n mask.

    The rank of a key and its bias are as in transformers: `exp(A * softplus(dt_proj(v)))`, chosen query by query, ties
    to the later key. A step behind a cache is transformers' own.
    """
    from transformers.models.doge import modeling_doge as doge

    register()
    own = doge.DogeAttention.forward
    if getattr(own, "is_sieve", False):
        return

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        cached = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        if self.config._attn_implementation != "sieve":
            return own(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        if cached:
            return _doge_step(own, self, hidden_states, position_embeddings, attention_mask, past_key_values, kwargs)
        if self.training and self.attention_dropout:
            raise SieveError("Doge: attention_dropout has no kernel\n  hint: set attention_dropout to 0 in the config")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape)
        q, k = doge.apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            past_key_values.update(k, v.transpose(1, 2), self.layer_idx)
        bias = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(v.flatten(2)))).transpose(1, 2).float()
        bounds = row_documents(attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), q)
        selection = functional.select(bias, keep=self.keep_window_size, documents=bounds)
        o = functional.expiring_attention(q.transpose(1, 2), k.transpose(1, 2), v, bias, selection, scale=self.scaling)
        return self.o_proj(o.flatten(2)), None

    forward.is_sieve = True
    doge.DogeAttention.forward = forward


def _doge_step(own, module, hidden_states, position_embeddings, attention_mask, past_key_values, kwargs):
    """Transformers' forward with the mask that it expects, by SDPA."""
    config, tokens = module.config, hidden_states.shape[1]
    keys = torch.arange(past_key_values.get_seq_length(module.layer_idx) + tokens, device=hidden_states.device)
    seen = (keys <= keys[-tokens:, None])[None, None]
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :].bool() | (keys == keys[-tokens:, None])
    least = torch.finfo(hidden_states.dtype).min
    mask = torch.zeros(seen.shape, dtype=hidden_states.dtype, device=seen.device).masked_fill(~seen, least)
    name, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        return own(module, hidden_states, position_embeddings, mask, past_key_values, **kwargs)
    finally:
        config._attn_implementation = name
