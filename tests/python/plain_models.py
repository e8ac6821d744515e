"""Sieve's models with latent or native sparse attention, InfLLM-V2, MoBA or MSA in plain PyTorch, from the weights of a
checkpoint.

Written from docs and papers (arXiv:2405.04434, 2502.11089, 2509.24663, 2502.13189, 2606.13392), with a full matrix of
scores and autograd: nothing is shared with the program or with the code that it exports. One document a row. Parameters
have the checkpoint's names.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotate(x, theta, step=1):
    """x [batch, tokens, heads, width]: columns i and i + width / 2 turn by step * token * theta^(-2 i / width)."""
    tokens, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = step * torch.arange(tokens, dtype=torch.float64)[:, None] * frequency
    cos, sin = (f(angle)[None, :, None, :].to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, visible):
    """Output [batch, queries, heads, width] and probabilities; a query that sees no key gives 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~visible, -math.inf).softmax(-1)
    p = torch.where(visible.any(-1, keepdim=True), p, torch.zeros_like(p))
    return torch.einsum("bhij,bjhd->bihd", p, v), p


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def linear(inner, outer):
    return nn.Linear(inner, outer, bias=False)


class LatentAttention(nn.Module):
    def __init__(self, model, attention, eps, has_norms):
        super().__init__()
        size, heads, d = model["hidden_size"], model["num_attention_heads"], model["head_dim"]
        self.heads, self.d, self.theta = heads, d, model["rope_theta"]
        self.rank, self.rope = attention["kv_lora_rank"], attention["qk_rope_head_dim"]
        self.q_proj = linear(size, heads * (d + self.rope))
        self.kv_a_proj = linear(size, self.rank + self.rope)
        self.kv_a_norm = RmsNorm(self.rank, eps)
        self.kv_b_proj = linear(self.rank, heads * 2 * d)
        self.o_proj = linear(heads * d, size)
        # Norms of each head's query and of its whole key, before the rotation.
        if has_norms:
            self.q_norm, self.k_norm = RmsNorm(d + self.rope, eps), RmsNorm(d + self.rope, eps)
        self.has_norms = has_norms

    def forward(self, x):
        batch, n, _ = x.shape
        heads, d, rope = self.heads, self.d, self.rope
        q = self.q_proj(x).view(batch, n, heads, d + rope)
        latent, shared = self.kv_a_proj(x).split([self.rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(batch, n, heads, 2 * d)
        k = torch.cat([kv[..., :d], shared[:, :, None, :].expand(-1, -1, heads, -1)], -1)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (torch.cat([y[..., :d], rotate(y[..., d:], self.theta)], -1) for y in (q, k))
        o, _ = attend(q, k, kv[..., d:], causal(n))
        return self.o_proj(o.reshape(batch, n, heads * d))


class BlockMlp(nn.Module):
    def __init__(self, size, d, hidden):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(size, d))
        self.up_proj, self.down_proj = linear(size * d, hidden), linear(hidden, d)

    def forward(self, blocks):
        """[batch, blocks, KV heads, size, d] to [batch, blocks, KV heads, d]"""
        return self.down_proj(functional.relu(self.up_proj((blocks + self.positions).flatten(-2))))


class Packed(nn.Module):
    def __init__(self, model, eps):
        super().__init__()
        heads = model["num_attention_heads"] + 2 * model["num_key_value_heads"]
        self.qkv_proj = linear(model["hidden_size"], heads * model["head_dim"])
        self.q_norm, self.k_norm = RmsNorm(model["head_dim"], eps), RmsNorm(model["head_dim"], eps)


def reads(importance, forced, sizes, n):
    """Whether each of the importance's heads [batch, heads, n, blocks] reads each token: the blocks `forced(own)`, then
    the most important, of equal ones the later. The smallest relative gap between a block that a query chose and the
    next one beside it."""
    select, count = sizes["select_block_size"], sizes["num_selected_blocks"]
    narrowest, values = math.inf, importance.tolist()
    mask = torch.zeros(*importance.shape[:2], n, n, dtype=torch.bool)
    for row in range(importance.shape[0]):
        for head in range(importance.shape[1]):
            for i in range(n):
                own, of = i // select, values[row][head][i]
                # Forced ones first, then by importance, of equal ones the later.
                order = sorted(range(own + 1), key=lambda block: (block in forced(own), of[block], block), reverse=True)
                if count <= own and order[count - 1] not in forced(own):
                    kept, dropped = (of[block] for block in order[count - 1 : count + 1])
                    if kept > dropped:
                        narrowest = min(narrowest, (kept - dropped) / max(abs(kept), abs(dropped)))
                for block in order[:count]:
                    mask[row, head, i, block * select : min((block + 1) * select, i + 1)] = True
    return mask, narrowest


class ChosenBlocks(nn.Module):
    """InfLLM-V2 and MoBA: exact attention over blocks that queries choose by means of rotated keys."""

    def __init__(self, model, attention, eps):
        super().__init__()
        self.heads, self.kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        self.d, self.theta, self.of = model["head_dim"], model["rope_theta"], attention
        self.narrowest = math.inf
        self.qkv = Packed(model, eps)
        self.o_proj = linear(self.heads * self.d, model["hidden_size"])
        if attention["kind"] == "msa":
            proj = linear(model["hidden_size"], (self.kv_heads + 1) * self.d)
            self.indexer = nn.ModuleDict({"proj": proj, "q_norm": RmsNorm(self.d, eps), "k_norm": RmsNorm(self.d, eps)})

    def index_scores(self, x):
        """Of each KV head, [batch, KV heads, queries, keys]."""
        packed = self.indexer["proj"](x).unflatten(-1, (self.kv_heads + 1, self.d))
        q, k = (self.indexer[f"{name}_norm"](y) for name, y in (("q", packed[:, :, :-1]), ("k", packed[:, :, -1:])))
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        return torch.einsum("bihd,bjd->bhij", q, k[:, :, 0])

    def by_indexer(self, x, q, k, v):
        """The output; keeps the divergence of the indexer, summed over queries, averaged over KV heads."""
        scores = self.index_scores(x.detach())
        n, select = x.shape[1], self.of["select_block_size"]
        seen = scores.detach().masked_fill(~causal(n), -math.inf)
        importance = torch.stack([seen[..., b : b + select].amax(-1) for b in range(0, n, select)], -1)
        mask, self.narrowest = reads(importance, lambda own: [own], self.of, n)
        o, p = attend(q, k, v, mask.repeat_interleave(self.heads // self.kv_heads, 1))
        p = p.detach().unflatten(1, (self.kv_heads, -1)).mean(2)
        index = (scores / math.sqrt(self.d)).masked_fill(~mask, -math.inf).log_softmax(-1).masked_fill(~mask, 0.0)
        self.divergence = (torch.xlogy(p, p) - p * index).sum() / self.kv_heads
        return o

    def by_pooled_indexer(self, x, q, k, v):
        """As by_indexer with QSA's scores: one key for each complete block, one choice for all heads."""
        packed = self.indexer["proj"](x.detach()).unflatten(-1, (self.kv_heads + 1, self.d))
        n, select = x.shape[1], self.of["select_block_size"]
        complete = n // select
        means = [packed[:, b * select : (b + 1) * select, -1:].mean(1) for b in range(complete)]
        means = torch.stack(means, 1) if means else packed[:, :0, -1:]
        keys = rotate(self.indexer["k_norm"](means), self.theta, select)
        index_q = rotate(self.indexer["q_norm"](packed[:, :, :-1]), self.theta)
        scores = torch.einsum("bihd,bcd->bhic", index_q, keys[:, :, 0]).relu().sum(1) / math.sqrt(self.d)
        importance = functional.pad(scores.detach(), (0, -(-n // select) - complete))
        mask, self.narrowest = reads(importance[:, None], lambda own: [own], self.of, n)
        o, p = attend(q, k, v, mask.expand(-1, self.heads, -1, -1))
        if complete == 0:
            self.divergence = scores.sum()
            return o
        p = p.detach().sum(1)[..., : complete * select].unflatten(-1, (complete, select)).amax(-1)
        ended = torch.arange(1, complete + 1)[None, :] * select - 1 <= torch.arange(n)[:, None]
        read = ended & mask[:, 0, :, : complete * select : select]
        p = p.masked_fill(~read, 0.0)
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
        # A finite number: a query may read no complete block.
        index = scores.masked_fill(~read, -1e30).log_softmax(-1).masked_fill(~read, 0.0)
        self.divergence = (torch.xlogy(p, p) - p * index).sum()
        return o

    def choice(self, q, k):
        n, group, select = q.shape[1], self.heads // self.kv_heads, self.of["select_block_size"]
        blocks = -(-n // select)
        if self.of["kind"] == "moba":
            means = torch.stack([k[:, b * select : (b + 1) * select].mean(1) for b in range(blocks)], 1)
            importance = torch.einsum("bihd,bjhd->bhij", q, means.repeat_interleave(group, 2))
            mask, self.narrowest = reads(importance, lambda own: [own], self.of, n)
            return mask
        size, stride = self.of["compress_block_size"], self.of["compress_stride"]
        starts = range(0, n - size + 1, stride)
        means = torch.stack([k[:, at : at + size].mean(1) for at in starts], 1)
        ended = torch.tensor([at + size - 1 for at in starts])[None, :] <= torch.arange(n)[:, None]
        _, p = attend(q, means, means, ended)
        p = p.unflatten(1, (self.kv_heads, group)).sum(2)
        importance = torch.zeros(*p.shape[:3], blocks, dtype=p.dtype)
        for block in range(blocks):
            for slot, at in enumerate(starts):
                if at < (block + 1) * select and at + size > block * select:
                    importance[..., block] = torch.maximum(importance[..., block], p[..., slot])
        local = self.of["num_local_blocks"]
        forced = lambda own: [0, *range(max(own - local + 1, 0), own + 1)]
        mask, self.narrowest = reads(importance, forced, self.of, n)
        return mask.repeat_interleave(group, 1)

    def forward(self, x):
        batch, n, _ = x.shape
        packed = self.qkv.qkv_proj(x).view(batch, n, self.heads + 2 * self.kv_heads, self.d)
        q, k, v = packed.split([self.heads, self.kv_heads, self.kv_heads], 2)
        q, k = (rotate(y, self.theta) for y in (self.qkv.q_norm(q), self.qkv.k_norm(k)))
        if self.of["kind"] == "msa":
            by = self.by_pooled_indexer if self.of.get("indexer") == "qsa" else self.by_indexer
            o = by(x, q, k, v)
        else:
            o, _ = attend(q, k, v, self.choice(q.detach(), k.detach()))
        return self.o_proj(o.reshape(batch, n, self.heads * self.d))


class SparseAttention(nn.Module):
    """Native sparse attention with keys and values that the branches share, compressed by an MLP or by means."""

    def __init__(self, model, attention, eps):
        super().__init__()
        self.heads, self.kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        self.d = model["head_dim"]
        self.theta, self.of = model["rope_theta"], attention
        # Smallest relative gap between a block that a query chose and the next one, of the last call.
        self.narrowest = math.inf
        self.qkv = Packed(model, eps)
        self.gate_proj = linear(model["hidden_size"], self.heads * 3)
        self.gate_bias = nn.Parameter(torch.zeros(self.heads * 3))
        self.o_proj = linear(self.heads * self.d, model["hidden_size"])
        if attention["compress"] == "mlp":
            sizes = attention["compress_block_size"], self.d, attention["compress_hidden_size"]
            self.k_compress, self.v_compress = BlockMlp(*sizes), BlockMlp(*sizes)

    def choice(self, p):
        """Whether each query's KV head reads each token, from the compressed branch's probabilities."""
        batch, _, n, slots = p.shape
        stride, select, size = (self.of[key] for key in ("compress_stride", "select_block_size", "compress_block_size"))
        p = p.detach().view(batch, self.kv_heads, -1, n, slots).sum(2)
        blocks = -(-n // select)
        # A compressed block counts once for each pair of strides that it and the selected block share (eq. 9).
        weight = torch.zeros(slots, blocks, dtype=p.dtype)
        for block in range(blocks):
            for m in range(select // stride):
                for l in range(size // stride):
                    slot = block * (select // stride) + m - l
                    if 0 <= slot < slots:
                        weight[slot, block] += 1
        mask, self.narrowest = reads(p @ weight, lambda own: [own, own - 1, 0], self.of, n)
        return mask.repeat_interleave(self.heads // self.kv_heads, 1)

    def forward(self, x):
        batch, n, _ = x.shape
        heads, kv_heads, d = self.heads, self.kv_heads, self.d
        packed = self.qkv.qkv_proj(x).view(batch, n, heads + 2 * kv_heads, d)
        q, k, v = packed.split([heads, kv_heads, kv_heads], 2)
        q, k = self.qkv.q_norm(q), self.qkv.k_norm(k)
        turned_q, turned_k = rotate(q, self.theta), rotate(k, self.theta)
        token = torch.arange(n)

        size, stride = self.of["compress_block_size"], self.of["compress_stride"]
        if self.of["compress"] == "mlp":
            blocks = [y.unfold(1, size, stride).transpose(-1, -2) for y in (k, v)]
            coarse_q, coarse_k, coarse_v = q, self.k_compress(blocks[0]), self.v_compress(blocks[1])
        else:
            coarse_q, coarse_k, coarse_v = turned_q, *(y.unfold(1, size, stride).mean(-1) for y in (turned_k, v))
        last = torch.arange(coarse_k.shape[1]) * stride + size - 1
        coarse, p = attend(coarse_q, coarse_k, coarse_v, last[None, :] <= token[:, None])
        selected, _ = attend(turned_q, turned_k, v, self.choice(p))
        near = causal(n) & (token[:, None] - token[None, :] < self.of["window_size"])
        window, _ = attend(turned_q, turned_k, v, near)

        gates = torch.sigmoid(self.gate_proj(x) + self.gate_bias).view(batch, n, heads, 3)
        o = sum(gates[..., at, None] * branch for at, branch in enumerate((coarse, selected, window)))
        return self.o_proj(o.reshape(batch, n, heads * d))


class Mlp(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(size, 2 * inner), linear(inner, size)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, model, attention, eps, has_norms):
        super().__init__()
        size = model["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(size, eps), RmsNorm(size, eps)
        if attention["kind"] == "mla":
            self.self_attn = LatentAttention(model, attention, eps, has_norms)
        elif attention["kind"] == "nsa":
            self.self_attn = SparseAttention(model, attention, eps)
        else:
            self.self_attn = ChosenBlocks(model, attention, eps)
        self.mlp = Mlp(size, model["intermediate_size"])

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainModel(nn.Module):
    """The model of a recipe's tables `model` and `attention`, in float64, with the weights of a checkpoint."""

    def __init__(self, model, attention, weights):
        super().__init__()
        eps = model.get("rms_norm_eps", 1e-6)
        model = {"rope_theta": 10_000.0, **model}
        has_norms = "layers.0.self_attn.q_norm.weight" in weights
        vocabulary, size = weights["embed_tokens.weight"].shape
        self.embed_tokens = nn.Embedding(vocabulary, size)
        layers = range(model["num_hidden_layers"])
        self.layers = nn.ModuleList(Layer(model, attention, eps, has_norms) for _ in layers)
        self.head = nn.ModuleDict({"norm": RmsNorm(size, eps)})
        self.double()
        self.load_state_dict({name: value.double() for name, value in weights.items()})

    def narrowest_choice(self):
        """The smallest relative gap between what a query chose and what it did not, in the last call."""
        return min(getattr(layer.self_attn, "narrowest", math.inf) for layer in self.layers)

    def divergence(self):
        """The indexers' loss in the last call, summed over queries and layers."""
        return sum(layer.self_attn.divergence for layer in self.layers)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head["norm"](x) @ self.embed_tokens.weight.T
