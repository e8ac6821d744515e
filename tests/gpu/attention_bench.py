"""Times the attention kernels beside SDPA's FlashAttention-2 and cuDNN: CUDA events, L2 flushed before each run, medians."""

import multiprocessing
import statistics

import numpy as np
import torch

import attention_kernels as kernels
from attention_kernels import Heads
from attention_reference import Lists, expire_oracle

HEADS, KV_HEADS = 16, 8


def tiling(rows, warps, kv, stages, blocks, q_in_registers=0, **more):
    return dict(WARP_ROWS=rows, NUM_WARPS=warps, BLOCK_KV=kv, NUM_STAGES=stages, MIN_BLOCKS=blocks, Q_IN_REGISTERS=q_in_registers, **more)


# Forward tilings tried at head_dim 128: (rows a warp, warps, keys a tile, stages, blocks per SM, queries in registers).
FORWARD = [(32, 4, 64, 2, 2, 0), (32, 4, 48, 2, 2, 0)]
FORWARD_64 = [(32, 4, 64, 2, 2, 1), (32, 4, 80, 2, 2, 1), (32, 4, 96, 2, 2, 0)]
BACKWARD = [dict(NUM_WARPS=8, BLOCK_Q=64, MIN_BLOCKS=1)]
BACKWARD_64 = [dict(NUM_WARPS=4, BLOCK_Q=64, MIN_BLOCKS=2), dict(NUM_WARPS=8, BLOCK_Q=64, MIN_BLOCKS=1)]
DMA_FORWARD = [(32, 4, 64, 2, 2, 0)]
ROW_SUMS = [(32, 4, 32, 2, 2, 1)]


