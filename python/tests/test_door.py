"""The way in: `on_cpu()` is as narrow as a GPU, `supports` answers without one, other packages' keywords are answered,
and what those packages have is here: log-sum-exps, several tokens a step, cu_seqlens."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, ROOT
from parity import assert_close, random

import sieve_attention as sieve
from sieve_attention import _library, _on_cpu

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of a machine without a GPU")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(_library.Op, "emulator", None)


@pytest.fixture
def on_cpu(no_gpu):
    with sieve.on_cpu():
        yield


def made(*shape, dtype=BF16):
    return random(*shape, device="cpu", dtype=dtype, seed=sum(shape))


def qkv(heads=4, kv_heads=2, width=64, batch=1, tokens=128, dtype=BF16):
    return tuple(made(batch, tokens, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads))


INDEX = made(1, 128, 2, 64), made(1, 128, 1, 64)


def step(dtype=BF16, new=1, capacity=8):
    caches = [torch.zeros(1, 2, capacity, 64, dtype=dtype) for _ in range(2)]
    return *qkv(tokens=new, dtype=dtype), *caches, torch.tensor([3], dtype=torch.int32)


def nsa(width=64, slots=8, blocks=sieve.NsaBlocks(32, 16, 64, 4)):
    compressed = [made(1, slots, 2, width) for _ in range(2)]
    return (*qkv(width=width), *compressed, made(1, 128, 4, 3)), {"blocks": blocks}


# What a GPU refuses, of issue and of use: function, arguments, a part of the sentence.
NARROW = {
    "width 60": ("attention", qkv(width=60), {}, "head_dim 60 is not supported (supported: multiples of 16"),
    "width 320": ("attention", qkv(width=320), {}, "head_dim 320 is not supported"),
    "nsa of 32": ("nsa", *nsa(width=32), "heads of 64 and 128"),
    "infllm_v2 of 256": ("infllm_v2", qkv(width=256), {}, "heads of 64 and 128"),
    "msa of 32": ("msa", (*qkv(width=32), made(1, 128, 2, 32), made(1, 128, 1, 32)), {}, "heads of 64 and 128"),
    "a stride that does not divide": ("nsa", *nsa(blocks=sieve.NsaBlocks(33, 16, 64, 16)), "stride divide both"),
    "blocks of 100": ("msa", (*qkv(), *INDEX), {"block": 100}, "block 100 is not supported (supported: up to 64, and"),
    "40 KV heads": (
        "dma_attention", (*qkv(40, 40), made(40, 40 * 64), made(40)), {"keep": 16}, "KV heads 40 is not supported"
    ),
    "documents of one row": (
        "attention", qkv(batch=2), {"documents": sieve.documents(torch.tensor([0, 9, 128]), 128)},
        "documents has shape [1, 128], expected [2, 128]",
    ),
    "float indices": ("selected_attention", (*qkv(), torch.zeros(1, 128, 2, 3)), {}, "indices is f32, expected i32"),
    "f16 ranks": ("select", (made(1, 2, 128, dtype=torch.float16),), {"keep": 8}, "rank is float16"),
    "f16": ("attention", qkv(dtype=torch.float16), {}, "q is float16"),
    "a step with a gradient": ("decode", (step()[0].requires_grad_(), *step()[1:]), {}, "has no gradient"),
    "missing compressed keys": ("nsa", *nsa(slots=3), "does not fit tokens and blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", NARROW)
def test_on_cpu_refuses_what_a_gpu_refuses_in_the_same_words(case, on_cpu):
    name, args, kwargs, sentence = NARROW[case]
    with pytest.raises(sieve.SieveError) as error:
        getattr(sieve, name)(*args, **kwargs)
    assert sentence in str(error.value)
    assert sieve.supports(name, *args, **kwargs, device="cuda") == (False, str(error.value))
    assert sieve.supports(getattr(sieve, name), *args, **kwargs) == (False, str(error.value))


@pytest.mark.parametrize("case", sorted(set(NARROW) - {"documents of one row", "missing compressed keys"}))
def test_definitions_alone_take_more(case, no_gpu):
    name, args, kwargs, _ = NARROW[case]
    if case == "a stride that does not divide":
        args = (*args[:3], made(1, 8, 2, 64), made(1, 8, 2, 64), args[5])
    with sieve.on_cpu(strict=False):
        getattr(sieve, name)(*args, **kwargs)


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_more_exact_types_count_as_bf16(dtype, on_cpu):
    q, k, v = (x.requires_grad_() for x in qkv(dtype=dtype))
    o = sieve.attention(q, k, v, bias=made(1, 2, 128, dtype=dtype), window=9)
    assert o.dtype == dtype
    o.sum().backward()
    rank = made(1, 2, 128, dtype=dtype)
    selection = sieve.select(rank, keep=16, local=4)
    assert selection.lists.is_meta and sieve.expiring_attention(q, k, v, rank, selection).dtype == dtype
    with torch.no_grad():
        assert sieve.decode(*step(dtype), sinks=made(4, dtype=dtype)).dtype == dtype


def test_derivatives_that_kernels_lack_are_refused(on_cpu):
    """In the words of torch, as of the kernels' functions."""
    q, k, v = (x.requires_grad_() for x in qkv(tokens=16, dtype=F32))
    (dq,) = torch.autograd.grad(sieve.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.vmap(lambda x: sieve.attention(x, k, v))(torch.stack([q, q]))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: sieve.attention(x, k, v).sum())(q)


