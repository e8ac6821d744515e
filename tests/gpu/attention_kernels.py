"""The attention kernels as Python calls: tilings, grids, shared memory and params words, as the heads of kernels/*attention*.cu state them.

A runtime has `launch(file, entry, defines, grid, threads, shared, tensors, words)`; `CubinRuntime` is the one for a GPU.
Tensors are torch tensors on the runtime's device.
"""

import ctypes
import json
import os
import struct

import torch

SUPER_BLOCK = 1024
TILE_QUERIES = 64  # queries a row of tile_window stands for


def f32_word(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def ceil_div(a, b):
    return -(-a // b)


def spec_name(entry, defines):
    """File name of a compiled specialisation."""
    return entry + "".join(f"-{k}={v}" for k, v in sorted(defines.items())) + ".cubin"


class CubinRuntime:
    """Launches cubins from a folder through the CUDA driver, on torch's current stream."""

    def __init__(self, folder):
        self.folder, self.functions = folder, {}
        torch.zeros(1, device="cuda")  # makes torch's context current
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.device = "cuda"

    def check(self, code, what):
        if code:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value.decode() if name.value else code}")

    def function(self, entry, defines, shared):
        path = os.path.join(self.folder, spec_name(entry, defines))
        if path not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.check(self.driver.cuModuleLoadData(ctypes.byref(module), open(path, "rb").read()), f"load {path}")
            self.check(self.driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), entry)
            self.check(self.driver.cuFuncSetAttribute(function, 8, shared), f"{shared} bytes of shared memory for {path}")
            self.functions[path] = function
        return self.functions[path]

    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        function = self.function(entry, defines, shared)
        values = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        params = (ctypes.c_ulonglong * len(words))(*[int(w) for w in words])
        pointers = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values] + [ctypes.cast(params, ctypes.c_void_p)]
        args = (ctypes.c_void_p * len(pointers))(*pointers)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self.driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, args, None)
        self.check(code, f"launch {entry} {defines}")

    def synchronize(self):
        torch.cuda.synchronize()


class Heads:
    """Heads from element `offset` on in each token of a packed [batch, seq_len, width] tensor, as the kernels address them."""

    def __init__(self, packed, offset, num_heads, head_dim):
        self.packed, self.offset, self.num_heads, self.head_dim = packed, offset, num_heads, head_dim
        self.token_stride, self.batch_stride = packed.stride(1), packed.stride(0)

    def view(self):
        b, n = self.packed.shape[:2]
        return torch.as_strided(self.packed, (b, n, self.num_heads, self.head_dim), (self.batch_stride, self.token_stride, self.head_dim, 1), self.offset)


def stride_words(*views):
    return [v.offset for v in views] + [v.token_stride for v in views] + [v.batch_stride for v in views]


