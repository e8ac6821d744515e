"""Who races: for each rival a function that takes a problem and returns a call `(q, k, v) -> o`, all in
FlashAttention's shapes. What the call needs beyond q, k and v (lists of blocks, masks) is made before it and is not
timed, but for `own`.

A rival raises `NotOffered` for what its interface does not have; any other error counts as its own refusal.
"""

import contextlib
import functools
import os
import sys
import types
from unittest import mock

import torch
from problems import BANDS, BLOCK, CHOSEN, FIRST, LOCAL, TILE, WIDTH, WINDOW

SCALE = WIDTH**-0.5
MSA_BLOCK, MSA_KEYS = 128, 2048


class NotOffered(Exception):
    pass


def first(x):
    return x[0] if isinstance(x, (tuple, list)) else x


def unpacked(call):
    """`call` of rows `[tokens, heads, 128]`, as of a batch of one."""
    return lambda *rows: first(call(*(x[0] for x in rows)))[None]


def refuse_documents(problem, why):
    if problem.documents:
        raise NotOffered(why)


# ---- ours
def sieve(problem, deterministic=True):
    """sieve_attention, sums in a fixed order, or in any."""
    import sieve_attention as ours

    documents = ours.documents(problem.cu_seqlens, problem.tokens) if problem.documents else None
    settings = {"documents": documents, "deterministic": deterministic}
    if problem.task == "dense":
        return lambda q, k, v: ours.attention(q, k, v, **settings)
    if problem.task == "window":
        return lambda q, k, v: ours.attention(q, k, v, window=WINDOW, **settings)
    if problem.task == "bands":
        bands = ours.Bands(FIRST, problem.reach, BANDS)
        return lambda q, k, v: ours.attention(q, k, v, window=WINDOW, bands=bands, **settings)
    if problem.task in ("selected", "shared"):
        indices = problem.blocks[None]
        return lambda q, k, v: ours.selected_attention(q, k, v, indices, block=BLOCK, **settings)
    if problem.task == "tiles":
        tiles = ours.block_mask(problem.tiles, TILE, documents)
        return lambda q, k, v: ours.block_sparse(q, k, v, tiles, deterministic=deterministic)
    if problem.task == "expiring":
        rank = problem.rank

        def call(q, k, v):
            kept = ours.select(rank, keep=WINDOW, local=LOCAL, documents=documents)
            return ours.expiring_attention(q, k, v, rank, kept, deterministic=deterministic)

        return call
    raise NotOffered(f"no task {problem.task}")


def sieve_own(kind):
    """A whole method of sieve_attention, with its choice of keys, sums in a fixed order."""

    def build(problem):
        """The call of the method on `problem`; what DMA, NSA and MSA need beyond q, k and v is random."""
        import sieve_attention as ours

        heads, kv_heads, tokens = problem.heads, problem.kv_heads, problem.tokens
        settings = {"deterministic": True}
        if kind == "dma":
            w_dt = problem.random(kv_heads, kv_heads * WIDTH) * (kv_heads * WIDTH) ** -0.5
            a = problem.random(kv_heads)
            return lambda q, k, v: ours.dma_attention(q, k, v, w_dt, a, keep=WINDOW, **settings)
        if kind == "nsa":
            gates = problem.random(1, tokens, heads, 3).bfloat16()
            return lambda q, k, v: ours.nsa(q, k, v, *ours.nsa_mean_pool(k, v), gates, window=512, **settings)
        if kind == "msa":
            index_q, index_k = problem.new(kv_heads).detach(), problem.new(1).detach()
            return lambda q, k, v: ours.msa(q, k, v, index_q, index_k, **settings)
        return lambda q, k, v: getattr(ours, kind)(q, k, v, **settings)

    return build