def test_supports_answers_by_name_without_a_gpu(no_gpu):
    q, k, v = qkv()
    assert sieve.supports("attention", q, k, v, device="cuda") == (True, "")
    assert sieve.supports(sieve.infllm_v2, q, k, v, device="cuda") == (True, "")
    assert "on_cpu" in sieve.supports("attention", q, k, v)[1]
    with pytest.raises(sieve.SieveError, match='no function "atention"; there are attention, block_mask'):
        sieve.supports("atention", q, k, v)
    # A gradient's plans are asked too.
    assert sieve.supports(
        "block_sparse", q.requires_grad_(), k, v, sieve.block_mask(torch.ones(4, 1, 1)), device="cuda"
    )[0]


def test_definitions_need_no_library(tmp_path):
    """The package imports and computes; it says once that no limits were checked, and of a kernel what is missing."""
    code = """
import warnings, torch
import sieve_attention as sieve
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    sieve.on_cpu(); sieve.on_cpu()
assert len(said) == 1 and "no GPU's limits are checked" in str(said[0].message), said
q = torch.randn(1, 32, 4, 60, requires_grad=True)
sieve.attention(q, q, q).sum().backward()
sieve.on_cpu(False)
answer = sieve.supports("attention", q, q, q, device="cuda")
assert not answer[0] and "the library of kernels is not there" in answer[1] and "cargo xtask wheel" in answer[1], answer
"""
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(sys.path), SIEVE_ATTENTION_LIBRARY=str(tmp_path / "none.so")
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


KEYWORDS = {
    "attention is always causal: leave it out": {"causal": True},
    "scaled_dot_product_attention reads both ways": {"is_causal": False},
    "it is scale here": {"softmax_scale": 0.1},
    "pass window=129": {"window_size": (128, 0)},
    "no kernel for a right window": {"window_size": (128, 128)},
    "pass window=64": {"window_size": 64},
    "leave it out, or pass window=": {"window_size": (-1, -1)},
    "pass documents=cu_seqlens": {"cu_seqlens": torch.tensor([0, 128])},
    "the row's length is known": {"max_seqlen_q": 128},
    "leave it out": {"dropout_p": 0.0},
    "no kernel drops probabilities": {"dropout_p": 0.1},
    "bias=(slopes[:, None]": {"alibi_slopes": torch.ones(4)},
    "soft caps have no kernel": {"softcap": 30.0},
    "return_lse=True": {"return_attn_probs": True},
    "select and block_mask say what a query sees": {"mask_mod": lambda *_: True},
    "is added to each key's logits": {"score_mod": lambda *_: 0.0},
    "block_sparse(q, k, v, block_mask(bools, 128))": {"block_mask": None},
}


@pytest.mark.parametrize("way", ["kernels", "definitions"])
@pytest.mark.parametrize("sentence", KEYWORDS)
def test_keywords_of_other_packages_are_answered(sentence, way, no_gpu):
    ((keyword, _),) = KEYWORDS[sentence].items()
    with sieve.on_cpu(way == "definitions"), pytest.raises(TypeError) as error:
        sieve.attention(*qkv(), **KEYWORDS[sentence])
    assert str(error.value).startswith(f"attention() got an unexpected keyword argument '{keyword}'\n  hint: ")
    assert sentence in str(error.value)


