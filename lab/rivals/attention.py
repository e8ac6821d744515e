"""Times PyTorch's attention on the shapes of `sieve kernels bench`, and puts the two side by side. Run both in one sitting:

    sieve kernels bench --json OURS && python3 lab/rivals/attention.py --ours OURS --json OUT

Dense: SDPA with cuDNN and with FlashAttention-2. Windows: FlexAttention, compiled. Decoding: cuDNN. bf16, 16 query and 8 KV heads;
`--only table2`: the rows of `sieve kernels bench --table2`, SDPA under a mask as a tensor, which is how the paper times its rival, and cuDNN dense.
`--only sparse`: the rows of `sieve kernels bench --sparse`, 32 query and 8 KV heads, FlexAttention under random blocks of 128, cuDNN dense.
`--only nsa`: the rows of `sieve kernels bench --nsa --heads 16/8,64/4,16/2`, cuDNN dense, fla's Triton kernels without the window branch (they refuse
groups under 16), and those of flash_nsa (github.com/mdy666) with a window by FlashAttention-4 or, where it is missing, FlexAttention.
`--only msa`: the rows `msa, 2048 keys` of `sieve kernels bench --nsa --heads 64/4,16/2`, flash-msa with 16 blocks of 128.
`--only dma`: the rows `dma w 1024, independent` of `sieve kernels bench --dma --lengths 8192,32768 --scores independent`, FlexAttention with DMA's mask,
with and without the bias of keys and its gradient. The masks are drawn anew; each query keeps as many keys as ours.
Rivals of nsa, msa and dma are first compared with f32 attention; one that is wrong, fails or cannot be imported is left out, with the reason.
`--only heads`: the rows of `sieve kernels bench --heads 16/8,16/16,32/8,32/4,64/8,64/4,16/2,16/1 --lengths 4096,8192,32768` and of
`--heads 9/3,14/2,32/8 --width 64`, cuDNN and, where it can be imported (pack.sh packs it for a machine without a network), FlashAttention-4.
`--only mla`: the rows of `sieve kernels bench --mla` with keys of 192 and values of 128 columns, cuDNN.
CUDA events, the L2 flushed by reads before each run, the launches queued before the GPU is free, medians. A ratio is the rival's time over ours.
"""

import argparse
import contextlib
import functools
import heapq
import json
import statistics
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS = 16, 8
DENSE = [(2, 8192, 128), (8, 2048, 128), (1, 16384, 128), (1, 32768, 128), (2, 8192, 64), (8, 2048, 64), (1, 32768, 64), (1, 8192, 128), (1, 16384, 64), (1, 131072, 128)]
WINDOWS = [(16384, 128, 1024), (16384, 128, 2048), (65536, 128, 1024), (65536, 128, 2048)]
DECODE = [(16, 131072, 128), (1, 131072, 128)]
SPARSE_HEADS, SPARSE = 32, [(8192, []), (32768, [0.125]), (131072, [0.125, 0.0625])]
NSA_HEADS, NSA_LENGTHS, NSA_BLOCK, NSA_CHOSEN = [(16, 8), (64, 4), (16, 2)], (8192, 32768, 65536), 64, 16
NSA_WINDOW, NSA_POOLED, NSA_STRIDE = 512, 32, 16
MSA_HEADS, MSA_BLOCK, MSA_KEYS, DMA_LENGTHS, DMA_KEPT = [(64, 4), (16, 2)], 128, 2048, (8192, 32768), 1024
TOLERANCE = 0.02  # of a norm; kernels in bf16 are off by 2e-3 to 6e-3
WIDE_HEADS, NARROW_HEADS = [(16, 8), (16, 16), (32, 8), (32, 4), (64, 8), (64, 4), (16, 2), (16, 1)], [(9, 3), (14, 2), (32, 8)]
HEAD_SHAPES = [(*heads, width, n) for width, shapes in ((128, WIDE_HEADS), (64, NARROW_HEADS)) for heads in shapes for n in (4096, 8192, 32768)]
MLA = [(2, 8192), (8, 2048), (1, 32768)]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}

