"""Times the Hopper kernels: variants of their tilings on a few shapes, rivals beside them. CUDA events, L2 flushed, medians."""

import multiprocessing

import numpy as np
import torch

import attention_kernels as kernels
from attention_bench import HEADS, Inputs, Timer, make_lists, rivals

FORWARD = {"": {}}
FORWARD_64 = {"": {}}
GATHER = {"": {}}
ROW_SUMS = {"": {}}
BACKWARD = {"": {}}


class NoLists:
    """Stands for lists where nothing is launched."""

    capacity, tile_queries = 128, 64
    list = list_len = tile_window = torch.zeros(1)


def with_variant(rt, kind, options):
    setattr(rt, kind, options)
    return rt


def record(rt, names):
    """Asks `rt` for every specialisation that `run` launches."""
    x, y = Inputs("cpu", 1, 64, 128), Inputs("cpu", 1, 64, 64)
    if "forward" in names:
        for options in FORWARD.values():
            x.forward(with_variant(rt, "forward", options))
        for options in FORWARD_64.values():
            y.forward(with_variant(rt, "forward", options))
        x.forward(with_variant(rt, "forward", {}), bias=True)
        for options in GATHER.values():
            for z in (x, y):
                z.dma_forward(with_variant(rt, "forward", options), NoLists)
        for options in ROW_SUMS.values():
            for z in (x, y):
                z.backward(with_variant(rt, "row_sums", options), bias=True)
                z.dma_backward(rt, NoLists)
        rt.row_sums = {}
    rt.forward = {}
    if "backward" in names:
        for options in BACKWARD.values():
            with_variant(rt, "backward", options)
            for z in (x, y):
                z.backward(rt)
                z.backward(rt, deterministic=True)
                z.backward(rt, bias=True)
                z.dma_backward(rt, NoLists)
    rt.backward = {}
    if "table" in names:
        for z in (x, y):
            for bias in (False, True):
                z.forward(rt, bias=bias)
                z.backward(rt, bias=bias)
            z.dma_forward(rt, NoLists)
            z.dma_backward(rt, NoLists)
            z.dma_backward(rt, NoLists, deterministic=True)


def pairs_flops(d, b, n, window):
    """FLOPs of the forward products over the pairs that a causal window attends."""
    window = min(window, n)
    return 4 * d * HEADS * b * (window * n - window * (window - 1) / 2)


def run_forward(rt, timer, pool):
    for b, n, window in ((2, 8192, 8192), (1, 32768, 32768), (8, 2048, 2048), (1, 16384, 1024), (1, 16384, 2048)):
        x = Inputs("cuda", b, n, 128)
        flops = pairs_flops(128, b, n, window)
        label = f"{b}x{n}" + (f" w {window}" if window < n else "")
        if window == n:
            rivals(timer, x, label, flops, False)
        for name, options in FORWARD.items():
            timer.time(f"{label} forward: {name}", flops, lambda: x.forward(with_variant(rt, "forward", options), window=window), 10)
        rt.forward = {}
        timer.time(f"{label} forward + bias", flops, lambda: x.forward(rt, bias=True, window=window), 10)
    y, flops = Inputs("cuda", 2, 8192, 64), pairs_flops(64, 2, 8192, 8192)
    rivals(timer, y, "2x8192 d64", flops, False)
    for name, options in FORWARD_64.items():
        timer.time(f"2x8192 d64 forward: {name}", flops, lambda: y.forward(with_variant(rt, "forward", options)), 10)
    n, window = 16384, 1024
    x, y = Inputs("cuda", 1, n, 128), Inputs("cuda", 1, n, 64)
    for kind in ("rising", "independent"):
        lists = make_lists(pool, kind, n, window, "cuda")
        for name, options in GATHER.items():
            timer.time(f"dma {n} w {window} {kind}: {name}", pairs_flops(128, 1, n, window), lambda: x.dma_forward(with_variant(rt, "forward", options), lists), 15)
            timer.time(f"dma {n} w {window} {kind} d64: {name}", pairs_flops(64, 1, n, window), lambda: y.dma_forward(rt, lists), 15)
        rt.forward = {}


