"""Sieve's models with latent or native sparse attention, or kinds that choose blocks, in plain PyTorch, from the
weights of a checkpoint.

Attention and the choice of blocks are those of the package's definitions.py, with a full matrix of scores; projections,
norms, rotations and the indexers' losses are here, with autograd. Nothing is shared with the program. One document a row.
Parameters have the checkpoint's names.
"""

import math
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
from dma_expiry import exported
from torch import nn
from torch.nn import functional

definitions = exported("definitions")


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


def causal(tokens):
    return definitions.seen(1, tokens)[0, 0]


def linear(inner, outer):
    return nn.Linear(inner, outer, bias=False)


class LatentAttention(nn.Module):
    def __init__(self, model, attention, eps, has_norms):
        """`model`, `attention`: tables of the recipe; has_norms: whether heads' queries
        and keys are normed before the rotation."""
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
        """Output for x `[batch, tokens, hidden size]`, over keys and values of each head made from the latents."""
        batch, n, _ = x.shape
        heads, d, rope = self.heads, self.d, self.rope
        q = self.q_proj(x).view(batch, n, heads, d + rope)
        latent, shared = self.kv_a_proj(x).split([self.rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(batch, n, heads, 2 * d)
        k = torch.cat([kv[..., :d], shared[:, :, None, :].expand(-1, -1, heads, -1)], -1)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (torch.cat([y[..., :d], rotate(y[..., d:], self.theta)], -1) for y in (q, k))
        o = definitions.attention(q, k, kv[..., d:])
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


def chosen(importance, first, local, sizes):
    """Which blocks each of the importance's heads [batch, heads, n, blocks] reads, and the smallest relative gap between
    a block that a query chose and the next one beside it."""
    n, count = importance.shape[2], sizes["num_selected_blocks"]
    own = (torch.arange(n) // sizes["select_block_size"])[:, None]
    forced = definitions.in_any_case(importance, own, first, local)
    ranked = functional.pad(forced.sort(-1, descending=True).values, (0, 1), value=-math.inf)
    kept, dropped = ranked[..., :-1][..., count - 1 : count], ranked[..., 1:][..., count - 1 : count]
    gap = (kept - dropped) / torch.maximum(kept.abs(), dropped.abs())
    gap = gap[kept.isfinite() & dropped.isfinite() & (kept > dropped)]
    return definitions.best_blocks(forced, count), min([math.inf, *gap.tolist()])


def tokens_of(blocks, size):
    """Chosen blocks as the tokens that each query reads, [batch, heads, n, n]."""
    n = blocks.shape[2]
    return blocks.repeat_interleave(size, -1)[..., :n] & causal(n)


class ChosenBlocks(nn.Module):
    """Exact attention over blocks that queries choose by means of rotated keys, or by an indexer."""

    def __init__(self, model, attention, eps, chooser=None):
        """`attention`: the recipe's table, whose kind MSA adds the indexer's projection and norms. `chooser`: the layer
        whose blocks this one reads; it has no indexer of its own then."""
        super().__init__()
        # In a list, so that its parameters are not this module's too.
        self.chooser = [chooser] if chooser else []
        self.heads, self.kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
        self.d, self.theta, self.of = model["head_dim"], model["rope_theta"], attention
        self.narrowest = math.inf
        self.qkv = Packed(model, eps)
        self.o_proj = linear(self.heads * self.d, model["hidden_size"])
        if attention["kind"] == "msa" and not chooser:
            proj = linear(model["hidden_size"], (self.kv_heads + 1) * self.d)
            self.indexer = nn.ModuleDict({"proj": proj, "q_norm": RmsNorm(self.d, eps), "k_norm": RmsNorm(self.d, eps)})

    def index_heads(self, x):
        """Queries of each KV head and the one key, [batch, heads, n, d]."""
        packed = self.indexer["proj"](x).unflatten(-1, (self.kv_heads + 1, self.d))
        q, k = (self.indexer[f"{name}_norm"](y) for name, y in (("q", packed[:, :, :-1]), ("k", packed[:, :, -1:])))
        return (rotate(x, self.theta).transpose(1, 2) for x in (q, k))

    def by_indexer(self, x, q, k, v):
        """The output; keeps what the indexer reads, its log-probabilities, and the attention that it learns."""
        index_q, index_k = self.index_heads(x.detach())
        n, select = x.shape[1], self.of["select_block_size"]
        by = index_q.detach(), index_k.detach(), torch.arange(n)[None, :, None]
        blocks, self.narrowest = chosen(definitions.msa_importance(*by, select, n), 0, 1, self.of)
        mask = tokens_of(blocks, select)
        scores = index_q @ index_k.transpose(2, 3) / math.sqrt(self.d)
        index = scores.masked_fill(~mask, -math.inf).log_softmax(-1).masked_fill(~mask, 0.0)
        self.read, self.teachers = (mask, index), []
        return self.taught(q, k, v, self)

    def taught(self, q, k, v, chooser):
        """The output over what `chooser` reads, whose indexer learns these probabilities too."""
        mask, _ = chooser.read
        chooser.teachers.append(definitions.probabilities(q, k, mask).detach().unflatten(1, (self.kv_heads, -1)).mean(2))
        return definitions.masked_attention(q, k, v, mask)

    def divergence(self):
        """Of the indexer from the mean attention of the layers that read its choice, times their number, summed over
        queries, averaged over KV heads; 0 without an indexer."""
        if self.chooser:
            return 0.0
        if self.of.get("indexer") == "qsa":
            return self.of_blocks
        p, (_, index) = torch.stack(self.teachers).mean(0), self.read
        return len(self.teachers) * (torch.xlogy(p, p) - p * index).sum() / self.kv_heads

    def by_pooled_indexer(self, x, q, k, v):
        """As by_indexer with QSA's scores: one key for each complete block, one choice for all heads."""
        packed = self.indexer["proj"](x.detach()).unflatten(-1, (self.kv_heads + 1, self.d))
        n, select = x.shape[1], self.of["select_block_size"]
        complete = n // select
        means = [packed[:, b * select : (b + 1) * select, -1:].mean(1) for b in range(complete)]
        means = torch.stack(means, 1) if means else packed[:, :0, -1:]
        keys = rotate(self.indexer["k_norm"](means), self.theta, select)
        index_q = rotate(self.indexer["q_norm"](packed[:, :, :-1]), self.theta)
        scores = definitions.qsa_scores(index_q.transpose(1, 2), keys.transpose(1, 2)) / math.sqrt(self.d)
        importance = functional.pad(scores.detach(), (0, -(-n // select) - complete))
        blocks, self.narrowest = chosen(importance, 0, 1, self.of)
        mask, scores = tokens_of(blocks, select), scores[:, 0]
        o, p = definitions.masked_attention(q, k, v, mask), definitions.probabilities(q, k, mask)
        if complete == 0:
            self.of_blocks = scores.sum()
            return o
        p = p.detach().sum(1)[..., : complete * select].unflatten(-1, (complete, select)).amax(-1)
        ended = torch.arange(1, complete + 1)[None, :] * select - 1 <= torch.arange(n)[:, None]
        read = ended & mask[:, 0, :, : complete * select : select]
        p = p.masked_fill(~read, 0.0)
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
        # A finite number: a query may read no complete block.
        index = scores.masked_fill(~read, -1e30).log_softmax(-1).masked_fill(~read, 0.0)
        self.of_blocks = (torch.xlogy(p, p) - p * index).sum()
        return o

    def choice(self, q, k):
        """The blocks that each query chooses, `[batch, choosers, tokens, blocks]`, and the narrowest gap of the choice:
        by the mean key of a block, or of a kind with a stride by InfLLM-V2's overlapping means."""
        n, select, (q, k) = q.shape[1], self.of["select_block_size"], (x.transpose(1, 2) for x in (q, k))
        if "compress_stride" not in self.of:
            # By the mean of all of a block's keys: the definition has the kind's name.
            importance = getattr(definitions, f"{self.of['kind']}_importance")
            scores = definitions.slot_scores(q, definitions.means_of(k, select, select))
            return chosen(importance(scores, select, n), 0, 1, self.of)
        sizes = self.of["compress_block_size"], self.of["compress_stride"]
        scores = definitions.slot_scores(q, definitions.means_of(k, *sizes)) / math.sqrt(self.d)
        p = definitions.slot_probabilities(scores, torch.arange(n)[None, :, None], *sizes)
        importance = definitions.infllm_importance(p, *sizes, select, n)
        return chosen(importance, 1, self.of["num_local_blocks"], self.of)

    def forward(self, x):
        """Output for x `[batch, tokens, hidden size]`; keeps the narrowest gap of the
        choice, and of an indexer what its divergence is made of."""
        batch, n, _ = x.shape
        packed = self.qkv.qkv_proj(x).view(batch, n, self.heads + 2 * self.kv_heads, self.d)
        q, k, v = packed.split([self.heads, self.kv_heads, self.kv_heads], 2)
        q, k = (rotate(y, self.theta) for y in (self.qkv.q_norm(q), self.qkv.k_norm(k)))
        if self.chooser:
            o = self.taught(q, k, v, *self.chooser)
        elif self.of["kind"] == "msa":
            by = self.by_pooled_indexer if self.of.get("indexer") == "qsa" else self.by_indexer
            o = by(x, q, k, v)
        else:
            blocks, self.narrowest = self.choice(q.detach(), k.detach())
            o = definitions.block_attention(q, k, v, blocks, self.of["select_block_size"])
        return self.o_proj(o.reshape(batch, n, self.heads * self.d))


class SparseAttention(nn.Module):
    """Native sparse attention with keys and values that the branches share, compressed by an MLP or by means."""

    def __init__(self, model, attention, eps):
        """`attention`: the recipe's table; its "compress" says whether blocks have an MLP or their mean."""
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

    def forward(self, x):
        """Output for x `[batch, tokens, hidden size]`: the three branches by their
        gates; keeps the narrowest gap of the choice."""
        batch, n, _ = x.shape
        heads, kv_heads, d = self.heads, self.kv_heads, self.d
        packed = self.qkv.qkv_proj(x).view(batch, n, heads + 2 * kv_heads, d)
        q, k, v = packed.split([heads, kv_heads, kv_heads], 2)
        q, k = self.qkv.q_norm(q), self.qkv.k_norm(k)
        turned_q, turned_k = rotate(q, self.theta), rotate(k, self.theta)
        size, stride = self.of["compress_block_size"], self.of["compress_stride"]
        if self.of["compress"] == "mlp":
            blocks = [y.unfold(1, size, stride).transpose(-1, -2) for y in (k, v)]
            coarse_q, coarse_k, coarse_v = q, self.k_compress(blocks[0]), self.v_compress(blocks[1])
        else:
            coarse_q, coarse_k, coarse_v = turned_q, *(y.unfold(1, size, stride).mean(-1) for y in (turned_k, v))
        select, query = self.of["select_block_size"], torch.arange(n)
        ended = (torch.arange(coarse_k.shape[1]) * stride + size - 1 <= query[:, None])[None, None]
        coarse = definitions.masked_attention(coarse_q, coarse_k, coarse_v, ended)
        p = definitions.probabilities(coarse_q, coarse_k, ended).detach().unflatten(1, (kv_heads, -1))
        importance = definitions.nsa_importance(p, size, stride, select, n)
        blocks, self.narrowest = chosen(importance, 1, 2, self.of)
        selected = definitions.block_attention(turned_q, turned_k, v, blocks, select)
        window = definitions.attention(turned_q, turned_k, v, window=self.of["window_size"])

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
    def __init__(self, model, attention, eps, has_norms, chooser=None):
        """A layer with the attention of the recipe's kind: latent, NSA, or of blocks that it or `chooser` chooses."""
        super().__init__()
        size = model["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(size, eps), RmsNorm(size, eps)
        if attention["kind"] == "mla":
            self.self_attn = LatentAttention(model, attention, eps, has_norms)
        elif attention["kind"] == "nsa":
            self.self_attn = SparseAttention(model, attention, eps)
        else:
            self.self_attn = ChosenBlocks(model, attention, eps, chooser)
        self.mlp = Mlp(size, model["intermediate_size"])

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainModel(nn.Module):
    """The model of a recipe's tables `model` and `attention`, in float64, with the weights of a checkpoint."""

    def __init__(self, model, attention, weights):
        """`model`, `attention`: the recipe's tables; `weights`: the checkpoint's tensors by name,
        which also say whether MLA norms its heads."""
        super().__init__()
        eps = model.get("rms_norm_eps", 1e-6)
        model = {"rope_theta": 10_000.0, **model}
        has_norms = "layers.0.self_attn.q_norm.weight" in weights
        vocabulary, size = weights["embed_tokens.weight"].shape
        self.embed_tokens = nn.Embedding(vocabulary, size)
        types, self.layers = model.get("layer_types") or ["sparse"], nn.ModuleList()
        for index in range(model["num_hidden_layers"]):
            # "shared": the blocks of the last layer that chooses.
            chooser = (chooser if types[index % len(types)] == "shared" else None) if index else None
            layer = Layer(model, attention, eps, has_norms, chooser)
            self.layers.append(layer)
            chooser = chooser or layer.self_attn
        self.head = nn.ModuleDict({"norm": RmsNorm(size, eps)})
        self.double()
        self.load_state_dict({name: value.double() for name, value in weights.items()})

    def narrowest_choice(self):
        """The smallest relative gap between what a query chose and what it did not, in the last call."""
        return min(getattr(layer.self_attn, "narrowest", math.inf) for layer in self.layers)

    def divergence(self):
        """The indexers' loss in the last call, summed over queries and layers."""
        return sum(layer.self_attn.divergence() for layer in self.layers)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head["norm"](x) @ self.embed_tokens.weight.T
