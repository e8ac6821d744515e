"""What the package is without a GPU: sentences for what it refuses, fakes, operators under torch's own checks."""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import on_gpu
import pytest
import torch
import torch._dynamo.testing
from conftest import DEVICE
from parity import random

import sieve_attention as sieve
from sieve_attention import _dma, _library, _shapes, definitions, ops

BLOCKS = sieve.NsaBlocks(16, 8, 32, 3)


def tensors(dtype=torch.bfloat16, tokens=32, kv_tokens=None, kv_heads=2, width=64, device=DEVICE):
    q = torch.zeros(1, tokens, 4, width, dtype=dtype, device=device)
    return q, *[torch.zeros(1, kv_tokens or tokens, kv_heads, width, dtype=dtype, device=device) for _ in range(2)]


def nsa_of(compressed=(1, 4, 2, 64), gates=(1, 32, 4, 3), values=None, **settings):
    shapes = compressed, values or compressed, gates
    given = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
    return sieve.nsa(*tensors(), *given, **{"blocks": BLOCKS, **settings})


def rank(*shape):
    return torch.zeros(shape or (1, 2, 64), device=DEVICE)


def mask(*shape, block=64):
    return sieve.block_mask(torch.ones(shape, device=DEVICE), block)


def decode(given=(True, True), length=None, **settings):
    q, k, v = tensors(tokens=1)
    caches = (torch.zeros(1, 2, 8, 64, device=DEVICE).bfloat16() for _ in range(2))
    length = torch.zeros(1, dtype=torch.int32, device=DEVICE) if length is None else length
    return sieve.decode(q, k if given[0] else None, v if given[1] else None, *caches, length, **settings)


