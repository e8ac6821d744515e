"""The kinds of attention as layers: hidden states in and out, with the projections, the rotary positions and the cache.

A layer's arguments are the keys of an export's `config.json`, and its weights have the names of an export's
`self_attn`: `of_config(config, index)` makes the layer, `load_state_dict` fills it. Matrices begin normal with a
standard deviation of 0.02, as in Sieve; norms at 1, biases, sinks and DMA's factors at 0.

    layer = DynamicMaskAttention(512, 8, 4, keep_window_size=256)
    y = layer(x)                                  # x: [batch, tokens, hidden_size]
    y = layer(packed, documents=cu_seqlens)       # one row of several documents
    cache = Cache(4096)
    with torch.no_grad():
        y = layer(prompt, cache=cache)            # then token by token, behind what the cache has

Every layer takes `forward(x, *, documents=None, cache=None)`:

x: `[batch, tokens, hidden_size]`, as is what it returns. A row of f32 hidden states needs autocast to bf16 on a GPU.
documents: cu_seqlens of one packed row, or `sieve_attention.documents(cu_seqlens, tokens)`, made once for all layers;
or first tokens and ends of your own, two int32 `[batch, tokens]`, which serve rows with padding: a token of padding is
a document of one token. Padding behind a row's tokens needs neither, as no token sees it. Positions begin at 0 in each
document.
cache: a `Cache` of this layer alone, which gets what the call brings; rows in it have equal lengths, and one document.
Behind it the attention of `DenseAttention`, `WindowAttention` and `CoWindowAttention` has the bits of whole rows where
`decode` has them; the projections before and behind it are other products for a token than for a row, and so the output's last bits differ.
What no kernel does is a SieveError, as of the functions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _axes, _config, _dma, _foreign, functional
from . import definitions as d
from ._library import SieveError
from ._parts import Cache, RMSNorm, Rotary, cast
from .functional import Bands, Documents, NsaBlocks

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class Shared(TypedDict, total=False):
        """What every layer with queries, keys and values takes."""

        rope_theta: float
        rope_frequencies: Sequence[float] | None
        rope_amplitude: float
        rotates: bool
        qk_norm: bool
        qkv_bias: bool
        rms_norm_eps: float
        initializer_range: float


__all__ = [
    "Cache", "CoWindowAttention", "DenseAttention", "DynamicMaskAttention", "InfLLMv2Attention", "LatentAttention", "MSA",
    "MoBA", "NativeSparseAttention", "WindowAttention", "of_config",
]  # fmt: skip


def _positions(x: Tensor, documents: Documents | None, cache: Cache | None) -> Tensor:
    """The number of each token in its document, `[batch or 1, tokens]`."""
    index = torch.arange(x.shape[1], device=x.device)[None]
    start, _ = functional._bounds(documents, x)
    return index + (0 if cache is None else cache.length) if start is None else index - start


EMPTY_PLACE = 2**31 - 1
"""The position of a place of DMA's cache that has no key."""


def _is_step(x: Tensor, documents: Documents | None, cache: Cache | None) -> bool:
    """Whether the call adds to a cache that already has tokens. `DenseAttention` takes several new ones one by one."""
    if cache is not None and documents is not None:
        raise SieveError("a row of several documents has no cache\n  hint: give each document a row")
    return cache is not None and cache.length > 0


def _listed(chosen: Tensor, count: int) -> Tensor:
    """Chosen blocks of one query a row, bools `[batch, choosers, 1, blocks]`, as `decode` takes them."""
    chosen = chosen[:, :, 0]
    order = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.where(chosen.gather(2, order), order, -1).to(torch.int32)


class _Layer(nn.Module):
    """How the weights of every layer begin, and what it says of itself."""

    def __new__(cls, *_: Any, **given: Any) -> "Self":
        if cls.__module__ == __name__:
            _foreign.refuse(f"{cls.__name__}.__init__", given, _foreign.taken_by(cls), _foreign.OF_LAYERS)
        return super().__new__(cls)

    def __init__(self, initializer_range: float) -> None:
        super().__init__()
        self.initializer_range = initializer_range

    def extra_repr(self) -> str:
        return _config.described(self)

    def reset_parameters(self) -> None:
        """Gives all weights the values of a new layer: for one that was made on the device "meta" and has got memory
        since by `to_empty`, as torchtitan and FSDP do it."""
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        for name, x in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                nn.init.normal_(x, std=self.initializer_range)
            else:
                nn.init.constant_(x, 1.0 if isinstance(module, RMSNorm) else 0.0)


