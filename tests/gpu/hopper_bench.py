"""Times the Hopper kernels: variants of their tilings on a few shapes, rivals beside them. CUDA events, L2 flushed, medians."""

import multiprocessing

import numpy as np
import torch

import attention_kernels as kernels
from attention_bench import HEADS, Inputs, Timer, make_lists, rivals

FORWARD = {
    "cp.async": {},
    "cp.async v3": dict(V_STAGES=3),
    "cp.async free": dict(TAKE_TURNS=0),
    "cp.async 2 heads": dict(HEADS_PER_TILE=2),
    "cp.async 2 heads v3": dict(HEADS_PER_TILE=2, V_STAGES=3),
    "maps": dict(TENSOR_MAPS=1),
    "maps v3": dict(TENSOR_MAPS=1, V_STAGES=3),
    "maps free": dict(TENSOR_MAPS=1, TAKE_TURNS=0),
    "maps 2 heads": dict(TENSOR_MAPS=1, HEADS_PER_TILE=2),
}
FORWARD_64 = {"cp.async": {}, "cp.async free": dict(TAKE_TURNS=0), "cp.async 2 heads": dict(HEADS_PER_TILE=2), "maps": dict(TENSOR_MAPS=1),
              "maps free": dict(TENSOR_MAPS=1, TAKE_TURNS=0)}
GATHER = {"": {}, "free": dict(TAKE_TURNS=0), "v3": dict(V_STAGES=3), "k3": dict(K_STAGES=3), "1 head": dict(HEADS_PER_TILE=1)}
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
            x.dma_forward(with_variant(rt, "forward", options), NoLists)
        y.dma_forward(with_variant(rt, "forward", {}), NoLists)
    rt.forward = {}
    if "backward" in names:
        for options in BACKWARD.values():
            for z in (x, y):
                z.backward(with_variant(rt, "backward", options))
                z.backward(rt, bias=True)
                z.dma_backward(rt, NoLists)
    rt.backward = {}


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
        rt.forward = {}
        timer.time(f"dma {n} w {window} {kind} d64", pairs_flops(64, 1, n, window), lambda: y.dma_forward(rt, lists), 15)


def run(make_runtime, names, torch):
    """Rows of the variants named."""
    pool = multiprocessing.get_context("fork").Pool(8)
    rt = make_runtime()
    timer = Timer(rt)
    print(torch.cuda.get_device_name(), torch.__version__)
    if "forward" in names:
        run_forward(rt, timer, pool)
    return timer.rows