def run_backward(rt, timer, pool):
    for b, n, window, d in ((2, 8192, 8192, 128), (1, 32768, 32768, 128), (1, 16384, 1024, 128), (1, 16384, 2048, 128), (2, 8192, 8192, 64), (8, 2048, 2048, 128)):
        x = Inputs("cuda", b, n, d)
        flops = 2.5 * pairs_flops(d, b, n, window)
        label = f"{b}x{n} d{d}" + (f" w {window}" if window < n else "")
        if window == n:
            rivals(timer, x, label, flops / 2.5)
        x.forward(rt, window=window)
        dq_sum = torch.empty(b, HEADS, kernels.padded_len(n), d, device="cuda")
        for name, options in BACKWARD.items():
            timer.time(f"{label} backward: {name}", flops, lambda: x.backward(with_variant(rt, "backward", options), window=window, dq_sum=dq_sum), 8)
        rt.backward = {}
        if n == 2048:
            rt.residual = True
            timer.time(f"{label} forward + bias, residual", flops / 2.5, lambda: x.forward(rt, bias=True), 8)
            timer.time(f"{label} backward + bias, residual", flops, lambda: x.backward(rt, bias=True, dq_sum=dq_sum), 8)
            rt.residual = False
            x.forward(rt, bias=True)
            timer.time(f"{label} backward + bias", flops, lambda: x.backward(rt, bias=True, dq_sum=dq_sum), 8)
            pieces(rt, timer, label, lambda rt: x.backward(rt, bias=True, dq_sum=dq_sum))
        timer.time(f"{label} backward, deterministic", flops, lambda: x.backward(rt, window=window, deterministic=True), 8)
    n, window = 16384, 1024
    for d in (128, 64):
        x = Inputs("cuda", 1, n, d)
        dk_sum, dv_sum = torch.empty(1, x.hkv, n, d, device="cuda"), torch.empty(1, x.hkv, n, d, device="cuda")
        sums = (torch.empty(1, HEADS, 16384, d, device="cuda"), dk_sum, dv_sum)
        for kind in ("rising", "independent"):
            lists = make_lists(pool, kind, n, window, "cuda")
            x.dma_forward(rt, lists)
            flops = 2.5 * pairs_flops(d, 1, n, window)
            for name, options in BACKWARD.items():
                timer.time(f"dma {n} w {window} {kind} d{d} backward: {name}", flops, lambda: x.dma_backward(with_variant(rt, "backward", options), lists, None, False, 16, sums), 8)
            rt.backward = {}
            for name, options in ROW_SUMS.items():
                timer.time(f"dma {n} w {window} {kind} d{d} backward: row sums {name}", flops, lambda: x.dma_backward(with_variant(rt, "row_sums", options), lists, None, False, 16, sums), 8)
            rt.row_sums = {}
            pieces(rt, timer, f"dma {n} w {window} {kind} d{d}", lambda rt: x.dma_backward(rt, lists, None, False, 16, sums))
            rt.residual = True
            timer.time(f"dma {n} w {window} {kind} d{d} forward, residual", flops / 2.5, lambda: x.dma_forward(rt, lists), 8)
            timer.time(f"dma {n} w {window} {kind} d{d} backward, residual", flops, lambda: x.dma_backward(rt, lists, None, False, 16, sums), 8)
            rt.residual = False
            timer.time(f"dma {n} w {window} {kind} d{d} backward, row sums from o", flops, lambda: x.dma_backward(rt, lists, None, False, 16, sums, False), 8)