# ---- dense and windows
def flash_attention_4(deterministic=False):
    """The builder of FlashAttention-4's call; deterministic: sums in a fixed order in its backward pass."""

    def build(problem):
        """The call for dense attention, windows or tiles; rows of documents are packed, which tiles do not offer."""
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        options = {"deterministic": deterministic}
        if problem.task == "tiles":
            refuse_documents(problem, "no backward pass of packed rows with tiles")
            tiles, turned = of_tiles(problem.tiles), of_tiles(problem.tiles.transpose(1, 2))
            options |= {"block_sparse_tensors": tiles, "block_sparse_tensors_bwd": turned}
        else:
            options |= {"causal": True, "window_size": (WINDOW - 1, 0) if problem.task == "window" else (None, None)}
        if problem.documents:
            ends = {"cu_seqlens_q": problem.cu_seqlens, "cu_seqlens_k": problem.cu_seqlens}
            longest = max(end - begin for begin, end in zip(problem.documents, problem.documents[1:]))
            options |= ends | {"max_seqlen_q": longest, "max_seqlen_k": longest}
            return unpacked(lambda q, k, v: flash_attn_varlen_func(q, k, v, **options))
        return lambda q, k, v: first(flash_attn_func(q, k, v, **options))

    return build


def of_tiles(tiles):
    """Tiles as FlashAttention-4 reads them: all of them whole."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    count, order = lists_of(tiles)
    return BlockSparseTensorsTorch(count * 0, order * 0, count, order, block_size=(TILE, TILE))


def lists_of(tiles, most=None):
    """How many tiles of keys a tile of queries sees, and which, ascending: int32 `[1, heads, tiles]`, one axis more."""
    order = (~tiles).byte().sort(dim=-1, stable=True).indices[..., :most]
    return tiles.sum(-1)[None].int().contiguous(), order[None].int().contiguous()


def flash_sparse_attn(problem):
    """Its package's own __init__ wants triton_kernels, so that `ops.cute` is imported as a bare package."""
    if "flash_sparse_attn.ops" not in sys.modules:
        base = next(path for folder in sys.path if os.path.isdir(path := os.path.join(folder, "flash_sparse_attn")))
        for name, folder in (("flash_sparse_attn", base), ("flash_sparse_attn.ops", os.path.join(base, "ops"))):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [folder]
    from flash_sparse_attn.ops.cute.interface import flash_attn_func, flash_attn_varlen_func

    options = {"is_causal": True}
    if problem.task == "window":
        # Columns: first keys, distant band, gap, near keys.
        sizes = torch.tensor([[0, 0, 0, WINDOW]] * problem.kv_heads, dtype=torch.int32, device=problem.device)
        options |= {"is_local": True, "window_sizes": sizes}
    if problem.documents:
        ends = {"cu_seqlens_q": problem.cu_seqlens, "cu_seqlens_k": problem.cu_seqlens}
        longest = max(end - begin for begin, end in zip(problem.documents, problem.documents[1:]))
        options |= ends | {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return unpacked(lambda q, k, v: flash_attn_varlen_func(q, k, v, **options))
    return lambda q, k, v: first(flash_attn_func(q, k, v, **options))


# Tiles of queries and keys, warps and stages of its Triton kernels: those of its own lists that are tried here. Its own
# search compiles 54 for each kernel and length, which takes longer than the whole race.
TRITON_TILES = {
    "fwd": [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3)],
    "bwd": [(64, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1), (32, 128, 4, 2)],
    "dec": [(16, 64, 4, 2), (16, 128, 4, 2), (16, 64, 4, 3)],
}
TRITON_TOKENS = 8192  # of the row whose times choose among them


def triton_package():
    """flash-sparse-attn's Triton functions; two packages that they do without get stand-ins."""
    for name in ("triton_kernels", "triton_kernels.matmul_ogs", "triton_kernels.numerics"):
        sys.modules.setdefault(name, mock.MagicMock())
    import flash_sparse_attn.ops.triton.interface as package
    from flash_sparse_attn.ops.triton import launch_template

    return package, launch_template


class TritonTiles:
    """Sets which tiles the package's kernels take, and finds the fastest of `TRITON_TILES` once a process and number of
    heads."""

    taken, chosen = {}, {kind: tiles[0] for kind, tiles in TRITON_TILES.items()}

    @classmethod
    def best(cls, key, launch_template, kinds, run):
        """`run`: a call that launches the kernels of these kinds; those that a GPU has no room for are left out."""
        launch_template.load_launch_config = lambda kernel_name, **_: (*cls.chosen[kernel_name[:3]], 1)
        for kind in kinds if key not in cls.taken else []:
            timed = {}
            for tiles in TRITON_TILES[kind]:
                cls.chosen[kind] = tiles
                with contextlib.suppress(Exception):
                    timed[tiles] = min(milliseconds(run) for _ in range(3))
            cls.chosen[kind] = min(timed, key=timed.get, default=TRITON_TILES[kind][0])
        cls.taken.setdefault(key, {kind: cls.chosen[kind] for kind in kinds})
        cls.chosen.update(cls.taken[key])


