"""attn_implementation="sieve" beside transformers' own eager attention, on small models with random weights."""

import collections
import copy
import importlib
import inspect
import sys
import types
from pathlib import Path

import parity
import pytest
import torch
from conftest import DEVICE
from parity import random

transformers = pytest.importorskip("transformers")

import sieve_attention.transformers as integration  # noqa: E402
from sieve_attention import functional  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip


def tokens(batch=2, count=40):
    return torch.randint(1, 64, (batch, count), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def randomise(model):
    """Matrices and sinks; the factors of DMA's scores, of which 0 would give all keys one rank, become 1."""
    for name, weights in model.named_parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
        elif name.endswith(".sinks"):
            torch.nn.init.normal_(weights)
        elif name.endswith(".A"):
            weights.data.fill_(1.0)


def models(config, kind=None):
    """The same weights in f32 with eager attention, in bf16 with eager attention, in bf16 with ours."""
    torch.manual_seed(7)
    make = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
    exact = make(copy.deepcopy(config), attn_implementation="eager").to(DEVICE).eval()
    randomise(exact)
    made = [exact]
    for name in ("eager", "sieve"):
        model = make(copy.deepcopy(config), attn_implementation=name).to(DEVICE).eval()
        model.load_state_dict(exact.state_dict())
        assert model.config._attn_implementation == name
        made.append(model.to(torch.bfloat16))
    return made


def compare(three, *inputs, real=None, of_few=1e-3, **settings):
    """Logits and gradients of ours are at most twice as far from f32 as eager attention's in bf16.

    of_few: added tolerance of gradients of fewer than 16 numbers, as a share of their norm; 1e-3 for others.
    """
    results = []
    for model in three:
        logits = model(*inputs, **settings, use_cache=False).logits.float()
        if real is not None:
            logits = logits[real]
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.float() for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    assert len({len(result) for result in results}) == 1, "a gradient is missing"
    for at, (exact, plain, ours) in enumerate(zip(*results)):
        floor = of_few if exact.numel() < 16 else 1e-3
        error, allowed = (ours - exact).norm(), 2 * (plain - exact).norm() + floor * exact.norm() + 1e-6
        assert error <= allowed, f"{'logits' if at == 0 else f'gradient {at}'}: {error:.3g} against {allowed:.3g}"


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def qwen3(**settings):
    return transformers.Qwen3Config(**SIZES, **settings)


def window_config():
    return qwen3(use_sliding_window=True, sliding_window=9, max_window_layers=0, layer_types=["sliding_attention"] * 2)


@pytest.mark.parametrize("config", [qwen3, window_config])
def test_dense_and_windows(config):
    compare(models(config()), tokens())


def test_padding_on_both_sides():
    mask = torch.ones(2, 40, dtype=torch.long, device=DEVICE)
    mask[0, :7], mask[1, 33:] = 0, 0
    compare(models(qwen3()), tokens(), attention_mask=mask, real=mask.bool())


def test_padding_inside_a_row_is_refused():
    mask = torch.ones(2, 40, dtype=torch.long, device=DEVICE)
    mask[0, 7] = 0
    with pytest.raises(ValueError, match="padding between a row's tokens"):
        models(qwen3())[2](tokens(), attention_mask=mask)


def test_a_mask_of_the_models_own_is_kept():
    """Bools, or numbers that are added, `[batch, 1, tokens, tokens]`: not of documents, so by SDPA."""
    own = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE) < 0.5
    own = own.tril() | torch.eye(40, dtype=torch.bool, device=DEVICE)
    added = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    compare(models(qwen3()), tokens(), attention_mask=added)
    q, k, v = heads_first(40, 40)
    module, settings = layer_of(16), {"scaling": 0.2, "block_indices": indices_of(2, 16, 2, 40, 40)}
    results = [integration.attention_forward(module, q, k, v, mask, **settings)[0] for mask in (own, added)]
    assert torch.equal(*results)


