"""Qwen3-style language models with NSA, MLA, DMA with recency or dense layers between them, as Sieve exports them: plain PyTorch, for reading and for checking.

Everything is computed with full score matrices; nothing is fast here. Sequences are not padded and start at position 0.
"""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class SieveConfig(PretrainedConfig):
    model_type = "sieve"

    def __init__(self, rope_theta=10000.0, tie_word_embeddings=False, **kwargs):
        for name, value in DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.rope_theta = rope_theta


DEFAULTS = {
    "attention_kind": "nsa",
    # Repeated over the layers: true where a layer is dense.
    "dense_layers": [],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "residual_scale": False,
    # MLA
    "kv_lora_rank": 0,
    "qk_rope_head_dim": 0,
    "mla_qk_norm": False,
    # NSA
    "compress_block_size": 32,
    "compress_stride": 16,
    "compress": "mlp",
    "compress_hidden_size": None,
    "select_block_size": 64,
    "num_selected_blocks": 16,
    "window_size": 512,
    "shared_kv": True,
    # DMA
    "keep_window_size": 2048,
    "local_window_size": 0,
    "bias": "exp",
    "slopes": None,
}


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def linear(d_in, d_out, bias=False):
    return nn.Linear(d_in, d_out, bias=bias)


def rotate(x, theta):
    """Rotary positions 0, 1, … of x [batch, tokens, heads, width], the halves of a head being the pairs."""
    n, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(n, device=x.device, dtype=torch.float64)[:, None] * frequency
    cos, sin = (f(angle).float()[None, :, None, :] for f in (torch.cos, torch.sin))
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def attend(q, k, v, visible, scale, bias=None):
    """Softmax attention of q [batch, tokens, heads, d] over k, v [batch, keys, KV heads, d]; rows that see nothing give 0.

    bias [batch, KV heads, keys] is added to the logits. Returns the output and the probabilities [batch, heads, tokens, keys].
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    logits = (q.transpose(1, 2).float() @ k.float().transpose(2, 3)) * scale
    if bias is not None:
        logits = logits + bias.repeat_interleave(group, 1)[:, :, None, :]
    logits = logits.masked_fill(~visible, float("-inf"))
    p = torch.softmax(logits, -1).nan_to_num(0.0)
    return (p.to(v.dtype) @ v).transpose(1, 2), p


def causal(n, device):
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


class LatentAttention(nn.Module):
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
            self.q_norm, self.k_norm = RMSNorm(d + rope, config.rms_norm_eps), RMSNorm(d + rope, config.rms_norm_eps)

    def forward(self, x):
        config = self.config
        (batch, n, _), d, heads = x.shape, config.head_dim, config.num_attention_heads
        rope, theta = config.qk_rope_head_dim, config.rope_theta
        q = self.q_proj(x).view(batch, n, heads, d + rope)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, n, heads, 2 * d)
        k = torch.cat([kv[..., :d], k_rope[:, :, None, :].expand(-1, -1, heads, -1)], -1)
        if config.mla_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (torch.cat([x[..., :d], rotate(x[..., d:], theta)], -1) for x in (q, k))
        scale = 1.0 / math.sqrt(d + rope)
        o, _ = attend(q, k, kv[..., d:], causal(n, x.device), scale)
        return self.o_proj(o.reshape(batch, n, heads * d))


class BlockMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, d, hidden = config.compress_block_size, config.head_dim, config.compress_hidden_size
        self.positions = nn.Parameter(torch.zeros(size, d))
        self.up_proj = linear(size * d, hidden)
        self.down_proj = linear(hidden, d)

    def forward(self, blocks):
        """[batch, blocks, KV heads, size, d] to [batch, blocks, KV heads, d]"""
        return self.down_proj(torch.relu(self.up_proj((blocks + self.positions).flatten(-2))))


class DenseAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        size, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(size, heads * d)
        self.k_proj, self.v_proj = linear(size, kv_heads * d), linear(size, kv_heads * d)
        self.q_norm, self.k_norm = RMSNorm(d, config.rms_norm_eps), RMSNorm(d, config.rms_norm_eps)
        self.o_proj = linear(heads * d, size)

    def rotated(self, x):
        """Normalised and rotated queries and keys, [batch, tokens, heads, head_dim]."""
        shape, theta = (*x.shape[:2], -1, self.config.head_dim), self.config.rope_theta
        return rotate(self.q_norm(self.q_proj(x).view(shape)), theta), rotate(self.k_norm(self.k_proj(x).view(shape)), theta)

    def forward(self, x):
        (q, k), v = self.rotated(x), self.v_proj(x)
        visible = causal(x.shape[1], x.device)
        o, _ = attend(q, k, v.view(k.shape), visible, 1.0 / math.sqrt(self.config.head_dim))
        return self.o_proj(o.reshape(*x.shape[:2], -1))


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

    def key_value(self, x, branch):
        """Normalised keys before their rotation, and values, of one branch."""
        config = self.config
        prefix = "" if config.shared_kv or branch == "window" else f"{branch}_"
        shape = (*x.shape[:2], config.num_key_value_heads, config.head_dim)
        k = getattr(self, f"{prefix}k_proj")(x).view(shape)
        return self.k_norm(k), getattr(self, f"{prefix}v_proj")(x).view(shape)

    def compressed(self, k, v, k_rotated):
        """One key and one value per block; blocks that are not whole do not exist."""
        size, stride = self.config.compress_block_size, self.config.compress_stride
        if k.shape[1] < size:
            return k[:, :0], v[:, :0]
        if self.config.compress == "mean":
            return tuple(x.unfold(1, size, stride).mean(-1) for x in (k_rotated, v))
        k, v = (x.unfold(1, size, stride).transpose(-1, -2) for x in (k, v))
        return self.k_compress(k), self.v_compress(v)

    def chosen(self, p, n):
        """Blocks of each query from the compressed branch's probabilities [batch, heads, tokens, compressed blocks]."""
        config, device = self.config, p.device
        kv_heads, select = config.num_key_value_heads, config.select_block_size
        per_select = select // config.compress_stride
        per_compress = config.compress_block_size // config.compress_stride
        num_blocks = -(-n // select)
        p = p.unflatten(1, (kv_heads, -1)).sum(2)
        weight = torch.zeros(p.shape[-1], num_blocks, device=device)
        for block in range(num_blocks):
            for a in range(per_select):
                for b in range(per_compress):
                    c = block * per_select + a - b
                    if 0 <= c < p.shape[-1]:
                        weight[c, block] += 1
        importance = p @ weight
        own = (torch.arange(n, device=device) // select)[:, None]
        block = torch.arange(num_blocks, device=device)[None, :]
        forced = (block == own) | (block == own - 1) | (block == 0)
        importance = importance.masked_fill(forced, float("inf"))
        importance = importance.masked_fill(block > own, float("-inf"))
        # Of equal ones the later: a stable sort of the blocks from the last to the first.
        order = importance.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        best = num_blocks - 1 - order[..., : config.num_selected_blocks]
        chosen = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True)
        return chosen & (block <= own)

    def forward(self, x):
        config, device = self.config, x.device
        batch, n, _ = x.shape
        d, heads = config.head_dim, config.num_attention_heads
        scale, theta = 1.0 / math.sqrt(d), config.rope_theta
        q = self.q_norm(self.q_proj(x).view(batch, n, heads, d))
        q_rotated = rotate(q, theta)
        token = torch.arange(n, device=device)

        k, v = self.key_value(x, "compress")
        k, v = self.compressed(k, v, rotate(k, theta))
        last = torch.arange(k.shape[1], device=device) * config.compress_stride + config.compress_block_size - 1
        # Means are of rotated keys; the MLP's keys carry learned positions instead.
        coarse_q = q_rotated if config.compress == "mean" else q
        coarse, p = attend(coarse_q, k, v, last[None, :] <= token[:, None], scale)

        k, v = self.key_value(x, "select")
        chosen = self.chosen(p, n).repeat_interleave(config.select_block_size, -1)[..., :n]
        visible = chosen.repeat_interleave(heads // config.num_key_value_heads, 1) & causal(n, device)
        selected, _ = attend(q_rotated, rotate(k, theta), v, visible, scale)

        k, v = self.key_value(x, "window")
        near = causal(n, device) & (token[:, None] - token[None, :] < config.window_size)
        window, _ = attend(q_rotated, rotate(k, theta), v, near, scale)

        gate = torch.sigmoid(self.gate_proj(x)).view(batch, n, heads, 3, 1)
        o = gate[..., 0, :] * coarse + gate[..., 1, :] * selected + gate[..., 2, :] * window
        return self.o_proj(o.reshape(batch, n, heads * d))


class DynamicMaskAttention(DenseAttention):
    """Each query sees the last local_window_size keys and the best-ranked older ones, keep_window_size in all."""

    def __init__(self, config):
        super().__init__(config)
        kv_heads = config.num_key_value_heads
        self.dt_proj = linear(kv_heads * config.head_dim, kv_heads)
        self.A = nn.Parameter(torch.zeros(kv_heads))

    def kept(self, rank):
        """Keys of each query, [batch, KV heads, tokens, tokens], from their ranks [batch, KV heads, tokens]."""
        config, n = self.config, rank.shape[-1]
        token = torch.arange(n, device=rank.device)
        age = token[:, None] - token[None, :]
        older = age >= max(config.local_window_size, 0)
        ranks = rank[:, :, None, :].expand(-1, -1, n, -1).masked_fill(~older, float("-inf"))
        # Of equal ranks the later key: a stable sort from the last key to the first.
        order = ranks.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        best = n - 1 - order[..., : config.keep_window_size - config.local_window_size]
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, best, True)
        return (chosen & older) | ((age >= 0) & ~older)

    def forward(self, x):
        config = self.config
        (batch, n, _), d, kv_heads = x.shape, config.head_dim, config.num_key_value_heads
        (q, k), v = self.rotated(x), self.v_proj(x)
        rank = (self.A * nn.functional.softplus(self.dt_proj(v))).float().transpose(1, 2)
        if config.slopes is not None:
            slopes = torch.tensor(config.slopes, device=x.device, dtype=torch.float32)
            rank = rank + torch.arange(n, device=x.device).float() * slopes[:, None]
        bias = rank if config.bias == "linear" else torch.exp(rank.clamp(max=60.0))
        visible = self.kept(rank).repeat_interleave(config.num_attention_heads // kv_heads, 1)
        o, _ = attend(q, k, v.view(batch, n, kv_heads, d), visible, 1.0 / math.sqrt(d), bias)
        return self.o_proj(o.reshape(batch, n, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        kinds = {"mla": LatentAttention, "nsa": NativeSparseAttention, "dma": DynamicMaskAttention}
        pattern = config.dense_layers
        is_dense = bool(pattern) and pattern[index % len(pattern)]
        kind = DenseAttention if is_dense else kinds[config.attention_kind]
        self.self_attn = kind(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.scaled = config.residual_scale
        if self.scaled:
            self.input_residual = nn.Parameter(torch.ones(config.hidden_size))
            self.post_attention_residual = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x):
        y = self.self_attn(self.input_layernorm(x))
        x = (x * self.input_residual if self.scaled else x) + y
        y = self.mlp(self.post_attention_layernorm(x))
        return (x * self.post_attention_residual if self.scaled else x) + y


class SieveModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class SieveForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SieveConfig
    base_model_prefix = "model"
    # Version 5 reads a mapping, version 4 the keys of it.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = SieveModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("padding is not supported: pass sequences of one length, or one at a time")
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