class DenseAttention(_Layer):
    """Causal attention over all tokens before (arXiv:1706.03762), in groups of heads (arXiv:2305.13245).

    num_key_value_heads: as many as heads without it; head_dim: `hidden_size / num_attention_heads` without it; a
    multiple of 16 up to 256, and 64 or 128 for kinds that choose blocks. rope_theta: the base of the rotation's angles
    (arXiv:2104.09864), whose pairs are the halves of a head, or rope_frequencies: `head_dim / 2` angles a position in
    radians, and rope_amplitude: a factor on cosines and sines; rotates: False for a layer without positions. qk_norm:
    RMSNorm of each head's query and key before the rotation, as Qwen3; qkv_bias: biases of these projections.
    attention_sinks: a learned logit of each head, whose value is zero (gpt-oss, arXiv:2508.10925). initializer_range:
    the standard deviation with which matrices begin. All other layers of queries, keys and values take these too.
    """

    window_size: int | None = None
    bands: Bands | None = None

    def __init__(
        self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int | None = None,
        head_dim: int | None = None, *, rope_theta: float = 10000.0, rope_frequencies: Sequence[float] | None = None,
        rope_amplitude: float = 1.0, rotates: bool = True, qk_norm: bool = True, qkv_bias: bool = False,
        attention_sinks: bool = False, rms_norm_eps: float = 1e-6, initializer_range: float = 0.02,
    ) -> None:  # fmt: skip
        """Makes projections, norms of heads, sinks and rotation, and gives the weights their first values."""
        super().__init__(initializer_range)
        kv_heads, width = num_key_value_heads or num_attention_heads, head_dim or hidden_size // num_attention_heads
        if num_attention_heads % kv_heads:
            raise SieveError(f"{type(self).__name__}: {kv_heads} KV heads do not divide {num_attention_heads} heads")
        self.num_heads, self.num_kv_heads, self.head_dim, self.scale = num_attention_heads, kv_heads, width, width**-0.5
        self.rotary = Rotary(rope_theta, rope_frequencies, rope_amplitude, rotates)
        self.q_proj = nn.Linear(hidden_size, num_attention_heads * width, bias=qkv_bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden_size, kv_heads * width, bias=qkv_bias) for _ in range(2))
        self.q_norm, self.k_norm = (RMSNorm(width, rms_norm_eps) if qk_norm else nn.Identity() for _ in range(2))
        self.sinks = nn.Parameter(torch.zeros(num_attention_heads)) if attention_sinks else None
        self.o_proj = nn.Linear(num_attention_heads * width, hidden_size, bias=False)
        self.reset_parameters()

    def heads(self, x: Tensor) -> Tensor:
        """`[batch, tokens, heads, head_dim]`"""
        return x.unflatten(-1, (-1, self.head_dim))

    @_axes.known
    @_foreign.refusing
    def forward(self, x: Tensor, *, documents: Documents | None = None, cache: Cache | None = None) -> Tensor:
        """x: `[batch, tokens, hidden_size]`; documents: as the functions take them, or cu_seqlens."""
        if _is_step(x, documents, cache) and x.shape[1] > 1:
            return torch.cat([self.forward(token, cache=cache) for token in x.split(1, 1)], 1)
        positions = _positions(x, documents, cache)
        q = cast(self.rotary(self.q_norm(self.heads(self.q_proj(x))), positions))
        if cache is not None and cache.length:
            o = self.step(x, q, positions, cache)
        else:
            o = self.whole(x, q, positions, documents, cache)
        if cache is not None:
            cache.length += x.shape[1]
        return self.o_proj(o.flatten(2))

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, `[batch, tokens, KV heads, head_dim]`."""
        k = self.rotary(self.k_norm(self.heads(self.k_proj(x))), positions)
        return cast(k), self.heads(self.v_proj(x))

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        """Attention of whole rows, `[batch, tokens, heads, head_dim]`; a cache that is given gets their keys."""
        k, v = self.keys(x, positions)
        self.keep(cache, k=k, v=v)
        return functional.attention(q, k, v, documents=documents, sinks=self.sinks, **self.reads())

    def step(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The same of one token a row behind a cache."""
        sinks = None if self.sinks is None else cast(self.sinks)
        return self.join(q, *self.keys(x, positions), cache, sinks=sinks)

    def reads(self) -> dict[str, Any]:
        """Which keys a query sees, and the scale, as `attention` and `decode` take them."""
        return {"window": self.window_size, "scale": self.scale, "bands": self.bands}

    @staticmethod
    def keep(cache: Cache | None, **new: Tensor) -> None:
        """Writes keys and values to a cache."""
        for name, x in new.items():
            if cache is not None:
                cache.append(name, x)

    def join(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, sinks: Tensor | None = None) -> Tensor:
        """Attention of a token over a cache, which gets its key and value: only `decode` with both has `whole`'s bits."""
        settings = {**self.reads(), "sinks": sinks}
        caches = cache.tensors["k"], cache.tensors["v"]
        if torch.compiler.is_compiling():
            # torch.compile traces no operator that returns a list and writes to its inputs.
            self.keep(cache, k=k, v=v)
            return functional.decode(q, None, None, *caches, cache.lengths(q, 1), **settings)
        cache.check(cache.length + 1)
        return functional.decode(q, k, v, *caches, cache.lengths(q), **settings)


class WindowAttention(DenseAttention):
    """Each query sees the last `window_size` tokens, its own among them."""

    def __init__(self, *sizes: int, window_size: int = 512, attention_sinks: bool = False, **shared: "Unpack[Shared]"):
        super().__init__(*sizes, attention_sinks=attention_sinks, **shared)
        self.window_size = window_size


