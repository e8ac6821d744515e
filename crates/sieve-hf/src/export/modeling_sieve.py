"""Language models whose attention no class of transformers has, as Sieve exports them: plain PyTorch.

The attention is NSA, MLA, DMA, InfLLM-V2, MoBA, MSA, CoWindow, a sliding window or dense, the sparse kinds with or
without dense layers between them.

Padding, wherever attention_mask has it, is moved behind the tokens of its row, where causal attention never looks, and
the outputs are moved back. So positions, blocks and windows count the tokens of a row alone. Queries are read in tiles
of BLOCK, and no tensor has tokens x tokens elements.

What a kind computes and chooses is in definitions.py, which lies beside this file.

With attn_implementation="sieve", from the package sieve_attention, rows without a cache are read by Sieve's kernels,
and so is one token a row behind a cache.

A cache is a DynamicCache whose layers are SieveCacheLayer: keys and values of dense layers and of kinds that choose
blocks, with NSA's compressed ones; the latents of MLA; and the keep_window_size keys a head that DMA can still see.
"""

import importlib
import math

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .definitions import (
    along, band_mask, best_blocks, content_scores, dma_bias, expiry, first_true, in_any_case, indices, infllm_importance,
    masked_attention, means_of, moba_importance, msa_importance, nsa_importance, qsa_scores, slot_probabilities,
    slot_scores,
)  # fmt: skip

# Implementations that see this file's masks, biases and chosen blocks. An engine's own function passes over them.
ATTENTION = ("eager", "sdpa", "sieve")
NO_ENGINE = """an engine's attention function reads a cache of its own and no mask, and this file has its own of both
  hint: attn_implementation="sdpa" in transformers, or `sieve generate` on this folder; engines serve the dense and
  sliding-window models that `sieve export` writes for classes of transformers (Qwen3, Qwen2, Llama, Mistral)"""

# Queries of one tile.
BLOCK = 256


class SieveConfig(PretrainedConfig):
    model_type = "sieve"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, rope_theta=10000.0, tie_word_embeddings=False, **kwargs):
        for name, value in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.rope_theta = rope_theta


DEFAULTS = {
    "attention_kind": "nsa",
    # Repeated over the layers: true where a layer is dense.
    "dense_layers": [],
    # The same: true where a layer reads the blocks that the last layer before it chose.
    "shared_layers": [],
    # Repeated over the layers: the keys of a layer of another kind than the model's own, its attention_kind among them.
    "layer_attention": [],
    # For each layer 1 where it rotates queries and keys, 0 where it does not (NoPE); an empty list: all do.
    "no_rope_layers": [],
    # Whether each head's query and key go through RMSNorm before the rotation (MLA: mla_qk_norm), and whether the
    # projections of queries, keys and values have biases.
    "qk_norm": True,
    "qkv_bias": False,
    "attention_sinks": False,  # whether dense and window layers have a logit of each head, whose value is zero
    # Angle per position of each channel pair, and the factor of cosines and sines; without a list those of rope_theta.
    "rope_frequencies": None,
    "rope_amplitude": 1.0,
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "residual_scale": False, "use_cache": True,
    # MLA; mla_qk_norm: whether each head's query and key go through RMSNorm before the rotation, all with one weight.
    "kv_lora_rank": 0, "qk_rope_head_dim": 0, "mla_qk_norm": False,
    # NSA; window_size is that of a sliding window too, num_local_blocks InfLLM-V2's and MSA's.
    "compress_block_size": 32, "compress_stride": 16, "compress": "mlp", "compress_hidden_size": None,
    "select_block_size": 64, "num_selected_blocks": 16, "window_size": 512, "shared_kv": True, "num_local_blocks": 1,
    # MSA: how its indexer scores a block, "msa" or "qsa".
    "indexer": "msa",
    # DMA; periods: tokens over which a rank grows by one, a number for each KV head.
    "keep_window_size": 2048, "local_window_size": 0, "bias": "exp", "periods": None,
    "sink_tokens": 64, "near_window": 1024, "far_reach": 8128, "num_bands": 2,  # CoWindow
}  # fmt: skip


class LayerConfig:
    """The model's configuration, with a layer's own keys before it."""

    def __init__(self, config, own):
        self.__dict__.update(own, _of_model=config)

    def __getattr__(self, name):
        if name.startswith("__") or name == "_of_model":
            raise AttributeError(name)
        return getattr(self._of_model, name)