sdpa = torch.nn.functional.scaled_dot_product_attention


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Timer:
    """Rows `(what, batch, seq_len, head_dim, rival, phase) -> ms`."""

    def __init__(self, heads=()):
        self.heads, self.rows, self.flush = heads, {}, torch.zeros(128 << 20, device="cuda", dtype=torch.int32)

    def time(self, key, run, repetitions):
        """Stores the median of so many runs as the row `key`, in ms of the GPU, with the L2
        flushed and launches queued before each."""
        for _ in range(3):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
        for begin, end in events:
            self.flush.sum()
            torch.cuda._sleep(4_000_000)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        self.rows[key] = statistics.median(b.elapsed_time(e) for b, e in events)

    def say(self, *shape):
        """Prints all rows of a `(what, batch, seq_len, head_dim)`."""
        rows = {key[4:]: ms for key, ms in self.rows.items() if key[:4] == shape}
        print(*shape, *(f"{rival} {phase} {ms:.4f}" for (rival, phase), ms in rows.items()), flush=True)


@contextlib.contextmanager
def rival(name, origin):
    """Leaves out a rival that cannot be imported, fails or is wrong: one line says why, and its package or its shape."""
    try:
        yield
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0][:300]
        print(f"{name} is not timed: {type(error).__name__}: {why} ({origin})", flush=True)


def flash_attention_4():
    """FlashAttention-4's function, which returns o alone, or None where it cannot be imported."""
    with rival("FlashAttention-4", "pip install --pre flash-attn-4, or pack.sh"):
        from flash_attn.cute import flash_attn_func

        first = lambda result: result[0] if isinstance(result, (tuple, list)) else result
        return lambda *inputs, **options: first(flash_attn_func(*inputs, causal=True, **options))


def compiled_flex():
    """FlexAttention, compiled; forgets the shapes compiled before, since PyTorch compiles a function for eight at most."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # so that a graph can be walked again
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def inputs(batch, seq_len, width, queries=None):
    """q, k and v as `[batch, heads, seq_len, width]`, and a gradient of o."""
    new = lambda heads, n: random(batch, n, heads, width).transpose(1, 2).requires_grad_()
    q, k, v = new(HEADS, queries or seq_len), new(KV_HEADS, seq_len), new(KV_HEADS, seq_len)
    return q, k, v, torch.randn_like(q)


def both(timer, key, call, inputs, gradient, repetitions):
    """Forward, and backward from a kept graph."""
    timer.time((*key, "forward"), call, repetitions)
    o = call()
    timer.time((*key, "backward"), lambda: torch.autograd.grad(o, inputs, gradient, retain_graph=True), repetitions)


def dense(timer):
    """Rows of cuDNN's and FlashAttention-2's dense attention, both passes; the latter not over 100,000 tokens."""
    for batch, n, width in DENSE:
        for name, backend in BACKENDS.items():
            if n > 100_000 and name == "FA2":
                continue
            q, k, v, gradient = inputs(batch, n, width)
            with sdpa_kernel(backend):
                call = lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)
                both(timer, ("dense", batch, n, width, name), call, (q, k, v), gradient, 3 if n > 100_000 else 15)


def block_mask(n, some, whole, mask, block=128):
    """The block mask of the blocks `[1, heads, n / block, n / block]` with some pairs visible and of those with all, without an n x n tensor."""
    from torch.nn.attention.flex_attention import BlockMask

    listed = lambda blocks: (blocks.sum(-1).to(torch.int32), torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32))
    return BlockMask.from_kv_blocks(*listed(some & ~whole), *listed(whole), BLOCK_SIZE=block, mask_mod=mask, seq_lengths=(n, n))


@functools.cache
def window_mask(n, window, block=128):
    at = torch.arange(n // block, device="cuda")
    first, last = at * block, at * block + block - 1
    some = (first[None, :] <= last[:, None]) & (first[:, None] - last[None, :] < window)
    whole = (last[None, :] <= first[:, None]) & (last[:, None] - first[None, :] < window)
    return block_mask(n, some[None, None], whole[None, None], lambda b, h, q, k: (q >= k) & (q - k < window), block)


def windows(timer):
    flex = compiled_flex()
    for n, width, window in WINDOWS:
        q, k, v, gradient = inputs(1, n, width)
        mask = window_mask(n, window)
        both(timer, (f"window {window}", 1, n, width, "FlexAttention"), lambda: flex(q, k, v, block_mask=mask, enable_gqa=True), (q, k, v), gradient, 15)


def decoding(timer):
    for batch, n, width in DECODE:
        q, k, v, _ = inputs(batch, n, width, queries=1)
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            timer.time(("decode", batch, n, width, "cuDNN", "forward"), lambda: sdpa(q, k, v, enable_gqa=True), 15)


# Batch, tokens, query and KV heads, width: as `sieve kernels bench --table2`.
TABLE2 = (
    [(1, 1 << power, 2, 1, 128) for power in range(8, 16)]
    + [(batch, 4096, 2, 1, 32) for batch in (1, 2, 4, 8)]
    + [(1, 4096, *heads, 32) for heads in ((1, 1), (4, 1), (8, 2))]
    + [(1, 4096, 2, 1, width) for width in (64, 96, 128)]
)
TABLE2_DECODE = [(1, 1 << power, 2, 1, 128) for power in range(8, 17)]
TABLE2_KEPT = 2048


def table2(timer):
    """SDPA under a mask of kept keys as a `[batch, heads, queries, keys]` tensor, which no back-end but the memory-efficient one takes; KV heads
    repeated before, which is not timed."""
    for phase, shapes in (("table2", TABLE2), ("table2 decode", TABLE2_DECODE)):
        for batch, n, heads, kv_heads, width in shapes:
            queries = 1 if phase.endswith("decode") else n
            new = lambda heads, n: random(batch, n, heads, width).transpose(1, 2)
            q, k, v = new(heads, queries), new(kv_heads, n), new(kv_heads, n)
            group = heads // kv_heads
            wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            kept = torch.rand(batch, kv_heads, 1, n, device="cuda") < TABLE2_KEPT / n
            at = torch.arange(n, device="cuda")
            sees = (at[None, :] <= at[n - queries:, None]) & kept | (at[None, :] == at[n - queries:, None])
            mask = torch.zeros(sees.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~sees, float("-inf")).repeat_interleave(group, 1)
            name = f"{batch}x{n} h{heads}/{kv_heads}"
            with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                timer.time((name, batch, n, width, "SDPA + mask", phase), lambda: sdpa(q, wide_k, wide_v, attn_mask=mask), 15)
            if width >= 64:
                with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    causal = queries == n
                    timer.time((name, batch, n, width, "cuDNN dense", phase), lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True), 15)


def random_blocks(n, density, block=128):
    """The diagonal block of each row and random others before it, for each head."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = n // block
    at = torch.arange(blocks, device="cuda")
    wanted = (density * (at + 1)).round().clamp(min=1) - 1
    rank = torch.rand(SPARSE_HEADS, blocks, blocks, device="cuda").masked_fill_(at[None, :] >= at[:, None], 2.0).argsort(-1)
    # The first `wanted` of a random order of the earlier blocks.
    count = wanted.to(torch.int32)[None, None].expand(1, SPARSE_HEADS, -1).contiguous()
    own = at.to(torch.int32)[:, None].expand(-1, blocks)[None, None].expand(1, SPARSE_HEADS, -1, -1).contiguous()
    return BlockMask.from_kv_blocks(torch.ones_like(count), own, count, rank.to(torch.int32)[None], BLOCK_SIZE=block, mask_mod=lambda b, h, q, k: q >= k,
                                    seq_lengths=(n, n), compute_q_blocks=False)