def forward_tiling(d, dv, gather=False, group=1):
    """The shipped tiling of a forward kernel."""
    if d > 192:
        tiling = dict(WARP_ROWS=16, NUM_WARPS=8, BLOCK_KV=32, NUM_STAGES=2, MIN_BLOCKS=1, Q_IN_REGISTERS=0)
    elif d > 128:
        tiling = dict(WARP_ROWS=16, NUM_WARPS=8, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=1, Q_IN_REGISTERS=0)
    elif d > 64:
        tiling = dict(WARP_ROWS=32, NUM_WARPS=4, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=2, Q_IN_REGISTERS=0)
    else:
        tiling = dict(WARP_ROWS=32, NUM_WARPS=4, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=2, Q_IN_REGISTERS=1)
    if gather:
        rows = tiling["WARP_ROWS"] * tiling["NUM_WARPS"]
        tiling["HEADS_PER_TILE"] = next(h for h in ((8, 4, 2, 1) if d in (64, 128) else (2, 1)) if group % h == 0 and rows // h >= 16)
    return tiling


def forward_shared_bytes(d, dv, t, gather, bias):
    rows, stages, kv = t["WARP_ROWS"] * t["NUM_WARPS"], t["NUM_STAGES"], t["BLOCK_KV"]
    shared = rows * d * 2 + stages * kv * (d + dv) * 2
    if bias:
        shared += stages * kv * 4
    if gather:
        shared += kv * 8 * (4 if stages == 2 else 8 if stages <= 4 else 16)
    return shared


def head_defines(d, dv):
    return dict(HEAD_DIM=d) if d == dv else dict(HEAD_DIM=d, HEAD_DIM_V=dv)


def bias_base(rt, delta, lists=None, doc_start=None, window=None):
    """The largest bias that each query sees, [batch, kv_heads, padded_len]."""
    b, hkv, n = delta.shape if delta.dim() == 3 else (1, 1, 1)
    base = torch.full((b, hkv, padded_len(n)), float("nan"), device=delta.device)
    gathered = lists is not None
    tensors = [delta] + ([lists.list, lists.list_len] if gathered else [doc_start]) + [base]
    rt.launch("bias_base.cu", "bias_base", dict(GATHER=int(gathered)), (ceil_div(n, SUPER_BLOCK), hkv, b), SUPER_BLOCK, 0, tensors,
              [n, padded_len(n), lists.capacity if gathered else window])
    return base


def attention_forward(rt, q, k, v, doc_start, window, scale, o, lse, delta=None, tiling=None):
    b, n = q.packed.shape[:2]
    d, dv, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    t = tiling or forward_tiling(d, dv)
    tile_queries = t["WARP_ROWS"] * t["NUM_WARPS"] // t.get("HEADS_PER_TILE", 1)
    bias = delta is not None
    words = [b, n, h, hkv] + stride_words(q, k, v) + [window, f32_word(scale)]
    tensors = [q.packed, k.packed, v.packed, doc_start] + ([delta, bias_base(rt, delta, None, doc_start, window)] if bias else []) + [o, lse]
    rt.launch("attention_forward.cu", "attention_forward", {**head_defines(d, dv), **t, "HAS_BIAS": int(bias)},
              (ceil_div(n, tile_queries), h // t.get("HEADS_PER_TILE", 1), b), t["NUM_WARPS"] * 32,
              forward_shared_bytes(d, dv, t, False, bias), tensors, words)


def dma_attention_forward(rt, q, k, v, delta, lists, scale, o, lse, tiling=None):
    b, n = q.packed.shape[:2]
    d, dv, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    t = tiling or forward_tiling(d, dv, True, h // hkv)
    tile_queries = t["WARP_ROWS"] * t["NUM_WARPS"] // t["HEADS_PER_TILE"]
    words = [b, n, h, hkv] + stride_words(q, k, v) + [f32_word(scale), lists.capacity, lists.tile_queries]
    tensors = [q.packed, k.packed, v.packed, delta, bias_base(rt, delta, lists), lists.list, lists.tile_window, o, lse]
    rt.launch("dma_attention_forward.cu", "dma_attention_forward", {**head_defines(d, dv), **t},
              (ceil_div(n, SUPER_BLOCK) * ceil_div(SUPER_BLOCK, tile_queries), h // t["HEADS_PER_TILE"], b), t["NUM_WARPS"] * 32,
              forward_shared_bytes(d, dv, t, True, True), tensors, words)


def padded_len(n):
    return ceil_div(n, 64) * 64


def backward_tiling(d, dv):
    """The shipped tiling of the key-stationary backward, and the gradients its launches make: (defines, [launch flags])."""
    both = [dict(COMPUTE_DQ=1, COMPUTE_DK=1, COMPUTE_DV=1)]
    apart = [dict(COMPUTE_DQ=0, COMPUTE_DK=0, COMPUTE_DV=1), dict(COMPUTE_DQ=1, COMPUTE_DK=1, COMPUTE_DV=0)]
    if d + dv > 320:
        return dict(NUM_WARPS=4, BLOCK_Q=32, MIN_BLOCKS=1), apart
    if d > 128:
        return dict(NUM_WARPS=4, BLOCK_Q=32, MIN_BLOCKS=1), both
    if d <= 64:
        return dict(NUM_WARPS=4, BLOCK_Q=64, MIN_BLOCKS=2), both
    return dict(NUM_WARPS=8, BLOCK_Q=64, MIN_BLOCKS=1), both


def backward_shared_bytes(d, dv, t, flags, bias):
    kv, q = 16 * t["NUM_WARPS"], t["BLOCK_Q"]
    swapped = flags["COMPUTE_DV"] + (2 if flags["COMPUTE_DQ"] else flags["COMPUTE_DK"])
    return (kv + 2 * q) * (d + dv) * 2 + 2 * kv * q * swapped + (24 if bias else 16) * q + kv * (12 if bias else 8) + 128


def query_tiling(d, dv, gather=False, group=1):
    """The shipped tiling of the query-stationary dq kernel."""
    if d > 128:
        tiling = dict(NUM_WARPS=8, BLOCK_KV=32, NUM_STAGES=2, MIN_BLOCKS=1)
    else:
        tiling = dict(NUM_WARPS=8, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=1)
    if gather:
        rows = 16 * tiling["NUM_WARPS"]
        tiling["HEADS_PER_TILE"] = next(h for h in ((8, 4, 2, 1) if d in (64, 128) else (2, 1)) if group % h == 0 and rows // h >= 16)
    return tiling


def query_shared_bytes(d, dv, t, gather, bias):
    rows, stages, kv = t.get("WARP_ROWS", 16) * t["NUM_WARPS"], t["NUM_STAGES"], t["BLOCK_KV"]
    shared = (rows + stages * kv) * (d + dv) * 2
    if bias:
        shared += stages * kv * 4
    if gather:
        shared += kv * 8 * (4 if stages == 2 else 8 if stages <= 4 else 16)
    return shared


def fill_zero(rt, x):
    rt.launch("fill_zero.cu", "fill_zero", {}, (ceil_div(x.numel(), 1024), 1, 1), 256, 0, [x], [x.numel()])


def prepare(rt, o, do, lse):
    """row_stats of the backward kernels."""
    b, n, h, dv = o.shape
    stats = torch.full((b, h, padded_len(n), 2), float("nan"), device=o.device)
    lanes = 2
    while lanes < dv // 8:
        lanes *= 2
    rt.launch("attention_backward_prepare.cu", "attention_backward_prepare", dict(HEAD_DIM_V=dv),
              (ceil_div(b * padded_len(n) * h, 256 // lanes), 1, 1), 256, 0, [o, do, lse, stats], [b, n, h, padded_len(n)])
    return stats


def convert_dq(rt, dq_sum, sum_len, first_query, dq, scale, clear=False):
    b, n = dq.packed.shape[:2]
    warps = b * dq.num_heads * sum_len // 16 * ceil_div(dq.head_dim, 32)
    rt.launch("attention_backward_convert.cu", "attention_backward_convert", dict(HEAD_DIM=dq.head_dim), (ceil_div(warps, 8), 1, 1), 256, 0,
              [dq_sum, dq.packed], [b, n, dq.num_heads, sum_len, first_query, dq.offset, dq.token_stride, dq.batch_stride, f32_word(scale)])
    if clear:
        fill_zero(rt, dq_sum)


def convert_rows(rt, sums, grad, scale):
    b, n = grad.packed.shape[:2]
    threads = b * grad.num_heads * n * (grad.head_dim // 16)
    rt.launch("dma_attention_backward_convert.cu", "dma_attention_backward_convert", dict(ROW_DIM=grad.head_dim), (ceil_div(threads, 256), 1, 1), 256, 0,
              [sums, grad.packed], [b, n, grad.num_heads, grad.offset, grad.token_stride, grad.batch_stride, f32_word(scale)])


def row_sums_tiling(d, dv, gather=False, group=1):
    """The shipped tiling of the row sums."""
    if d > 128:
        tiling = dict(WARP_ROWS=16, NUM_WARPS=8, BLOCK_KV=32, NUM_STAGES=2, MIN_BLOCKS=1, Q_IN_REGISTERS=0)
    else:
        tiling = dict(WARP_ROWS=32, NUM_WARPS=4, BLOCK_KV=32, NUM_STAGES=2, MIN_BLOCKS=2, Q_IN_REGISTERS=1)
    if gather:
        rows = tiling["WARP_ROWS"] * tiling["NUM_WARPS"]
        tiling["HEADS_PER_TILE"] = next(h for h in ((8, 4, 2, 1) if d in (64, 128) else (2, 1)) if group % h == 0 and rows // h >= 16)
    return tiling


def query_kernel(rt, name, t, q, k, v, do, stats, doc_start, window, scale, delta, base, dq=None):
    """attention_backward_query, or attention_row_sums when there is no `dq`."""
    b, n = q.packed.shape[:2]
    d, d_v, h, hkv, bias = q.head_dim, v.head_dim, q.num_heads, k.num_heads, delta is not None
    rows = t.get("WARP_ROWS", 16) * t["NUM_WARPS"]
    words = [b, n, h, hkv] + stride_words(q, k, v) + [window, f32_word(scale), padded_len(n)] + ([dq.offset, dq.token_stride, dq.batch_stride] if dq else [])
    tensors = [q.packed, k.packed, v.packed, do, stats, doc_start] + ([delta, base] if bias else []) + ([dq.packed] if dq else [])
    rt.launch(name + ".cu", name, {**head_defines(d, d_v), **t, "HAS_BIAS": int(bias)}, (ceil_div(n, rows), h, b), t["NUM_WARPS"] * 32,
              query_shared_bytes(d, d_v, t, False, bias), tensors, words)


def dma_query_kernel(rt, name, t, q, k, v, do, stats, delta, base, lists, scale, dq=None):
    """dma_attention_backward_query, or dma_attention_row_sums when there is no `dq`."""
    b, n = q.packed.shape[:2]
    d, d_v, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    tile_queries = t.get("WARP_ROWS", 16) * t["NUM_WARPS"] // t["HEADS_PER_TILE"]
    words = [b, n, h, hkv] + stride_words(q, k, v) + [f32_word(scale), lists.capacity, padded_len(n)]
    words += ([dq.offset, dq.token_stride, dq.batch_stride] if dq else []) + [lists.tile_queries]
    tensors = [q.packed, k.packed, v.packed, do, stats, delta, base, lists.list, lists.tile_window] + ([dq.packed] if dq else [])
    rt.launch(name + ".cu", name, {**head_defines(d, d_v), **t}, (ceil_div(n, SUPER_BLOCK) * ceil_div(SUPER_BLOCK, tile_queries), h // t["HEADS_PER_TILE"], b),
              t["NUM_WARPS"] * 32, query_shared_bytes(d, d_v, t, True, True), tensors, words)


def attention_backward(rt, q, k, v, o, lse, do, doc_start, doc_end, window, scale, dq, dk, dv, delta=None, ddelta=None, deterministic=False,
                       tiling=None, dq_sum=None, exact=None, row_sums=None):
    """`exact`: row sums from the probabilities instead of from o; on by default where there is a bias."""
    b, n = q.packed.shape[:2]
    d, d_v, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    bias = delta is not None
    t, launches = backward_tiling(d, d_v)
    t = tiling or t
    stats = prepare(rt, o, do, lse)
    base = bias_base(rt, delta, None, doc_start, window) if bias else None
    if bias if exact is None else exact:
        query_kernel(rt, "attention_row_sums", row_sums or row_sums_tiling(d, d_v), q, k, v, do, stats, doc_start, window, scale, delta, base)
    if not deterministic:
        if dq_sum is None:
            dq_sum = torch.empty(b, h, padded_len(n), d, device=o.device)
        fill_zero(rt, dq_sum)
    words = [b, n, h, hkv] + stride_words(q, k, v) + [dk.offset, dv.offset, dk.token_stride, dv.token_stride, dk.batch_stride, dv.batch_stride,
                                                      window, f32_word(scale), padded_len(n)]
    for flags in launches:
        if deterministic:
            flags = {**flags, "COMPUTE_DQ": 0}
        tensors = [q.packed, k.packed, v.packed, do, stats, doc_end] + ([delta, base] if bias else [])
        tensors += [dq_sum] if flags["COMPUTE_DQ"] else []
        tensors += [dk.packed] if flags["COMPUTE_DK"] else []
        tensors += [dv.packed] if flags["COMPUTE_DV"] else []
        tensors += [ddelta] if bias and flags["COMPUTE_DK"] else []
        rt.launch("attention_backward.cu", "attention_backward", {**head_defines(d, d_v), **t, **flags, "HAS_BIAS": int(bias)},
                  (ceil_div(n, 16 * t["NUM_WARPS"]), hkv, b), t["NUM_WARPS"] * 32, backward_shared_bytes(d, d_v, t, flags, bias), tensors, words)
    if not deterministic:
        convert_dq(rt, dq_sum, padded_len(n), 0, dq, scale)
        return
    query_kernel(rt, "attention_backward_query", query_tiling(d, d_v), q, k, v, do, stats, doc_start, window, scale, delta, base, dq)


def dma_attention_backward(rt, q, k, v, o, lse, do, delta, lists, scale, dq, dk, dv, ddelta, deterministic=False, super_blocks=16, tiling=None,
                           sums=None, exact=True):
    """`super_blocks`: how many share one buffer of dq sums, and one launch. `sums`: (dq, dk, dv) f32 buffers to reuse."""
    b, n = q.packed.shape[:2]
    d, d_v, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    t, launches = backward_tiling(d, d_v)
    t = tiling or t
    blocks = ceil_div(n, SUPER_BLOCK)
    super_blocks = 1 if deterministic else min(super_blocks, blocks)
    stats, base = prepare(rt, o, do, lse), bias_base(rt, delta, lists)
    if exact:
        dma_query_kernel(rt, "dma_attention_row_sums", row_sums_tiling(d, d_v, True, h // hkv), q, k, v, do, stats, delta, base, lists, scale)
    if sums is None:
        dq_sum = None if deterministic else torch.empty(b, h, super_blocks * SUPER_BLOCK, d, device=o.device)
        dk_sum, dv_sum = torch.empty(b, hkv, n, d, device=o.device), torch.empty(b, hkv, n, d_v, device=o.device)
    else:
        dq_sum, dk_sum, dv_sum = sums
    for x in (dk_sum, dv_sum, ddelta) + (() if deterministic else (dq_sum,)):
        fill_zero(rt, x)
    for first in range(0, blocks, super_blocks):
        count = min(super_blocks, blocks - first)
        words = [b, n, h, hkv] + stride_words(q, k, v) + [f32_word(scale), padded_len(n), lists.capacity, first, count * SUPER_BLOCK]
        for flags in launches:
            if deterministic:
                flags = {**flags, "COMPUTE_DQ": 0, "DETERMINISTIC": 1}
            tensors = [q.packed, k.packed, v.packed, do, stats, delta, base, lists.list, lists.list_len]
            tensors += [dq_sum] if flags["COMPUTE_DQ"] else []
            tensors += [dk_sum] if flags["COMPUTE_DK"] else []
            tensors += [dv_sum] if flags["COMPUTE_DV"] else []
            tensors += [ddelta] if flags["COMPUTE_DK"] else []
            rt.launch("dma_attention_backward.cu", "dma_attention_backward", {**head_defines(d, d_v), **t, **flags},
                      (count * ceil_div(lists.capacity, 16 * t["NUM_WARPS"]), hkv, b), t["NUM_WARPS"] * 32,
                      backward_shared_bytes(d, d_v, t, flags, True), tensors, words)
        if not deterministic:
            convert_dq(rt, dq_sum, count * SUPER_BLOCK, first * SUPER_BLOCK, dq, scale, first + count < blocks)
    convert_rows(rt, dk_sum, dk, scale)
    convert_rows(rt, dv_sum, dv, 1.0)
    if deterministic:
        dma_query_kernel(rt, "dma_attention_backward_query", query_tiling(d, d_v, True, h // hkv), q, k, v, do, stats, delta, base, lists, scale, dq)