class SieveCacheLayer(DynamicLayer):
    """What one layer keeps of earlier tokens: tensors [batch, heads, tokens, ...] in which each row is left-aligned."""

    def __init__(self, is_croppable):
        super().__init__()
        self.is_croppable = is_croppable
        self.reset()

    def reset(self):
        self.tensors = {}
        # DMA's kernel overwrites the key that leaves with the new one; otherwise keys are in the order of the text.
        self.in_order = True
        # Columns of input that went through, and how many of each row were tokens: a number, or [batch] after padding.
        self.columns, self.length = 0, 0

    def append(self, name, new, at, total):
        """Writes `new` from index `at` of each row on and returns the first `total` indices."""
        old = self.tensors.get(name)
        if old is None or old.shape[2] < total:
            # The buffer is a quarter larger than needed, so that a new token rarely copies the earlier ones.
            buffer = new.new_zeros(*new.shape[:2], total + total // 4 + 64, *new.shape[3:])
            if old is not None:
                buffer[:, :, : old.shape[2]] = old
        else:
            buffer = old.clone() if torch.is_grad_enabled() and (old.requires_grad or new.requires_grad) else old
        self.tensors[name] = put(buffer, new, at)
        return buffer[:, :, :total]

    def advance(self, rows):
        self.columns += rows.count
        self.length = rows.first + rows.new

    def get_seq_length(self, *_):
        return self.columns

    def select(self, change):
        """Applies a change of the batch's rows to all kept tensors."""
        self.tensors = {name: change(x) for name, x in self.tensors.items()}
        self.length = change(self.length) if torch.is_tensor(self.length) else self.length

    def reorder_cache(self, beam_idx):
        self.select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats):
        self.select(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices):
        self.select(lambda x: x[indices])

    def crop(self, tokens):
        """Forgets the last -tokens tokens, or all but the first `tokens` as version 4 means it."""
        gone = -tokens if tokens <= 0 else max(self.columns - tokens, 0)
        if gone and (torch.is_tensor(self.length) or not self.is_croppable):
            reason = "rows have padding" if self.is_croppable else "DMA keeps no key that left"
            hint = "generate() without assistant_model and prompt_lookup_num_tokens, which crop it"
            raise ValueError(f"{reason}: this cache cannot be cropped\n  hint: {hint}")
        self.columns, self.length = self.columns - gone, self.length - gone

    def update(self, *_, **__):
        raise NotImplementedError("SieveForCausalLM's layers write their cache themselves")


class Rows:
    """The tokens of one call: how many columns, and how many tokens each row had before (a number, or [batch])."""

    def __init__(self, first, columns, count, new, config, device):
        self.first, self.columns, self.count, self.new, self.config = first, columns, count, new, config
        self.positions = indices(first, count, device)
        self.total, self.tables = columns + count, {}
        self.chosen = {}  # by layer: the blocks that it chose, tile by tile

    def rotate(self, x):
        """Rotary positions of x [batch, heads, tokens, width], the halves of a head being the pairs."""
        half = x.shape[-1] // 2
        if half not in self.tables:
            frequency = self.config.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
            if self.config.rope_frequencies is not None:
                frequency = torch.tensor(self.config.rope_frequencies, device=x.device, dtype=torch.float64)
            angle, amplitude = self.positions[:, None, :, None] * frequency, self.config.rope_amplitude
            self.tables[half] = (angle.cos() * amplitude).float(), (angle.sin() * amplitude).float()
        cos, sin = self.tables[half]
        x1, x2 = x.float().chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def put(buffer, new, at):
    """Writes new [batch, heads, tokens, ...] into the buffer from index `at` of each row on."""
    if not torch.is_tensor(at):
        buffer[:, :, at : at + new.shape[2]] = new
        return buffer
    return buffer.scatter_(2, along(indices(at, new.shape[2], new.device), new), new)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        return self.weight * (y * self.inverse(y)).to(x.dtype)

    def inverse(self, x):
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)


def linear(d_in, d_out, bias=False):
    return nn.Linear(d_in, d_out, bias=bias)


def eager(module, q, k, v, attention_mask, scaling, is_causal=False, **_):
    logits = q.float() @ k.float().transpose(2, 3) * scaling
    if is_causal:
        attention_mask = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, float("-inf"))
    elif attention_mask is not None:
        logits = logits + attention_mask
    return (torch.softmax(logits, -1).to(v.dtype) @ v).transpose(1, 2), None


def kernels(module, cache):
    """The package with Sieve's kernels, where the model asks for it and no earlier tokens count; else None."""
    if module.config._attn_implementation != "sieve" or (cache is not None and cache.columns > 0):
        return None
    # An import statement would make transformers require the package of every user of the file.
    return importlib.import_module("sieve_attention")


def steps(module, q, rows, cache):
    """Its decoding, where the call is one token a row behind a cache and needs no gradient; else None."""
    is_step = cache is not None and cache.columns > 0 and rows.count == 1
    if module.config._attn_implementation != "sieve" or not is_step or (torch.is_grad_enabled() and q.requires_grad):
        return None
    return importlib.import_module("sieve_attention.exported")


def by_kernel(attention, q, k, v, *inputs, **settings):
    """A function of that package on q, k and v [batch, heads, tokens, width]."""
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), *inputs, **settings).transpose(1, 2)