def sparse(timer):
    """Rows of forward passes with 32 query heads: cuDNN dense, and FlexAttention by share of blocks; prints them."""
    flex = compiled_flex()
    for n, densities in SPARSE:
        new = lambda heads: random(1, n, heads, 128).transpose(1, 2)
        q, k, v = new(SPARSE_HEADS), new(KV_HEADS), new(KV_HEADS)
        with torch.no_grad():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                call = lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)
                timer.time(("dense", 1, n, 128, "cuDNN", "forward 32/8"), call, 5)
            for density in densities:
                mask = random_blocks(n, density)
                timer.time((f"blocks {density}", 1, n, 128, "FlexAttention", "forward 32/8"), lambda: flex(q, k, v, block_mask=mask, enable_gqa=True), 5)
    for (what, _, n, _, rival, phase), ms in timer.rows.items():
        if phase == "forward 32/8":
            print(f"{rival} {what} 1 x {n} h{SPARSE_HEADS}/{KV_HEADS}: {ms:.3f} ms", flush=True)


def nsa_inputs(n, heads, kv_heads):
    """q, k, v as `[1, n, heads, 128]`, and a gradient of o."""
    new = lambda heads: random(1, n, heads, 128).requires_grad_()
    q = new(heads)
    return q, new(kv_heads), new(kv_heads), torch.randn_like(q)


