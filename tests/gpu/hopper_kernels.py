"""The Hopper kernels behind the launches of attention_kernels: a runtime that takes the sm_90a kernel where there is one.

Buffers and params words are those of the portable kernels; grid, threads, shared memory and defines differ, as the heads of kernels/hopper_*.cu
state them.
"""

import ctypes

import torch

import attention_kernels as kernels
from attention_kernels import CubinRuntime, ceil_div, spec_name

TENSOR_MAP_BF16, SWIZZLE_128, PROMOTE_256 = 9, 3, 3


def forward_tiling(d, gather, group, bias):
    """The tiling of a forward kernel."""
    tiling = dict(NUM_CONSUMERS=2, BLOCK_KV=128, K_STAGES=2 if d == 128 else 3, V_STAGES=3, TAKE_TURNS=2, TENSOR_MAPS=1, CONSUMER_REGISTERS=216, PRODUCER_REGISTERS=72)
    if d == 64 and not bias:
        tiling.update(NUM_CONSUMERS=3, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32)
    tiling["HEADS_PER_TILE"] = 2 if gather and group % 2 == 0 else 1
    return tiling


def row_sums_tiling(d, gather, group, bias):
    """The tiling of the row sums."""
    return {**forward_tiling(d, gather, group, True), "V_STAGES": 2 if d == 128 else 3, "TAKE_TURNS": 0}


def query_tiling(d, gather, group, at_128):
    """The tiling of the query-stationary dq, or None where the portable kernel runs: at head_dim 128 for lists with odd groups (it would spill),
    and where `at_128` is off."""
    if d == 128 and (not at_128 or (gather and group % 2)):
        return None
    return {**row_sums_tiling(d, gather, group, True), "CONSUMER_REGISTERS": 224, "PRODUCER_REGISTERS": 56}