def cudnn_rival(timer, x, label, flops, reps):
    """SDPA with cuDNN, dense causal, on the same tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.view().transpose(1, 2).contiguous().requires_grad_() for t in (x.q, x.k, x.v))
    do = x.do.transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = call()
        timer.time(f"{label} forward: SDPA cuDNN", flops, call, reps)
        timer.time(f"{label} backward: SDPA cuDNN", 2.5 * flops, lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), reps)


def run_table(rt, timer, pool):
    """The shapes that are published, rivals beside them."""
    for b, n, d in ((2, 8192, 128), (1, 32768, 128), (8, 2048, 128), (2, 8192, 64), (1, 32768, 64), (1, 16384, 128)):
        x, flops, label = Inputs("cuda", b, n, d), pairs_flops(d, b, n, n), f"dense {b}x{n} d{d}"
        cudnn_rival(timer, x, label, flops, 10)
        timer.time(f"{label} forward", flops, lambda: x.forward(rt), 10)
        dq_sum = torch.empty(b, HEADS, kernels.padded_len(n), d, device="cuda")
        timer.time(f"{label} backward", 2.5 * flops, lambda: x.backward(rt, dq_sum=dq_sum), 10)
        if n == 2048:
            for rt.residual in (False, True):
                name = "residual" if rt.residual else "row sums"
                timer.time(f"{label} forward + bias, {name}", flops, lambda: x.forward(rt, bias=True), 10)
                timer.time(f"{label} backward + bias, {name}", 2.5 * flops, lambda: x.backward(rt, bias=True, dq_sum=dq_sum), 10)
            rt.residual = False
    for n, window, d in ((16384, 1024, 128), (16384, 2048, 128), (65536, 1024, 128), (65536, 2048, 128), (16384, 1024, 64)):
        x, flops, label = Inputs("cuda", 1, n, d), pairs_flops(d, 1, n, window), f"window 1x{n} w {window} d{d}"
        timer.time(f"{label} forward", flops, lambda: x.forward(rt, window=window), 10)
        dq_sum = torch.empty(1, HEADS, n, d, device="cuda")
        timer.time(f"{label} backward", 2.5 * flops, lambda: x.backward(rt, window=window, dq_sum=dq_sum), 10)
    for n, window, d, kind in ((8192, 1024, 128, "independent"), (16384, 1024, 128, "rising"), (16384, 1024, 128, "independent"), (32768, 1024, 128, "independent"),
                               (16384, 1024, 64, "rising"), (131072, 2048, 128, "independent")):
        x, flops, label = Inputs("cuda", 1, n, d), pairs_flops(d, 1, n, window), f"dma {n} w {window} {kind} d{d}"
        lists = make_lists(pool, kind, n, window, "cuda")
        sums = [torch.empty(1, h, m, d, device="cuda") for h, m in ((HEADS, min(n, 16384)), (x.hkv, n), (x.hkv, n))]
        for rt.residual in (False, True):
            name = "residual" if rt.residual else "row sums"
            timer.time(f"{label} forward, {name}", flops, lambda: x.dma_forward(rt, lists), 10)
            timer.time(f"{label} backward, {name}", 2.5 * flops, lambda: x.dma_backward(rt, lists, None, False, 16, sums), 8)
        rt.residual = False
        if n == 16384 and kind == "rising":
            timer.time(f"{label} backward, deterministic", 2.5 * flops, lambda: x.dma_backward(rt, lists, None, True, 1, (None, *sums[1:])), 8)
        if n in (8192, 131072):
            cudnn_rival(timer, x, f"dense 1x{n} d{d}", pairs_flops(d, 1, n, n), 10 if n < 100000 else 2)


def run_deterministic(rt, timer, pool):
    """The backward in a fixed order beside the usual one."""
    for b, n, window in ((2, 8192, 8192), (1, 16384, 1024)):
        x, flops, label = Inputs("cuda", b, n, 128), 2.5 * pairs_flops(128, b, n, window), f"{b}x{n} w {window}"
        x.forward(rt, window=window)
        dq_sum = torch.empty(b, HEADS, n, 128, device="cuda")
        timer.time(f"{label} backward", flops, lambda: x.backward(rt, window=window, dq_sum=dq_sum), 8)
        timer.time(f"{label} backward, deterministic", flops, lambda: x.backward(rt, window=window, deterministic=True), 8)
    lists = make_lists(pool, "rising", n, window, "cuda")
    sums = [torch.empty(1, h, n, 128, device="cuda") for h in (HEADS, x.hkv, x.hkv)]
    rt.residual = True
    x.dma_forward(rt, lists)
    timer.time(f"dma {label} rising backward", flops, lambda: x.dma_backward(rt, lists, None, False, 16, sums), 8)
    timer.time(f"dma {label} rising backward, deterministic", flops, lambda: x.dma_backward(rt, lists, None, True, 1, (None, *sums[1:])), 8)
    pieces(rt, timer, f"dma {label} deterministic", lambda rt: x.dma_backward(rt, lists, None, True, 1, (None, *sums[1:])))


def pieces(rt, timer, label, call):
    """Times each launch of `call` by itself."""
    recorded = []

    class Capture:
        def launch(self, *launch):
            recorded.append(launch)

    call(Capture())
    for launch in recorded:
        timer.time(f"{label}: {launch[1]}", 0, lambda: rt.launch(*launch), 8)


def run(make_runtime, names, torch):
    """Rows of the variants named."""
    pool = multiprocessing.get_context("fork").Pool(8)
    rt = make_runtime()
    timer = Timer(rt)
    print(torch.cuda.get_device_name(), torch.__version__)
    if "forward" in names:
        run_forward(rt, timer, pool)
    if "backward" in names:
        run_backward(rt, timer, pool)
    if "table" in names:
        run_table(rt, timer, pool)
    if "deterministic" in names:
        run_deterministic(rt, timer, pool)
    return timer.rows