def weights(q, k, mask, bias=0.0):
    """Attention weights `[heads, n, keys]` in f32 over the pairs of mask `[some heads, n, keys]`; a query that sees none gets 0."""
    group = q.shape[2] // k.shape[2]
    q, k = (x[0].transpose(0, 1).float() for x in (q, k))
    scores = q @ k.repeat_interleave(group, 0).mT / q.shape[-1] ** 0.5 + bias
    return scores.masked_fill(~mask.repeat_interleave(len(q) // len(mask), 0), -torch.inf).softmax(-1).nan_to_num()


def visible(q, k, v, mask, bias=0.0):
    """Attention in f32 over the pairs of mask."""
    group = q.shape[2] // k.shape[2]
    return (weights(q, k, mask, bias) @ v[0].transpose(0, 1).float().repeat_interleave(group, 0)).transpose(0, 1)[None]


def check(what, call, exact, inputs, gradient):
    """Prints the relative errors of call's first output and of all gradients against those of exact; raises where one is too large."""

    def results(run):
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [g.to(o.dtype) for g, o in zip(gradient, outputs)]
        return outputs[0], *torch.autograd.grad(outputs, inputs, gradients)

    torch.backends.cuda.matmul.allow_tf32 = False
    errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(results(call), results(exact))]
    print(f"{what}: relative error of o {errors[0]:.1e}, of gradients " + ", ".join(f"{error:.1e}" for error in errors[1:]), flush=True)
    if not all(error < TOLERANCE for error in errors):
        raise ValueError(f"wrong: relative errors above {TOLERANCE}")


def chosen_mask(indices, n, block):
    """The mask `[kv_heads, n, n]` of blocks `[kv_heads, n, chosen]`, of which indices outside the row stand for none."""
    blocks = n // block
    indices = torch.where((indices < 0) | (indices >= blocks), blocks, indices.long())
    chosen = torch.zeros(*indices.shape[:2], blocks + 1, device="cuda", dtype=torch.bool).scatter_(-1, indices, True)[..., :-1]
    token = torch.arange(n, device="cuda")
    return chosen.repeat_interleave(block, -1) & (token[:, None] >= token)


def pooled_mask(n, block, stride):
    """The mask `[1, n, pooled keys]` of means of `block` keys every `stride`, visible from the last key on."""
    last = torch.arange(0, n - block + 1, stride, device="cuda") + block - 1
    return (torch.arange(n, device="cuda")[:, None] >= last)[None]


def fla_nsa(n=2048, heads=64, kv_heads=4):
    """fla's NSA, after a check of its two branches over blocks of 64 and their gradients."""
    from fla.ops.nsa import parallel_nsa
    from fla.ops.nsa.compression import parallel_nsa_compression

    q, k, v, gradient = nsa_inputs(n, heads, kv_heads)
    # Distinct blocks up to each token's own, which is always there; -1 for none.
    weight = torch.rand(n, kv_heads, n // NSA_BLOCK, device="cuda")
    own, block = torch.arange(n, device="cuda")[:, None, None] // NSA_BLOCK, torch.arange(n // NSA_BLOCK, device="cuda")
    best = weight.masked_fill(block == own, 2).masked_fill(block > own, -1).topk(NSA_CHOSEN, -1)
    chosen = best.indices.masked_fill(best.values < 0, -1).sort(-1).values
    selected, compressed = chosen_mask(chosen.transpose(0, 1), n, NSA_BLOCK), pooled_mask(n, NSA_BLOCK, NSA_BLOCK)
    means = lambda x: x.unflatten(1, (-1, NSA_BLOCK)).float().mean(2).bfloat16().detach().requires_grad_()
    ones = torch.ones(1, n, heads, device="cuda", dtype=torch.bfloat16)
    fine = lambda q, k, v: parallel_nsa(q, k, v, g_slc=ones, block_indices=chosen[None], block_counts=NSA_CHOSEN, block_size=NSA_BLOCK)
    coarse = lambda q, k, v: parallel_nsa_compression(q, k, v, TK=n, block_size=NSA_BLOCK, scale=128**-0.5)[0]
    for what, call, mask, inputs in [("selected", fine, selected, (q, k, v)), ("compressed", coarse, compressed, (q, means(k), means(v)))]:
        check(f"fla {what} n {n} h{heads}/{kv_heads}", call, lambda q, k, v: visible(q, k, v, mask), inputs, (gradient,))
    return parallel_nsa


def window_passes():
    """Forward and backward pass of the window as flash_nsa calls them, in place of its calls of older FlashAttention."""
    attend = flash_attention_4()
    if attend:
        call = lambda q, k, v: attend(q, k, v, window_size=(NSA_WINDOW - 1, 0))
    else:
        flex, first = compiled_flex(), lambda x: x.transpose(1, 2)
        call = lambda q, k, v: first(flex(first(q), first(k), first(v), block_mask=window_mask(q.shape[1], NSA_WINDOW), enable_gqa=True)).contiguous()
    tape = []

    def forward(q, k, v, **_):
        with torch.enable_grad():
            inputs = [x.detach()[None].requires_grad_() for x in (q, k, v)]
            tape[:] = inputs, call(*inputs)
        return tape[1].detach()[0], None

    def backward(q, k, v, o, lse, do, **_):
        return tuple(x[0].contiguous() for x in torch.autograd.grad(tape[1], tape[0], do[None], retain_graph=True))

    return forward, backward


def flash_nsa(n=2048, heads=64, kv_heads=4):
    """flash_nsa's NSA of q, k, v and the gates' logits `[n, heads, 3]`, after a check. Compressed keys are means of 32 every 16."""
    from flash_nsa import NSAHelper
    from flash_nsa.modules import megatron_level_nsa as package

    package.swa_fwd, package.swa_bwd = window_passes()
    NSAHelper.set_hyperparameters(NSA_POOLED, NSA_STRIDE, NSA_BLOCK, NSA_WINDOW, NSA_CHOSEN, num_init_blocks=1, num_local_blocks=2)

    def nsa(q, k, v, logits):
        if NSAHelper.x_maxlen != q.shape[1]:  # It waits for the GPU.
            NSAHelper.init_cu_seqlens(torch.tensor([0, q.shape[1]], device="cuda", dtype=torch.int32))
        return package.flash_nsa_varlen_func(q[0], k[0], v[0], logits, None, None, 128**-0.5)[None]

    choose, chosen = package.slc_topk_indices, []
    kept = lambda *inputs, **options: chosen.append(choose(*inputs, **options)) or chosen[-1]

    def exact(q, k, v, logits):
        """The three branches of NSA in f32 over the blocks that flash_nsa chose
        in its last call, weighted by the gates."""
        means = lambda x: x.float().unfold(1, NSA_POOLED, NSA_STRIDE).mean(-1)
        far = torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda")
        branches = [
            visible(q, means(k), means(v), pooled_mask(n, NSA_POOLED, NSA_STRIDE)),
            visible(q, k, v, chosen_mask(chosen[-1][0], n, NSA_BLOCK)),
            visible(q, k, v, ((far >= 0) & (far < NSA_WINDOW))[None]),
        ]
        return sum(gate[None, ..., None] * branch for gate, branch in zip(logits.float().sigmoid().unbind(-1), branches))

    q, k, v, gradient = nsa_inputs(n, heads, kv_heads)
    logits = random(n, heads, 3).requires_grad_()
    with mock.patch.object(package, "slc_topk_indices", kept):
        check(f"flash_nsa n {n} h{heads}/{kv_heads}", nsa, exact, (q, k, v, logits), (gradient,))
    return nsa


def nsa(timer):
    """Rows of NSA by fla (two branches, groups of 16 and more) and by flash_nsa, beside cuDNN's dense attention."""
    fla = flash = None
    with rival("fla", "pip install fla-core, or pack.sh"):
        fla = fla_nsa()
    with rival("flash_nsa", "github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, or pack.sh"):
        flash = flash_nsa()
    for n in NSA_LENGTHS:
        for heads, kv_heads in NSA_HEADS:
            q, k, v, gradient = nsa_inputs(n, heads, kv_heads)
            repetitions, label = 9 if n < 10_000 else 3, f"h{heads}/{kv_heads}"
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
                call = lambda: sdpa(*heads_first, is_causal=True, enable_gqa=True)
                both(timer, (f"dense {label}", 1, n, 128, "cuDNN"), call, heads_first, gradient.transpose(1, 2), repetitions)
            if fla and heads // kv_heads >= 16:
                gates = [torch.rand(1, n, heads, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
                call = lambda: fla(q, k, v, *gates, block_counts=NSA_CHOSEN, block_size=NSA_BLOCK)
                with rival("fla", f"{label}, {n} tokens"):
                    both(timer, (f"nsa {label}", 1, n, 128, "fla, no window"), call, (q, k, v, *gates), gradient, 3)
            if flash:
                logits = random(n, heads, 3).requires_grad_()
                with rival("flash_nsa", f"{label}, {n} tokens"):
                    both(timer, (f"nsa {label}", 1, n, 128, "flash_nsa"), lambda: flash(q, k, v, logits), (q, k, v, logits), gradient, repetitions)
            for what in ("dense", "nsa"):
                timer.say(f"{what} {label}", 1, n, 128)


def msa_inputs(n, heads, kv_heads):
    """The indexer's q and k, then q, k and v as `[1, heads, n, 128]`; the gradient of o and of the indexer's loss."""
    new = lambda heads: random(1, heads, n, 128).requires_grad_()
    gradient = random(1, n, heads * 128), torch.ones((), device="cuda")
    return [new(heads) for heads in (kv_heads, 1, heads, kv_heads, kv_heads)], gradient


def msa_check(package, n=4096, heads=16, kv_heads=2):
    """flash-msa's output and gradients, those of the indexer's loss included: the KL divergence from the mean weights of a group's heads."""
    inputs, gradient = msa_inputs(n, heads, kv_heads)
    with torch.no_grad():
        chosen = package.select_blocks(*inputs[:2], scale=128**-0.5, num_blocks=n // MSA_BLOCK, top_k_blocks=MSA_KEYS // MSA_BLOCK)
    mask = chosen_mask(chosen[0], n, MSA_BLOCK)

    def exact(*inputs):
        index_q, index_k, q, k, v = (x.transpose(1, 2) for x in inputs)
        target = weights(q, k, mask).unflatten(0, (kv_heads, -1)).mean(1).detach()
        loss = -(target * weights(index_q, index_k, mask).masked_fill(~mask, 1).log()).sum() / (kv_heads * n)
        return visible(q, k, v, mask).flatten(2), loss

    check(f"flash-msa n {n} h{heads}/{kv_heads}", lambda *inputs: package.sparse_attention(*inputs, MSA_KEYS, 128**-0.5), exact, inputs, gradient)


def msa(timer):
    """Rows of flash-msa with and without the gradient of its indexer's loss, once it is right on 4096 tokens."""
    with rival("flash-msa", "pip install flash-msa==0.1.1 flash-attn-4, or pack.sh; set CUDA_HOME, it builds an extension"):
        from flash_msa import flash_msa as package
        from flash_msa import sparse_flash_varlen

        try:
            msa_check(package)
        except Exception as error:
            print(f"flash-msa without narrow values and paged keys, since with them: {error}", flush=True)
            sparse_flash_varlen.flash_attn_supports_narrow_value_dim = lambda: False
            sparse_flash_varlen.flash_attn_varlen_paged_forward = lambda **_: None
            msa_check(package)
        backward = package._run_fused_selected_edge_backward
        # flash-msa has no call without the indexer's loss: this leaves out the loss's gradient and the indexer's log-sum-exp.
        no_gradient = lambda *inputs, scale: backward(*inputs[:8], None, *inputs[9:], scale=scale)
        no_lse = lambda q, k, **_: q.new_zeros(q.shape[:3], dtype=torch.float32)
        for heads, kv_heads in MSA_HEADS:
            for n in NSA_LENGTHS:
                inputs, gradient = msa_inputs(n, heads, kv_heads)
                shape, repetitions = (f"msa, {MSA_KEYS} keys, h{heads}/{kv_heads}", 1, n, 128), 9 if n < 10_000 else 3
                call = lambda: package.sparse_attention(*inputs, MSA_KEYS, 128**-0.5)
                timer.time((*shape, "flash-msa", "forward"), call, repetitions)
                outputs = call()
                walk = lambda: torch.autograd.grad(outputs, inputs, gradient, retain_graph=True)
                timer.time((*shape, "flash-msa", "backward + loss"), walk, repetitions)
                with mock.patch.multiple(package, _run_fused_selected_edge_backward=no_gradient, compute_proxy_lse=no_lse):
                    timer.time((*shape, "flash-msa", "backward"), walk, repetitions)
                timer.say(*shape)


def expiries(scores, kept):
    """The first query after each key that no longer sees it, `[heads, n]`: a query sees the `kept` keys with the highest scores so far."""
    rows = []
    for row in scores.tolist():
        end, best = [len(row)] * len(row), [(score, at) for at, score in enumerate(row[:kept])]
        heapq.heapify(best)
        for at in range(kept, len(row)):
            end[heapq.heappushpop(best, (row[at], at))[1]] = at
        rows.append(end)
    return torch.tensor(rows, device="cuda", dtype=torch.int32)


def dma_shape(timer, flex, name, has_bias, n, is_check=False):
    """FlexAttention under DMA's mask of random scores: compared with f32 or timed."""
    group, block = HEADS // KV_HEADS, 128
    expiry = expiries(torch.randn(KV_HEADS, n), DMA_KEPT)
    at = torch.arange(n // block, device="cuda") * block
    ends = expiry.repeat_interleave(group, 0).unflatten(1, (-1, block))[None]
    earlier = at < at[:, None]
    some = earlier & (ends.amax(-1)[:, :, None] > at[:, None]) | (at == at[:, None])
    whole = earlier & (ends.amin(-1)[:, :, None] >= at[:, None] + block)
    mask = block_mask(n, some, whole, lambda b, h, q, k: (q >= k) & (q < expiry[h // group, k]), block)
    q, k, v, gradient = inputs(1, n, 128)
    bias = torch.randn(KV_HEADS, n, device="cuda").requires_grad_()
    scored = (lambda score, b, h, q, k: score + bias[h // group, k]) if has_bias else None
    leaves = (q, k, v, bias)[: 4 if has_bias else 3]
    call = lambda *_: flex(q, k, v, score_mod=scored, block_mask=mask, enable_gqa=True)
    if is_check:
        token = torch.arange(n, device="cuda")
        sees = (token[:, None] >= token) & (token[:, None] < expiry[:, None])
        wide = bias.repeat_interleave(group, 0)[:, None] if has_bias else 0.0
        exact = lambda q, k, v, *_: visible(*(x.transpose(1, 2) for x in (q, k, v)), sees, wide).transpose(1, 2)
        check(f"{name}, DMA n {n} h{HEADS}/{KV_HEADS}", call, exact, leaves, (gradient,))
    else:
        shape = f"dma w {DMA_KEPT}, independent: h{HEADS}/{KV_HEADS}", 1, n, 128
        both(timer, (*shape, name), call, leaves, gradient, 9)
        timer.say(*shape)


def dma(timer):
    flex = compiled_flex()
    for name, has_bias in (("FlexAttention", True), ("Flex, no bias", False)):
        with rival(name, "PyTorch"):
            dma_shape(timer, flex, name, has_bias, 2 * DMA_KEPT, is_check=True)
            for n in DMA_LENGTHS:
                dma_shape(timer, flex, name, has_bias, n)


def heads(timer):
    """Rows of dense attention at each number of heads and width: cuDNN,
    FlashAttention-4 summing in any and in fixed order."""
    attend = flash_attention_4()
    for heads, kv_heads, width, n in HEAD_SHAPES:
        if timer.heads and f"{heads}/{kv_heads}" not in timer.heads:
            continue
        new = lambda heads: random(1, n, heads, width).requires_grad_()
        q, k, v = new(heads), new(kv_heads), new(kv_heads)
        gradient, repetitions, what = torch.randn_like(q), 5 if n > 16_000 else 9, f"dense h{heads}/{kv_heads}"

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                inner = [x.transpose(1, 2) for x in (q, k, v)]
                return sdpa(*inner, is_causal=True, enable_gqa=True).transpose(1, 2)

        both(timer, (what, 1, n, width, "cuDNN"), cudnn, (q, k, v), gradient, repetitions)
        for name, deterministic in (("FA4", False), ("FA4 fixed order", True)) if attend else ():
            both(timer, (what, 1, n, width, name), lambda: attend(q, k, v, deterministic=deterministic), (q, k, v), gradient, repetitions)
        timer.say(what, 1, n, width)


def mla(timer):
    """Rows of cuDNN with the widths of MLA, and a printed line of both passes' TFLOP/s, of causal pairs."""
    for batch, n in MLA:
        new = lambda width: random(batch, n, HEADS, width).transpose(1, 2).requires_grad_()
        q, k, v = new(192), new(192), new(128)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            call = lambda: sdpa(q, k, v, is_causal=True)
            both(timer, ("mla", batch, n, 192, "cuDNN"), call, (q, k, v), torch.randn_like(v), 5)
        forward, backward = (timer.rows[("mla", batch, n, 192, "cuDNN", phase)] for phase in ("forward", "backward"))
        pairs = batch * HEADS * n * (n + 1) / 2
        rates = 2 * (192 + 128) * pairs / forward / 1e9, 2 * (3 * 192 + 2 * 128) * pairs / backward / 1e9
        print(f"cuDNN mla {batch} x {n}: {forward:.3f} ({rates[0]:.0f} TFLOP/s) + {backward:.3f} ms ({rates[1]:.0f})", flush=True)


def shape_of(batch, n, width):
    """A shape as `sieve kernels bench` names it."""
    return f"{batch}x{n} h{HEADS}/{KV_HEADS} d{width}"


def print_ratio(what, rival, our_ms, rival_ms):
    """A line of what both timed; none where one of the times is not there."""
    if our_ms and rival_ms:
        print(f"{what:64} {our_ms:9.4f} {rival:>14} {rival_ms:9.4f} {rival_ms / our_ms:8.2f}x", flush=True)


def print_equal_calls(rows, our_times):
    """What both timed as the same call, or as the parts of one."""
    for (what, batch, n, width, rival, phase), ms in rows.items():
        if " h" in what:
            order = ", fixed order" if rival.endswith("fixed order") and phase == "backward" else ""
            kind, label = what.rsplit(" ", 1)
            parts = [our_times.get((f"{kind} {part}{order}", f"{batch}x{n} {label} d{width}")) for part in phase.split(" + ")]
            print_ratio(f"{kind} {phase}{order} {label} {batch} x {n} d{width}", rival, sum(parts) if all(parts) else None, ms)
            continue
        name = what if what == "decode" else f"{what} {phase}"
        print_ratio(f"{name} {batch} x {n} d{width}", rival, our_times.get((name, shape_of(batch, n, width))), ms)


def print_dma_beside_dense(rows, our_times):
    """Both passes of DMA beside both of the rival's dense attention."""
    for (what, batch, n, width, rival, phase), ms in rows.items():
        if what != "dense" or phase != "forward":
            continue
        shape = shape_of(batch, n, width)
        both_ms = ms + rows[(what, batch, n, width, rival, "backward")]
        full = f"dma w {n} (nothing masked)"
        parts = [our_times.get((f"{full} {part}", shape)) for part in ("forward", "backward")]
        if all(parts):
            print_ratio(f"{full} forward + backward {batch} x {n} d{width}", f"{rival} dense", sum(parts), both_ms)
        for (name, of), our_ms in our_times.items():
            if name.startswith("dma w") and name.endswith("select, lists, forward, backward") and of == shape:
                print_ratio(f"{name} {batch} x {n} d{width}", f"{rival} dense", our_ms, both_ms)


def print_dma_beside_masks(rows, our_times):
    """DMA's passes and steps beside SDPA under a mask, and dense attention, in the shapes of Table 2."""
    for (shape, _, _, width, rival, phase), ms in rows.items():
        if phase.startswith("table2"):
            for (name, of), our_ms in our_times.items():
                is_dma = name.startswith("dma_decode") if phase.endswith("decode") else name.startswith("dma w") and name.endswith("select, forward")
                if is_dma and of == f"{shape} d{width}":
                    print_ratio(f"{name} {of}", rival, our_ms, ms)


def print_dma_steps(rows, our_times):
    """A step of DMA beside one of dense attention."""
    for batch, n, width in DECODE:
        dense_ms = rows.get(("decode", batch, n, width, "cuDNN", "forward"))
        for (name, shape), our_ms in our_times.items():
            if name.startswith("dma_decode") and shape == shape_of(batch, n, width):
                print_ratio(f"{name} {batch} x {n} d{width}", "cuDNN dense", our_ms, dense_ms)


def side_by_side(rows, ours):
    """Lines `what, shape, ours, rival, ratio` for everything that both timed."""
    our_times = {(row["name"], row["shape"]): row.get("median_ms") for row in ours["rows"]}
    print(f"{'what':64} {'ours, ms':>9} {'rival':>14} {'its ms':>9} {'ratio':>9}")
    for print_part in (print_equal_calls, print_dma_beside_dense, print_dma_beside_masks, print_dma_steps):
        print_part(rows, our_times)


def main():
    """Times the groups of --only, writes their rows to --json and, with --ours, prints them beside ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", help="JSON of `sieve kernels bench`")
    parser.add_argument("--json", default="/dev/null", help="where the rival's rows go")
    parser.add_argument("--only", default="dense,windows,decoding")
    parser.add_argument("--heads", help="of the rows of --only heads those with these query and KV heads alone: 16/8,64/4")
    args = parser.parse_args()
    groups = {"dense": dense, "windows": windows, "decoding": decoding, "table2": table2, "sparse": sparse}
    groups |= {"nsa": nsa, "msa": msa, "dma": dma, "mla": mla, "heads": heads}
    wanted = args.only.split(",")
    for name in wanted:
        if name not in groups:
            parser.error(f"--only {name}: not known; one of {', '.join(groups)}")
    timer = Timer(args.heads.split(",") if args.heads else ())
    for name in wanted:
        groups[name](timer)
    names = ("what", "batch", "seq_len", "head_dim", "rival", "phase")
    with open(args.json, "w") as file:
        json.dump({"torch": torch.__version__, "rows": [dict(zip(names, key), ms=ms) for key, ms in timer.rows.items()]}, file, indent=1)
    if args.ours:
        with open(args.ours) as file:
            side_by_side(timer.rows, json.load(file))


if __name__ == "__main__":
    main()
