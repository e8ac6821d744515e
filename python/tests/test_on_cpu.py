"""`on_cpu()`: every function by its definition on CPU tensors, beside the kernels, with gradients."""

import copy
import warnings

import conftest
import pytest
import test_kernels
import torch
from parity import assert_close, random
from test_kernels import BLOCKS, in_a_packed_row, qkv, two_documents

import sieve_attention as sieve
from sieve_attention import _library, _on_cpu


@pytest.fixture
def on_cpu(monkeypatch):
    """No emulator: what has no definition is refused."""
    monkeypatch.setattr(_library.Op, "emulator", None)
    with sieve.on_cpu():
        yield


def passes(function, inputs):
    """Output and gradients of all inputs; of a tuple the first item, the others behind it."""
    copies = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    o = function(*copies)
    first, *more = o if isinstance(o, tuple) else (o,)
    d_o = random(*first.shape, device="cpu", seed=99).to(first.dtype)
    wanted = [x for x in copies if x.requires_grad]
    gradients = torch.autograd.grad(first, wanted, d_o, allow_unused=True)
    return [first.detach(), *[x for x in gradients if x is not None], *[x.detach() for x in more]]


def f32(shape, seed):
    return random(*shape, device="cpu", dtype=torch.float32, seed=seed)


TOKENS = 100
Q, K, V = qkv(1, TOKENS, 4, 2, 64, device="cpu")
GATES, BIAS = random(1, TOKENS, 4, 3, device="cpu", seed=20), f32((4, 3), 21)
INDEX = random(1, TOKENS, 2, 64, device="cpu", seed=22), random(1, TOKENS, 1, 64, device="cpu", seed=23)
W_DT, A = f32((2, 128), 9) / 10, f32((2,), 10).abs()
RANK = f32((1, 2, TOKENS), 7)
INFLLM = {"blocks": sieve.NsaBlocks(16, 8, 32, 3), "local": 1}
SIZES = {"block": 32, "num_selected": 2}
GIVEN = torch.randint(-1, 5, (1, TOKENS, 2, 3), generator=torch.Generator().manual_seed(24), dtype=torch.int32)


def expiring(q, k, v, bias, **documents):
    return sieve.expiring_attention(q, k, v, bias, sieve.select(RANK, keep=24, local=8, **documents))


def nsa_parts(q, k, v, **documents):
    """The compressed branch; the selected one over the blocks that it chose."""
    pooled = sieve.nsa_mean_pool(k, v, blocks=BLOCKS, **documents)
    o, indices = sieve.nsa_compressed(q, *pooled, blocks=BLOCKS, **documents)
    return o + sieve.nsa_selected(q, k, v, indices, blocks=BLOCKS, **documents), indices


def nsa(q, k, v, gates, bias, **documents):
    pooled = sieve.nsa_mean_pool(k, v, blocks=BLOCKS, **documents)
    settings = {"gate_bias": bias, "blocks": BLOCKS, "window": 24, "scale": 0.2}
    return sieve.nsa(q, k, v, *pooled, gates, **settings, **documents)


