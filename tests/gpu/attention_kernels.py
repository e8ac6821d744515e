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
    """A strided [batch, seq_len, heads, head_dim] view of a packed tensor, as the kernels address it."""

    def __init__(self, packed, first_head, num_heads, head_dim):
        self.packed, self.num_heads, self.head_dim = packed, num_heads, head_dim
        self.offset = first_head * head_dim if isinstance(first_head, int) else first_head[0]
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
        tiling = dict(WARP_ROWS=16, NUM_WARPS=8, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=1, Q_IN_REGISTERS=1)
    else:
        tiling = dict(WARP_ROWS=16, NUM_WARPS=8, BLOCK_KV=64, NUM_STAGES=2, MIN_BLOCKS=2, Q_IN_REGISTERS=1)
    if gather:
        rows = tiling["WARP_ROWS"] * tiling["NUM_WARPS"]
        tiling["HEADS_PER_TILE"] = next(h for h in (8, 4, 2, 1) if group % h == 0 and rows // h >= 16)
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


def attention_forward(rt, q, k, v, doc_start, window, scale, o, lse, delta=None, tiling=None):
    b, n = q.packed.shape[:2]
    d, dv, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    t = tiling or forward_tiling(d, dv)
    tile_queries = t["WARP_ROWS"] * t["NUM_WARPS"] // t.get("HEADS_PER_TILE", 1)
    bias = delta is not None
    words = [b, n, h, hkv] + stride_words(q, k, v) + [window, f32_word(scale)]
    tensors = [q.packed, k.packed, v.packed, doc_start] + ([delta] if bias else []) + [o, lse]
    rt.launch("attention_forward.cu", "attention_forward", {**head_defines(d, dv), **t, "HAS_BIAS": int(bias)},
              (ceil_div(n, tile_queries), h // t.get("HEADS_PER_TILE", 1), b), t["NUM_WARPS"] * 32,
              forward_shared_bytes(d, dv, t, False, bias), tensors, words)


def dma_attention_forward(rt, q, k, v, delta, lists, scale, o, lse, tiling=None):
    b, n = q.packed.shape[:2]
    d, dv, h, hkv = q.head_dim, v.head_dim, q.num_heads, k.num_heads
    t = tiling or forward_tiling(d, dv, True, h // hkv)
    tile_queries = t["WARP_ROWS"] * t["NUM_WARPS"] // t["HEADS_PER_TILE"]
    words = [b, n, h, hkv] + stride_words(q, k, v) + [f32_word(scale), lists.capacity, lists.tile_queries]
    tensors = [q.packed, k.packed, v.packed, delta, lists.list, lists.tile_window, o, lse]
    rt.launch("dma_attention_forward.cu", "dma_attention_forward", {**head_defines(d, dv), **t},
              (ceil_div(n, SUPER_BLOCK) * ceil_div(SUPER_BLOCK, tile_queries), h // t["HEADS_PER_TILE"], b), t["NUM_WARPS"] * 32,
              forward_shared_bytes(d, dv, t, True, True), tensors, words)
