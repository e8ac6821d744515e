"""No axis is exchanged in silence: every function, every set of its tensors with two axes exchanged, is refused or
warned of, by the kernels' plans and by the definitions."""

import itertools
import warnings

import pytest
import torch
from conftest import DEVICE

import sieve_attention as sieve
from sieve_attention import _axes, _library

BATCH, TOKENS, WIDTH, KEEP = 2, 48, 64, 16
BLOCKS = sieve.NsaBlocks(16, 8, 32, 3)


def made(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).to(DEVICE)


def calls(heads, kv_heads):
    """Each function with its arguments that have two axes of which one is of tokens, heads or blocks."""
    q, k, v = (made(BATCH, TOKENS, n, WIDTH) for n in (heads, kv_heads, kv_heads))
    qkv, rank = {"q": q, "k": k, "v": v}, made(BATCH, kv_heads, TOKENS, dtype=torch.float32)
    dma = {"w_dt": made(kv_heads, kv_heads * WIDTH), "a": made(kv_heads)}
    pooled = {name: made(BATCH, TOKENS // 8, kv_heads, WIDTH) for name in ("compressed_k", "compressed_v")}
    indices = torch.zeros(BATCH, TOKENS, kv_heads, 3, dtype=torch.int32, device=DEVICE)
    caches = {name: made(BATCH, kv_heads, 20, WIDTH) for name in ("k_cache", "v_cache")}
    length = torch.full((BATCH,), 5, dtype=torch.int32, device=DEVICE)
    token = {name: x[:, :1].contiguous() for name, x in qkv.items()}
    kept = {name: made(BATCH, kv_heads, KEEP, WIDTH) for name in ("k_cache", "v_cache")}
    kept |= {"z_cache": rank[:, :, :KEEP].contiguous(), "positions": torch.arange(KEEP).expand(BATCH, kv_heads, -1)}
    kept["positions"] = kept["positions"].to(DEVICE, torch.int32).contiguous()
    index = {"index_q": k, "index_k": k[:, :, :1]}
    ranked = lambda **x: sieve.expiring_attention(**x, selection=sieve.select(rank, keep=KEEP))  # noqa: E731
    return {
        "attention": (sieve.attention, qkv),
        "attention with a window": (lambda **x: sieve.attention(**x, window=9), qkv),
        "attention with a bias": (sieve.attention, {**qkv, "bias": rank}),
        "attention with sinks": (lambda **x: sieve.attention(**x, sinks=made(heads)), qkv),
        "select": (lambda rank: sieve.select(rank, keep=KEEP), {"rank": rank}),
        "expiring_attention": (ranked, {**qkv, "bias": rank}),
        "dma_scores": (lambda **x: sieve.dma_scores(**x, a=dma["a"]), {"v": v, "w_dt": dma["w_dt"]}),
        "dma_attention": (
            lambda **x: sieve.dma_attention(**x, a=dma["a"], keep=KEEP), {**qkv, "w_dt": dma["w_dt"]}
        ),
        "nsa_mean_pool": (lambda **x: sieve.nsa_mean_pool(**x, blocks=BLOCKS), {"k": k, "v": v}),
        "nsa_compressed": (lambda **x: sieve.nsa_compressed(**x, blocks=BLOCKS), {"q": q, **pooled}),
        "nsa_selected": (lambda **x: sieve.nsa_selected(**x, blocks=BLOCKS), {**qkv, "indices": indices}),
        "nsa": (
            lambda **x: sieve.nsa(**x, blocks=BLOCKS, window=9),
            {**qkv, **pooled, "gates": made(BATCH, TOKENS, heads, 3)},
        ),
        "infllm_v2": (lambda **x: sieve.infllm_v2(**x, blocks=BLOCKS, local=1), qkv),
        "moba": (lambda **x: sieve.moba(**x, block=32, num_selected=1), qkv),
        "msa": (lambda **x: sieve.msa(**x, block=32, num_selected=1), {**qkv, **index}),
        "selected_attention": (lambda **x: sieve.selected_attention(**x, block=32), {**qkv, "indices": indices}),
        "decode": (lambda **x: sieve.decode(**x, length=length), {**token, **caches}),
        "decode of a cache that has the keys": (
            lambda **x: sieve.decode(**x, k=None, v=None, length=length), {"q": token["q"], **caches}
        ),
        "dma_decode": (
            lambda **x: sieve.dma_decode(**x, z=rank[:, :, 0].contiguous(), length=length), {**token, **kept}
        ),
        "mla_decode": (
            lambda **x: sieve.mla_decode(**x, rank=32, scale=0.1, key_scale=None),
            {"q": token["q"], "latents": made(BATCH, TOKENS, WIDTH)},
        ),
        "mla_decode with factors": (
            lambda **x: sieve.mla_decode(**x, rank=32, scale=0.1),
            {"q": token["q"], "latents": made(BATCH, TOKENS, WIDTH), "key_scale": made(BATCH, TOKENS, heads).float()},
        ),
        "block_mask": (lambda mask: sieve.block_mask(mask, 64), {"mask": made(heads, 6, 6).abs().tril()}),
    }  # fmt: skip


def exchanged(name, x):
    """Axes 1 and 2, of a matrix 0 and 1; contiguous, as a tensor that was made so."""
    return x.transpose(*((0, 1) if x.dim() == 2 else (1, 2))).contiguous()


def outcome(function, arguments):
    """What a call says: its error, its warning, or nothing."""
    _axes._said.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            function(**arguments)
        except sieve.SieveError as error:
            return str(error)
    return "".join(str(x.message) for x in said if "sieve_attention" in str(x.message))


@pytest.fixture(params=["kernels", "definitions"])
def by(request, monkeypatch):
    if request.param == "definitions":
        monkeypatch.setattr(_library.Op, "emulator", None)
        with sieve.on_cpu():
            yield
    else:
        if DEVICE == "cpu":
            # Plans alone: what these refuse no kernel sees.
            zeros = lambda plan, _: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]  # noqa: E731
            monkeypatch.setattr(_library.Op, "emulator", staticmethod(zeros))
        yield
    for op in sieve.ops.IMPLEMENTATIONS.values():
        op.plans.clear()


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", calls(4, 4))
def test_no_axis_is_exchanged_in_silence(name, heads, kv_heads, by):
    if DEVICE != "cpu" and name == "block_mask":
        pytest.skip("it has no plan")
    function, arguments = calls(heads, kv_heads)[name]
    for op in sieve.ops.IMPLEMENTATIONS.values():
        op.plans.clear()
    assert outcome(function, arguments) == "", "the right call"
    silent = []
    for count in range(1, len(arguments) + 1):
        for names in itertools.combinations(arguments, count):
            changed = {x: exchanged(x, y) if x in names else y for x, y in arguments.items()}
            same = all(
                torch.equal(changed[x], y) for x, y in arguments.items() if x in names and y.shape == changed[x].shape
            )
            if same and all(changed[x].shape == arguments[x].shape for x in names):
                continue
            if not outcome(function, changed):
                silent.append((names, [list(changed[x].shape) for x in names]))
    assert not silent, silent


@pytest.mark.parametrize("shape", [(1, 256, 8, 64), (1, 8, 8, 64), (3, 1, 8, 64)])
def test_rows_as_they_are_meant_give_no_warning(shape, by):
    q = made(*shape)
    assert outcome(sieve.attention, {"q": q, "k": q, "v": q}) == ""


def test_a_tensor_that_was_transposed_on_the_way_gives_no_warning(by):
    q = made(1, 8, 5, 64).transpose(1, 2)
    assert outcome(sieve.attention, {"q": q, "k": q, "v": q}) == ""
    wrong = q.transpose(1, 2).contiguous().transpose(1, 2).contiguous()
    assert "[batch, tokens, heads, width]: 8 heads and 5 tokens" in outcome(
        sieve.attention, {"q": wrong, "k": wrong, "v": wrong}
    )


def test_the_warning_comes_once_and_points_at_the_caller(by):
    _axes._said.clear()
    q = made(1, 4, 40, 64)
    with pytest.warns(UserWarning, match=r"pass \.transpose\(1, 2\)") as said:
        sieve.attention(q, q, q)
        sieve.attention(q, q, q, window=3)
    assert [x.filename for x in said] == [__file__]


REFUSED = {
    "k has shape [2, 2, 48, 64], expected [2, 4, 48, 64], [batch, tokens, KV heads, width]\n  hint: of tensors": (4, 2),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_shapes_name_their_axes(sentence, by):
    heads, kv_heads = REFUSED[sentence]
    q, k = made(2, heads, 48, 64), made(2, kv_heads, 48, 64)
    assert sentence in outcome(sieve.attention, {"q": q, "k": k, "v": k})


def test_a_rank_of_two_axes_names_all_three(by):
    assert "3 axes: [batch, KV heads, tokens]" in outcome(
        lambda **x: sieve.select(**x, keep=4), {"rank": made(2, 48).float()}
    )