FUNCTIONS = {
    "attention": (lambda q, k, v, **s: sieve.attention(q, k, v, window=17, scale=0.2, **s), (Q, K, V)),
    "attention with a bias": (lambda q, k, v, b, **s: sieve.attention(q, k, v, bias=b, **s), (Q, K, V, RANK)),
    "attention with sinks": (lambda q, k, v, x, **s: sieve.attention(q, k, v, sinks=x, **s), (Q, K, V, f32((4,), 25))),
    "expiring_attention": (expiring, (Q, K, V, RANK)),
    "dma_scores": (lambda v, w, a, **s: sieve.dma_scores(v, w, a, slopes=[0.1, 0.2], **s), (V, W_DT, A)),
    "dma_attention": (lambda *x, **s: sieve.dma_attention(*x, keep=24, **s), (Q, K, V, W_DT, A)),
    "dma_attention of the paper": (
        lambda *x, **s: sieve.dma_attention(*x, keep=24, preset="paper", **s), (Q, K, V, W_DT, A),
    ),
    "nsa": (nsa, (Q, K, V, GATES, BIAS)),
    "parts of nsa": (nsa_parts, (Q, K, V)),
    "infllm_v2": (lambda *x, **s: sieve.infllm_v2(*x, **INFLLM, **s), (Q, K, V)),
    "moba": (lambda *x, **s: sieve.moba(*x, **SIZES, **s), (Q, K, V)),
    "msa": (lambda *x, **s: sieve.msa(*x, *INDEX, **SIZES, **s), (Q, K, V)),
    "selected_attention": (
        lambda *x, **s: sieve.selected_attention(*x, GIVEN, block=32, block_sums=True, **s), (Q, K, V),
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_packed", [False, True], ids=["row", "packed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_the_kernels(name, is_packed, device, monkeypatch):
    """Outputs and gradients in bf16; in f64 the definitions' own gradients are exact."""
    if device != "cpu":
        pytest.skip("the kernels are the emulator's here")
    function, inputs = FUNCTIONS[name]
    documents = {"documents": two_documents(TOKENS, "cpu", (0, 37, 38))} if is_packed else {}
    call = lambda *x: function(*x, **documents)  # noqa: E731
    kernels = passes(call, inputs)
    monkeypatch.setattr(_library.Op, "emulator", None)
    with sieve.on_cpu():
        ours = passes(call, inputs)
    assert len(kernels) == len(ours)
    for at, (by_torch, by_kernels) in enumerate(zip(ours, kernels)):
        assert by_torch.dtype == by_kernels.dtype and by_torch.shape == by_kernels.shape, f"{name}, {at}"
        if not by_torch.is_floating_point():
            assert torch.equal(by_torch, by_kernels), f"{name}, {at}"
            continue
        error, size = (by_torch.float() - by_kernels.float()).norm(), by_kernels.float().norm()
        assert error <= 0.02 * size + 1e-5, f"{name}, {at}: {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("test", ["decode", "dma_decode", "mla_decode"])
def test_steps_behind_a_cache(test, on_cpu):
    getattr(test_kernels, f"test_{test}")("cpu")


def test_a_step_over_chosen_blocks(on_cpu, device, monkeypatch):
    """As the kernel: of rows of different lengths, each reads its blocks up to its own key."""
    q, k, v = qkv(2, 80, 4, 2, 64, device="cpu")
    length = torch.tensor([69, 7], dtype=torch.int32)
    chosen = torch.tensor([[[1, 4], [3, 4]], [[0, -1], [0, -1]]], dtype=torch.int32)
    caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
    token = torch.stack([q[0, 69], q[1, 7]])[:, None]
    given = token, None, None, *caches, length
    for by in (chosen, chosen.repeat_interleave(2, 1)):
        ours = sieve.decode(*given, chosen=by, block=16)
        monkeypatch.setattr(_library.Op, "emulator", staticmethod(conftest.emulate))
        with sieve.on_cpu(False):
            kernel = sieve.decode(*given, chosen=by, block=16)
        monkeypatch.setattr(_library.Op, "emulator", None)
        assert (ours.float() - kernel.float()).abs().max() < 0.02
    with pytest.raises(sieve.SieveError, match="together with block"):
        sieve.decode(*given, chosen=chosen)


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_a_mask(block, on_cpu):
    test_kernels.test_block_sparse(block, "cpu")


def test_dma_decode_may_leave_the_token_out(on_cpu):
    """Without a local window a token of the least rank sees what is kept, and is not."""
    keep, tokens = 4, 12
    q, k, v = qkv(1, tokens, 2, 1, 16, device="cpu")
    z = -torch.arange(tokens, dtype=torch.float32).view(1, 1, -1)
    caches = [torch.zeros(1, 1, keep, 16, dtype=torch.bfloat16) for _ in range(2)]
    caches += [torch.zeros(1, 1, keep), torch.zeros(1, 1, keep, dtype=torch.int32)]
    for t in range(tokens):
        token = [x[:, t : t + 1] for x in (q, k, v)]
        length = torch.tensor([t], dtype=torch.int32)
        sieve.dma_decode(*token, z[:, :, t].contiguous(), *caches, length, preset="paper")
    assert caches[3].flatten().tolist() == [0, 1, 2, 3]


def test_every_function_has_a_definition():
    """Those that compute from tensors alone, without kernels, need none."""
    without = {"BlockMask", "SieveError", "Selection", "NsaBlocks", "block_mask", "dma_slopes", "documents", "on_cpu"}
    without |= {"Bands", "supports"}
    assert set(_on_cpu.DEFINITIONS) == set(sieve.__all__) - without


def test_float_types_and_gradients(on_cpu):
    """f64 gradients by finite differences; f32 and f16 keep their type."""
    inputs = [x[:, :20, :, :16].double().requires_grad_() for x in (Q, K, V)]
    assert torch.autograd.gradcheck(lambda *x: sieve.attention(*x, window=5), inputs)
    for dtype in (torch.float32, torch.float16):
        with sieve.on_cpu(strict=False):
            assert sieve.attention(*(x.to(dtype) for x in (Q, K, V))).dtype == dtype


def test_it_is_explicit_and_ends(monkeypatch):
    monkeypatch.setattr(_library.Op, "emulator", None)
    hint = "hint: sieve_attention.on_cpu"
    with pytest.raises(sieve.SieveError, match=hint):
        sieve.attention(Q, K, V)
    with sieve.on_cpu():
        sieve.attention(Q, K, V)
        assert sieve.supports(sieve.attention, Q, K, V) == (True, "")
        with sieve.on_cpu(False), pytest.raises(sieve.SieveError, match=hint):
            sieve.attention(Q, K, V)
        sieve.attention(Q, K, V)
        with pytest.raises(sieve.SieveError, match="attention: window is 0; it must be a whole number"):
            sieve.attention(Q, K, V, window=0)
        with pytest.raises(sieve.SieveError, match="select: local 9 is not supported"):
            sieve.select(RANK, keep=8, local=9)
        with pytest.raises(sieve.SieveError, match="kernels need tensors on a CUDA GPU|is on meta"):
            sieve.attention(*(x.to("meta") for x in (Q, K, V)))
    with pytest.raises(sieve.SieveError, match=hint):
        sieve.attention(Q, K, V)


def test_models_of_transformers(monkeypatch):
    """Loading says that there is no GPU; with on_cpu() logits and gradients are eager attention's in f32."""
    transformers = pytest.importorskip("transformers")
    import sieve_attention.transformers as integration

    monkeypatch.setattr(_library.Op, "emulator", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no CUDA GPU\n  hint: sieve_attention.on_cpu"):
        integration.register()
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    made = []
    for name in ("eager", "sieve"):
        torch.manual_seed(3)
        make = transformers.AutoModelForCausalLM.from_config
        made.append(make(copy.deepcopy(config), attn_implementation=name).float().eval())
    ids = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(5))
    padding = torch.ones_like(ids)
    padding[1, :6] = 0
    with warnings.catch_warnings(), sieve.on_cpu():
        warnings.simplefilter("error")
        integration.register()
        for settings in ({}, {"attention_mask": padding}):
            results = []
            for model in made:
                logits = model(ids, **settings, use_cache=False).logits[settings.get("attention_mask", padding + 1) > 0]
                logits.square().mean().backward()
                results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
                model.zero_grad()
            for exact, computed in zip(*results):
                assert_close("model", computed, exact, exact, floor=1e-4)
        said = [model.generate(ids[:1], max_new_tokens=8, do_sample=False).tolist() for model in made]
        assert said[0] == said[1]


OTHERS = {
    "q is int32; the definitions take float64": lambda q, k, v: sieve.attention(q.int(), k.int(), v.int()),
    "k is bfloat16, expected float32": lambda q, k, v: sieve.attention(q, k.bfloat16(), v),
    "number of q/k/v heads 3/2/2": lambda q, k, v: sieve.moba(q[:, :, :3], k, v, block=32),
    "number of q/k/v heads 4/2/1": lambda q, k, v: sieve.attention(q, k, v[:, :, :1]),
    "number of k/v heads 2/1": lambda q, k, v: sieve.nsa_mean_pool(k, v[:, :, :1]),
    "k has shape [1, 30, 2, 64], expected [1, 100, 2, 64]": lambda q, k, v: sieve.attention(q, k[:, :30], v[:, :30]),
    "v has shape [1, 30, 2, 64], expected [1, 100, 2, 64]": lambda q, k, v: sieve.infllm_v2(q, k, v[:, :30]),
    "k has shape [1, 100, 2, 32], expected [1, 100, 2, 64]": lambda q, k, v: sieve.attention(q, k[..., :32], v),
    "bias has shape [1, 4, 100], expected [1, 2, 100]": lambda q, k, v: sieve.attention(
        q, k, v, bias=torch.zeros(1, 4, 100)
    ),
    "w_dt has shape [2, 64], expected [2, 128]": lambda q, k, v: sieve.dma_attention(q, k, v, W_DT[:, :64], A, keep=8),
    "a has shape [3], expected [2]": lambda q, k, v: sieve.dma_scores(v, W_DT, torch.ones(3)),
    "indices has shape [1, 30, 2, 3], expected [1, 100, 2, 3]": lambda q, k, v: sieve.selected_attention(
        q, k, v, GIVEN[:, :30], block=32
    ),
    "mask is a tensor [1, 2, 4, 4]; it must be a tensor of 3 axes": lambda q, k, v: sieve.block_sparse(
        q, k, v, sieve.block_mask(torch.ones(1, 2, 4, 4, dtype=torch.bool))
    ),
    "k is on meta, and q on cpu": lambda q, k, v: sieve.attention(q, k.to("meta"), v),
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_arguments_that_do_not_fit_each_other_are_named(sentence, on_cpu):
    with pytest.raises(sieve.SieveError) as error:
        OTHERS[sentence](Q.float(), K.float(), V.float())
    assert sentence in str(error.value)