def milliseconds(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def window_sizes(problem):
    """A row for each KV head: first keys, width of the band, gap between the window and the band, window."""
    bands = [problem.band(head) for head in range(problem.kv_heads)]
    rows = [[FIRST, end - begin, begin - WINDOW, WINDOW] for begin, end in bands]
    return torch.tensor(rows, dtype=torch.int32, device=problem.device)


def triton_options(problem, package, threshold):
    """The package's functions for whole rows and for a step, and what both take."""
    options = {"skip_checks": True}
    if problem.task == "bands":
        options |= {"window_sizes": window_sizes(problem), "is_local": True}
    if threshold is None:
        return package.flash_dense_attn_func, package.flash_dense_attn_with_kvcache_func, options
    options["softmax_threshold"] = threshold
    return package.flash_sparse_attn_func, package.flash_sparse_attn_with_kvcache_func, options


def flash_sparse_attn_triton(threshold=None):
    """The builder of its Triton kernels' call; threshold: that of MassAlloc (arXiv:2609.32712)."""

    def build(problem):
        """The call for dense attention or bands; at 8,192 tokens both passes choose the tiles of later calls."""
        refuse_documents(problem, "packed rows were not tried")
        package, launch_template = triton_package()
        whole, _, options = triton_options(problem, package, threshold)
        call = lambda q, k, v: whole(q, k, v, is_causal=True, **options)  # noqa: E731
        key = threshold, problem.task, problem.heads, problem.kv_heads
        if problem.tokens == TRITON_TOKENS or key in TritonTiles.taken:

            def both():
                o = call(problem.q, problem.k, problem.v)
                torch.autograd.grad(o, problem.inputs, problem.do)

            TritonTiles.best(key, launch_template, ["fwd", "bwd"], both)
        else:
            TritonTiles.best(None, launch_template, [], None)
        return call

    return build


# ---- a decoding step: for each rival and task a function that takes a problem and returns a call without arguments,
# the attention of the row's last token over a cache of the others, `[heads, width]`
def sieve_step(problem):
    """sieve_attention's decode; it writes the token's key and value."""
    import sieve_attention as ours

    q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
    caches = [x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (k, v)]
    length = torch.full((1,), problem.tokens - 1, dtype=torch.int32, device=problem.device)
    token = [x[:, -1:].contiguous() for x in (q, k, v)]
    settings = {"window": WINDOW} if problem.task in ("window", "bands") else {}
    if problem.task == "bands":
        settings["bands"] = ours.Bands(FIRST, problem.reach, BANDS)
    return lambda: ours.decode(*token, *caches, length, **settings)[0, 0]


def triton_step(threshold=None):
    """The builder of its decoding step; the token's key and value are in the cache."""

    def build(problem):
        """The call of the last token; the first of so many heads chooses its tiles."""
        package, launch_template = triton_package()
        _, step, options = triton_options(problem, package, threshold)
        q, k, v = problem.q.detach()[:, -1].contiguous(), problem.k.detach(), problem.v.detach()
        run = lambda: first(step(q, k, v, **options))[0]  # noqa: E731
        key = threshold, problem.task, "step", problem.heads, problem.kv_heads
        TritonTiles.best(key, launch_template, ["dec"], run)
        return run

    return build


def cudnn(problem):
    """cuDNN's dense attention through PyTorch's SDPA, in whose layout heads come before tokens."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    refuse_documents(problem, "scaled_dot_product_attention has no documents")
    turn = lambda x: x.transpose(1, 2)  # noqa: E731

    def call(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attend = torch.nn.functional.scaled_dot_product_attention
            return turn(attend(turn(q), turn(k), turn(v), is_causal=True, enable_gqa=True))

    return call


def flex(problem):
    """FlexAttention, compiled; its mask and the lists of its tiles are made before."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    start, group, task = problem.start, problem.group, problem.task
    mixed_tiles, whole = problem.mixed(TILE)
    lists = *lists_of(mixed_tiles & ~whole), *lists_of(whole)
    expires = problem.expires if task == "expiring" else None
    rank = problem.rank[0] if task == "expiring" else None
    if task == "selected":
        chosen = problem.blocks.long().transpose(0, 1)
        last = -(-problem.tokens // BLOCK)
        table = torch.zeros(*chosen.shape[:2], last + 1, dtype=torch.bool, device=problem.device)
        table.scatter_(2, torch.where(chosen < 0, last, chosen), True)
    tiles, tile_of = (problem.tiles, problem.tile_of) if task == "tiles" else (None, None)

    def sees(b, h, i, j):
        """FlexAttention's mask: whether query i of head h sees key j in this task;
        `start`: the first token of i's document."""
        visible = (j <= i) & (j >= start[i])
        if task == "window":
            return visible & (i - j < WINDOW)
        if task == "selected":
            return visible & table[h // group, i, (j - start[i]).clamp(min=0) // BLOCK]
        if task == "expiring":
            return visible & (i < expires[h // group, j])
        return tiles[h, tile_of[i], tile_of[j]] if task == "tiles" else visible

    biased = (lambda logit, b, h, i, j: logit + rank[h // group, j]) if rank is not None else None
    length = problem.tokens, problem.tokens
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=length)
    compiled = torch.compile(flex_attention, dynamic=False)
    turn = lambda x: x.transpose(1, 2)  # noqa: E731
    options = {"block_mask": mask, "score_mod": biased, "enable_gqa": True}
    return lambda q, k, v: turn(compiled(turn(q), turn(k), turn(v), **options))


# ---- chosen blocks
def refuse_groups(problem):
    """What fla's NSA does not take, and what takes it too long here."""
    if problem.group < 16:
        raise NotOffered("fewer than 16 query heads a KV head")
    if problem.group > 64:
        raise NotOffered("it tries 40 variants for each group; those for 128 heads were not compiled within 120 s")


def fla_selected(problem):
    """The selected branch of fla's NSA alone."""
    from fla.ops.nsa.parallel import ParallelNSAFunction

    refuse_groups(problem)
    indices = problem.blocks[None].long()
    ends = problem.cu_seqlens.long() if problem.documents else None
    return lambda q, k, v: ParallelNSAFunction.apply(q, k, v, indices, CHOSEN, BLOCK, SCALE, ends)


def fla_own(problem):
    """fla's NSA, compressed keys the means of its blocks; its window of 512 by FlashAttention-4."""
    import fla.ops.nsa.parallel as package
    from flash_attn.cute import flash_attn_func

    refuse_groups(problem)
    package.flash_attn_func = lambda *inputs, **options: first(flash_attn_func(*inputs, **options))
    gates = [problem.random(1, problem.tokens, problem.heads).sigmoid().bfloat16() for _ in range(3)]
    options = {"block_counts": CHOSEN, "block_size": BLOCK, "window_size": 512}
    return lambda q, k, v: package.parallel_nsa(q, k, v, *gates, **options)


def fla_moba(problem):
    from fla.ops.moba import parallel_moba
    from fla.ops.moba.parallel import flash_attn_varlen_func

    if flash_attn_varlen_func is None:
        raise NotOffered("needs FlashAttention-2, which has no wheel for this torch and CUDA")
    return unpacked(lambda q, k, v: parallel_moba(q, k, v, problem.cu_seqlens, problem.tokens, 512, 3))


def flash_nsa_package(problem):
    """Sets flash_nsa's sizes of blocks and the documents; packages that it only names get stand-ins."""
    # What setuptools 82 and the machine lack, and the package only names.
    for name in ("pandas", "pkg_resources"):
        with contextlib.suppress(ImportError):
            __import__(name)
        sys.modules.setdefault(name, types.ModuleType(name))
    if not hasattr(sys.modules["pkg_resources"], "parse_version"):
        from packaging.version import parse

        sys.modules["pkg_resources"].parse_version = parse
    from flash_nsa import NSAHelper

    NSAHelper.set_hyperparameters(32, 16, BLOCK, 512, CHOSEN, num_init_blocks=1, num_local_blocks=2)
    NSAHelper.init_cu_seqlens(problem.cu_seqlens)


def flash_nsa_selected(problem):
    """The selected branch of mdy666's Triton NSA alone; it counts a list's unused places as the last block's end."""
    flash_nsa_package(problem)
    from flash_nsa.ops.select_attn import select_attn

    indices = problem.blocks.transpose(0, 1).contiguous()
    indices = torch.where(indices < 0, -(-problem.tokens // BLOCK), indices).int()
    return unpacked(lambda q, k, v: select_attn(q, k, v, indices, SCALE))


def flash_nsa_own(problem):
    """mdy666's Triton NSA whole; its window of 512 by FlashAttention-4."""
    flash_nsa_package(problem)
    from flash_attn.cute import flash_attn_func
    from flash_nsa.modules import megatron_level_nsa as package

    tape = []

    def window_forward(q, k, v, **_):
        with torch.enable_grad():
            inputs = [x.detach()[None].requires_grad_() for x in (q, k, v)]
            tape[:] = inputs, first(flash_attn_func(*inputs, causal=True, window_size=(511, 0)))
        return tape[1].detach()[0], None

    def window_backward(q, k, v, o, lse, do, **_):
        return tuple(x[0].contiguous() for x in torch.autograd.grad(tape[1], tape[0], do[None], retain_graph=True))

    package.swa_fwd, package.swa_bwd = window_forward, window_backward
    gates = problem.random(problem.tokens, problem.heads, 3).bfloat16()
    return unpacked(lambda q, k, v: package.flash_nsa_varlen_func(q, k, v, gates, None, None, SCALE))


def attention_gym(problem):
    """gather_attn: lists of tokens, shared by all heads, of keys that are values too."""
    from attn_gym.sparse.gather_attn import gather_attn

    refuse_documents(problem, "not tried: its documents count their keys anew")
    token = problem.blocks[:, 0, :, None].int() * BLOCK + torch.arange(BLOCK, device=problem.device, dtype=torch.int32)
    query = torch.arange(problem.tokens, device=problem.device)[:, None, None]
    token = torch.where((token < 0) | (token > query), -1, token).flatten(1)[None].int().contiguous()
    turn = lambda x: x.transpose(1, 2)  # noqa: E731

    def call(q, k, v):
        keys = turn(k)
        return turn(gather_attn(turn(q), keys, keys, token, sliding_window_size=0))

    return call


# ---- tiles
class _FrontendTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, count, order):
        """o by cuDNN's frontend. count: tiles of keys that each tile of queries
        sees; order: which, as `lists_of` gives both."""
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        settings = {"q2k_block_nums": count, "sparse_block_size": TILE, "softmax_scale": SCALE, "layout": "bshd"}
        results = block_sparse_attention_forward(q, k, v, order, allow_empty_block_nums=True, **settings)
        ctx.save_for_backward(q, k, v, results["o_tensor"], results["lse_tensor"], count, order)
        return results["o_tensor"]

    @staticmethod
    def backward(ctx, do):
        """Gradients of q, k and v, by the same lists as forward."""
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        q, k, v, o, lse, count, order = ctx.saved_tensors
        settings = {"q2k_block_nums": count, "sparse_block_size": TILE, "softmax_scale": SCALE, "layout": "bshd"}
        results = block_sparse_attention_backward(do.contiguous(), q, k, v, o, lse, order, **settings)
        return results["dq_tensor"], results["dk_tensor"], results["dv_tensor"], None, None


def cudnn_frontend(problem):
    refuse_documents(problem, "its tiles have no documents")
    count, order = lists_of(problem.tiles)
    order = order[..., : max(int(count.max()), 1)].contiguous()
    return lambda q, k, v: _FrontendTiles.apply(q, k, v, count, order)


# ---- MSA
def flash_msa(problem):
    """flash-msa with the gradient of its proxies' KL loss off; it builds an extension at its first call."""
    from flash_msa import flash_msa as package
    from flash_msa import sparse_flash_varlen

    turned = lambda heads: problem.new(heads).detach().transpose(1, 2).contiguous()  # noqa: E731
    proxies = turned(problem.kv_heads), turned(1)
    # Without FlashAttention-3 its two shorter ways have no kernel.
    sparse_flash_varlen.flash_attn_supports_narrow_value_dim = lambda: False
    sparse_flash_varlen.flash_attn_varlen_paged_forward = lambda **_: None
    if not isinstance(package.compute_proxy_lse, mock.Mock):
        backward = package._run_fused_selected_edge_backward

        def no_loss(qp, kp, q, k, v, lse, o, do, _, metadata, *, scale):
            return backward(qp, kp, q, k, v, lse, o, do, None, metadata, scale=scale)

        no_lse = lambda q, k, **_: torch.zeros(q.shape[:3], device=q.device)  # noqa: E731
        package._run_fused_selected_edge_backward = no_loss
        package.compute_proxy_lse = mock.Mock(side_effect=no_lse)

    def call(q, k, v):
        o, _ = package.sparse_attention(*proxies, *(x.transpose(1, 2) for x in (q, k, v)), MSA_KEYS, SCALE)
        return o.unflatten(-1, (problem.heads, WIDTH))

    return call


# Name of a rival and task: how a call of it is made. Those that matter most come first.
RIVALS = {
    ("Sieve", "dense"): sieve,
    ("FlashAttention-4", "dense"): flash_attention_4(),
    ("Sieve", "selected"): sieve,
    ("fla NSA's branch", "selected"): fla_selected,
    ("flash_nsa's branch", "selected"): flash_nsa_selected,
    ("Sieve", "window"): sieve,
    ("FlashAttention-4", "window"): flash_attention_4(),
    ("Sieve", "bands"): sieve,
    ("flash-sparse-attn, Triton", "bands"): flash_sparse_attn_triton(),
    ("Sieve, any order", "bands"): functools.partial(sieve, deterministic=False),
    ("flash-sparse-attn, MassAlloc", "dense"): flash_sparse_attn_triton(1.0),
    ("Sieve", "tiles"): sieve,
    ("FlashAttention-4", "tiles"): flash_attention_4(),
    ("cuDNN frontend", "tiles"): cudnn_frontend,
    ("Sieve, any order", "tiles"): functools.partial(sieve, deterministic=False),
    ("Sieve, any order", "dense"): functools.partial(sieve, deterministic=False),
    ("flash-sparse-attn", "dense"): flash_sparse_attn,
    ("flash-sparse-attn", "window"): flash_sparse_attn,
    ("cuDNN", "dense"): cudnn,
    ("Sieve", "expiring"): sieve,
    ("FlexAttention", "window"): flex,
    ("FlexAttention", "expiring"): flex,
    ("FlexAttention", "tiles"): flex,
    ("FlexAttention", "selected"): flex,
    ("Sieve", "shared"): sieve,
    ("attention-gym", "shared"): attention_gym,
    ("FlashAttention-4, fixed order", "dense"): flash_attention_4(deterministic=True),
    ("Sieve DMA", "own"): sieve_own("dma"),
    ("Sieve NSA", "own"): sieve_own("nsa"),
    ("Sieve MSA", "own"): sieve_own("msa"),
    ("Sieve MoBA", "own"): sieve_own("moba"),
    ("Sieve InfLLM-V2", "own"): sieve_own("infllm_v2"),
    ("fla NSA", "own"): fla_own,
    ("flash_nsa", "own"): flash_nsa_own,
    ("flash-msa", "own"): flash_msa,
    ("fla MoBA", "own"): fla_moba,
}
STEPS = {
    **{("Sieve", task): sieve_step for task in ("dense", "window", "bands")},
    ("flash-sparse-attn, Triton", "bands"): triton_step(),
    ("flash-sparse-attn, MassAlloc", "dense"): triton_step(1.0),
}
# Rivals that no call can be made of on a machine without a network, and why.
ABSENT = {
    ("MagiAttention FFA", "selected"):
        "its package on PyPI (0.0.1) is empty; it is built from source with CUTLASS, which was not done",
    ("InfLLM-V2's CUDA", "own"): "has no package on PyPI; it is built from source with CUTLASS, which was not done",
}