def test_inference_mode():
    ours = models(qwen3())[2]
    with torch.inference_mode():
        logits = ours(tokens(1)).logits
    with torch.no_grad():
        assert torch.equal(logits, ours(tokens(1)).logits)


def test_packed_rows():
    three = models(qwen3())
    both = torch.cat([torch.arange(17), torch.arange(23)]), torch.cat([torch.arange(30), torch.arange(10)])
    compare(three, tokens(), position_ids=torch.stack(both).to(DEVICE))
    positions = torch.cat([torch.arange(17), torch.arange(1), torch.arange(22)])[None].to(DEVICE)
    ids = tokens(1)
    packed = three[2](ids, position_ids=positions, use_cache=False).logits
    second_row = three[2](ids[:, 18:], use_cache=False).logits
    assert (packed[:, 18:] - second_row).abs().max() < 0.1
    compare(three, ids, position_ids=positions)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("config", [qwen3, window_config])
def test_generation(config, padded, cache):
    ours = models(config())[2]
    ids = tokens(count=12)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    outputs = []
    for name in ("sieve", "sdpa"):
        ours.set_attn_implementation(name)
        outputs.append(ours.generate(ids, attention_mask=mask, **settings))
    for row in range(len(ids)):
        for step, (got, expected) in enumerate(zip(*(output.logits for output in outputs))):
            assert (got[row] - expected[row]).abs().max() < 0.05 * expected[row].abs().max(), (row, step)
            # Behind a tie that falls the other way the rows are different texts.
            if got[row].argmax() != expected[row].argmax():
                break