class CoWindowAttention(DenseAttention):
    """CoWindow (arXiv:2609.32704): each query sees the last `near_window` tokens, the first `sink_tokens` of its document,
    and the distances of its KV head's band. Nothing is learned or chosen.

    The distances from `near_window` to `far_reach` are divided into `num_bands` of equal width, one for each KV head
    without it; KV head h has band h. far_reach: `near_window + num_bands` at least; a row's length less `sink_tokens` is
    usual. A cache holds all tokens: those between two bands come back to a query later.
    """

    def __init__(
        self, *sizes: int, sink_tokens: int = 64, near_window: int = 1024, far_reach: int = 8128,
        num_bands: int | None = None, **shared: "Unpack[Shared]",
    ) -> None:  # fmt: skip
        """Sets the bands beside the dense layer's weights; SieveError where they do not divide the KV heads or have no
        room."""
        super().__init__(*sizes, **shared)
        number = self.num_kv_heads if num_bands is None else num_bands
        if number < 1 or self.num_kv_heads % number:
            what = f"CoWindowAttention: {number} bands do not divide {self.num_kv_heads} KV heads"
            raise SieveError(f"{what}\n  hint: leave num_bands out: every KV head then has a band of its own")
        if far_reach < near_window + number:
            what = f"CoWindowAttention: far_reach {far_reach} has no room for {number} bands behind near_window"
            raise SieveError(f"{what} = {near_window}\n  hint: the row's length less sink_tokens is usual")
        self.sink_tokens, self.near_window, self.far_reach, self.num_bands = sink_tokens, near_window, far_reach, number
        self.window_size, self.bands = near_window, Bands(sink_tokens, far_reach, number)