def test_keywords_of_other_functions(on_cpu):
    with pytest.raises(TypeError, match="'other_chunk_size'\n  hint: it is block here"):
        sieve.msa(*qkv(), *INDEX, other_chunk_size=64)
    with pytest.raises(TypeError, match="'cache_seqlens'\n  hint: length= of decode"):
        sieve.decode(*step()[:5], cache_seqlens=step()[5])
    with pytest.raises(TypeError, match=r"argument 'windw'\n  hint: did you mean window\?$"):
        sieve.attention(*qkv(), windw=3)
    with pytest.raises(TypeError, match="argument 'zzz'$"):
        sieve.attention(*qkv(), zzz=3)
    with pytest.raises(TypeError, match="'num_selected_blocks'\n  hint: it is num_selected here"):
        sieve.msa(*qkv(), *INDEX, num_selected_blocks=2)
    with pytest.raises(TypeError, match="it has no packed rows"):
        sieve.block_sparse(*qkv(), None, cu_seqlens=torch.tensor([0, 128]))


@pytest.mark.parametrize("way", [False, True])
def test_all_keywords_are_named_at_once(way, no_gpu):
    with sieve.on_cpu(way), pytest.raises(TypeError) as error:
        sieve.attention(*qkv(), causal=True, window_size=(64, 0), documnts=None)
    assert str(error.value).split("\n  hint: ") == [
        "attention() got unexpected keyword arguments 'causal', 'window_size' and 'documnts'",
        "causal: attention is always causal: leave it out",
        "window_size: pass window=65: the query's own key is counted here",
        "documnts: did you mean documents?",
    ]


def test_what_is_missing_or_too_much_is_said_of_the_function(on_cpu):
    with pytest.raises(TypeError, match=r"dma_attention\(\): missing a required argument: 'keep'"):
        sieve.dma_attention(*qkv(), made(2, 128), made(2))
    with pytest.raises(TypeError, match=r"attention\(\): too many positional arguments"):
        sieve.attention(*qkv(), torch.tensor([0, 128]), 128)