def attend(module, q, k, v, scale, mask=None, is_causal=False):
    """Attention of q [batch, heads, tokens, d] over k, v [batch, KV heads, keys, d]; every query sees a key.

    mask: [batch or 1, KV heads or 1, tokens, keys], where it is true, or numbers to add.
    """
    (batch, heads, n, _), kv_heads, dtype = q.shape, k.shape[1], q.dtype
    if mask is not None and mask.dtype not in (torch.bool, dtype):
        # f32 biases grow with the row's length: bf16's 8 bits would round them too much.
        q, k, v = q.float(), k.float(), v.float()
    # A KV head and its group are a row of their own: keys are not repeated, and a mask is shared by the group.
    q = q.reshape(batch * kv_heads, heads // kv_heads, n, -1)
    k, v = (x.reshape(batch * kv_heads, 1, *x.shape[2:]).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    if mask is not None and mask.shape[:2] != (1, 1):
        mask = mask.expand(batch, kv_heads, -1, -1).reshape(batch * kv_heads, 1, *mask.shape[2:])
    name = module.config._attn_implementation
    attention = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa" if name == "sieve" else name]
    o, _ = attention(module, q, k, v, mask, scaling=scale, dropout=0.0, is_causal=is_causal)
    return o.transpose(1, 2).reshape(batch, heads, n, -1).to(dtype)


def tiles(rows, keys):
    """Tiles of queries: where each starts and stops, its indices [batch or 1, tokens, 1], and keys that it may see."""
    for start in range(0, rows.count, BLOCK):
        stop = min(start + BLOCK, rows.count)
        end = keys if torch.is_tensor(rows.first) else rows.first + stop
        yield start, stop, rows.positions[:, start:stop, None], end


def dense(module, q, k, v, rows, scale, window=None, cache=None, sinks=None):
    """Causal attention over the keys of a row up to the query's own, or the last `window` of them."""
    if sieve := kernels(module, cache):
        return by_kernel(sieve.attention, q, k, v, scale=scale, window=window, sinks=sinks)
    if sieve := steps(module, q, rows, cache):
        return sieve.attention(q, k, v, rows, scale=scale, window=window, sinks=sinks)
    keys, own_alone = k.shape[2], not torch.is_tensor(rows.first) and rows.first == 0
    if sinks is None and own_alone and (window is None or window >= keys):
        return attend(module, q, k, v, scale, is_causal=True)
    o = []
    for start, stop, query, end in tiles(rows, keys):
        begin = 0 if window is None or torch.is_tensor(rows.first) else max(rows.first + start + 1 - window, 0)
        index = torch.arange(begin, end, device=q.device)
        visible = index <= query if window is None else (index <= query) & (index > query - window)
        tile, mask = (q[:, :, start:stop], k[:, :, begin:end], v[:, :, begin:end]), visible[:, None]
        y = sinks is not None and masked_attention(*(x.transpose(1, 2).float() for x in tile), mask, None, scale, sinks)
        o.append(attend(module, *tile, scale, mask) if sinks is None else y.transpose(1, 2).to(q.dtype))
    return torch.cat(o, 2)


class LatentAttention(nn.Module):
    """MLA: the cache holds latents, one rotated key a token, and 1 / rms of each head's key where keys have a norm."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        d, heads = config.head_dim, config.num_attention_heads
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        self.q_proj = linear(config.hidden_size, heads * (d + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, rank + rope)
        self.kv_a_layernorm = RMSNorm(rank, config.rms_norm_eps)
        self.kv_b_proj = linear(rank, heads * 2 * d)
        self.o_proj = linear(heads * d, config.hidden_size)
        if config.mla_qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(d + rope, config.rms_norm_eps) for _ in range(2))

    def heads(self, x):
        return x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)

    def forward(self, x, rows, cache):
        d, rank, norm = self.config.head_dim, self.config.kv_lora_rank, self.config.mla_qk_norm
        scale = 1.0 / math.sqrt(d + self.config.qk_rope_head_dim)
        q = self.heads(self.q_proj(x))
        latent, k_rope = self.kv_a_proj_with_mqa(x)[:, None].split([rank, self.config.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)
        kv, inverse = self.heads(self.kv_b_proj(latent[:, 0])), None
        if norm:
            q = self.q_norm(q)
            inverse = self.k_norm.inverse(torch.cat([kv[..., :d], k_rope.expand(-1, q.shape[1], -1, -1)], -1))
            # Turning a key and dividing it by its root mean square commute: one rotated key serves all heads.
            k_rope = k_rope * self.k_norm.weight[d:]
        q = torch.cat([q[..., :d], rows.rotate(q[..., d:])], -1)
        memory = torch.cat([latent, rows.rotate(k_rope)], -1)
        is_later = cache is not None and cache.columns > 0
        if cache is not None:
            memory = cache.append("latent", memory, rows.first, rows.total)
            inverse = inverse if inverse is None else cache.append("inverse", inverse, rows.first, rows.total)
        if is_later and rows.count < d:
            o = self.folded(q, memory, inverse, rows, scale, cache)
        else:
            kv = self.heads(self.kv_b_proj(memory[:, 0, :, :rank])) if is_later else kv
            k = kv[..., :d] * self.k_norm.weight[:d] if norm else kv[..., :d]
            k = torch.cat([k, memory[..., rank:].expand(-1, k.shape[1], -1, -1)], -1)
            k = (k * inverse).to(k.dtype) if norm else k
            # Values are padded to the keys' width: most fast kernels need one width.
            width = 0 if kernels(self, cache) else k.shape[-1] - d
            o = dense(self, q, k, nn.functional.pad(kv[..., d:], (0, width)), rows, scale, cache=cache)[..., :d]
        return self.o_proj(o.transpose(1, 2).flatten(2))

    def folded(self, q, memory, inverse, rows, scale, cache):
        """Attention on the latents themselves: the way up is multiplied into the queries and into what they read."""
        d, rank, norm = self.config.head_dim, self.config.kv_lora_rank, self.config.mla_qk_norm
        up, down = self.kv_b_proj.weight.view(q.shape[1], 2 * d, rank).split(d, 1)
        q_nope = q[..., :d] * self.k_norm.weight[:d] if norm else q[..., :d]
        latent, shape = memory[:, 0, :, :rank], (*q.shape[:3], memory.shape[2])
        if sieve := steps(self, q, rows, cache):
            q = torch.cat([q_nope @ up, q[..., d:]], -1)
            return sieve.latent_attention(q, memory, inverse, rank, rows, scale) @ down.transpose(1, 2)
        # One GEMM serves all heads.
        logits = ((q_nope @ up).flatten(1, 2) @ latent.transpose(1, 2)).view(shape).float()
        logits = logits + (q[..., d:].flatten(1, 2) @ memory[:, 0, :, rank:].transpose(1, 2)).view(shape).float()
        logits = logits * inverse.transpose(2, 3) if norm else logits
        visible = torch.arange(shape[3], device=q.device) <= rows.positions[:, :, None]
        p = torch.softmax((logits * scale).masked_fill(~visible[:, None], float("-inf")), -1).to(q.dtype)
        o = (p.flatten(1, 2) @ latent).view(*shape[:3], rank)
        return o @ down.transpose(1, 2)


class BlockMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, d, hidden = config.compress_block_size, config.head_dim, config.compress_hidden_size
        self.positions = nn.Parameter(torch.zeros(size, d))
        self.up_proj = linear(size * d, hidden)
        self.down_proj = linear(hidden, d)

    def forward(self, blocks):
        """[batch, KV heads, blocks, size, d] to [batch, KV heads, blocks, d]"""
        return self.down_proj(torch.relu(self.up_proj((blocks + self.positions).flatten(-2))))


class DenseAttention(nn.Module):
    def __init__(self, config, window=None):
        super().__init__()
        self.config, self.window = config, window
        self.scale = 1.0 / math.sqrt(config.head_dim)
        size, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(size, heads * d, config.qkv_bias)
        self.k_proj, self.v_proj = (linear(size, kv_heads * d, config.qkv_bias) for _ in range(2))
        norm = (lambda: RMSNorm(d, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.o_proj = linear(heads * d, size)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def rotated(self, x, rows):
        """Normalised and rotated queries and keys, [batch, heads, tokens, head_dim]."""
        q, k = self.heads(self.q_proj(x)), self.heads(self.k_proj(x))
        return self.rotate(self.q_norm(q), rows), self.rotate(self.k_norm(k), rows)

    def rotate(self, x, rows):
        """x at the positions of rows; unchanged in a layer without positions."""
        return rows.rotate(x) if self.config.rotates else x

    def out(self, o):
        return self.o_proj(o.transpose(1, 2).flatten(2))

    def keys(self, x, rows, cache):
        """Rotated queries, and keys and values of all tokens."""
        (q, k), v = self.rotated(x, rows), self.heads(self.v_proj(x))
        if cache is not None:
            k, v = (cache.append(name, new, rows.first, rows.total) for name, new in (("k", k), ("v", v)))
        return q, k, v

    def forward(self, x, rows, cache):
        q, k, v = self.keys(x, rows, cache)
        return self.out(dense(self, q, k, v, rows, self.scale, self.window, cache, self.sinks))


class CoWindowAttention(DenseAttention):
    """Each KV head reads the last near_window keys, the row's first sink_tokens, and a band of distances of its own."""

    def forward(self, x, rows, cache):
        (q, k, v), c, o = self.keys(x, rows, cache), self.config, []
        bands = k.shape[1], c.sink_tokens, c.near_window, c.far_reach, c.num_bands
        for start, stop, query, end in tiles(rows, k.shape[2]):
            mask = band_mask(query[:, None], torch.arange(end, device=q.device), *bands)
            o.append(attend(self, q[:, :, start:stop], k[:, :, :end], v[:, :, :end], self.scale, mask))
        return self.out(torch.cat(o, 2))


def choose(importance, query, config, first, local):
    """True where a query reads a block: the last `local` up to its own, the `first` ones, then the most important."""
    own = (query // config.select_block_size)[:, None]
    return best_blocks(in_any_case(importance, own, first, local), config.num_selected_blocks)


def read_blocks(module, q, k, v, chosen, query, rows, start, end, cache=None):
    """Attention of the queries that begin at `start` over chosen blocks, [batch, KV heads, tokens, blocks]."""
    if sieve := steps(module, q, rows, cache):
        sizes = {"block": module.config.select_block_size, "num_blocks": module.config.num_selected_blocks}
        return sieve.attention(q, k, v, rows, chosen=chosen, scale=module.scale, **sizes)
    # Adds 0 or -inf, as SDPA does for true and false. No query has chosen blocks later than its own.
    select = module.config.select_block_size
    mask = torch.zeros_like(chosen, dtype=v.dtype).masked_fill_(~chosen, float("-inf"))
    mask = mask[..., None].expand(-1, -1, -1, -1, select).contiguous().flatten(3)[..., :end]
    begin = 0 if torch.is_tensor(rows.first) else (rows.first + start) // select * select
    index = torch.arange(begin, end, device=q.device)
    mask[..., begin:].masked_fill_((index > query)[:, None], float("-inf"))
    return attend(module, q, k[:, :, :end], v[:, :, :end], module.scale, mask)


class BlocksAttention(DenseAttention):
    """Queries read the blocks that they chose in layer `source`: this one where it has a chooser, else one before."""

    has_kernel = True

    def chooser(self, x, q, k, rows, cache):
        """A function of a tile that gives the blocks its queries choose, [batch, choosers, tokens, blocks]."""

    def forward(self, x, rows, cache):
        (q, k, v), o = self.keys(x, rows, cache), []
        if self.has_kernel and (sieve := kernels(self, cache)) and not any(self.config.shared_layers):
            return self.out(self.by_kernel(sieve, (q, k, v), x, rows, cache))
        if chosen := self.chooser(x, q, k, rows, cache):
            rows.chosen[self.source] = [chosen(*tile) for tile in tiles(rows, k.shape[2])]
        chosen = rows.chosen[self.source]
        if steps(self, q, rows, cache):
            return self.out(read_blocks(self, q, k, v, chosen[0], None, rows, 0, None, cache))
        if chosen[0].shape[1] != k.shape[1]:  # of each query head
            k, v = (y.repeat_interleave(chosen[0].shape[1] // k.shape[1], 1) for y in (k, v))
        for (start, stop, query, end), blocks in zip(tiles(rows, k.shape[2]), chosen):
            o.append(read_blocks(self, q[:, :, start:stop], k, v, blocks, query, rows, start, end))
        return self.out(torch.cat(o, 2))


class PooledAttention(BlocksAttention):
    """InfLLM-V2 and MoBA: each query chooses blocks by means of keys and reads all their tokens."""

    def by_kernel(self, sieve, qkv, *_):
        config, select, num = self.config, self.config.select_block_size, self.config.num_selected_blocks
        if config.attention_kind == "moba":
            return by_kernel(sieve.moba, *qkv, block=select, num_selected=num, scale=self.scale)
        sizes = sieve.NsaBlocks(config.compress_block_size, config.compress_stride, select, num)
        return by_kernel(sieve.infllm_v2, *qkv, blocks=sizes, local=config.num_local_blocks, scale=self.scale)

    def chooser(self, x, q, k, rows, cache):
        config, select, is_moba = self.config, self.config.select_block_size, self.config.attention_kind == "moba"
        size, stride = (select, select) if is_moba else (config.compress_block_size, config.compress_stride)
        means = means_of(k.float(), size, stride).to(k.dtype).float()

        def chosen(start, stop, query, end):
            scores = slot_scores(q[:, :, start:stop].float(), means)
            if is_moba:
                return choose(moba_importance(scores, select, end), query, config, 0, 1)
            p = slot_probabilities(scores * self.scale, query, size, stride)
            importance = infllm_importance(p, size, stride, select, end)
            return choose(importance, query, config, 1, config.num_local_blocks)

        return chosen


class IndexedAttention(BlocksAttention):
    """MSA: an indexer's queries, one for each KV head, choose blocks by the best of their tokens' keys, one head.

    With config.indexer = "qsa" all choose together, by one pooled key of each complete block.
    """

    def __init__(self, config):
        super().__init__(config)
        size, d = config.hidden_size, config.head_dim
        self.index_q_proj, self.index_k_proj = linear(size, config.num_key_value_heads * d), linear(size, d)
        self.index_q_norm, self.index_k_norm = (RMSNorm(d, config.rms_norm_eps) for _ in range(2))
        self.has_kernel = config.indexer == "msa"

    def index_heads(self, x, rows, cache):
        index_q = self.rotate(self.index_q_norm(self.heads(self.index_q_proj(x))), rows)
        index_k = self.heads(self.index_k_proj(x))
        if self.config.indexer == "msa":
            index_k = self.rotate(self.index_k_norm(index_k), rows)
        return index_q, index_k if cache is None else cache.append("index_k", index_k, rows.first, rows.total)

    def by_kernel(self, sieve, qkv, *inputs):
        index, config = (y.transpose(1, 2) for y in self.index_heads(*inputs)), self.config
        sizes = {"block": config.select_block_size, "num_selected": config.num_selected_blocks}
        return by_kernel(sieve.msa, *qkv, *index, local=config.num_local_blocks, scale=self.scale, **sizes)

    def pooled_chooser(self, index_q, index_k, kv_heads):
        select, config = self.config.select_block_size, self.config
        count = index_k.shape[2] // select
        # Complete blocks alone; means_of has a slot for a row without one, too.
        means = means_of(index_k.float(), select, select)[:, :, :count].to(index_k.dtype)
        blocks = Rows(0, 0, count, count, config, index_k.device)
        blocks.positions = blocks.positions * select
        keys = self.rotate(self.index_k_norm(means), blocks).float()

        def chosen(start, stop, query, end):
            scores = qsa_scores(index_q[:, :, start:stop].float(), keys[:, :, : end // select])
            scores = nn.functional.pad(scores, (0, -(-end // select) - scores.shape[-1]))
            return choose(scores, query, config, 0, config.num_local_blocks).expand(-1, kv_heads, -1, -1)

        return chosen

    def chooser(self, x, q, k, rows, cache):
        if self.config.indexer == "qsa":
            return self.pooled_chooser(*self.index_heads(x, rows, cache), k.shape[1])
        index_q, index_k = (y.float() for y in self.index_heads(x, rows, cache))

        def chosen(start, stop, query, end):
            select = self.config.select_block_size
            scores = msa_importance(index_q[:, :, start:stop], index_k, query, select, end)
            return choose(scores, query, self.config, 0, self.config.num_local_blocks)

        return chosen


class NativeSparseAttention(DenseAttention):
    def __init__(self, config):
        super().__init__(config)
        size, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if not config.shared_kv:
            for branch in ("compress", "select"):
                for part in ("k", "v"):
                    self.add_module(f"{branch}_{part}_proj", linear(size, kv_heads * d))
        if config.compress == "mlp":
            self.k_compress, self.v_compress = BlockMlp(config), BlockMlp(config)
        self.gate_proj = linear(size, heads * 3, bias=True)

    def key_value(self, x, branch, rows, cache):
        """Keys of a branch, rotated but for an MLP, and values, of all tokens."""
        config = self.config
        source = "" if config.shared_kv or branch == "window" else f"{branch}_"
        k = self.k_norm(self.heads(getattr(self, f"{source}k_proj")(x)))
        # An MLP's keys carry learned positions instead.
        is_plain = branch == "compress" and config.compress == "mlp"
        k = k * config.rope_amplitude if is_plain else self.rotate(k, rows)
        v = self.heads(getattr(self, f"{source}v_proj")(x))
        if cache is None:
            return k, v
        named = ((f"{source}k{'_plain' * is_plain}", k), (f"{source}v", v))
        return tuple(cache.append(name, new, rows.first, rows.total) for name, new in named)

    def compressed(self, k, v, rows, cache):
        """One key and one value a block: those that this call's tokens complete, behind those before.

        Blocks that are not whole yet are there too; no query sees them, and they are written again.
        """
        size, stride = self.config.compress_block_size, self.config.compress_stride
        done = -((size - 1 - rows.first) // stride)
        done = done.clamp(min=0) if torch.is_tensor(done) else max(done, 0)
        block = indices(done, rows.count // stride + 1, k.device)
        index = block[:, :, None] * stride + torch.arange(size, device=k.device)
        index = index.clamp(max=k.shape[2] - 1).flatten(1)
        pair = (x.gather(2, along(index, x)).unflatten(2, (-1, size)) for x in (k, v))
        if self.config.compress == "mean":
            k, v = (x.mean(3) for x in pair)
        else:
            k, v = (mlp(x) for mlp, x in zip((self.k_compress, self.v_compress), pair))
        if cache is None:
            return k, v
        total = rows.total // stride + 2
        return cache.append("compressed_k", k, done, total), cache.append("compressed_v", v, done, total)

    def forward(self, x, rows, cache):
        config = self.config
        size, stride, select = config.compress_block_size, config.compress_stride, config.select_block_size
        q = self.q_norm(self.heads(self.q_proj(x)))
        q_rotated = self.rotate(q, rows)
        coarse_q = q_rotated if config.compress == "mean" else q * config.rope_amplitude
        coarse_k, coarse_v = self.compressed(*self.key_value(x, "compress", rows, cache), rows, cache)
        k, v = self.key_value(x, "select", rows, cache)
        if sieve := kernels(self, cache):
            blocks = sieve.NsaBlocks(size, stride, select, config.num_selected_blocks)
            slots = -(-rows.count // stride)
            coarse = (y[:, :, :slots].transpose(1, 2) for y in (coarse_k, coarse_v))
            o, chosen = sieve.nsa_compressed(coarse_q.transpose(1, 2), *coarse, blocks=blocks, scale=self.scale)
            selected = by_kernel(sieve.nsa_selected, q_rotated, k, v, chosen, blocks=blocks, scale=self.scale)
            return self.gated(o.transpose(1, 2), selected, x, q_rotated, rows, cache)
        coarse, selected = [], []
        for start, stop, query, end in tiles(rows, k.shape[2]):
            scores = slot_scores(coarse_q[:, :, start:stop].float(), coarse_k.float()) * self.scale
            p = slot_probabilities(scores, query, size, stride)
            coarse.append((p.to(v.dtype) @ coarse_v[:, :, None]).flatten(1, 2))
            chosen = choose(nsa_importance(p, size, stride, select, end), query, config, 1, 2)
            here = q_rotated[:, :, start:stop]
            selected.append(read_blocks(self, here, k, v, chosen, query, rows, start, end, cache))
        return self.gated(torch.cat(coarse, 2), torch.cat(selected, 2), x, q_rotated, rows, cache)

    def gated(self, coarse, selected, x, q, rows, cache):
        """The output of these two branches and the window's."""
        k, v = self.key_value(x, "window", rows, cache)
        branches = coarse, selected, dense(self, q, k, v, rows, self.scale, self.config.window_size, cache)
        gate = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (-1, 3, 1)).transpose(1, 2).unbind(3)
        return self.out(sum(weight * branch for weight, branch in zip(gate, branches)))


class DynamicMaskAttention(DenseAttention):
    """Each query sees the last local_window_size keys and the best-ranked older ones, keep_window_size in all."""

    def __init__(self, config):
        super().__init__(config)
        kv_heads = config.num_key_value_heads
        self.dt_proj = linear(kv_heads * config.head_dim, kv_heads)
        self.A = nn.Parameter(torch.zeros(kv_heads))

    def rank(self, v, rows):
        """Ranks of the call's keys, [batch, KV heads, tokens], in f32. A GPU is waited for once, to get the periods."""
        z, periods = content_scores(v.float(), self.dt_proj.weight.float(), self.A.float()), self.config.periods
        if periods and (key := tuple(periods)) not in rows.tables:
            rows.tables[key] = rows.positions[:, None].float() / z.new_tensor(periods)[:, None]
        return z + rows.tables[key] if periods else z

    def forward(self, x, rows, cache):
        keep, local = self.config.keep_window_size, self.config.local_window_size
        q, k = self.rotated(x, rows)
        v = self.v_proj(x)
        keys = {"k": k, "v": self.heads(v), "rank": self.rank(v, rows)}
        # A padding token must not evict a key.
        if (sieve := steps(self, q, rows, cache)) and not torch.is_tensor(rows.new):
            cache.in_order = False
            return self.out(sieve.dma_attention(q, keys, cache.tensors, rows, self.config, self.scale))
        keys["position"] = rows.positions.to(torch.int32)[:, None].expand(keys["rank"].shape)
        # Kept keys in their order, then the new ones, are ranked as in the whole row: a key that left never returns.
        first = rows.first.clamp(max=keep) if torch.is_tensor(rows.first) else min(rows.first, keep)
        num_kept = 0
        if cache is not None and cache.columns > 0:
            kept = cache.tensors
            if not cache.in_order:
                order = kept["position"].argsort(dim=2)[:, :, : None if torch.is_tensor(first) else first]
                kept, cache.in_order = {name: y.gather(2, along(order, y)) for name, y in kept.items()}, True
            num_kept = kept["k"].shape[2]
            for name, new in keys.items():
                room = new.new_zeros(*new.shape[:2], num_kept + rows.count, *new.shape[3:])
                room[:, :, :num_kept] = kept[name]
                keys[name] = put(room, new, first)
        n = num_kept + rows.count
        rank, query = keys["rank"], indices(first, rows.count, x.device)
        bias = dma_bias(rank, self.config.bias == "linear")
        if sieve := kernels(self, cache):
            selection = sieve.select(rank, keep=keep, local=local)
            expire = selection.expire
            o = by_kernel(sieve.expiring_attention, q, keys["k"], keys["v"], bias, selection, scale=self.scale)
        else:
            expire = expiry(rank, keep - local, local)
            o = self.in_tiles(q, query, num_kept, (keys["k"], keys["v"], bias, expire))
        if cache is not None:
            if n > keep:
                end, index = indices(first + rows.new, 1, x.device)[:, None], torch.arange(n, device=x.device)
                index = first_true((index < end) & (expire >= end), keep)
                keys = {name: y.gather(2, along(index, y)) for name, y in keys.items()}
            cache.tensors = keys
        return self.out(o)

    def in_tiles(self, q, query, num_kept, keys):
        """Attention of the queries of indices `query` over keys: k, v, bias and expiry, `num_kept` of them earlier."""
        keep, count, o = self.config.keep_window_size, q.shape[2], []
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            here, end = query[:, None, start:stop, None], num_kept + stop
            index, seen = torch.arange(end, device=q.device).expand(1, 1, -1), tuple(y[:, :, :end] for y in keys)
            if end > keep + stop - start:
                # A tile reads the earlier keys that its first query still sees, and all of its own.
                seen_here = seen[3] > torch.maximum(index, here[:, :, 0])
                index = first_true(seen_here & (index <= here[:, :, -1]), keep + stop - start)
                seen = tuple(y.gather(2, along(index, y)) for y in seen)
            k, v, added, until = seen
            visible = (index[:, :, None] <= here) & (here < until[:, :, None])
            mask = torch.where(visible, added[:, :, None], float("-inf"))
            o.append(attend(self, q[:, :, start:stop], k, v, self.scale, mask))
        return torch.cat(o, 2)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(config.hidden_size, config.intermediate_size) for _ in range(2))
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, index):
        super().__init__()
        kinds = {
            "mla": LatentAttention, "nsa": NativeSparseAttention, "infllm_v2": PooledAttention, "moba": PooledAttention,
            "msa": IndexedAttention, "dma": DynamicMaskAttention, "mha": DenseAttention, "shared": BlocksAttention,
            "swa": lambda config: DenseAttention(config, config.window_size), "cowa": CoWindowAttention,
        }  # fmt: skip
        others = config.layer_attention or [{}]
        rotates = bool((config.no_rope_layers or [1] * (index + 1))[index])
        # The factor of cosines and sines is part of the rotation.
        still = {"rotates": rotates, **({} if rotates else {"rope_amplitude": 1.0})}
        own = lambda layer: LayerConfig(config, {**others[layer % len(others)], **still})  # noqa: E731
        marked = ("mha", config.dense_layers), ("shared", config.shared_layers)
        of = lambda n: next((kind for kind, at in marked if at and at[n % len(at)]), own(n).attention_kind)  # noqa: E731
        self.self_attn = kinds[of(index)](own(index))
        # The last layer up to this one that chooses blocks, among kinds that do.
        chooses = ("infllm_v2", "moba", "msa")
        self.self_attn.source = next((n for n in range(index, -1, -1) if of(n) in chooses), None)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.scaled = config.residual_scale
        if self.scaled:
            self.input_residual = nn.Parameter(torch.ones(config.hidden_size))
            self.post_attention_residual = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x, rows, past_key_values=None):
        y = self.self_attn(self.input_layernorm(x), rows, past_key_values)
        x = (x * self.input_residual if self.scaled else x) + y
        y = self.mlp(self.post_attention_layernorm(x))
        return (x * self.post_attention_residual if self.scaled else x) + y


class SievePreTrainedModel(PreTrainedModel):
    config_class = SieveConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        pass

    @classmethod
    def is_backend_compatible(cls):
        """Whether an engine, which asks here, may put in its own attention function."""
        logging.get_logger(__name__).warning(NO_ENGINE)
        return False

    def require_attention(self):
        """Refuses an attention function that would give wrong text."""
        if (name := self.config._attn_implementation) not in ATTENTION:
            raise ValueError(f"attn_implementation={name!r}: {NO_ENGINE}")


class SieveModel(SievePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.require_attention()
        self.post_init()

    def caches(self, past_key_values):
        """The layers of a cache, made when it is empty."""
        if not isinstance(past_key_values, DynamicCache) or getattr(past_key_values, "offloading", False):
            hint = "pass DynamicCache(), or leave cache_implementation out"
            name = type(past_key_values).__name__
            raise ValueError(f"past_key_values: {name} is not supported\n  hint: {hint}")
        layers = past_key_values.layers
        if not layers or not isinstance(layers[0], SieveCacheLayer):
            if past_key_values.get_seq_length() > 0:
                raise ValueError("past_key_values was filled by another model")
            is_dma = [isinstance(layer.self_attn, DynamicMaskAttention) for layer in self.layers]
            past_key_values.layers = [SieveCacheLayer(not dma) for dma in is_dma]
        return past_key_values.layers

    def forward(
        self,
        input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, output_hidden_states=None, cache=None, **kwargs,
    ):  # fmt: skip
        # The argument `past_key_values` has the name `cache` from transformers 5.24 on.
        past_key_values = cache if past_key_values is None else past_key_values
        self.require_attention()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions is not supported: no layer holds its probabilities")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        (batch, count), device = x.shape[:2], x.device
        if batch == 0 or count == 0:
            raise ValueError(f"the input is of [{batch}, {count}] tokens, and must have at least one")
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.training and self.is_gradient_checkpointing):
            past_key_values = DynamicCache()
        caches = [None] * len(self.layers) if past_key_values is None else self.caches(past_key_values)
        columns, first = (0, 0) if past_key_values is None else (caches[0].columns, caches[0].length)

        real, back = self.real_tokens(attention_mask, batch, columns, count), None
        if real is not None:
            order = real.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
            back = order.argsort(dim=1)[..., None]
            x = x.gather(1, order[..., None].expand_as(x))
        rows = Rows(first, columns, count, count if real is None else real.sum(1), self.config, device)
        if position_ids is not None and not torch.compiler.is_compiling():
            expected = rows.positions.expand(batch, -1)
            expected = expected if back is None else expected.gather(1, back[..., 0])
            differs = position_ids.to(device) != expected
            if (differs if real is None else differs & real).any():
                hint = 'to generate from several prompts, pad on the left (tokenizer.padding_side = "left")'
                wanted = "must count a row's tokens from 0, padding left out: one document a row"
                raise ValueError(f"position_ids {wanted}\n  hint: {hint}")

        hidden = []
        for layer, cache in zip(self.layers, caches):
            hidden.append(x)
            x = layer(x, rows, past_key_values=cache)
        for cache in caches if past_key_values is not None else []:
            cache.advance(rows)
        hidden.append(self.norm(x))
        if back is not None:
            hidden = [y.gather(1, back.expand_as(y)) for y in (hidden if output_hidden_states else hidden[-1:])]
        states = tuple(hidden) if output_hidden_states else None
        return BaseModelOutputWithPast(hidden[-1], past_key_values, states)

    @staticmethod
    def real_tokens(attention_mask, batch, columns, count):
        """Which of the call's tokens are no padding, or None where none is."""
        if attention_mask is None:
            return None
        if attention_mask.shape != (batch, columns + count):
            wanted = f"[batch, earlier tokens + new ones]: [{batch}, {columns + count}]"
            raise ValueError(f"attention_mask is {list(attention_mask.shape)}, and must be {wanted}")
        real = attention_mask[:, columns:].bool()
        # A compiled call does not read the mask to find out.
        return None if not torch.compiler.is_compiling() and bool(real.all()) else real


class SieveForCausalLM(SievePreTrainedModel, GenerationMixin):
    # Version 5 reads a mapping, version 4 the keys of it.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = SieveModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def init_continuous_batching(self, *_, **__):
        """All ways to continuous batching begin here; behind it an error is logged and texts come back empty."""
        problem = "continuous batching is not supported: this model's layers write a cache of their own"
        raise NotImplementedError(f"{problem}\n  hint: generate() takes a batch of prompts, padded on the left")

    def forward(
        self,
        input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, labels=None,
        use_cache=None, output_hidden_states=None, return_dict=None, logits_to_keep=0, cache=None, **kwargs,
    ):  # fmt: skip
        past_key_values = cache if past_key_values is None else past_key_values
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        found = self.model(*inputs, output_hidden_states, output_attentions=kwargs.pop("output_attentions", None))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        cache = found.cache if hasattr(found, "cache") else found.past_key_values
        output = CausalLMOutputWithPast(loss, logits, cache, found.hidden_states)
        return output.to_tuple() if return_dict is False else output