def forward_shared_bytes(d, t, gather, bias, sums):
    rows, stages = t["NUM_CONSUMERS"] * 64, t["K_STAGES"] + t["V_STAGES"]
    shared = rows * d * (4 if sums else 2) + stages * 256 * d + (8192 + 4096 if bias else 0) + (4096 if gather else 0)
    return shared + 2 * (32 + (0 if gather else rows // t["HEADS_PER_TILE"] * 4)) + (2 * stages + 2) * 8 + 1024


def backward_tiling(d):
    """The tiling of a backward kernel."""
    tiling = dict(DQ_BULK=1, Q_STAGES=3, DO_STAGES=2, TENSOR_MAPS=1, CONSUMER_REGISTERS=232, PRODUCER_REGISTERS=40)
    if d == 64:
        tiling.update(DQ_BULK=0, DO_STAGES=3)
    return tiling


def backward_shared_bytes(d, t, compute_dq, bias):
    stages = t["Q_STAGES"] + t["DO_STAGES"]
    stats = t["Q_STAGES"] * 1024 + t["DO_STAGES"] * 1280 + 2048 if bias else stages * 1024 if d == 64 else t["DO_STAGES"] * 512
    return 512 * d + stages * 128 * d + 32768 + (256 * d if compute_dq and t["DQ_BULK"] else 0) + stats + (2 * stages + 1) * 8 + 1024


class HopperRuntime(CubinRuntime):
    """`forward`, `row_sums`, `backward`: entries that replace those of the tiling chosen, for trying others.
    `residual`: the forward with a bias also stores o_low, the lower bits of o, and no row sums are made."""

    def __init__(self, folder, kinds=("forward", "backward"), residual=False, query_at_128=True):
        super().__init__(folder)
        self.residual, self.query_at_128, self.o_low = residual, query_at_128, None
        self.forward, self.row_sums, self.backward, self.kinds = {}, {}, {}, kinds
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.maps = {}

    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        spec = self.translate(entry, defines, grid, words)
        tensors = list(tensors)
        if self.residual:
            tensors, skip = self.with_residual(entry, defines, tensors)
            if skip:
                return
        if spec is None:
            return super().launch(file, entry, defines, grid, threads, shared, tensors, words)
        entry, defines, grid, threads, shared, tensor_maps = spec
        maps = [self.tensor_map(tensors[at], *shape) for at, shape in tensor_maps]
        function = self.function(entry, defines, shared)
        values = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        params = (ctypes.c_ulonglong * len(words))(*[int(w) for w in words])
        mapped = [ctypes.c_void_p(tensors[at].data_ptr()) for at, _ in tensor_maps]  # CubeCL passes these too
        pointers = [ctypes.c_void_p(m) for m in maps] + [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in mapped + values] + [ctypes.cast(params, ctypes.c_void_p)]
        args = (ctypes.c_void_p * len(pointers))(*pointers)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, args, None), f"launch {entry} {defines}")

    def translate(self, entry, defines, grid, words):
        """(entry, defines, grid, threads, shared bytes, tensor maps) of the Hopper kernel, or None."""
        d, gather = defines.get("HEAD_DIM"), entry.startswith("dma_")
        if entry == "attention_backward_prepare" and self.residual and self.o_low is not None and defines["HEAD_DIM_V"] in (64, 128):
            return "hopper_" + entry, defines, grid, 256, 0, []
        if d not in (64, 128) or defines.get("HEAD_DIM_V", d) != d:
            return None
        group, bias = words[2] // words[3], gather or bool(defines.get("HAS_BIAS"))
        packed = lambda at, heads, rows: (at, (words[4 + at], heads * d, words[1], words[0], words[7 + at], words[10 + at], rows))
        if entry.replace("dma_", "") in ("attention_forward", "attention_row_sums", "attention_backward_query") and "forward" in self.kinds:
            sums = not entry.endswith("forward")
            t = {**(row_sums_tiling if sums else forward_tiling)(d, gather, group, bias), **(self.row_sums if sums else self.forward)}
            if entry.endswith("query"):
                t = query_tiling(d, gather, group, self.query_at_128)
                if t is None:
                    return None
            while group % t["HEADS_PER_TILE"]:
                t["HEADS_PER_TILE"] //= 2
            maps, width = [], words[2] * d
            if t["TENSOR_MAPS"]:
                rows = t["NUM_CONSUMERS"] * 64 // t["HEADS_PER_TILE"]
                maps = [packed(0, words[2], rows)] + ([] if gather else [packed(at, words[3], 128) for at in (1, 2)])
                maps += [(3, (0, width, words[1], words[0], width, words[1] * width, rows))] if sums else []
            specific = {} if gather else dict(HAS_BIAS=int(bias))
            if self.residual and bias and not sums:
                specific["RESIDUAL"] = 1
            return ("hopper_" + entry, {"HEAD_DIM": d, **t, **specific}, (self.multiprocessors, 1, 1), 128 + t["NUM_CONSUMERS"] * 128,
                    forward_shared_bytes(d, t, gather, bias, sums), maps)
        if entry in ("attention_backward", "dma_attention_backward") and "backward" in self.kinds and defines["COMPUTE_DK"] and defines["COMPUTE_DV"]:
            t = {**backward_tiling(d), **self.backward}
            compute_dq = defines["COMPUTE_DQ"]
            if not compute_dq:
                t.update(CONSUMER_REGISTERS=224, PRODUCER_REGISTERS=56)
            if gather:
                specific = dict(DETERMINISTIC=defines.get("DETERMINISTIC", 0))
                blocks = words[17] // kernels.SUPER_BLOCK * ceil_div(words[15], 128)
            else:
                specific, blocks = dict(HAS_BIAS=int(bias)), ceil_div(words[1], 128)
            width = words[2] * d
            maps = [packed(0, words[2], 64), (3, (0, width, words[1], words[0], width, words[1] * width, 64))] if t.get("TENSOR_MAPS") else []
            return ("hopper_" + entry, {"HEAD_DIM": d, **t, "COMPUTE_DQ": compute_dq, **specific}, (blocks, words[3], words[0]), 384,
                    backward_shared_bytes(d, t, compute_dq, bias), maps)
        return None

    def with_residual(self, entry, defines, tensors):
        """The tensors with o_low among them, and whether the launch is not needed."""
        bias = entry.startswith("dma_") or bool(defines.get("HAS_BIAS"))
        if entry.endswith("attention_forward"):
            o = tensors[-2]
            if not bias or defines["HEAD_DIM"] not in (64, 128):
                self.o_low = None
            else:
                if self.o_low is None or self.o_low[0] != o.data_ptr() or self.o_low[1].shape != o.shape:
                    self.o_low = (o.data_ptr(), torch.full(o.shape, 0x7FFF, dtype=torch.int16, device=o.device))
                tensors.append(self.o_low[1])
        elif entry == "attention_backward_prepare" and self.o_low is not None:
            assert self.o_low[0] == tensors[0].data_ptr(), "the backward of another forward"
            tensors.insert(1, self.o_low[1])
        return tensors, entry.endswith("row_sums") and self.o_low is not None

    def tensor_map(self, tensor, offset, width, rows, batch, token_stride, batch_stride, box_rows):
        """Address of a map of bf16 [batch, rows, width], boxes 1 x box_rows x 64."""
        key = (tensor.data_ptr(), offset, width, rows, batch, token_stride, batch_stride, box_rows)
        if key not in self.maps:
            memory = ctypes.create_string_buffer(256)
            at = (ctypes.addressof(memory) + 63) & ~63
            u64, u32 = ctypes.c_ulonglong, ctypes.c_uint
            code = self.driver.cuTensorMapEncodeTiled(
                ctypes.c_void_p(at), TENSOR_MAP_BF16, 3, ctypes.c_void_p(tensor.data_ptr() + 2 * offset), (u64 * 3)(width, rows, batch),
                (u64 * 2)(2 * token_stride, 2 * batch_stride), (u32 * 3)(64, box_rows, 1), (u32 * 3)(1, 1, 1), 0, SWIZZLE_128, PROMOTE_256, 0)
            self.check(code, "tensor map")
            self.maps[key] = (memory, at)
        return self.maps[key][1]


class HopperRecorder(HopperRuntime):
    """Launches nothing and remembers which specialisations were asked for."""

    device = "cpu"

    def __init__(self):
        self.residual, self.query_at_128, self.o_low = False, False, True
        self.forward, self.row_sums, self.backward, self.kinds, self.multiprocessors, self.seen = {}, {}, {}, ("forward", "backward"), 132, {}

    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        spec = self.translate(entry, defines, grid, words)
        if spec is None:
            self.seen[spec_name(entry, defines)] = (file, defines, shared)
        else:
            self.seen[spec_name(spec[0], spec[1])] = (spec[0] + ".cu", spec[1], spec[4])

    def synchronize(self):
        pass