def test_the_hint_for_slopes_is_a_call_that_is_taken(on_cpu):
    q, k, v = qkv(batch=2, dtype=F32)
    with pytest.raises(TypeError) as error:
        sieve.attention(q, k, v, alibi_slopes=torch.ones(2))
    (expression,) = re.findall(r"bias=(.*) gives", str(error.value))
    slopes, position = torch.tensor([0.5, 0.125]), torch.arange(128)
    bias = eval(expression, {"torch": torch, "slopes": slopes, "tokens": 128, "batch": 2})
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8
    logits = logits - slopes.repeat_interleave(2)[:, None, None] * (position[:, None] - position)
    p = logits.masked_fill(position > position[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    assert (sieve.attention(q, k, v, bias=bias) - expected).abs().max() < 1e-4


def test_whole_numbers_are_refused_without_naming_what_is_refused_too(on_cpu):
    with pytest.raises(sieve.SieveError, match="the definitions take float64, float32, bfloat16$"):
        sieve.attention(*(x.int() for x in qkv()))


def test_documents_of_several_rows(on_cpu):
    rows = [torch.tensor([0, 37, 128]), torch.tensor([0, 128], dtype=torch.int32), torch.tensor([0, 1, 2, 128])]
    start, end = sieve.documents(rows, 128)
    assert start.shape == end.shape == (3, 128) and start.dtype == end.dtype == torch.int32
    q, k, v = qkv(batch=3)
    packed = sieve.attention(q, k, v, documents=(start, end))
    for row, offsets in enumerate(rows):
        alone = sieve.attention(*(x[row : row + 1] for x in (q, k, v)), documents=offsets)
        assert torch.equal(packed[row : row + 1], alone)
    with pytest.raises(sieve.SieveError, match="must ascend from 0 to the 128 tokens"):
        sieve.documents([rows[0], torch.tensor([0, 9])], 128)


WRONG_PAIRS = {
    "ends behind the row": lambda start, end: (start, end + 100),
    "the last token as an end": lambda start, end: (start, end - 1),
    "the row's end of all": lambda start, end: (start, torch.full_like(end, 128)),
    "a start behind its token": lambda start, end: (start + 1, end),
    "starts that differ in a document": lambda start, end: (torch.where(torch.arange(128) == 60, 50, start).int(), end),
    "a start before the row": lambda start, end: (start - 1, end),
}


@pytest.mark.parametrize("case", WRONG_PAIRS)
def test_pairs_that_are_no_documents_are_refused(case, on_cpu):
    pair = sieve.documents(torch.tensor([0, 37, 38, 128]), 128)
    wrong = WRONG_PAIRS[case](*pair)
    of_blocks = {"block": 32, "num_selected": 2}
    for call in (
        lambda x: sieve.attention(*qkv(), documents=x), lambda x: sieve.msa(*qkv(), *INDEX, **of_blocks, documents=x)
    ):  # fmt: skip
        call(pair)
        with pytest.raises(sieve.SieveError, match="(attention|msa): documents: token .* of row 0 is in the document"):
            call(wrong)
    assert not sieve.supports("attention", *qkv(), documents=wrong)[0]


def test_supports_asks_of_other_gpus(no_gpu):
    """A GPU of less shared memory has no gradient of wide heads; the sizes are those of sieve-gpu."""
    q = torch.empty(1, 512, 4, 256, dtype=BF16, device="meta", requires_grad=True)
    assert sieve.supports("attention", q, q, q, arch="sm_90a") == (True, "")
    assert "limit of 101376" in sieve.supports("attention", q, q, q, device="cuda", arch="sm_86")[1]
    assert sieve.supports("attention", q, q, q, device="cuda") == (True, "")
    with pytest.raises(sieve.SieveError, match="arch is 'sm_90'; it must be one of sm_80, "):
        sieve.supports("attention", q, q, q, arch="sm_90")
    text = (ROOT / "crates/sieve-gpu/src/runtime/hardware.rs").read_text()
    arms = re.findall(r'"(sm_\w+)" => (?:\(\((\d+), (\d+)\), (\d+), (\d+)\)|return Some\(Self::(\w+)\))', text)
    named = re.findall(
        r"const (\w+): Self =\s*Self \{\s*compute_capability: \((\d+), (\d+)\),\s*num_multiprocessors: (\d+),"
        r"\s*max_shared_bytes: (\d+) << 10", text,
    )  # fmt: skip
    named = {name: numbers for name, *numbers in named}
    assert {
        arch: _library._gpu([int(major), int(minor)], int(count), int(kib))
        for arch, *given, name in arms for major, minor, count, kib in [named[name] if name else given]
    } == _library.ARCHITECTURES  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"sinks": True}, {"bias": True}, {"documents": True}], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_log_sum_exps(settings, grad, monkeypatch):
    """Of the kernels and of the definition: those of the logits in f64, and the same output as without them."""
    q, k, v = (x.requires_grad_(grad) for x in qkv(tokens=70))
    values = {"sinks": made(4, dtype=F32), "bias": made(1, 2, 70, dtype=F32), "window": 9,
              "documents": sieve.documents(torch.tensor([0, 20, 70]), 70)}  # fmt: skip
    settings = {name: values[name] for name in settings}
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 8
    if "bias" in settings:
        logits = logits + values["bias"].double().repeat_interleave(2, 1)[:, :, None]
    i = torch.arange(70)
    hidden = (i > i[:, None]) | (i <= i[:, None] - settings.get("window", 70))
    if "documents" in settings:
        hidden |= i < values["documents"][0][0][:, None]
    logits = logits.masked_fill(hidden, float("-inf"))
    if "sinks" in settings:
        logits = torch.cat([logits, values["sinks"].double()[:, None, None].expand(1, 4, 70, 1)], -1)
    expected = logits.logsumexp(-1)
    for way in ("kernels", "definitions"):
        if way == "definitions":
            monkeypatch.setattr(_library.Op, "emulator", None)
        with sieve.on_cpu(way == "definitions"):
            o, lse = sieve.attention(q, k, v, **settings, return_lse=True)
            assert torch.equal(o, sieve.attention(q, k, v, **settings)) and not lse.requires_grad
            assert lse.dtype == F32 and lse.shape == (1, 4, 70)
            assert (lse - expected).abs().max() < 0.02, way
            if grad:
                torch.autograd.grad(o.float().sum(), [q, k, v])