class Inputs:
    """Packed q, k, v and everything a launch needs."""

    def __init__(self, device, b, n, d, h=HEADS, hkv=KV_HEADS):
        self.b, self.n, self.d, self.h, self.hkv, self.scale = b, n, d, h, hkv, d**-0.5
        self.packed = torch.randn(b, n, (h + 2 * hkv) * d, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v = (Heads(self.packed, at * d, heads, d) for at, heads in ((0, h), (h, hkv), (h + hkv, hkv)))
        self.o = torch.empty(b, n, h, d, device=device, dtype=torch.bfloat16)
        self.lse = torch.empty(b, h, n, device=device)
        self.do = torch.randn_like(self.o)
        self.start = torch.zeros(b, n, device=device, dtype=torch.int32)
        self.end = torch.full((b, n), n, device=device, dtype=torch.int32)
        self.delta = torch.rand(b, hkv, n, device=device)
        self.ddelta = torch.empty(b, hkv, n, device=device)
        self.grad = torch.empty_like(self.packed)
        self.dq, self.dk, self.dv = (Heads(self.grad, x.offset, x.num_heads, d) for x in (self.q, self.k, self.v))

    def forward(self, rt, tiling=None, bias=False, window=None):
        kernels.attention_forward(rt, self.q, self.k, self.v, self.start, window or self.n, self.scale, self.o, self.lse, self.delta if bias else None, tiling)

    def backward(self, rt, tiling=None, bias=False, window=None, deterministic=False, dq_sum=None, exact=None, row_sums=None):
        kernels.attention_backward(rt, self.q, self.k, self.v, self.o, self.lse, self.do, self.start, self.end, window or self.n, self.scale,
                                   self.dq, self.dk, self.dv, self.delta if bias else None, self.ddelta if bias else None, deterministic, tiling, dq_sum, exact, row_sums)

    def dma_forward(self, rt, lists, tiling=None):
        kernels.dma_attention_forward(rt, self.q, self.k, self.v, self.delta, lists, self.scale, self.o, self.lse, tiling)

    def dma_backward(self, rt, lists, tiling=None, deterministic=False, super_blocks=16, sums=None, exact=True):
        kernels.dma_attention_backward(rt, self.q, self.k, self.v, self.o, self.lse, self.do, self.delta, lists, self.scale, self.dq, self.dk, self.dv,
                                       self.ddelta, deterministic, super_blocks, tiling, sums, exact)


def record(rt, which):
    """Asks `rt` for every specialisation `run` launches."""

    class NoLists:
        capacity, tile_queries = 128, 64
        list = list_len = tile_window = torch.zeros(1)

    x = Inputs("cpu", 1, 64, 128)
    for t in FORWARD:
        x.forward(rt, tiling(*t))
        x.forward(rt, tiling(*t), bias=True)
    for t in DMA_FORWARD:
        x.dma_forward(rt, NoLists, tiling(*t, HEADS_PER_TILE=2))
    for t in BACKWARD:
        x.backward(rt, t)
        x.backward(rt, t, bias=True)
    for t in ROW_SUMS:
        x.backward(rt, bias=True, row_sums=tiling(*t))
    for t in BACKWARD:
        x.dma_backward(rt, NoLists, t)
    x.backward(rt, deterministic=True)
    x.dma_backward(rt, NoLists, deterministic=True)
    y = Inputs("cpu", 1, 64, 64)
    for t in FORWARD_64:
        y.forward(rt, tiling(*t))
    for t in BACKWARD_64:
        y.backward(rt, t)
    y.forward(rt)


class Timer:
    def __init__(self, rt):
        self.rt, self.rows, self.flush = rt, [], torch.empty(256 << 20, device="cuda", dtype=torch.int8)

    def time(self, name, flops, run, reps=15):
        """Median milliseconds of `run`; a failure becomes a row."""
        try:
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
            for begin, end in events:
                self.flush.zero_()
                begin.record()
                run()
                end.record()
            torch.cuda.synchronize()
            times = sorted(b.elapsed_time(e) for b, e in events)
            row = dict(name=name, ms=statistics.median(times), p10=times[len(times) // 10], p90=times[-1 - len(times) // 10])
            row["tflops"] = flops / row["ms"] / 1e9
        except Exception as e:
            row = dict(name=name, error=str(e)[:200])
        self.rows.append(row)
        print(f"{name:58s} " + (row.get("error") or f"{row['ms']:8.3f} ms ({row['p10']:.3f}-{row['p90']:.3f}) {row['tflops']:6.0f} TFLOP/s"), flush=True)
        return row.get("ms")


def head_expire(args):
    z, window = args
    n = z.shape[-1]
    return expire_oracle(z[None, None], np.zeros((1, n), np.int32), np.full((1, n), n, np.int32), window)


def make_lists(pool, kind, n, window, device):
    rng = np.random.default_rng(7)
    z = {"independent": lambda: rng.standard_normal((KV_HEADS, n)), "rising": lambda: np.broadcast_to(np.arange(n) / n, (KV_HEADS, n)),
         "tied": lambda: np.zeros((KV_HEADS, n))}[kind]().astype(np.float32)
    expire = np.concatenate(pool.map(head_expire, [(z[i], window) for i in range(KV_HEADS)]), 1)
    return Lists(expire, window, device)


def rivals(timer, x, label, flops, backward=True):
    """SDPA with FlashAttention-2 and with cuDNN on the same tensors; returns {backend: (forward ms, backward ms)}."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    out = {}
    for name, backend in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        q, k, v = (t.view().transpose(1, 2).contiguous().requires_grad_() for t in (x.q, x.k, x.v))
        do = x.do.transpose(1, 2)
        with sdpa_kernel(backend):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            with torch.no_grad():
                f = timer.time(f"{label} forward: SDPA {name}", flops, call)
            b = None
            if backward:
                o = call()
                b = timer.time(f"{label} backward: SDPA {name}", 2.5 * flops, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), 8)
        out[name] = (f, b)
    return out


def run(make_runtime, which):
    pool = multiprocessing.get_context("fork").Pool(8)
    n32 = 32768
    rt = make_runtime()
    timer = Timer(rt)
    print(torch.cuda.get_device_name(), torch.__version__)
    for b, n in ((2, 8192), (1, n32), (8, 2048)):
        x, flops = Inputs("cuda", b, n, 128), 4 * 128 * HEADS * b * n * (n + 1) / 2
        label = f"dense {b}x{n}"
        rivals(timer, x, label, flops)
        for t in FORWARD:
            timer.time(f"{label} forward: {t}", flops, lambda: x.forward(rt, tiling(*t)))
        if n != n32:
            for t in FORWARD:
                timer.time(f"{label} forward + bias: {t}", flops, lambda: x.forward(rt, tiling(*t), bias=True))
        x.forward(rt)
        dq_sum = torch.empty(b, HEADS, kernels.padded_len(n), 128, device="cuda")
        for t in BACKWARD:
            timer.time(f"{label} backward: {list(t.values())}", 2.5 * flops, lambda: x.backward(rt, t, dq_sum=dq_sum), 8)
        if n != n32:
            x.forward(rt, bias=True)
            for t in ROW_SUMS:
                timer.time(f"{label} backward + bias, row sums {t}", 2.5 * flops, lambda: x.backward(rt, bias=True, dq_sum=dq_sum, row_sums=tiling(*t)), 8)
            timer.time(f"{label} backward + bias, row sums from o", 2.5 * flops, lambda: x.backward(rt, bias=True, dq_sum=dq_sum, exact=False), 8)
            timer.time(f"{label} backward, deterministic", 2.5 * flops, lambda: x.backward(rt, deterministic=True), 8)
            stats = kernels.prepare(rt, x.o, x.do, x.lse)
            timer.time(f"{label} prepare", 0, lambda: kernels.prepare(rt, x.o, x.do, x.lse), 8)
            timer.time(f"{label} clear dq", 0, lambda: kernels.fill_zero(rt, dq_sum), 8)
            timer.time(f"{label} convert dq", 0, lambda: kernels.convert_dq(rt, dq_sum, kernels.padded_len(n), 0, x.dq, x.scale), 8)
        del x, dq_sum
    y, flops = Inputs("cuda", 2, 8192, 64), 4 * 64 * HEADS * 2 * 8192 * 8193 / 2
    rivals(timer, y, "dense 2x8192 d64", flops)
    for t in FORWARD_64:
        timer.time(f"dense 2x8192 d64 forward: {t}", flops, lambda: y.forward(rt, tiling(*t)))
    y.forward(rt)
    for t in BACKWARD_64:
        timer.time(f"dense 2x8192 d64 backward: {list(t.values())}", 2.5 * flops, lambda: y.backward(rt, t), 8)
    del y
    for n, window, kind in ((n32, 1024, "independent"), (n32, 1024, "rising"), (131072, 2048, "independent")):
        lists = make_lists(pool, kind, n, window, "cuda")
        x = Inputs("cuda", 1, n, 128)
        flops = 4 * 128 * HEADS * (window * n - window * (window - 1) / 2)
        label = f"dma {n} w {window} {kind}"
        for t in DMA_FORWARD:
            timer.time(f"{label} forward: {t}", flops, lambda: x.dma_forward(rt, lists, tiling(*t, HEADS_PER_TILE=2)))
        dk_sum, dv_sum = torch.empty(1, KV_HEADS, n, 128, device="cuda"), torch.empty(1, KV_HEADS, n, 128, device="cuda")
        for blocks in (32, 16, 8):
            sums = (torch.empty(1, HEADS, blocks * 1024, 128, device="cuda"), dk_sum, dv_sum)
            for t in BACKWARD if blocks == 32 else BACKWARD[:1]:
                timer.time(f"{label} backward, {blocks} super-blocks: {list(t.values())}", 2.5 * flops, lambda: x.dma_backward(rt, lists, t, False, blocks, sums), 8)
            if blocks == 32:
                timer.time(f"{label} backward, row sums from o", 2.5 * flops, lambda: x.dma_backward(rt, lists, BACKWARD[0], False, blocks, sums, False), 8)
        if n == n32:
            timer.time(f"{label} backward, deterministic", 2.5 * flops, lambda: x.dma_backward(rt, lists, None, True, 1, (None, dk_sum, dv_sum)), 8)
            timer.time(f"{label}: dense kernel with window {window}, forward", flops, lambda: x.forward(rt, tiling(*FORWARD[0]), window=window))
        del x, sums, dk_sum, dv_sum
    return timer.rows