def gpt_oss():
    """A window layer and a dense one, both with sinks; every token goes to all experts, whatever rounding does."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    return transformers.GptOssConfig(**SIZES, **experts, **layers)


@pytest.mark.skipif(not hasattr(transformers, "GptOssConfig"), reason="this transformers has no gpt-oss")
def test_sinks_of_gpt_oss(monkeypatch):
    """Whole rows with gradients, padded rows, steps by the decode kernels, several tokens at once by SDPA."""
    three, ids = models(gpt_oss()), tokens()
    # A layer's four sinks: measured 0.022 of the norm where eager attention in bf16 happened to have 0.007.
    compare(three, ids, of_few=0.04)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    compare(three, ids, real=mask.bool(), attention_mask=mask, of_few=0.04)
    exact, _, ours = three
    ran, cache, at, logits = count_runs(monkeypatch), transformers.DynamicCache(config=ours.config), 0, []
    parts = [12, 1, 1, 5, *[1] * 21]
    with torch.no_grad():
        for count in parts:
            logits.append(ours(ids[:, at : at + count], past_key_values=cache, use_cache=True).logits)
            at += count
        whole = exact(ids, use_cache=False).logits
    assert ran["attention_decode"] == 2 * parts.count(1) and not ran["cached_decode"], ran
    error = (torch.cat(logits, 1).float() - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert error.max() < 0.1, error.max()


@pytest.mark.parametrize("config", [qwen3, window_config])
def test_generation_decodes_by_kernels(config, monkeypatch):
    """The default cache of generate(), one key longer each token, and few plans; padding goes to SDPA."""
    ours, op = models(config())[2], functional.ops.IMPLEMENTATIONS["attention_decode"]
    monkeypatch.setattr(op, "plans", {})
    ran = count_runs(monkeypatch)
    with torch.no_grad():
        ours.generate(tokens(count=12), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert ran["attention_decode"] == 7 * 2 and len(op.plans) == 1, (ran, op.plans.keys())
    mask = torch.ones(2, 12, dtype=torch.long, device=DEVICE)
    mask[0, :5] = 0
    ours.generate(tokens(count=12), attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert ran["attention_decode"] == 7 * 2 and not ran["cached_decode"], ran


def count_runs(monkeypatch):
    """How often each op runs from here on."""
    ran = collections.Counter()
    for name, op in functional.ops.IMPLEMENTATIONS.items():
        own = op.key
        monkeypatch.setattr(op, "key", lambda *given, own=own, name=name: (ran.update([name]), own(*given))[1])
    return ran


def test_a_step_with_a_gradient_goes_to_sdpa(monkeypatch):
    ours = models(window_config())[2]
    first = ours(tokens()[:, :39], use_cache=True)
    ran = count_runs(monkeypatch)
    step = ours(tokens()[:, 39:], past_key_values=first.past_key_values, use_cache=True).logits
    step.float().square().mean().backward()
    assert ours.model.layers[0].self_attn.k_proj.weight.grad.isfinite().all()
    assert not ran["attention_decode"] and not ran["cached_decode"]
    whole = ours(tokens(), use_cache=False).logits[:, 39]
    assert (step[:, 0] - whole).norm() < 0.05 * whole.norm()


def test_bounds_are_made_once_in_a_pass(monkeypatch):
    """In inference mode too, where a tensor does not count its changes: a change between passes is seen."""
    made = []
    own = integration._of_padding
    monkeypatch.setattr(integration, "_of_padding", lambda mask: (made.append(mask), own(mask))[1])
    model = models(qwen3())[2]
    for inference in (False, True):
        made.clear()
        with torch.inference_mode(inference), torch.no_grad():
            mask = torch.ones(2, 40, dtype=torch.long, device=DEVICE)
            mask[:, :7] = 0
            assert mask.is_inference() == inference
            first = model(tokens(), attention_mask=mask, use_cache=False).logits
            assert len(made) == 1, f"inference {inference}: once for both layers"
            mask[:, :7] = 1
            mask[:, 30:] = 0
            second = model(tokens(), attention_mask=mask, use_cache=False).logits
            assert len(made) == 2, f"inference {inference}: the change is seen"
            again = model(tokens(), attention_mask=mask.clone(), use_cache=False).logits
            assert torch.equal(second, again) and not torch.equal(first, second)


def test_bounds_of_another_model_are_its_own():
    """An inference tensor that changes between the passes of two models."""
    first, other = (types.SimpleNamespace(layer_idx=layer, config=object()) for layer in (0, 1))
    with torch.inference_mode():
        x, made = torch.zeros(3), []
        for module in (first, first, other, first, types.SimpleNamespace(layer_idx=5, config=first.config)):
            integration._once(module, x, made.append)
    assert len(made) == 4, "the last module alone follows one of its own model"


def test_what_has_no_kernel_is_refused():
    _, _, ours = models(qwen3(attention_dropout=0.1))
    with pytest.raises(ValueError, match="dropout 0.1 has no kernel"):
        ours.train()(tokens())


@pytest.mark.parametrize("keep", [16, 512])
def test_doge(keep):
    integration.patch_doge()
    config = transformers.DogeConfig(**SIZES, keep_window_size=keep, is_moe=False)
    three = models(config)
    # The rank of eager attention is rounded to bf16 in bf16: choices differ where ranks are near, so f32 decides.
    for model in three:
        for layer in model.model.layers:
            layer.self_attn.A.data.normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    exact, plain, ours = (model(tokens(), use_cache=False).logits.float() for model in three)
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm()
    whole = three[2](tokens(), use_cache=False).logits
    first = three[2](tokens()[:, :39], use_cache=True)
    step = three[2](tokens()[:, 39:], past_key_values=first.past_key_values, use_cache=True).logits
    assert (step[:, 0] - whole[:, 39]).abs().max() < 0.15 * whole.abs().max()


# An indexer: choosers (0: one choice for all heads, without that dimension), keys of a block, blocks of a query.
INDEXERS = {
    "pieces": (2, 128, 2), "one choice": (0, 128, 2), "blocks of 32": (2, 32, 4), "each query head": (4, 64, 2),
}  # fmt: skip


def layer_of(block, local=1):
    """A layer with an indexer, as transformers calls attention with it."""
    return types.SimpleNamespace(is_causal=True, indexer=types.SimpleNamespace(block_size=block, local_blocks=local))


def indices_of(choosers, block, count, keys, queries, own=True):
    """Blocks up to each query's own, `[batch, (choosers,) queries, count]`, in no order, then -1."""
    shape = (2, max(choosers, 1), queries)
    scores = torch.rand(*shape, -(-keys // block), generator=torch.Generator().manual_seed(8))
    at = (torch.arange(keys - queries, keys) // block)[:, None]
    number = torch.arange(scores.shape[-1])
    scores = scores.masked_fill(number == at, 0.5 if not own else 2.0).masked_fill(number > at, -1.0)
    best = scores.topk(min(count, scores.shape[-1]))
    chosen = best.indices.masked_fill(best.values < 0, -1).to(DEVICE)
    return chosen if choosers else chosen[:, 0]


def heads_first(queries, keys):
    """q, k, v `[batch, heads, tokens, width]` of 4 query and 2 KV heads."""
    sizes = ((4, queries), (2, keys), (2, keys))
    return [random(2, heads, count, 64, device=DEVICE, seed=seed) for seed, (heads, count) in enumerate(sizes)]


def of_blocks(q, k, v, chosen, block):
    """Attention under the mask that the blocks spell out; q, k, v `[batch, heads, tokens, width]`."""
    chosen, (queries, keys) = chosen if chosen.dim() == 4 else chosen[:, None], (q.shape[2], k.shape[2])
    key, at = torch.arange(keys, device=q.device), torch.arange(keys - queries, keys, device=q.device)
    mask = (chosen[..., None] == key // block).any(3) & (key <= at[:, None])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
    return o.transpose(1, 2)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", INDEXERS)
def test_blocks_of_an_indexer(name, own):
    """What MiniMax M3's layers pass: whole rows with gradients."""
    choosers, block, count = INDEXERS[name]
    module, chosen = layer_of(block), indices_of(choosers, block, count, 300, 300, own)
    inputs = heads_first(300, 300)

    def ours(q, k, v):
        return integration.attention_forward(module, q, k, v, None, scaling=0.2, block_indices=chosen)[0]

    parity.compare(name, ours, lambda q, k, v: of_blocks(q, k, v, chosen, block), inputs)
    mask = torch.ones(2, 300, dtype=torch.bool, device=DEVICE)
    mask[1, 290:] = False
    settings = {"scaling": 0.2, "block_indices": chosen}
    padded = integration.attention_forward(module, *inputs, mask, **settings)[0]
    assert torch.equal(padded[1, :290], ours(*inputs)[1, :290])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", INDEXERS)
def test_blocks_of_an_indexer_behind_a_cache(name, queries, own, monkeypatch):
    choosers, block, count = INDEXERS[name]
    chosen = indices_of(choosers, block, count, 300, queries, own)
    q, k, v = heads_first(queries, 300)
    if queries == 1:
        mask = torch.full((2,), 300, dtype=torch.int32, device=DEVICE)
    else:
        mask = torch.ones(2, 1, queries, 300, dtype=torch.bool, device=DEVICE).tril(300 - queries)
    ran = count_runs(monkeypatch)
    settings = {"scaling": 0.2, "block_indices": chosen}
    o = integration.attention_forward(layer_of(block, int(own)), q, k, v, mask, **settings)[0]
    assert ran["cached_decode"] == (queries == 1 and own), ran
    exact, plain = (of_blocks(*(x.to(dtype) for x in (q, k, v)), chosen, block) for dtype in (torch.float32, q.dtype))
    parity.assert_close(name, o, exact, plain, floor=4e-3)


def test_blocks_of_an_indexer_that_have_no_kernel_are_refused():
    q, k, v = heads_first(70, 70)
    chosen = indices_of(2, 64, 2, 70, 70)
    left = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    left[0, :3] = False
    positions = torch.cat([torch.arange(30), torch.arange(40)]).expand(2, -1).to(DEVICE)
    for sentence, module, mask, settings in (
        ("without module.indexer.block_size", types.SimpleNamespace(is_causal=True), None, {}),
        ("padding on the left", layer_of(64), left, {}),
        ("packed rows", layer_of(64), None, {"position_ids": positions}),
        ("a window of 9 keys", layer_of(64), None, {"sliding_window": 9}),
        ("choosers a multiple of 2", layer_of(64), None, {"block_indices": chosen[:, :1]}),
        ("block 96", layer_of(96), None, {}),
    ):
        with pytest.raises(ValueError, match=sentence):
            integration.attention_forward(module, q, k, v, mask, **{"block_indices": chosen, **settings})


def test_minimax_m3():
    """The model itself, an MSA layer and a dense one, beside transformers' eager attention."""
    if not hasattr(transformers, "MiniMaxM3VLTextConfig"):
        pytest.skip("transformers without MiniMax M3")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

    config = transformers.MiniMaxM3VLTextConfig(
        **SIZES, dense_intermediate_size=96, shared_intermediate_size=96, rotary_dim=32, num_local_experts=2,
        num_experts_per_tok=1, index_n_heads=2, index_head_dim=64, index_block_size=16, index_topk_blocks=2,
        layer_types=["minimax_m3_sparse", "full_attention"], mlp_layer_types=["dense", "dense"],
    )  # fmt: skip
    outputs, chosen = [], []
    for model in models(config, MiniMaxM3VLTextModel):
        indexer = model.layers[0].self_attn.indexer
        # Rounding may swap blocks of nearly equal scores: all three read those that f32 chose.
        indexer.register_forward_hook(lambda *given: chosen.append(given[-1]) or chosen[0])
        with torch.no_grad():
            outputs.append(model(tokens(), use_cache=False).last_hidden_state.float())
    exact, plain, ours = outputs
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm()
    dense = copy.deepcopy(model)
    dense.layers[0].self_attn.indexer = None
    with torch.no_grad():
        other = dense(tokens(), use_cache=False).last_hidden_state.float()
    assert (other - exact).norm() > 4 * (ours - exact).norm(), "dense attention would show"


def exported():
    """modeling_sieve.py, with definitions.py beside it as in an export."""
    package = types.ModuleType("exported")
    package.__path__ = [str(ROOT / "crates/sieve-hf/src/export"), str(ROOT / "python/sieve_attention")]
    sys.modules["exported"] = package
    return importlib.import_module("exported.modeling_sieve")


KINDS = {
    "mha": {},
    "swa": {"window_size": 9},
    "dma": {"keep_window_size": 12, "local_window_size": 3, "periods": [16.0, 32.0]},
    "mla": {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "mla_qk_norm": True},
    "nsa": {
        "compress_block_size": 16, "compress_stride": 8, "select_block_size": 16, "num_selected_blocks": 2,
        "window_size": 12, "compress": "mean",
    },
    "infllm_v2": {
        "compress_block_size": 16, "compress_stride": 8, "select_block_size": 16, "num_selected_blocks": 3,
        "num_local_blocks": 1,
    },
    "moba": {"select_block_size": 16, "num_selected_blocks": 2},
    "msa": {"select_block_size": 16, "num_selected_blocks": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_exports(kind):
    module = exported()
    config = module.SieveConfig(**SIZES, attention_kind=kind, **KINDS[kind])
    exact, plain, ours = models(config, module.SieveForCausalLM)
    if kind in ("dma", "nsa", "infllm_v2", "moba", "msa"):
        # Which keys are chosen hangs on rounding; what is computed with them does not.
        with torch.no_grad():
            logits = [model(tokens(), use_cache=False).logits.float() for model in (exact, plain, ours)]
        assert (logits[2] - logits[0]).norm() <= 2 * (logits[1] - logits[0]).norm() + 1e-3 * logits[0].norm()
    else:
        compare((exact, plain, ours), tokens())
    with torch.no_grad():
        whole = ours(tokens(), use_cache=False).logits
        first = ours(tokens()[:, :39], use_cache=True)
        step = ours(tokens()[:, 39:], past_key_values=first.past_key_values, use_cache=True).logits
    assert (step[:, 0] - whole[:, 39]).norm() < 0.1 * whole[:, 39].norm()


DECODING = {
    "mha": {"attention_decode": 2}, "swa": {"attention_decode": 2}, "dma": {"dma_decode": 2}, "mla": {"mla_decode": 2},
    "nsa": {"cached_decode": 2, "attention_decode": 2}, "infllm_v2": {"cached_decode": 2}, "moba": {"cached_decode": 2},
    "msa": {"cached_decode": 2},
}  # fmt: skip


def test_an_export_with_sinks(monkeypatch):
    """Rows and steps by the kernels, beside eager attention in f32 and bf16."""
    module = exported()
    layers = {"attention_kind": "swa", "window_size": 9, "dense_layers": [1], "attention_sinks": True}
    three = models(module.SieveConfig(**SIZES, **layers), module.SieveForCausalLM)
    compare(three, tokens(), of_few=0.04)
    ours, ran = three[2], count_runs(monkeypatch)
    with torch.no_grad():
        whole = ours(tokens(), use_cache=False).logits
        first = ours(tokens()[:, :39], use_cache=True)
        step = ours(tokens()[:, 39:], past_key_values=first.past_key_values, use_cache=True).logits
    assert (step[:, 0] - whole[:, 39]).norm() < 0.1 * whole[:, 39].norm()
    assert ran["attention_decode"] == 2, ran


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exports_decode_by_kernels(kind, padded, monkeypatch):
    """Steps, several tokens at once and steps again, beside the same by SDPA; rows of two lengths."""
    module = exported()
    torch.manual_seed(7)
    config = module.SieveConfig(**SIZES, attention_kind=kind, **KINDS[kind])
    model = module.SieveForCausalLM._from_config(config, attn_implementation="sieve").to(DEVICE, torch.bfloat16).eval()
    randomise(model)
    for op in functional.ops.IMPLEMENTATIONS.values():
        monkeypatch.setattr(op, "plans", {})
    ids, mask = tokens(), torch.ones(2, 40, dtype=torch.long, device=DEVICE)
    if padded:
        mask[0, :3] = 0
    parts, logits_by_name = [9, *[1] * 11, 5, *[1] * 15], []
    for name in ("sieve", "sdpa"):
        model.config._attn_implementation = name
        ran, cache, at, logits = count_runs(monkeypatch), transformers.DynamicCache(), 0, []
        with torch.no_grad():
            for count in parts:
                given = {"attention_mask": mask[:, : at + count], "past_key_values": cache, "use_cache": True}
                logits.append(model(ids[:, at : at + count], **given).logits)
                at += count
        logits_by_name.append(torch.cat(logits, 1))
        steps = {op: ran[op] for op in ("attention_decode", "cached_decode", "dma_decode", "mla_decode") if ran[op]}
        assert steps == ({op: times * 26 for op, times in DECODING[kind].items()} if name == "sieve" else {}), steps
    for op in DECODING[kind]:
        plans = len(functional.ops.IMPLEMENTATIONS[op].plans)
        assert plans <= 2, f"{op}: {plans} plans"
    real = mask.bool()
    for row in range(2):
        got, expected = (x[row][real[row]].float() for x in logits_by_name)
        worst = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        assert worst < 0.1, f"row {row}: {worst}"


def _mask_of(make, config, count=40, **more):
    """What a model with attn_implementation="sieve" gets as the mask of two whole rows."""
    integration.register()
    config._attn_implementation = "sieve"
    embeds = torch.zeros(2, count, 64, dtype=torch.bfloat16)
    cache = {name: None for name in ("cache", "past_key_values") if name in inspect.signature(make).parameters}
    return make(config=config, inputs_embeds=embeds, **cache, **{"attention_mask": None, **more})


def test_what_a_mask_adds_to_causal_windows_and_documents_is_in_the_mask():
    """Else a kernel, which knows windows and documents by other arguments, would read other keys without a word."""
    masking = importlib.import_module("transformers.masking_utils")
    llama = transformers.LlamaConfig(**SIZES)
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None].expand(2, -1)
    blocks = torch.full((2, 40), -1).index_fill(1, torch.arange(3, 9), 0)
    near = {"and_mask_function": lambda batch, head, q, kv: kv > q - 5}
    ahead = {"or_mask_function": lambda batch, head, q, kv: kv < 4}
    padding = {"attention_mask": torch.ones(2, 40).index_fill(1, torch.arange(6), 0)}
    cases = [({}, 0), (padding, 2), ({"position_ids": positions}, 0), (near, 4), (ahead, 4)]
    cases += [({"block_sequence_ids": blocks}, 4), ({**near, "position_ids": positions}, 4)]
    known = inspect.signature(masking.create_causal_mask).parameters  # earlier releases have fewer
    for more, axes in ((more, axes) for more, axes in cases if all(name in known for name in more)):
        mask = _mask_of(masking.create_causal_mask, llama, **more)
        assert (0 if mask is None else mask.dim()) == axes, more
        if axes == 4:
            exact = masking.sdpa_mask(
                batch_size=2, q_length=40, kv_length=40, attention_mask=None, allow_is_causal_skip=False,
                mask_function=_function_of(masking, more),
            )  # fmt: skip
            assert "position_ids" in more or torch.equal(mask, exact), more
    window = transformers.MistralConfig(**SIZES, sliding_window=9)
    assert _mask_of(masking.create_sliding_window_causal_mask, window) is None
    chunks = types.SimpleNamespace(attention_chunk_size=16, model_type="llama4_text", num_attention_heads=4)
    for count, axes in ((16, 0), (17, 4), (40, 4)):
        mask = _mask_of(masking.create_chunked_causal_mask, chunks, count)
        assert (0 if mask is None else mask.dim()) == axes, count
    if mask.dim() == 4:
        assert not mask[0, 0, 16, 15] and mask[0, 0, 17, 16], "a chunk begins at 16"


def _function_of(masking, more):
    causal, arguments = masking.causal_mask_function, dict(more)
    if "or_mask_function" in arguments:
        return masking.or_masks(causal, arguments["or_mask_function"])
    if "block_sequence_ids" in arguments:
        return masking.or_masks(causal, masking.blockwise_overlay(arguments["block_sequence_ids"]))
    return masking.and_masks(causal, arguments["and_mask_function"])


def test_doge_without_its_forward_has_a_causal_mask():
    doge = importlib.import_module("transformers.models.doge.modeling_doge")
    masking = importlib.import_module("transformers.masking_utils")
    if "allow_is_causal_skip" not in inspect.signature(masking.create_causal_mask).parameters:
        pytest.skip("its Doge asks for a mask in another way")
    config = transformers.DogeConfig(**SIZES)
    own = doge.DogeAttention.forward
    forward = getattr(own, "own", own)
    try:
        doge.DogeAttention.forward = forward
        mask = _mask_of(masking.create_causal_mask, config, allow_is_causal_skip=False)
        assert mask.dim() == 4 and not mask[0, 0, 3, 4]
        integration.patch_doge()
        assert _mask_of(masking.create_causal_mask, config, allow_is_causal_skip=False) is None
        config.sliding_window = 9
        make = masking.create_sliding_window_causal_mask
        assert _mask_of(make, config, allow_is_causal_skip=False).dim() == 4
    finally:
        doge.DogeAttention.forward = own


def test_a_bias_of_positions_is_refused():
    q = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    module = types.SimpleNamespace(is_causal=True)
    with pytest.raises(integration.SieveError, match="position_bias has no kernel"):
        integration.attention_forward(module, q, q, q, None, position_bias=torch.zeros(1, 2, 4, 4))