@pytest.mark.parametrize("way", ["kernels", "definitions"])
@pytest.mark.parametrize("settings", [{}, {"window": 4}, {"sinks": True}], ids=str)
def test_several_tokens_a_step(settings, way, monkeypatch):
    """The rows of `attention` behind what the cache has; so where the cache has the tokens' keys already."""
    if way == "definitions":
        monkeypatch.setattr(_library.Op, "emulator", None)
    settings = {"sinks": made(4)} if "sinks" in settings else settings
    q, k, v = qkv(tokens=12, batch=2)
    with sieve.on_cpu(way == "definitions"):
        whole = sieve.attention(q, k, v, **settings)
        caches = [torch.zeros(2, 2, 16, 64, dtype=BF16) for _ in range(2)]
        for cache, x in zip(caches, (k, v)):
            cache[:, :, :7] = x[:, :7].transpose(1, 2)
        length = torch.tensor([7, 7], dtype=torch.int32)
        o = sieve.decode(q[:, 7:], k[:, 7:], v[:, 7:], *caches, length, **settings)
        assert_close("tokens", o.float(), whole[:, 7:].float(), whole[:, 7:].float(), floor=2e-2)
        assert torch.equal(caches[0][:, :, :12], k.transpose(1, 2)) and length.tolist() == [7, 7]
        again = sieve.decode(q[:, 7:], None, None, *caches, length + 5, **settings)
        assert_close("again", again.float(), o.float(), o.float(), floor=2e-2)
        with pytest.raises(
            sieve.SieveError, match=r"decode: k (is|has shape) \[2, 2, 2, 64\], (and q has|expected) \[2, 5"
        ):
            sieve.decode(q[:, 7:], k[:, 7:9], v[:, 7:9], *caches, length)


FROM_OFFSETS = {
    "attention": lambda x, **s: sieve.attention(*x, **s),
    "dma_attention": lambda x, **s: sieve.dma_attention(*x, made(2, 128), made(2), keep=16, **s),
    "msa": lambda x, **s: sieve.msa(*x, *INDEX, block=32, num_selected=2, **s),
    "select": lambda x, **s: sieve.select(made(1, 2, 128, dtype=F32), keep=16, **s).expire,
    "dma_scores": lambda x, **s: sieve.dma_scores(x[2], made(2, 128), made(2), slopes=[0.1, 0.2], **s),
    "nsa_mean_pool": lambda x, **s: torch.stack(sieve.nsa_mean_pool(*x[1:], **s)),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", FROM_OFFSETS)
def test_cu_seqlens_in_place_of_documents(name, dtype, on_cpu):
    offsets = torch.tensor([0, 37, 38, 128], dtype=dtype)
    call = FROM_OFFSETS[name]
    expected = call(qkv(), documents=sieve.documents(offsets, 128))
    assert torch.equal(call(qkv(), documents=offsets), expected)
    assert not torch.equal(call(qkv()), expected)


def test_cu_seqlens_of_a_mask_of_blocks_and_of_kernels(on_cpu, monkeypatch):
    mask, offsets = torch.ones(4, 3, 3), torch.tensor([0, 70, 128])
    by_offsets, by_documents = (sieve.block_mask(mask, 64, x) for x in (offsets, sieve.documents(offsets, 128)))
    assert torch.equal(by_offsets.words, by_documents.words) and torch.equal(by_offsets.places, by_documents.places)
    starts = []
    monkeypatch.setattr(_library.Op, "emulator", lambda plan, x: (starts.append(x[3]), [torch.zeros(1, 128, 4, 64)])[1])
    with sieve.on_cpu(False):
        sieve.attention(*qkv(), documents=offsets)
    assert torch.equal(starts[0], sieve.documents(offsets, 128)[0])


@pytest.mark.parametrize("way", [False, True])
def test_offsets_that_are_no_whole_numbers_are_refused(way, no_gpu):
    for wrong in (torch.tensor([0.0, 10.5, 40.0]), torch.tensor([False, True])):
        with sieve.on_cpu(way), pytest.raises(sieve.SieveError, match="cu_seqlens is (float32|bool); it must be int32"):
            sieve.documents(wrong, 40)
    with (
        sieve.on_cpu(way),
        pytest.raises(sieve.SieveError, match="documents is a tensor .*cu_seqlens itself, int32 or"),
    ):
        sieve.attention(*qkv(), documents=torch.tensor([0.0, 10.5, 128.0]))


def test_answers_are_kept_by_shape(on_cpu):
    _on_cpu._answers.clear()
    for tokens in (32, 32, 48):
        sieve.attention(*qkv(tokens=tokens))
    assert len(_on_cpu._answers) == 2


def test_a_torch_that_is_broken_is_not_taken_for_a_missing_one(tmp_path):
    """The error of the import is named, with the file that took a module's name."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from http import nothing_of_this_name")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    code = "import sieve_attention"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "nothing_of_this_name" in done.stderr.splitlines()[-1] + done.stderr.splitlines()[-2], done.stderr
    assert "torch is installed" in done.stderr and "pip install torch" not in done.stderr.splitlines()[-1]


def test_no_warning_of_torch_comes_by(on_cpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sieve.attention(*(x.requires_grad_() for x in qkv())).sum().backward()
    assert Path(sieve.__file__).with_name("py.typed").is_file()