CHOSEN = {"chosen": torch.zeros(1, 2, 1, dtype=torch.int32, device=DEVICE), "block": 16}
BOUNDS = torch.tensor([0, 10, 32])
DMA = torch.zeros(2, 128, device=DEVICE), torch.zeros(2, device=DEVICE)
WRONG = {
    "q is float16, expected bf16\n  hint: cast it before the call, by .bfloat16()": lambda: sieve.attention(
        *tensors(torch.float16)
    ),
    "q is f32, expected bf16": lambda: sieve.attention(*tensors(torch.float32)),
    "k has shape [1, 40, 2, 64], expected [1, 32, 2, 64]": lambda: sieve.attention(*tensors(kv_tokens=40)),
    "head_dim 72 is not supported (supported: multiples of 16": lambda: sieve.attention(*tensors(width=72)),
    "number of q/k/v heads 4/3/3": lambda: sieve.attention(*tensors(kv_heads=3)),
    "scale is 0.0; it must be a positive, finite number, or None": lambda: sieve.attention(*tensors(), scale=0.0),
    "scale is nan": lambda: sieve.attention(*tensors(), scale=float("nan")),
    "scale is a tensor []": lambda: sieve.attention(*tensors(), scale=torch.tensor(0.1)),
    "attention: window is 0; it must be a whole number of at least 1, or None": lambda: sieve.attention(
        *tensors(), window=0
    ),
    "window is -1": lambda: sieve.attention(*tensors(), window=-1),
    "window is (8, 0)": lambda: sieve.attention(*tensors(), window=(8, 0)),
    "window is [8, 0]": lambda: sieve.attention(*tensors(), window=[8, 0]),
    "window is 1.5": lambda: sieve.attention(*tensors(), window=1.5),
    "attention: q is None": lambda: sieve.attention(None, *tensors()[1:]),
    "attention: batch is 0, nothing to compute": lambda: sieve.attention(*(x[:0] for x in tensors())),
    "attention: bias is bf16, expected f32": lambda: sieve.attention(*tensors(), bias=rank(1, 2, 32).bfloat16()),
    "attention: sinks are 3, and q has 4 heads": lambda: sieve.attention(*tensors(), sinks=torch.zeros(3)),
    "attention: sinks with a bias": lambda: sieve.attention(*tensors(), bias=rank(1, 2, 32), sinks=torch.zeros(4)),
    "documents is a tensor [3]; it must be a pair of tensors: use documents(cu_seqlens, tokens), or cu": lambda: (
        sieve.attention(*tensors(), documents=BOUNDS.float())
    ),
    "documents is [0, 32]": lambda: sieve.attention(*tensors(), documents=[0, 32]),
    "documents: cu_seqlens is [0, 10, 32]; it must be a tensor": lambda: sieve.documents([0, 10, 32], 32),
    "documents: cu_seqlens is [0, 10, 32]; it must ascend from 0 to the 64 tokens": lambda: sieve.documents(BOUNDS, 64),
    "cu_seqlens is [5, 10, 32]": lambda: sieve.documents(torch.tensor([5, 10, 32]), 32),
    "cu_seqlens is [0, 20, 10, 32]": lambda: sieve.documents(torch.tensor([0, 20, 10, 32]), 32),
    "cu_seqlens is [0, 10, 90]": lambda: sieve.documents(torch.tensor([0, 10, 90]), 32),
    "select: keep is 0; it must be a whole number of at least 1": lambda: sieve.select(rank(), keep=0),
    "select: keep is -1": lambda: sieve.select(rank(), keep=-1),
    "select: local is -1": lambda: sieve.select(rank(), keep=8, local=-1),
    "select: local 9 is not supported (supported: at most keep, 8)": lambda: sieve.select(rank(), keep=8, local=9),
    "select: rank is bf16, expected f32": lambda: sieve.select(rank().bfloat16(), keep=8),
    "select: rank is a sparse tensor [1, 2, 64]; it must be a tensor": lambda: sieve.select(rank().to_sparse(), keep=8),
    "documents: cu_seqlens is a sparse tensor [3]": lambda: sieve.documents(BOUNDS.to_sparse(), 32),
    "dma_slopes: keep is 0; it must be a whole number of at least 1": lambda: sieve.dma_slopes(0, 2),
    "dma_slopes: kv_heads is 4611686018427387904; it must be": lambda: sieve.dma_slopes(8, 1 << 62),
    "attention: head_dim 0 is not supported": lambda: sieve.attention(*tensors(width=0)),
    "select: rank is a tensor [2, 64]; it must be a tensor of 3 axes": lambda: sieve.select(rank(2, 64), keep=8),
    "slopes is [nan, 1.0]": lambda: sieve.dma_scores(tensors()[2], *DMA, slopes=[float("nan"), 1.0]),
    "slopes is a tensor [2]": lambda: sieve.dma_attention(*tensors(), *DMA, keep=4, slopes=torch.ones(2)),
    '"rank", and must be "exp"': lambda: sieve.dma_attention(*tensors(), None, None, keep=4, bias="rank"),
    'dma_attention: recency is "slopes", and must be "slope" or "none"': lambda: sieve.dma_attention(
        *tensors(), *DMA, keep=4, recency="slopes"
    ),
    'bias is "exp", but recency="slope" adds to the logit itself': lambda: sieve.dma_attention(
        *tensors(), *DMA, keep=4, recency="slope", bias="exp"
    ),
    "local is 1, but preset=\"paper\" sets it to 0": lambda: sieve.dma_attention(
        *tensors(), *DMA, keep=4, preset="paper", local=1
    ),
    'a period needs recency="slope"': lambda: sieve.dma_attention(
        *tensors(), *DMA, keep=4, bias="exp", longest_period=9
    ),
    'dma_decode: bias is "liner", and must be': lambda: sieve.dma_decode(*[None] * 9, bias="liner"),
    "stride divide both sizes": lambda: sieve.nsa_mean_pool(*tensors()[1:], blocks=sieve.NsaBlocks(30, 16)),
    "blocks is NsaBlocks(compressed=-8": lambda: sieve.nsa_mean_pool(*tensors()[1:], blocks=sieve.NsaBlocks(-8, 4)),
    "blocks is (16, 8, 32, 3); it must be NsaBlocks(...)": lambda: nsa_of(blocks=(16, 8, 32, 3)),
    "nsa: window is None; it must be a whole number of at least 1": lambda: nsa_of(window=None),
    "nsa: gates must end with heads and 3 branches": lambda: nsa_of(gates=(1, 32, 3, 4)),
    "[2, 1, 2, 4, 64], which does not fit tokens and blocks": lambda: nsa_of(compressed=(1, 2, 4, 64)),
    "nsa: compressed_k is [1, 4, 2, 64], and compressed_v [1, 3, 2, 64]": lambda: nsa_of(values=(1, 3, 2, 64)),
    "expiring_attention: selection is [1, 2, 64], and with this k must be [1, 2, 32]": lambda: sieve.expiring_attention(
        *tensors(), None, sieve.select(rank(), keep=8)
    ),
    "expiring_attention: bias is [1, 2, 64], and with this k must be [1, 2, 32]": lambda: sieve.expiring_attention(
        *tensors(), rank(), sieve.select(rank(1, 2, 32), keep=8)
    ),
    "selection is a tensor [1, 2, 64]; it must be what select": lambda: sieve.expiring_attention(
        *tensors(), None, rank()
    ),
    "msa: index_q has 4 heads; it must have one for each KV head, 2": lambda: sieve.msa(
        *tensors(), tensors()[0], tensors(kv_heads=1)[1], block=16
    ),
    "moba: block is -1": lambda: sieve.moba(*tensors(), block=-1),
    "moba: num_selected is -1": lambda: sieve.moba(*tensors(), block=16, num_selected=-1),
    "lists are not those of a selection for this bias": lambda: ops.dma_attention_forward(
        *tensors(), torch.zeros(1, 2, 32, device=DEVICE), torch.zeros(9, dtype=torch.int32, device=DEVICE), 0.1
    ),
    "number of q/k/v heads 4/0/0": lambda: sieve.moba(*tensors(kv_heads=0), block=32),
    "block_sparse: mask is a tensor [4, 1, 1]; it must be what block_mask(": lambda: sieve.block_sparse(
        *tensors(), torch.ones(4, 1, 1, dtype=torch.bool)
    ),
    "block_mask: block is 32; it must be 64 or 128": lambda: mask(4, 1, 1, block=32),
    "block_mask: block is 0": lambda: mask(4, 1, 1, block=0),
    "block_sparse: q has 2 rows": lambda: sieve.block_sparse(*(x.expand(2, -1, -1, -1) for x in tensors()), None),
    "the mask is [2, 1, 1]; these tensors need 4 query heads, 1 x 1 blocks of 64": lambda: sieve.block_sparse(
        *tensors(), mask(2, 1, 1)
    ),
    "decode: with k and v, chosen and block have no kernel": lambda: decode(**CHOSEN),
    "decode: chosen and window together have no kernel": lambda: decode(given=(False, False), window=4, **CHOSEN),
    "decode: chosen is a tensor [1, 2, 1, 1]; it must be a tensor of 3 axes": lambda: (
        decode(given=(False, False), **{**CHOSEN, "chosen": CHOSEN["chosen"][..., None]})
    ),
    "decode: length is int64, expected int32\n  hint: cast it before the call, by .int()": lambda: decode(
        length=torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ),
    "bias is float16, expected f32\n": lambda: sieve.attention(*tensors(), bias=rank(1, 2, 32).half()),
    "documents is int64, expected int32\n": lambda: sieve.attention(
        *tensors(), documents=tuple(x.long() for x in sieve.documents(BOUNDS.to(DEVICE), 32))
    ),
    "expected [2, 32]\n  hint: documents([cu_seqlens of a row, ..], tokens) makes the pair of all rows": lambda: (
        sieve.attention(*(x.expand(2, -1, -1, -1) for x in tensors()), documents=BOUNDS.to(DEVICE))
    ),
    "documents: cu_seqlens is []; it must be a tensor of 1 axis, or a list": lambda: sieve.documents([], 32),
    "decode: of k and v one is None": lambda: decode(given=(False, True)),
    "decode: length is 3; it must be a tensor of 1 axis": lambda: decode(length=3),
    "decode: has no gradient": lambda: sieve.decode(*[x.requires_grad_() for x in tensors()], *[None] * 3),
    "dma_decode: has no gradient": lambda: sieve.dma_decode(*[x.requires_grad_() for x in tensors()], *[None] * 6),
    "mla_decode: has no gradient": lambda: sieve.mla_decode(
        tensors()[0].requires_grad_(), tensors()[1][:, :, 0], 32, scale=0.1
    ),
    "k_cache is written in place: it must be contiguous": lambda: sieve.decode(
        *tensors(tokens=1), torch.zeros(1, 8, 2, 64, device=DEVICE).bfloat16().transpose(1, 2),
        torch.zeros(1, 2, 8, 64, device=DEVICE).bfloat16(), torch.zeros(1, dtype=torch.int32, device=DEVICE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_what_has_no_kernel_is_said_in_a_sentence(sentence):
    with pytest.raises(sieve.SieveError) as error:
        WRONG[sentence]()
    assert sentence in str(error.value)


@pytest.mark.parametrize("cu_seqlens", [[0, 10, 32], [5, 10, 90], [0, 10, 20], [0, 50, 10, -3, 32], [0]])
def test_wrong_bounds_on_a_gpu_stay_within_the_row(cu_seqlens):
    """Compiled, as values are not looked at there either."""
    documents_of = torch.compile(lambda x: sieve.documents(x, 32), fullgraph=True, backend="aot_eager")
    start, end = documents_of(torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE))
    at = torch.arange(32, device=DEVICE)
    assert ((start >= 0) & (start <= at) & (at < end) & (end <= 32)).all()
    if cu_seqlens == [0, 10, 32]:
        assert all(torch.equal(x.cpu(), y) for x, y in zip((start, end), sieve.documents(BOUNDS, 32)))


def test_autocast_casts_as_for_torch():
    q, k, v = (random(*x.shape, device=DEVICE, seed=1).float() for x in tensors(tokens=48))
    expected = sieve.attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast(DEVICE, torch.bfloat16):
        for compiled in (sieve.attention, torch.compile(sieve.attention, fullgraph=True, backend="aot_eager")):
            assert torch.equal(compiled(q, k, v=v), expected)


def test_tensors_on_a_cpu_are_refused(no_emulator):
    with pytest.raises(sieve.SieveError, match="q is on cpu; the kernels need tensors on a CUDA GPU"):
        sieve.attention(*tensors(device="cpu"))
    assert sieve.supports(sieve.attention, *tensors(device="cpu")) == (
        False,
        "attention: q is on cpu; the kernels need tensors on a CUDA GPU\n"
        "  hint: sieve_attention.on_cpu() computes by the definitions there",
    )


def test_a_tensor_on_another_device_is_refused_where_a_plan_is_known():
    q, k, v = tensors()
    sieve.attention(q, k, v)
    with pytest.raises(sieve.SieveError, match=f"k is on meta, and q on {q.device}"):
        sieve.attention(q, k.to("meta"), v)


def test_tangents_of_forward_mode_are_refused():
    q, k, v = tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp|forward AD|forward mode"):
            sieve.attention(dual, k, v)


def test_supports_runs_nothing(monkeypatch):
    monkeypatch.setattr(_library.Op, "__call__", lambda *_: pytest.fail("it ran"))
    assert sieve.supports(sieve.attention, *tensors(), window=5) == (True, "")
    allowed, why = sieve.supports(sieve.attention, *tensors(width=72))
    assert not allowed and "head_dim 72" in why


@pytest.mark.parametrize(
    "each_run, growth", [(7, "tensors: 693 bytes more"), (0, None), (-7, None)], ids=["grows", "stays", "shrinks"]
)
def test_growth_alone_is_growth(each_run, growth):
    """Of on_gpu.py's check: a function that keeps, or frees, 7 bytes a run, of what an earlier check left."""
    kept, free = [bytearray(1000)], 1 << 30

    def call():
        kept.append(bytearray(max(each_run, 0)))
        kept[0] = bytearray(len(kept[0]) + min(each_run, 0))
        return torch.zeros(1)

    def reading():
        return {"tensors": sum(map(len, kept)), "the GPU": free}

    assert on_gpu.growth_of(call, [], reading, runs=120) == growth


def test_growth_of_the_gpu_has_a_slack():
    before = {"tensors": 5, "the GPU": 1 << 30}
    more = on_gpu.DRIVER_BYTES + 1
    assert on_gpu.growth(before, {**before, "the GPU": before["the GPU"] + more - 1}) is None
    assert on_gpu.growth(before, {**before, "the GPU": before["the GPU"] + more}) == f"the GPU: {more} bytes more"
    assert on_gpu.growth(before, {"tensors": 6, "the GPU": 1 << 29}) == "tensors: 1 bytes more"


def test_nvrtc_comes_from_torch():
    if torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    assert _library.nvrtc_path() is not None


def plan_of_attention():
    op = ops.IMPLEMENTATIONS["attention_forward"]
    return op.plan((*tensors(), None, None), (0.1, None), _library.EMULATED)[0]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has its driver")
def test_a_machine_without_a_driver_is_named():
    with pytest.raises(sieve.SieveError, match="driver"):
        plan_of_attention().load(0)


@pytest.mark.skipif(DEVICE != "cpu" or shutil.which("cc") is None, reason="a GPU has its driver; or no C compiler")
@pytest.mark.parametrize(
    "nvrtc, sentence",
    [
        (False, "CUDA: the run-time compiler libnvrtc was not found\n  hint: install the CUDA toolkit"),
        (True, "the driver supports CUDA 11.4 only, so it would refuse the compiled kernels\n  hint: update"),
    ],
)
def test_a_machine_without_nvrtc_or_with_an_old_driver_is_named(nvrtc, sentence, tmp_path):
    """Beside a libcuda of CUDA 11.4, which the test compiles: it starts and has no other function."""
    path, linked = _library.nvrtc_path(), ctypes.util.find_library("nvrtc")
    if path is None if nvrtc else linked is not None:
        pytest.skip("a torch without CUDA" if nvrtc else f"the dynamic linker finds {linked}")
    driver = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v) { *v = 11040; return 0; }"
    built = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(built, input=driver, text=True, check=True)
    # Without torch, which brings an NVRTC into the process.
    code = """
import ctypes, sys
library, plan, (request, nvrtc) = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p(), map(str.encode, sys.argv[2:])
library.sieve_error.restype = ctypes.c_char_p
assert not library.sieve_plan(request, ctypes.byref(plan))
assert library.sieve_plan_load(plan, 0, nvrtc or None, None)
print(library.sieve_error().decode())
"""
    request = json.dumps(plan_of_attention().request)
    arguments = os.environ["SIEVE_ATTENTION_LIBRARY"], request, str(path if nvrtc else "")
    environment = dict(os.environ, LD_LIBRARY_PATH=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert sentence in done.stdout, done


@pytest.mark.parametrize(
    "torch_py, sentence",
    [
        ("raise ModuleNotFoundError('no torch', name='torch')", "pip install torch"),
        ("raise ImportError('libcudart is missing')", "torch is installed, and its import failed: libcudart is missing"),
    ],
)
def test_imports_that_cannot_work_say_why(torch_py, sentence, tmp_path):
    (tmp_path / "torch.py").write_text(torch_py)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    code = "import sieve_attention"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode and sentence in done.stderr.splitlines()[-1] + done.stderr.splitlines()[-2], done.stderr


def test_the_package_works_from_a_bare_folder(tmp_path):
    folder = tmp_path / "sieve_attention"
    folder.mkdir()
    for path in Path(sieve.__file__).parent.glob("*.py"):
        (folder / path.name).symlink_to(path)
    (folder / "libsieve_capi.so").symlink_to(os.environ["SIEVE_ATTENTION_LIBRARY"])
    environment = {k: v for k, v in os.environ.items() if k != "SIEVE_ATTENTION_LIBRARY"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    code = f"import sieve_attention; assert sieve_attention.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)


def test_opcheck():
    q, k, v = (random(*x.shape, device=DEVICE, seed=1) for x in tensors(tokens=70))
    o, lse = ops.attention_forward(q, k, v, None, None, None, 0.1, None)
    rank = random(1, 2, 70, device=DEVICE, dtype=torch.float32, seed=2)
    _, *lists = ops.dma_select(rank, None, None, 16, 2)
    (pooled,) = ops.nsa_mean_pool(k, v, None, None, BLOCKS.sizes())
    gates, w_dt = random(1, 70, 12, device=DEVICE, seed=3), torch.ones(2, 128, device=DEVICE)
    tiles = mask(4, 2, 2)
    masked = ops.block_sparse(q, k, v, tiles.words, 0.1, (64, 64))
    length, sinks = torch.full((1,), 70, dtype=torch.int32, device=DEVICE), random(4, device=DEVICE, seed=4)
    for name, arguments in {
        "attention_forward": (q, k, v, None, None, sinks, 0.1, 20),
        "attention_backward": (q, k, v, None, None, None, sinks, o, lse, None, None, o, 0.1, None, True),
        "dma_select": (rank, None, None, 16, 2),
        "dma_attention_forward": (q, k, v, rank, *lists, 0.1),
        "nsa_mean_pool": (k, v, None, None, BLOCKS.sizes()),
        "dma_forward": (q, k, v, w_dt, rank[0, :, 0].contiguous(), None, None, 0.1, 16, 2, [0.1, 0.2], False),
        "nsa_forward": (q, k, v, pooled, gates, None, None, None, 0.1, BLOCKS.sizes(), 20),
        "chosen_forward": (q, k, v, *[None] * 4, 0.1, BLOCKS.sizes(), "largest_probability", True, 1),
        "block_sparse": (q, k, v, tiles.words, 0.1, (64, 64)),
        "block_sparse_backward": (q, k, v, tiles.words, tiles.by_keys(2), *masked, o, 0.1, (64, 64), True),
        "cached_decode": (
            q[:, :1], *(x.transpose(1, 2).contiguous() for x in (k, v)), length, None, sinks, 0.1, None, None
        ),
    }.items():
        # Entries of a list behind its last one are never written: two runs on a GPU differ there.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        operator = getattr(torch.ops.sieve, name).default
        writes_lists = name in ("dma_select", "dma_forward")
        torch.library.opcheck(operator, arguments, test_utils=tests[: 3 if writes_lists else 4])


def several(q, k, v, rank):
    """Functions that are one operator for several ops."""
    sizes = {"block": 32, "num_selected": 2}
    chosen = sieve.moba(q, k, v, **sizes) + sieve.msa(q, k, v, v, k[:, :, :1], **sizes)
    ranked = sieve.dma_attention(q, k, v, rank[0, :, :1].expand(-1, 128) / 8, rank[0, :, 1].abs(), keep=16)
    pooled, gates = sieve.nsa_mean_pool(k, v, blocks=BLOCKS), q[..., :3]
    return chosen + ranked + sieve.nsa(q, k, v, *pooled, gates, blocks=BLOCKS, window=20)


def chosen_or_windowed(q, k, v, rank):
    chosen = sieve.expiring_attention(q, k, v, rank.exp(), sieve.select(rank, keep=16))
    return sieve.attention(q * 2, k, v, window=9) + chosen


@pytest.mark.parametrize("model", [chosen_or_windowed, several])
def test_compiled_without_a_break(model):
    inputs = [random(*x.shape, device=DEVICE, seed=n).requires_grad_() for n, x in enumerate(tensors(tokens=70))]
    rank = random(1, 2, 70, device=DEVICE, dtype=torch.float32, seed=2).requires_grad_()
    d_o = torch.ones_like(inputs[0])
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        o = function(*inputs, rank)
        results.append((o, *torch.autograd.grad(o, [*inputs, rank], d_o)))
    for ours, compiled in zip(*results):
        assert (ours.float() - compiled.float()).norm() <= 1e-2 * ours.float().norm()


def tensors_of(name, n, b=2):
    """Inputs of an operator for b rows of n tokens, and settings: all but the decoding ones, whose rows have one."""
    f32, i32 = {"dtype": torch.float32}, {"dtype": torch.int32}
    make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    q, k, v = make(b, n, 4, 64), make(b, n, 2, 64), make(b, n, 2, 64)
    bounds, bias, lse = (None, None), make(b, 2, n, **f32), make(b, 4, n, **f32)
    slots, sizes = -(-n // 8), BLOCKS.sizes()
    compressed, indices, rank = make(2, b, slots, 2, 64), make(b, n, 2, 3, **i32), make(b, 2, n, **f32)
    chosen = 0.1, sizes, "largest_probability", True, 1
    by_mean = 0.1, (64, 64, 64, 3), "mean_key", False, 1
    return {
        "attention_forward": [
            (q, k, v, None, None, None, 0.1, 20), (q, k, v, None, None, make(4), 0.1, 20),
            (q, k, v, None, bias, None, 0.1, None), (q, k, v, None, bias, None, 0.1, None, True),
        ],
        "attention_backward": [
            (q, k, v, None, None, None, sinks, q, lse, None, None, q, 0.1, None, True) for sinks in (None, make(4))
        ],
        "dma_scores": [(v, make(2, 128, **f32), make(2, **f32), None, ())],
        "dma_scores_backward": [(v, make(2, 128, **f32), make(2, **f32), rank, rank)],
        "dma_select": [(rank, *bounds, keep, 8) for keep in (16, 512)],
        "nsa_mean_pool": [(k, v, *bounds, sizes)],
        "nsa_mean_pool_backward": [(k, *bounds, compressed, sizes)],
        "nsa_compressed_forward": [(q, compressed, *bounds, 0.1, sizes)],
        "nsa_compressed_backward": [(q, compressed, *bounds, q, lse, q, 0.1, sizes, False)],
        "nsa_selected_forward": [(q, k, v, indices, *bounds, 0.1, sizes)],
        "nsa_selected_backward": [(q, k, v, indices, *bounds, q, lse, q, 0.1, sizes, True)],
        "selected_forward": [
            (q, k, v, indices, None, *bounds, 0.1, block, False, sums) for block in (32, 128) for sums in (False, True)
        ],
        "nsa_gates_backward": [(q, q, q, make(b, n, *end), None, q) for end in ((12,), (4, 3))],
        "nsa_forward": [(q, k, v, compressed, make(b, n, 12), None, *bounds, 0.1, sizes, 20)],
        "dma_forward": [
            (q, k, v, make(2, 128, **f32), make(2, **f32), *bounds, 0.1, keep, 8, (), linear)
            for keep in (16, 512) for linear in (True, False)
        ],
        "choose_blocks": [(q, k, *bounds, *chosen), (q, k, *bounds, *by_mean)],
        "chosen_forward": [
            (q, k, v, None, None, *bounds, *chosen),
            (q, make(b, n, 4, 64), make(b, n, 4, 64), q, k, *bounds, *by_mean),
        ],
    }[name]  # fmt: skip


# Operators whose inputs are outputs of those in `tensors_of`, or whose queries are one token a row: `test_opcheck` and
# `test_lengths_share_two_graphs` have them.
NOT_BY_LENGTH = {"dma_attention_forward", "dma_attention_backward", "block_sparse", "block_sparse_backward",
                 "attention_decode", "cached_decode", "dma_decode", "selected_decode", "mla_decode"}  # fmt: skip


@pytest.mark.parametrize("gpu", [None, _library.EMULATED], ids=["Hopper", "emulated"])
@pytest.mark.parametrize("name", sorted(set(ops.TABLE) - NOT_BY_LENGTH))
def test_outputs_of_any_length_are_those_of_its_plan(name, gpu, no_emulator):
    op = ops.IMPLEMENTATIONS[name]
    gpu = gpu or _library.gpu_of(torch.device("cpu"))
    for n in (1, 15, 16, 17, 64, 70, 511, 513, 1024, 1100, 1535, 1537, 2048, 5000, 32768, 32769):
        for arguments in tensors_of(name, n):
            given, settings = arguments[: op.count], arguments[op.count :]
            outputs = op.plan(given, settings, gpu)[0].outputs
            shapes = {name: x.shape for name, x in zip(op.tensors, given) if x is not None}
            shapes_found = _shapes.symbolic(outputs, shapes, dict(zip(op.settings, settings)), *op._tokens(given))
            assert shapes_found == [shape for _, shape, _ in outputs], (n, settings)


def test_o_low_is_kept_in_rows_of_any_length_where_gradients_may_follow(no_emulator):
    gpu, op = _library.gpu_of(torch.device("cpu")), ops.IMPLEMENTATIONS["dma_forward"]
    for n in (100, 32768, 40000):
        for arguments in tensors_of("dma_forward", n):
            given, settings = arguments[: op.count], arguments[op.count :]
            kept = "o_low" in [name for name, *_ in op.plan(given, settings, gpu)[0].outputs]
            asked = dict(zip(op.settings, settings))
            assert kept != bool(asked.get("only_o") or asked.get("same_bits")), (n, asked)


def one_layer_each(q, k, v, rank):
    """Every function with gradients that a model's layers call, on the same tensors."""
    w_dt, a = rank[0, :, :1].expand(-1, 128) / 8, rank[0, :, 1].abs()
    o = sieve.attention(q, k, v) + sieve.attention(q, k, v, window=9) + sieve.attention(q, k, v, bias=rank)
    o = o + sieve.attention(q, k, v, sinks=rank[0, :, 2].repeat(2))
    for form in ({}, {"preset": "paper"}):
        o = o + sieve.dma_attention(q, k, v, w_dt, a, keep=16, **form)
    o = o + sieve.infllm_v2(q, k, v, blocks=BLOCKS, local=1) + sieve.moba(q, k, v, block=128, num_selected=2)
    return o + chosen_or_windowed(q, k, v, rank) + several(q, k, v, rank)


@pytest.mark.skipif(DEVICE != "cpu", reason="of shapes alone")
@pytest.mark.parametrize("train", [True, False])
def test_lengths_share_two_graphs(train, monkeypatch):
    """24 lengths compile twice: the first for its length, the second for any. Outputs are zeros of the plans' shapes."""
    zeros = lambda plan, _: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]  # noqa: E731
    monkeypatch.setattr(_library.Op, "emulator", staticmethod(zeros))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(one_layer_each, fullgraph=True, backend=counter)
    for tokens in [100, 70, *range(128, 128 + 22 * 37, 37)]:
        inputs = [*tensors(tokens=tokens), torch.zeros(1, 2, tokens)]
        inputs = [x.requires_grad_(train) for x in inputs]
        o = compiled(*inputs)
        assert o.shape == inputs[0].shape
        if train:
            gradients = torch.autograd.grad(o, inputs, torch.ones_like(o))
            assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs"


def test_definitions_pass_gradcheck():
    """The kernels are bf16 alone, so finite differences check what they are compared with."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v, w, a = make(1, 9, 2, 4), make(1, 9, 1, 4), make(1, 9, 1, 4), make(1, 4), make(1)
    bounds = (torch.tensor([[0] * 4 + [4] * 5]), torch.tensor([[4] * 4 + [9] * 5]))
    form = _dma.form("dma_attention", 3, 1, local=1)._asdict()
    assert torch.autograd.gradcheck(lambda *x: definitions.attention(*x, window=3, documents=bounds), (q, k, v))
    with_sinks = lambda q, k, v, sinks: definitions.attention(q, k, v, sinks=sinks, documents=bounds)  # noqa: E731
    assert torch.autograd.gradcheck(with_sinks, (q, k, v, make(2)))
    assert torch.autograd.gradcheck(lambda *x: definitions.dma_attention(*x, keep=3, **form), (q, k, v, w, a))
