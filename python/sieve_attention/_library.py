"""Plans of the kernel library: made once for a shape, loaded once on a GPU, run on torch's current stream."""

import contextlib
import contextvars
import ctypes
import json
import math
import os
import struct
from functools import partial
from pathlib import Path

import torch

from . import _axes
from ._shapes import symbolic

ABI = 2

# Plans that are kept.
MOST_PLANS = 4096

# Ops whose caches may have any number of keys: a plan serves all numbers up to a multiple of this one.
GROWING = ("cached_decode", "attention_decode")
PLANNED_KEYS = 256

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bits that o lacks: no numbers by themselves, so torch holds them as integers and the library as what it stores.
BITS = {"o_low": torch.int16}

# Inputs that kernels walk by strides: heads side by side, tokens and rows anywhere.
STRIDED = ("q", "k", "v", "index_q", "index_k", "latents")


class SieveError(ValueError):
    """What a call asks for that no kernel does, or what a machine lacks, in a sentence."""


def _open():
    """The library, or None where it cannot be loaded, and then why: definitions do without it."""
    path = os.environ.get("SIEVE_ATTENTION_LIBRARY") or Path(__file__).with_name("libsieve_capi.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        where = "the kernels run on Linux with an NVIDIA GPU; sieve_attention.on_cpu() computes without them"
        return None, f"{error}\n  hint: install the wheel, or build it: cargo xtask wheel; {where}"
    void, text = ctypes.c_void_p, ctypes.c_char_p
    library.sieve_abi.restype = ctypes.c_uint32
    library.sieve_error.restype = library.sieve_plan_describe.restype = text
    library.sieve_plan.argtypes = [text, ctypes.POINTER(void)]
    library.sieve_plan_describe.argtypes = library.sieve_plan_free.argtypes = [void]
    library.sieve_plan_load.argtypes = [void, ctypes.c_int, text, text]
    library.sieve_plan_run.argtypes = [void, void, ctypes.c_size_t, void]
    library.sieve_plan_free.restype = None
    if library.sieve_abi() != ABI:
        return None, f"{path} has interface {library.sieve_abi()}, and this package needs {ABI}"
    return library, ""


_library, missing = _open()
_run = _library and _library.sieve_plan_run
# A torch without CUDA lacks these. Scratch memory is a block of torch's allocator: a tensor costs the host more.
_stream, _device, _allocate, _free = (
    getattr(torch._C, name, None)
    for name in (
        "_cuda_getCurrentRawStream",
        "_cuda_getDevice",
        "_cuda_cudaCachingAllocator_raw_alloc",
        "_cuda_cudaCachingAllocator_raw_delete",
    )
)


def _check(status):
    if status:
        raise SieveError(_library.sieve_error().decode())


def nvrtc_path():
    """The compiler that torch brought, or None where the dynamic linker is to find one."""
    import sysconfig

    major = (torch.version.cuda or "").split(".")[0]
    folders = {Path(torch.__file__).parents[1], Path(sysconfig.get_paths()["purelib"])}
    for folder in sorted(folders):
        for pattern in (f"nvidia/cu{major}/lib/libnvrtc.so.{major}", f"nvidia/cuda_nvrtc/lib/libnvrtc.so.{major}"):
            path = folder / pattern
            if path.is_file():
                return path
    return None


def cache_folder():
    """Where compiled kernels are kept: $XDG_CACHE_HOME/sieve."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sieve"


def _gpu(capability, multiprocessors, shared_kib):
    return {"capability": capability, "multiprocessors": multiprocessors, "shared_bytes": shared_kib << 10}


# What plans must know of the usual GPU of an architecture: A100, RTX 3090, L40S, H100, B200 and RTX 5090.
ARCHITECTURES = {
    "sm_80": _gpu([8, 0], 108, 163), "sm_86": _gpu([8, 6], 82, 99), "sm_89": _gpu([8, 9], 142, 99),
    "sm_90a": _gpu([9, 0], 132, 227), "sm_100a": _gpu([10, 0], 148, 227), "sm_120a": _gpu([12, 0], 170, 99),
}  # fmt: skip
# The GPU that a question is about, in place of this machine's.
_asked = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def asked_of(arch):
    """Within it plans are those of the architecture's usual GPU, or of this machine's where arch is None."""
    if arch is not None and arch not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise SieveError(f"supports: arch is {arch!r}; it must be one of {names}")
    before = _asked.set(ARCHITECTURES.get(arch))
    try:
        yield
    finally:
        _asked.reset(before)


def gpu_of(device):
    """What plans must know of a GPU: the one that is asked for, the emulator's, this machine's, or else an H100."""
    if asked := _asked.get():
        return asked
    if Op.emulator is not None:
        return EMULATED
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return {
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "shared_bytes": properties.shared_memory_per_block_optin,
        }
    return ARCHITECTURES["sm_90a"]


def _contiguous(shape):
    return tuple(math.prod(size or 1 for size in shape[at + 1 :]) for at in range(len(shape)))


class Plan:
    """The launches of an op for given shapes; `call` is its JSON: {op: settings}."""

    def __init__(self, call, gpu, tensors):
        """Asks the library for the plan. gpu: as `gpu_of` returns it; tensors: name, shape, dtype and, where the kernel
        walks them, strides of each input. No kernel is compiled before `load`.
        """
        self.handle, self.request = None, {"call": call, "gpu": gpu, "tensors": tensors}
        if _library is None:
            raise SieveError(f"the library of kernels is not there: {missing}")
        handle = ctypes.c_void_p()
        _check(_library.sieve_plan(json.dumps(self.request).encode(), ctypes.byref(handle)))
        self.handle = handle.value
        described = json.loads(_library.sieve_plan_describe(self.handle))
        self.launches = [launch["kernel"] for launch in described["launches"]]
        self.outputs = [
            (x["name"], tuple(x["shape"]), BITS.get(x["name"]) or DTYPES[x["dtype"]]) for x in described["outputs"]
        ]
        self.workspace_bytes = described["workspace_bytes"]
        # The input whose number of keys each run gives.
        self.capacity_of = described["capacity_of"]
        self.count = len(tensors) + len(self.outputs) + 1 + (self.capacity_of is not None)

    def load(self, index):
        path = nvrtc_path()
        paths = (str(path).encode() if path else None, str(cache_folder()).encode())
        _check(_library.sieve_plan_load(self.handle, index, *paths))

    def prepare(self, device, index, filled):
        """Prepares what every run needs. `filled`: the plan's last inputs, the same tensors in every run."""
        self.index, self.filled = index, filled
        self.filled_pointers = [x.data_ptr() for x in filled]
        # Strides too: torch.empty takes half as long again as empty_strided.
        empty = partial(torch.empty_strided, device=device)
        self.empty = [partial(empty, shape, _contiguous(shape), dtype=dtype) for _, shape, dtype in self.outputs]
        self.packed = struct.Struct(f"{self.count}Q").pack

    def run(self, inputs):
        """Queues the launches on the current stream and returns the outputs, without what is written in place."""
        outputs = [empty() for empty in self.empty]
        pointers = [x.data_ptr() for x in inputs]
        pointers += self.filled_pointers
        pointers += [x.data_ptr() for x in outputs]
        stream = _stream(self.index)
        workspace = self.workspace(stream) if self.workspace_bytes else 0
        pointers.append(workspace)
        if self.capacity_of is not None:
            pointers.append(inputs[self.capacity_of].shape[2])
        try:
            if _run(self.handle, self.packed(*pointers), self.count, stream):
                raise SieveError(_library.sieve_error().decode())
        finally:
            if workspace:
                _free(workspace)
        return outputs

    def workspace(self, stream):
        """Scratch memory for the work that is queued on the stream until `_free`."""
        if _device() == self.index:
            return _allocate(self.workspace_bytes, stream)
        return torch.cuda.caching_allocator_alloc(self.workspace_bytes, self.index, stream)

    def __del__(self):
        # A plan that was refused has none.
        if self.handle is not None:
            _library.sieve_plan_free(self.handle)


class Op:
    """An op of the library: the names of its tensors and of its settings, in the order of its torch schema. A tensor
    that may be None ends in ?, one that is written in place in !.

    `emulator`, where tests set it, takes the place of a GPU: a function of (plan, inputs) that returns the outputs.
    """

    emulator = None

    def __init__(self, name, tensors, settings):
        self.name, self.settings = name, settings
        self.tensors = [x.rstrip("?!") for x in tensors]
        self.count = len(tensors)
        self.written = {x.rstrip("!") for x in tensors if x.endswith("!")}
        self.plans = {}
        self.key = self._growing_key if name in GROWING else self._key

    def __call__(self, *arguments):
        """Runs the op on real tensors. Settings are hashed: a list must come as a tuple."""
        tensors, settings = arguments[: self.count], arguments[self.count :]
        key = self.key(settings, tensors)
        try:
            plan, copied = self.plans[key]
        except KeyError:
            plan, copied = self.plans[key] = self._prepared(tensors, settings)
        inputs = [x for x in tensors if x is not None]
        for at in copied:
            inputs[at] = inputs[at].contiguous()
        if Op.emulator is not None:
            return Op.emulator(plan, inputs + plan.filled)
        try:
            return plan.run(inputs)
        except SieveError:
            # Kernels read 16 bytes at a time.
            unaligned = {name: x for name, x in zip(self.tensors, tensors) if x is not None and x.data_ptr() % 16}
            if not unaligned:
                raise
            for name in self.written.intersection(unaligned):
                raise self._not_in_place(name, "begin at a multiple of 16 bytes") from None
        return self(*[x.clone() if name in unaligned else x for name, x in zip(self.tensors, tensors)], *settings)

    @staticmethod
    def _key(settings, tensors):
        """What a plan depends on."""
        key = [settings]
        for x in tensors:
            if x is None:
                key.append(None)
            else:
                key += (x.shape, x.stride(), x.dtype, x.device)
        return tuple(key)

    def _growing_key(self, settings, tensors):
        """As `_key`, but equal for caches whose numbers of keys round up to the same multiple of PLANNED_KEYS."""
        others = [None if name.endswith("_cache") else x for name, x in zip(self.tensors, tensors)]
        key = self._key(settings, others)
        for name, x in zip(self.tensors, tensors):
            if name.endswith("_cache"):
                keys = -(-x.shape[2] // PLANNED_KEYS) if x.dim() == 4 else -1
                key += ((*x.shape[:2], keys, *x.shape[3:]), x.is_contiguous(), x.dtype, x.device)
        return key

    def _prepared(self, tensors, settings):
        """A plan that is loaded on its GPU, and the indices of inputs that must be copied to contiguous memory."""
        device = tensors[0].device
        for name, x in zip(self.tensors, tensors):
            if x is not None and x.device != device:
                raise SieveError(f"{self.name}: {name} is on {x.device}, and {self.tensors[0]} on {device}")
        if device.type != "cuda" and Op.emulator is None:
            raise self._not_on_a_gpu(device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise SieveError(f"{self.name}: a call of new shapes under graph capture; run it once before the capture")
        while len(self.plans) >= MOST_PLANS:
            # Another thread may have removed it.
            self.plans.pop(next(iter(self.plans)), None)
        plan, copied = self.plan(tensors, settings, gpu_of(device))
        _axes.warn(dict(zip(self.tensors, tensors)))
        plan.prepare(device, device.index, self._absent(tensors, device))
        if Op.emulator is None:
            plan.load(device.index)
            # Runs on other streams read the tensors that were filled on this one.
            torch.cuda.current_stream(device).synchronize()
        return plan, copied

    def _not_in_place(self, name, wanted):
        return SieveError(f"{self.name}: {name} is written in place: it must {wanted}")

    def _not_on_a_gpu(self, device):
        what = f"{self.name}: {self.tensors[0]} is on {device}; the kernels need tensors on a CUDA GPU"
        hint = "\n  hint: sieve_attention.on_cpu() computes by the definitions there" if device.type == "cpu" else ""
        return SieveError(what + hint)

    def _absent(self, tensors, device):
        """Tensors in place of those that were not given: bounds of one document a row, a bias of 0 for gates."""
        filled = self._filled(tensors).values()
        return [torch.full(shape, value, dtype=DTYPES[dtype], device=device) for shape, value, dtype in filled]

    def _filled(self, tensors):
        """Shape, value and type of each tensor of `_absent`, by name."""
        batch, count = self._tokens(tensors)
        fillers = {"doc_start": ((batch, count), 0, "i32"), "doc_end": ((batch, count), count, "i32")}
        given = dict(zip(self.tensors, tensors))
        if "gate_bias" in given:
            fillers["gate_bias"] = (tuple(map(int, given["logits"].shape[2:])), 0, "f32")
        return {name: fillers[name] for name, x in given.items() if x is None and name in fillers}

    def _tokens(self, tensors):
        """Rows and tokens of a row: of q, k or v, or of ranks [batch, KV heads, tokens]."""
        shape = tensors[0].shape
        return (shape[0], shape[2] if self.tensors[0] == "rank" else shape[1]) if len(shape) > 2 else (1, 1)

    def plan(self, tensors, settings, gpu):
        """The plan for tensors (or fakes), and the indices of inputs that must be copied to contiguous memory. Tensors
        that the package fills are the plan's last inputs.
        """
        described, copied = [], []
        for name, x in zip(self.tensors, tensors):
            if x is None:
                continue
            dtype = "bf16" if BITS.get(name) == x.dtype else NAMES.get(x.dtype, str(x.dtype)[6:])
            spec = {"name": name, "shape": [int(size) for size in x.shape], "dtype": dtype}
            if x.is_contiguous():
                pass
            elif name in STRIDED and _is_walkable(x):
                spec["strides"] = [int(stride) for stride in x.stride()]
            elif name in self.written:
                raise self._not_in_place(name, f"be contiguous; its strides are {list(x.stride())}")
            else:
                copied.append(len(described))
            described.append(spec)
        for name, (shape, _, dtype) in self._filled(tensors).items():
            described.append({"name": name, "shape": shape, "dtype": dtype})
        call = {self.name: dict(zip(self.settings, settings))}
        return Plan(call, gpu, described), copied

    def fake(self, *arguments):
        """Outputs without values, for tracing; sizes that torch traces as symbols stay symbols."""
        tensors, settings = arguments[: self.count], arguments[self.count :]
        like = tensors[0]
        if like.device.type not in ("cuda", "meta") and Op.emulator is None:
            raise self._not_on_a_gpu(like.device)
        real = torch.device("cuda") if like.device.type == "meta" else like.device
        traced = [x if x is None else _of_numbers(x) for x in tensors]
        outputs = self.plan(traced, settings, gpu_of(real))[0].outputs
        shapes = [shape for _, shape, _ in outputs]
        given = {name: x.shape for name, x in zip(self.tensors, tensors) if x is not None}
        if any(isinstance(size, torch.SymInt) for shape in given.values() for size in shape):
            numbers, settings = shapes, dict(zip(self.settings, settings))
            shapes = symbolic(outputs, given, settings, *self._tokens(tensors))
            assert [tuple(map(_number, shape)) for shape in shapes] == numbers, f"{self.name}: {shapes}, not {numbers}"
        return [like.new_empty(shape, dtype=dtype) for shape, (_, _, dtype) in zip(shapes, outputs)]


def _number(size):
    """The number that torch traces a size with; no guard on it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _of_numbers(x):
    """A tensor without memory, of the numbers that x's sizes and strides are traced with."""
    if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())):
        return x
    sizes, strides = (tuple(map(_number, numbers)) for numbers in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")


EMULATED = {"capability": [8, 9], "multiprocessors": 108, "shared_bytes": 163 << 10}


def _is_walkable(x):
    """Whether kernels follow the strides of [batch, tokens, (heads,) width]: the last ones side by side."""
    shape, strides = list(x.shape), list(x.stride())
    if len(shape) == 3:
        shape, strides = [*shape[:2], 1, shape[2]], [*strides[:2], shape[2], strides[2]]
    if len(shape) != 4:
        return False
    (batch, count, heads, width), (row, token, head, column) = shape, strides
    return (
        (width == 1 or column == 1)
        and (heads == 1 or head == width)
        and (count == 1 or (token % 8 == 0 and token >= heads * width))
        and (batch == 1 or (row % 8 == 0 and row >= (count - 1) * token + heads * width))
    )