class DynamicMaskAttention(DenseAttention):
    """DMA (arXiv:2508.02124): each query sees the best-ranked `keep_window_size` tokens before it.

    The arguments are those of `dma_attention`, `keep_window_size` its `keep` and `local_window_size` its `local`;
    periods: tokens over which a rank grows by one, for each KV head. As in the paper A and so all scores begin at 0;
    they learn from the bias. recency="none" is the published form.
    """

    def __init__(
        self, *sizes: int, keep_window_size: int = 2048, local_window_size: int | None = None, bias: str | None = None,
        recency: str | None = None, periods: Sequence[float] | None = None, **shared: "Unpack[Shared]",
    ) -> None:  # fmt: skip
        """Adds to the dense weights those of the ranks: `dt_proj` of all KV heads' values, and A, which begins at 0."""
        super().__init__(*sizes, **shared)
        slopes = None if periods is None else [1.0 / period for period in periods]
        given: dict[str, Any] = {"bias": bias, "recency": recency, "local": local_window_size, "slopes": slopes}
        self.keep_window_size = keep_window_size
        self.form = _dma.form("DynamicMaskAttention", keep_window_size, self.num_kv_heads, **given)
        self.dt_proj = nn.Linear(self.num_kv_heads * self.head_dim, self.num_kv_heads, bias=False)
        self.A = nn.Parameter(torch.zeros(self.num_kv_heads))
        self._begin(self.dt_proj)

    def settings(self) -> dict[str, Any]:
        """Bias and local window, as the functions take them."""
        return {"bias": "linear" if self.form.linear else "exp", "local": self.form.local, "scale": self.scale}

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        """Attention of whole rows over the keys that each query keeps; a cache gets those that later queries see."""
        k, v = self.keys(x, positions)
        if cache is not None:
            self.fill(cache, k, v)
        by_slope: dict[str, Any] = {"slopes": self.form.slopes} if self.form.slopes else {"recency": "none"}
        settings = {"keep": self.keep_window_size, "documents": documents, **by_slope, **self.settings()}
        return functional.dma_attention(q, k, v, self.dt_proj.weight, self.A, **settings)

    @torch.no_grad()
    def fill(self, cache: Cache, k: Tensor, v: Tensor) -> None:
        """Keeps of whole rows what later queries can see, in places of any order; empty ones come last."""
        keep, tokens = self.keep_window_size, k.shape[1]
        rank = functional.dma_scores(v, self.dt_proj.weight, self.A, slopes=self.form.slopes)
        expire = functional.select(rank, keep=keep, local=self.form.local).expire
        count = min(keep, tokens)
        stays = (expire >= tokens).to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        named = {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "rank": rank}
        for name, x in named.items():
            index = stays if name == "rank" else stays[..., None].expand(-1, -1, -1, x.shape[3])
            cache.tensors[name] = x.new_zeros(*x.shape[:2], keep, *x.shape[3:])
            cache.tensors[name][:, :, :count] = x.gather(2, index)
        cache.tensors["position"] = torch.full((*rank.shape[:2], keep), EMPTY_PLACE, dtype=torch.int32, device=k.device)
        cache.tensors["position"][:, :, :count] = stays.to(torch.int32)

    def step(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """One token a row: its rank is its score plus its position times the slope; its key takes a free place, or that
        of the key that leaves.
        """
        k, v = self.keys(x, positions)
        rank = functional.dma_scores(v, self.dt_proj.weight, self.A)[:, :, 0]
        if self.form.slopes:
            rank = rank + cache.length * rank.new_tensor(self.form.slopes)
        k_cache, v_cache, ranks, places = (cache.tensors[name] for name in ("k", "v", "rank", "position"))
        given = q, k, v, rank, k_cache, v_cache, ranks, places, cache.lengths(q)
        return functional.dma_decode(*given, **self.settings())


class _BlocksAttention(DenseAttention):
    """Queries choose blocks of `select_block_size` tokens and read all their tokens."""

    select_block_size: int
    num_selected_blocks: int

    def __init__(self, *sizes: int, **shared: "Unpack[Shared]") -> None:
        super().__init__(*sizes, **shared)
        _config.check_width(self, self.head_dim)

    def blocks_of(self, importance: Tensor, length: int, first: int, local: int) -> Tensor:
        """The blocks that the query at position `length` reads, by their importance, as `decode` takes them."""
        own = torch.full((1, 1, 1, 1), length // self.select_block_size, device=importance.device)
        importance = d.in_any_case(importance, own, first, local)
        return _listed(d.best_blocks(importance, self.num_selected_blocks), self.num_selected_blocks)

    def step(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        k, v = self.keys(x, positions)
        self.keep(cache, k=k, v=v)
        with torch.no_grad():
            chosen = self.choose(x, q.transpose(1, 2).float(), positions, cache)
        given = q, None, None, cache.tensors["k"], cache.tensors["v"], cache.lengths(q)
        return functional.decode(*given, scale=self.scale, chosen=chosen, block=self.select_block_size)

    def choose(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The blocks of one query a row, q `[batch, heads, 1, width]`, as `decode` takes them."""
        raise NotImplementedError


class InfLLMv2Attention(_BlocksAttention):
    """InfLLM-V2 (arXiv:2509.24663, section 3.2): each group of heads reads the blocks that its pooled keys choose. It
    has the weights of a dense layer.

    Sizes in tokens: compress_block_size and compress_stride of the means of keys, of which the stride divides both
    other sizes; select_block_size of the blocks that are read, num_selected_blocks of them for each query, among them
    the first and the last num_local_blocks.
    """

    def __init__(
        self, *sizes: int, compress_block_size: int = 32, compress_stride: int = 16, select_block_size: int = 64,
        num_selected_blocks: int = 64, num_local_blocks: int = 32, **shared: "Unpack[Shared]",
    ) -> None:  # fmt: skip
        """A dense layer's weights and the sizes of blocks; all sizes in tokens but the numbers of blocks."""
        super().__init__(*sizes, **shared)
        self.select_block_size, self.num_selected_blocks = select_block_size, num_selected_blocks
        self.blocks = NsaBlocks(compress_block_size, compress_stride, select_block_size, num_selected_blocks)
        self.num_local_blocks = num_local_blocks

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        k, v = self.keys(x, positions)
        self.keep(cache, k=k, v=v)
        settings: dict[str, Any] = {"local": self.num_local_blocks, "scale": self.scale, "documents": documents}
        return functional.infllm_v2(q, k, v, blocks=self.blocks, **settings)

    def choose(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        size, stride, select, _ = self.blocks.sizes()
        end, query = cache.length + 1, positions[..., None]
        means = d.means_of(cache.tensors["k"][:, :, :end].float(), size, stride)
        p = d.slot_probabilities(d.slot_scores(q, means) * self.scale, query, size, stride)
        return self.blocks_of(d.infllm_importance(p, size, stride, select, end), cache.length, 1, self.num_local_blocks)


class MoBA(_BlocksAttention):
    """MoBA (arXiv:2502.13189, eq. 5, 6): each query head reads its own block and those whose mean key scores highest.
    It has the weights of a dense layer.

    num_selected_blocks blocks of select_block_size tokens for each query, its own among them.
    """

    def __init__(
        self, *sizes: int, select_block_size: int = 512, num_selected_blocks: int = 3, **shared: "Unpack[Shared]"
    ) -> None:
        super().__init__(*sizes, **shared)
        self.select_block_size, self.num_selected_blocks = select_block_size, num_selected_blocks

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        k, v = self.keys(x, positions)
        self.keep(cache, k=k, v=v)
        sizes: dict[str, Any] = {"block": self.select_block_size, "num_selected": self.num_selected_blocks}
        return functional.moba(q, k, v, scale=self.scale, documents=documents, **sizes)

    def choose(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        size, end = self.select_block_size, cache.length + 1
        scores = d.slot_scores(q, d.means_of(cache.tensors["k"][:, :, :end].float(), size, size))
        return self.blocks_of(d.moba_importance(scores, size, end), cache.length, 0, 1)


class MSA(_BlocksAttention):
    """MSA (arXiv:2606.13392): an indexer, a query head for each KV head and one key head, chooses blocks by their best
    token.

    num_selected_blocks blocks of select_block_size tokens for each query, the last num_local_blocks among them. The
    indexer learns by `indexer_loss` alone: add it to the model's loss, by a weight of 1 as in Sieve.
    """

    def __init__(
        self, *sizes: int, select_block_size: int = 128, num_selected_blocks: int = 16, num_local_blocks: int = 1,
        **shared: "Unpack[Shared]",
    ) -> None:  # fmt: skip
        """Adds the indexer to a dense layer: a query head for each KV head and one key head, with their norms."""
        super().__init__(*sizes, **shared)
        hidden_size, eps = self.q_proj.in_features, shared.get("rms_norm_eps", 1e-6)
        self.select_block_size, self.num_selected_blocks = select_block_size, num_selected_blocks
        self.num_local_blocks = num_local_blocks
        self.index_q_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.index_k_proj = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.index_q_norm, self.index_k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)
        for module in (self.index_q_proj, self.index_k_proj):
            self._begin(module)

    def index(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's queries and key, `[batch, tokens, KV heads or 1, head_dim]`; x gets no gradient."""
        x = x.detach()
        q, k = self.heads(self.index_q_proj(x)), self.heads(self.index_k_proj(x))
        q, k = self.rotary(self.index_q_norm(q), positions), self.rotary(self.index_k_norm(k), positions)
        return cast(q), cast(k)

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        """Attention of whole rows over the blocks that the indexer chooses; a cache gets its keys too."""
        k, v = self.keys(x, positions)
        with torch.no_grad():
            index_q, index_k = self.index(x, positions)
        self.keep(cache, k=k, v=v, index_k=index_k)
        sizes: dict[str, Any] = {"block": self.select_block_size, "num_selected": self.num_selected_blocks}
        settings = {"local": self.num_local_blocks, "scale": self.scale, "documents": documents, **sizes}
        return functional.msa(q, k, v, index_q, index_k, **settings)

    def choose(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        index_q, index_k = self.index(x, positions)
        keys, end = cache.append("index_k", index_k).float(), cache.length + 1
        query = index_q.transpose(1, 2).float()
        importance = d.msa_importance(query, keys, positions[..., None], self.select_block_size, end)
        return self.blocks_of(importance, cache.length, 0, self.num_local_blocks)

    def indexer_loss(self, x: Tensor, *, documents: Documents | None = None, warmup: bool = False) -> Tensor:
        """`KL(mean_h P^h || I)` over the tokens that a query reads, the mean over queries and KV heads.

        P^h are the attention's probabilities of a KV head's query heads, I the indexer's (arXiv:2606.13392). x and
        documents are what the layer was given; a document of one token, such as padding, adds nothing, and counts in
        the mean. The gradient goes to the indexer alone. warmup: over all tokens, as before a choice begins. In plain
        PyTorch, tiles of 256 queries one after another: their scores are made again in the backward pass, so that
        memory grows with the row's length and not with its square. Documents are read one after another.
        """
        begins, _ = functional._bounds(documents, x)
        if begins is not None:
            total = x.new_zeros((), dtype=torch.float32)
            for row, starts in enumerate(begins.expand(x.shape[0], -1).tolist()):
                firsts = [at for at in range(len(starts)) if at == 0 or starts[at] != starts[at - 1]]
                for first, end in zip(firsts, [*firsts[1:], len(starts)]):
                    if end - first > 1:
                        part = self.indexer_loss(x[row : row + 1, first:end], warmup=warmup)
                        total = total + part * (end - first)
            return total / (x.shape[0] * x.shape[1])
        positions = _positions(x, None, None)
        index_q, index_k = (y.transpose(1, 2) for y in self.index(x, positions))
        with torch.no_grad():
            q = self.rotary(self.q_norm(self.heads(self.q_proj(x))), positions).transpose(1, 2)
            k = self.keys(x, positions)[0].transpose(1, 2)
        total = x.new_zeros((), dtype=torch.float32)
        for start in range(0, x.shape[1], 256):
            given = q[:, :, start : start + 256], k, index_q[:, :, start : start + 256], index_k, start, warmup
            total = total + torch.utils.checkpoint.checkpoint(self._divergence, *given, use_reentrant=False)
        return total / (x.shape[0] * x.shape[1] * self.num_kv_heads)

    def _divergence(self, q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, start: int, warmup: bool) -> Tensor:
        """The summed divergences of a tile of queries, the first of them at `start`."""
        size, end = self.select_block_size, start + q.shape[2]
        query = torch.arange(start, end, device=q.device)[None, :, None]
        q, k, index_q, index_k = q.float(), k[:, :, :end].float(), index_q.float(), index_k[:, :, :end].float()
        hidden = (torch.arange(end, device=q.device) > query)[:, None]
        with torch.no_grad():
            if not warmup:
                importance = d.msa_importance(index_q, index_k, query, size, end)
                importance = d.in_any_case(importance, (query // size)[:, None], 0, self.num_local_blocks)
                chosen = d.best_blocks(importance, self.num_selected_blocks)
                hidden = hidden | ~chosen.repeat_interleave(size, -1)[..., :end]
            scores = (d.slot_scores(q, k) * self.scale).masked_fill(hidden[:, :, None], -math.inf)
            p = scores.softmax(-1).mean(2)
        log_index = (index_q @ index_k.transpose(2, 3) * self.scale).masked_fill(hidden, -math.inf).log_softmax(-1)
        # Finite, because the divergence multiplies it by probabilities of 0.
        log_index = log_index.masked_fill(hidden, 0.0)
        return (torch.special.xlogy(p, p) - p * log_index).sum()


class _BlockMlp(nn.Module):
    """A block of tokens' keys, or values, to one: `[.., size, width]` to `[.., width]`."""

    def __init__(self, size: int, width: int, hidden: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(size, width))
        self.up_proj, self.down_proj = nn.Linear(size * width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, blocks: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj((blocks + self.positions).flatten(-2))))


class NativeSparseAttention(_BlocksAttention):
    """NSA (arXiv:2502.11089): compressed tokens, the blocks that these choose, and a window, each by a learned gate.

    Sizes in tokens: compress_block_size and compress_stride of the compressed blocks, select_block_size of those that
    are read, num_selected_blocks of them for each query, window_size of the window. compress: "mlp", a network with
    learned positions inside a block, as in the paper (eq. 7), or "mean", without weights; compress_hidden_size: of the
    network, head_dim without it. shared_kv: whether the branches have one key and value, or each its own as in the
    paper. Gates are the sigmoids of a projection of x, three for each head.
    """

    def __init__(
        self, *sizes: int, compress_block_size: int = 32, compress_stride: int = 16, select_block_size: int = 64,
        num_selected_blocks: int = 16, window_size: int = 512, compress: str = "mlp", shared_kv: bool = True,
        compress_hidden_size: int | None = None, **shared: "Unpack[Shared]",
    ) -> None:  # fmt: skip
        """Adds the gates to a dense layer, keys and values of each branch where they are not shared,
        and with "mlp" the networks that compress.
        """
        super().__init__(*sizes, **shared)
        hidden_size, width = self.q_proj.in_features, self.head_dim
        self.select_block_size, self.num_selected_blocks = select_block_size, num_selected_blocks
        self.blocks = NsaBlocks(compress_block_size, compress_stride, select_block_size, num_selected_blocks)
        self.window_size, self.compress, self.shared_kv = window_size, compress, shared_kv
        if not shared_kv:
            for name in ("compress_k_proj", "compress_v_proj", "select_k_proj", "select_v_proj"):
                self.add_module(name, nn.Linear(hidden_size, self.num_kv_heads * width, bias=False))
        if compress == "mlp":
            hidden = compress_hidden_size or width
            self.k_compress, self.v_compress = (_BlockMlp(compress_block_size, width, hidden) for _ in range(2))
        elif compress != "mean":
            raise SieveError(f'NativeSparseAttention: compress is "{compress}", and must be "mlp" or "mean"')
        self.gate_proj = nn.Linear(hidden_size, self.num_heads * 3)
        self.reset_parameters()

    def branch(self, x: Tensor, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of a branch, rotated but for an MLP, whose keys have learned positions, and values."""
        source = "" if self.shared_kv or name == "window" else f"{name}_"
        k = self.k_norm(self.heads(getattr(self, f"{source}k_proj")(x)))
        is_plain = name == "compress" and self.compress == "mlp"
        k = k * self.rotary.amplitude if is_plain else self.rotary(k, positions)
        return cast(k), self.heads(getattr(self, f"{source}v_proj")(x))

    def coarse_query(self, x: Tensor, q: Tensor) -> Tensor:
        """The query of the compressed branch."""
        if self.compress == "mean":
            return q
        plain = self.q_norm(self.heads(self.q_proj(x)))
        return cast(plain * self.rotary.amplitude)

    def compressed(self, k: Tensor, v: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        """One key and value a block, `[batch, slots, KV heads, width]`, where the functions look for them."""
        if self.compress == "mean":
            return functional.nsa_mean_pool(k, v, blocks=self.blocks, documents=documents)
        size, stride, _, _ = self.blocks.sizes()
        tokens, slots = k.shape[1], -(-k.shape[1] // stride)
        token = torch.arange(tokens, device=k.device)[None]
        start, end = functional._bounds(documents, k)
        start, end = (
            (token.new_zeros(1, 1), token.new_full((1, 1), tokens)) if start is None or end is None else (start, end)
        )
        # The first token of each slot's block; blocks that a document's end cuts have none and are not read.
        place, is_first = token - start, ((token - start) % stride == 0) & (token + size <= end)
        slot = torch.where(is_first, -(-start // stride) + place // stride, slots).long()
        first = token.new_zeros(len(slot), slots + 1).scatter(1, slot, token.expand_as(slot))[:, :slots]
        index = (first[..., None] + torch.arange(size, device=k.device)).clamp(max=tokens - 1).flatten(1)
        index = index[..., None, None].expand(len(k), -1, *k.shape[2:])
        taken = (x.gather(1, index).unflatten(1, (slots, size)).transpose(2, 3) for x in (k, v))
        k, v = (mlp(x) for mlp, x in zip((self.k_compress, self.v_compress), taken))
        return k, v

    def whole(
        self, x: Tensor, q: Tensor, positions: Tensor, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        """The three branches of whole rows by their gates; a cache gets each
        branch's keys and values, and compressed blocks.
        """
        settings: dict[str, Any] = {"scale": self.scale, "documents": documents}
        plain, near = self.branch(x, "compress", positions), self.branch(x, "window", positions)
        far = near if self.shared_kv else self.branch(x, "select", positions)
        pooled = self.compressed(*plain, documents)
        if cache is not None:
            done = max((x.shape[1] - self.blocks.compressed) // self.blocks.stride + 1, 0)
            self.keep(cache, plain_k=plain[0], plain_v=plain[1], far_k=far[0], far_v=far[1], k=near[0], v=near[1])
            for name, y in zip(("pooled_k", "pooled_v"), pooled):
                cache.append(name, y[:, :done], 0)
        coarse, chosen = functional.nsa_compressed(self.coarse_query(x, q), *pooled, blocks=self.blocks, **settings)
        selected = functional.nsa_selected(q, *far, chosen, blocks=self.blocks, **settings)
        return self.gated(x, coarse, selected, functional.attention(q, *near, window=self.window_size, **settings))

    def gated(self, x: Tensor, *branches: Tensor) -> Tensor:
        """The branches by their gates."""
        gates = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (-1, 3, 1)).unbind(3)
        return gates[0] * branches[0] + gates[1] * branches[1] + gates[2] * branches[2]

    def step(self, x: Tensor, q: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The three branches of one token a row; the token that completes a compressed block adds it to the cache."""
        plain, near = self.branch(x, "compress", positions), self.branch(x, "window", positions)
        far = near if self.shared_kv else self.branch(x, "select", positions)
        self.keep(cache, plain_k=plain[0], plain_v=plain[1], far_k=far[0], far_v=far[1])
        (size, stride, select, _), end = self.blocks.sizes(), cache.length + 1
        if end >= size and (end - size) % stride == 0:
            # This token completes a block.
            k, v = (cache.tensors[name][:, :, end - size : end].transpose(1, 2) for name in ("plain_k", "plain_v"))
            for name, y in zip(("pooled_k", "pooled_v"), self.compressed(k, v, None)):
                cache.append(name, y[:, :1], (end - size) // stride)
        slots = max((end - size) // stride + 1, 1)
        pooled_k, pooled_v = (cache.tensors[name][:, :, :slots] for name in ("pooled_k", "pooled_v"))
        query = self.coarse_query(x, q).transpose(1, 2)
        scores = d.slot_scores(query.float(), pooled_k.float()) * self.scale
        p = d.slot_probabilities(scores, positions[..., None], size, stride)
        coarse = (p.to(pooled_v.dtype) @ pooled_v[:, :, None]).flatten(1, 2).transpose(1, 2)
        chosen = self.blocks_of(d.nsa_importance(p, size, stride, select, end), cache.length, 1, 2)
        caches = cache.tensors["far_k"], cache.tensors["far_v"]
        given = q, None, None, *caches, cache.lengths(q)
        selected = functional.decode(*given, scale=self.scale, chosen=chosen, block=select)
        return self.gated(x, coarse, selected, self.join(q, *near, cache))


class LatentAttention(_Layer):
    """MLA (arXiv:2405.04434, section 2.1): keys and values from a latent of `kv_lora_rank` numbers a token, which is
    what a cache holds, with one rotated key of `qk_rope_head_dim` for all heads. head_dim: of values, and of keys
    without the rotated part. mla_qk_norm: RMSNorm of each head's query and key, all with one weight. Other arguments as
    of `DenseAttention`.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, head_dim: int, *, kv_lora_rank: int, qk_rope_head_dim: int,
        mla_qk_norm: bool = False, rope_theta: float = 10000.0, rope_frequencies: Sequence[float] | None = None,
        rope_amplitude: float = 1.0, rms_norm_eps: float = 1e-6, initializer_range: float = 0.02,
    ) -> None:  # fmt: skip
        """Makes the projections down to the latent and up to the heads, and the rotation of the rest of a key."""
        super().__init__(initializer_range)
        self.num_heads, self.head_dim, self.rank, self.rope = (
            num_attention_heads,
            head_dim,
            kv_lora_rank,
            qk_rope_head_dim,
        )
        self.scale, self.mla_qk_norm = (head_dim + qk_rope_head_dim) ** -0.5, mla_qk_norm
        self.rotary = Rotary(rope_theta, rope_frequencies, rope_amplitude, True)
        self.q_proj = nn.Linear(hidden_size, num_attention_heads * (head_dim + qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, rms_norm_eps)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_attention_heads * 2 * head_dim, bias=False)
        self.o_proj = nn.Linear(num_attention_heads * head_dim, hidden_size, bias=False)
        if mla_qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(head_dim + qk_rope_head_dim, rms_norm_eps) for _ in range(2))
        self.reset_parameters()

    def heads(self, x: Tensor) -> Tensor:
        """`[batch, tokens, heads, width]`"""
        return x.unflatten(-1, (self.num_heads, -1))

    @_axes.known
    @_foreign.refusing
    def forward(self, x: Tensor, *, documents: Documents | None = None, cache: Cache | None = None) -> Tensor:
        """x: `[batch, tokens, hidden_size]`; documents: as the functions take them, or cu_seqlens."""
        is_step, width = _is_step(x, documents, cache), self.head_dim
        positions = _positions(x, documents, cache)
        q = self.heads(self.q_proj(x))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        latent, inverse = self.kv_a_layernorm(latent), None
        kv, k_rope = self.heads(self.kv_b_proj(latent)), k_rope[:, :, None]
        if self.mla_qk_norm:
            q = self.q_norm(q)
            inverse = self.k_norm.inverse(torch.cat([kv[..., :width], k_rope.expand(-1, -1, self.num_heads, -1)], -1))
            # Turning a key and dividing it by its root mean square commute: one rotated key serves all heads.
            k_rope = k_rope * self.k_norm.weight[width:]
        q = torch.cat([q[..., :width], self.rotary(q[..., width:], positions)], -1)
        k_rope = self.rotary(k_rope, positions)
        if cache is not None:
            cache.append("latent", cast(torch.cat([latent[:, :, None], k_rope], -1)))
            if inverse is not None:
                cache.append("inverse", inverse)
        o = self.folded(q, cache) if is_step and cache is not None else self.unfolded(q, kv, k_rope, inverse, documents)
        if cache is not None:
            cache.length += x.shape[1]
        return self.o_proj(o.flatten(2))

    def unfolded(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, inverse: Tensor | None, documents: Documents | None
    ) -> Tensor:
        """Attention of whole rows, over keys and values of each head."""
        k = kv[..., : self.head_dim]
        k = k * self.k_norm.weight[: self.head_dim] if inverse is not None else k
        k = torch.cat([k, k_rope.expand(-1, -1, self.num_heads, -1)], -1)
        k = k if inverse is None else (k * inverse).to(k.dtype)
        return functional.attention(q, k, kv[..., self.head_dim :], scale=self.scale, documents=documents)

    def folded(self, q: Tensor, cache: Cache) -> Tensor:
        """Attention on the latents themselves: the way up is multiplied into the queries and into what they read."""
        width, latents = self.head_dim, cache.tensors["latent"][:, 0]
        up, down = self.kv_b_proj.weight.view(self.num_heads, 2 * width, self.rank).split(width, 1)
        nope = q[..., :width] * self.k_norm.weight[:width] if self.mla_qk_norm else q[..., :width]
        folded = torch.cat([torch.einsum("bthd,hdr->bthr", nope, up), q[..., width:]], -1)
        inverse = cache.tensors.get("inverse")
        factors = None if inverse is None else inverse[..., 0].transpose(1, 2).float().contiguous()
        given: dict[str, Any] = {"scale": self.scale, "key_scale": factors, "length": cache.lengths(q)}
        o = functional.mla_decode(folded, latents, self.rank, **given)
        return torch.einsum("bthr,hdr->bthd", o, down)


SHARED = ("rope_theta", "rope_frequencies", "rope_amplitude", "rms_norm_eps")
OF_HEADS = (*SHARED, "qk_norm", "qkv_bias")
# The layer of each kind that an export names, and the keys of config.json that it takes.
KINDS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "mha": (DenseAttention, (*OF_HEADS, "attention_sinks")),
    "swa": (WindowAttention, (*OF_HEADS, "attention_sinks", "window_size")),
    "cowa": (CoWindowAttention, (*OF_HEADS, "sink_tokens", "near_window", "far_reach", "num_bands")),
    "dma": (DynamicMaskAttention, (*OF_HEADS, "keep_window_size", "local_window_size", "bias", "periods")),
    "nsa": (
        NativeSparseAttention,
        (*OF_HEADS, "compress_block_size", "compress_stride", "select_block_size", "num_selected_blocks", "window_size",
         "compress", "shared_kv", "compress_hidden_size"),
    ),
    "infllm_v2": (
        InfLLMv2Attention,
        (*OF_HEADS, "compress_block_size", "compress_stride", "select_block_size", "num_selected_blocks",
         "num_local_blocks"),
    ),
    "moba": (MoBA, (*OF_HEADS, "select_block_size", "num_selected_blocks")),
    "msa": (MSA, (*OF_HEADS, "select_block_size", "num_selected_blocks", "num_local_blocks")),
    "mla": (LatentAttention, (*SHARED, "kv_lora_rank", "qk_rope_head_dim", "mla_qk_norm")),
}  # fmt: skip


def of_config(config: Mapping[str, Any] | Any, index: int = 0) -> nn.Module:
    """The attention of layer `index` of an export: config is its `config.json`, as a mapping or an object of
    transformers, of the class SieveForCausalLM, or of Qwen3, as which dense attention and windows are exported. Other
    classes are refused. `load_state_dict` takes the weights below `model.layers.INDEX.self_attn.`.
    """
    given = _config.keys_of(config, index)
    at = lambda name: (given.get(name) or [None])[index % len(given.get(name) or [None])]  # noqa: E731
    given |= at("layer_attention") or {}
    kind = "mha" if at("dense_layers") else given.get("attention_kind", "mha")
    if at("shared_layers") or kind not in KINDS or given.get("indexer", "msa") != "msa":
        what = "reads another layer's blocks" if at("shared_layers") else f"is of kind {kind}, {given.get('indexer')}"
        raise SieveError(
            f"layer {index} {what}, which has no layer here\n  hint: modeling_sieve.py of the export has it"
        )
    layer, keys = KINDS[kind]
    settings = {key: given[key] for key in keys if key in given}
    if kind != "mla":
        settings["rotates"] = bool((given.get("no_rope_layers") or [1] * (index + 1))[index])
    if kind == "dma" and given.get("periods") is None:
        settings["recency"] = "none"
    sizes = [given[key] for key in _config.SIZES if kind != "mla" or key != "num_key_value_heads"]
    return layer(*sizes, **settings)
