"""`sieve_attention.layers` beside the layers of an export (modeling_sieve.py), which tests/parity_transformers.rs
compares with Sieve's own model: the same weights' names, outputs, gradients and steps behind a cache."""

import copy
import json

import pytest
import torch
from conftest import DEVICE
from parity import random
from test_transformers import SIZES, exported, randomise, transformers

import sieve_attention as sieve
from sieve_attention import _library, layers

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="in f32 by the definitions")
NSA = {"compress_block_size": 16, "compress_stride": 8, "select_block_size": 16, "num_selected_blocks": 3}
KINDS = {
    "mha": {}, "mha without norms, with biases": {"qk_norm": False, "qkv_bias": True},
    "mha without positions": {"no_rope_layers": [0, 1]}, "mha with sinks": {"attention_sinks": True},
    "mha, scaled": {"rope_frequencies": [0.5 ** n for n in range(32)], "rope_amplitude": 1.2},
    "swa": {"window_size": 9}, "swa with sinks": {"window_size": 9, "attention_sinks": True},
    "cowa": {"sink_tokens": 2, "near_window": 5, "far_reach": 30, "num_bands": 2},
    "cowa, one band, without norms": {
        "sink_tokens": 0, "near_window": 3, "far_reach": 50, "num_bands": 1, "qk_norm": False, "qkv_bias": True,
    },
    "dma": {"keep_window_size": 12, "local_window_size": 3, "bias": "linear", "periods": [16.0, 32.0]},
    "dma of the paper": {"keep_window_size": 12, "local_window_size": 0, "bias": "exp"},
    "nsa": {**NSA, "window_size": 12, "compress_hidden_size": 24},
    "nsa by means": {**NSA, "window_size": 12, "compress": "mean"},
    "nsa, each branch its own": {**NSA, "window_size": 12, "shared_kv": False, "compress_hidden_size": 24},
    "infllm_v2": {**NSA, "num_local_blocks": 1}, "moba": {"select_block_size": 16, "num_selected_blocks": 2},
    "msa": {"select_block_size": 16, "num_selected_blocks": 2},
    "mla": {"kv_lora_rank": 32, "qk_rope_head_dim": 32},
    "mla with norms": {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "mla_qk_norm": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(_library.Op, "emulator", None)
    with sieve.on_cpu():
        yield


def both(kind):
    """A layer of an export, and ours with its weights; f32."""
    module = exported()
    config = module.SieveConfig(**SIZES, attention_kind=kind.split()[0].rstrip(","), **KINDS[kind])
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    theirs = module.DecoderLayer(config, 0).self_attn
    randomise(theirs)
    ours = layers.of_config(config.to_dict(), 0)
    assert {name: x.shape for name, x in ours.state_dict().items()} == {
        n: x.shape for n, x in theirs.state_dict().items()
    }
    ours.load_state_dict(theirs.state_dict())
    rows = lambda count: module.Rows(0, 0, count, count, config, "cpu")  # noqa: E731
    return theirs, ours, rows


def hidden(tokens=40, batch=2, seed=1):
    return random(batch, tokens, SIZES["hidden_size"], device="cpu", dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_an_exports(kind):
    theirs, ours, rows = both(kind)
    results = []
    for layer in (lambda x: theirs(x, rows(40), None), ours):
        x = hidden().requires_grad_()
        o = layer(x)
        (o * hidden(seed=2)).sum().backward()
        results.append([o.detach(), x.grad])
    grads = [{name: p.grad for name, p in layer.named_parameters()} for layer in (theirs, ours)]
    for name, expected in grads[0].items():
        # An indexer learns by its loss alone.
        if expected is not None:
            results[0].append(expected)
            results[1].append(grads[1][name])
    for at, (expected, got) in enumerate(zip(*results)):
        assert (got - expected).norm() <= 2e-5 * expected.norm() + 1e-7, f"{kind}, {at}"


@pytest.mark.parametrize("kind", KINDS)
def test_steps_behind_a_cache_equal_the_whole_row(kind):
    """A prompt, several tokens at once, then token by token."""
    _, ours, _ = both(kind)
    x = hidden()
    with torch.no_grad():
        whole, cache = ours(x), layers.Cache(64)
        parts = [ours(part, cache=cache) for part in x.split([19, 4, *[1] * 17], 1)]
    assert cache.length == 40
    assert (torch.cat(parts, 1) - whole).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_documents_equals_each_by_itself(kind):
    _, ours, _ = both(kind)
    x, offsets = hidden(batch=1), torch.tensor([0, 17, 18, 40])
    with torch.no_grad():
        packed = ours(x, documents=offsets)
        by_themselves = [ours(x[:, a:b]) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
    assert (packed - torch.cat(by_themselves, 1)).norm() <= 1e-5 * packed.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_documents_of_one_token(kind):
    """Rows of documents of their own: before 15 tokens of padding each, which count no positions, and behind none."""
    _, ours, _ = both(kind)
    x, index = hidden(), torch.arange(40)
    is_padding = index < torch.tensor([[0], [15]])
    start = torch.where(is_padding, index, torch.tensor([[0], [15]])).int()
    end = torch.where(is_padding, index + 1, 40).int()
    with torch.no_grad():
        padded, by_themselves = ours(x, documents=(start, end)), [ours(x[:1]), ours(x[1:, 15:])]
        behind = ours(x)[:, :25]
        first, second = by_themselves
        for got, expected in ((padded[:1], first), (padded[1:, 15:], second), (behind, ours(x[:, :25]))):
            assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["mha with sinks", "cowa", "moba", "mla with norms"])
def test_one_graph_is_compiled(kind):
    """Without a break, with gradients."""
    _, ours, _ = both(kind)
    torch.compiler.reset()
    results = []
    for layer in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        x = hidden().requires_grad_()
        o = layer(x)
        o.sum().backward()
        results.append((o.detach(), x.grad))
    for expected, got in zip(*results):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_layer_from_the_device_meta_begin_as_a_new_ones(kind):
    _, ours, _ = both(kind)
    config = exported().SieveConfig(**SIZES, attention_kind=kind.split()[0].rstrip(","), **KINDS[kind]).to_dict()
    new = layers.of_config(config)
    with torch.device("meta"):
        made = layers.of_config(config)
    made = made.to_empty(device="cpu")
    for x in made.parameters():
        torch.nn.init.constant_(x, 7.0)
    made.reset_parameters()
    for (name, x), y in zip(made.named_parameters(), new.parameters(), strict=True):
        is_drawn = name.endswith("proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")
        assert (x.std() - y.std()).abs() < 2e-3 and 0.017 < x.std() < 0.023 if is_drawn else torch.equal(x, y), name


@pytest.mark.parametrize("kind", ["cowa", "dma", "nsa", "msa", "mla"])
def test_twenty_steps_equal_an_exports(kind):
    """A whole model of an export, and the same with our layers in it."""
    module = exported()
    config = module.SieveConfig(**SIZES, attention_kind=kind, **KINDS[kind])
    torch.manual_seed(5)
    theirs = module.SieveForCausalLM._from_config(config, attn_implementation="eager")
    randomise(theirs)
    ours = copy.deepcopy(theirs)

    class Inside(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, rows, cache):
            return self.layer(x)

    for index, layer in enumerate(ours.model.layers):
        attention = layers.of_config(config, index)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = Inside(attention)
    ids, losses = torch.randint(1, 64, (2, 33), generator=torch.Generator().manual_seed(8)), []
    for model in (theirs, ours):
        step, run_losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(20):
            loss = model(ids, labels=ids, use_cache=False).loss
            step.zero_grad()
            loss.backward()
            step.step()
            run_losses.append(loss.item())
        losses.append(torch.tensor(run_losses))
    assert losses[0][-1] < losses[0][0] - 1.0
    assert (losses[1] - losses[0]).abs().max() < 2e-3, losses


@pytest.mark.parametrize("warmup", [False, True])
def test_the_indexers_loss(warmup):
    """From every score, with its gradient; nothing else gets one."""
    _, ours, _ = both("msa")
    x = hidden(tokens=50).requires_grad_()
    loss = ours.indexer_loss(x, warmup=warmup)
    loss.backward()
    learns = {name for name, p in ours.named_parameters() if p.grad is not None}
    assert learns == {f"index_{a}_{b}.weight" for a in "qk" for b in ("proj", "norm")} and x.grad is None
    gradients = {name: ours.get_parameter(name).grad.clone() for name in learns}
    ours.zero_grad()
    positions = torch.arange(50)[None]
    index_q, index_k = ours.index(x, positions)
    q, (k, _) = ours.rotary(ours.q_norm(ours.heads(ours.q_proj(x))), positions), ours.keys(x, positions)
    blocks = sieve.NsaBlocks(1, 1, 16, 2)
    chosen = sieve.definitions.chosen_blocks(index_q, index_k, blocks, "largest_score", False, 1)
    visible = torch.ones(50, 50, dtype=torch.bool).tril() & (warmup | chosen.repeat_interleave(16, -1)[..., :50])
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)).detach() * ours.scale
    p = logits.masked_fill(~visible.repeat_interleave(2, 1), -torch.inf).softmax(-1).unflatten(1, (2, 2)).mean(2)
    index = torch.einsum("bihd,bjd->bhij", index_q, index_k[:, :, 0]) * ours.scale
    log_index = index.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0)
    expected = (torch.special.xlogy(p, p) - p * log_index).sum() / (2 * 50 * 2)
    expected.backward()
    assert (loss - expected).abs() < 1e-5 and loss > 0
    for name, grad in gradients.items():
        assert (ours.get_parameter(name).grad - grad).norm() <= 1e-4 * grad.norm() + 1e-8, name


def test_the_tiny_checkpoint_by_its_names():
    """Weights below `self_attn` of the checkpoint that is in the repository, layer by layer."""
    import json

    from conftest import ROOT
    from safetensors.torch import load_file

    folder = ROOT / "checkpoints/tiny"
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for index in range(config["num_hidden_layers"]):
        head = f"model.layers.{index}.self_attn."
        own = {name.removeprefix(head): x.float() for name, x in weights.items() if name.startswith(head)}
        layer = layers.of_config(config, index)
        layer.load_state_dict(own)
        assert type(layer).__name__ == ("DenseAttention" if config["dense_layers"][index] else "DynamicMaskAttention")


@pytest.mark.parametrize("kind", ["cowa", "dma", "nsa by means", "moba", "msa", "swa"])
def test_layers_compile_without_a_break(kind, monkeypatch):
    """In bf16, by plans of the kernels whose outputs are zeros."""
    _, ours, _ = both(kind)
    zeros = lambda plan, _: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]  # noqa: E731
    monkeypatch.setattr(_library.Op, "emulator", staticmethod(zeros))
    with sieve.on_cpu(False):
        o = torch.compile(ours.bfloat16(), fullgraph=True, backend="aot_eager")(hidden().bfloat16())
    assert o.shape == (2, 40, SIZES["hidden_size"])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_kernels_and_caches_their_type(kind, monkeypatch):
    """Weights in f32: whole rows with gradients, and steps, by plans of the kernels, whose outputs are zeros."""
    _, ours, _ = both(kind)
    zeros = lambda plan, _: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]  # noqa: E731
    monkeypatch.setattr(_library.Op, "emulator", staticmethod(zeros))
    with sieve.on_cpu(False), torch.autocast("cpu", torch.bfloat16):
        ours(hidden().requires_grad_()).sum().backward()
        with torch.no_grad():
            cache = layers.Cache(64)
            for part in hidden().split([38, 2], 1):
                assert ours(part, cache=cache).shape == part.shape
    assert {x.dtype for name, x in cache.tensors.items() if name in ("k", "v", "latent", "index_k")} == {torch.bfloat16}


def of_qwen3(**keys):
    """A layer of Qwen3 in eager attention, with random weights, and ours of the same config, as a mapping."""
    config = transformers.Qwen3Config(**SIZES, **keys)
    config._attn_implementation = "eager"
    torch.manual_seed(6)
    model = transformers.Qwen3ForCausalLM(config)
    randomise(model)
    return model, config


@pytest.mark.parametrize("saved_again", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_a_qwen3_is_read_with_its_window_and_angles(window, saved_again, tmp_path):
    """As a mapping, as an object, and as a config.json that transformers wrote, which has rope_theta elsewhere."""
    types = ["sliding_attention" if window else "full_attention"] * SIZES["num_hidden_layers"]
    given = {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": types}
    model, config = of_qwen3(rope_theta=100000.0, **given)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    for read in [config, stored] if saved_again else [config.to_dict()]:
        layer = layers.of_config(read)
        assert isinstance(layer, layers.WindowAttention if window else layers.DenseAttention)
        layer.load_state_dict(model.model.layers[0].self_attn.state_dict())
        x, position = hidden(batch=1), torch.arange(40)[None]
        angles = model.model.rotary_emb(x, position)
        reach = position[0] - position[0][:, None]
        hides = (reach > 0) | (reach <= -(window or 40))
        mask = torch.zeros(40, 40).masked_fill(hides, -torch.inf)[None, None]
        expected = model.model.layers[0].self_attn(x, position_embeddings=angles, attention_mask=mask)[0]
        assert (layer(x) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "doge"}, "config is of a doge"),
    ({"model_type": "llama"}, "make the layer by its class"),
    ({"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "angles of the form 'yarn'"),
    ({"model_type": "qwen3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "angles of the form 'linear'"),
    ({"model_type": "qwen3", "attention_bias": True}, "a bias behind o_proj"),
    ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "of type 'chunked_attention'"),
    ({"model_type": "qwen3", "num_hidden_layers": 6, "index": 6}, "the model has layers 0 to 5"),
    ({"num_hidden_layers": 6, "index": -1}, "there is no layer -1"),
    ("config.json", "config is a str"),
    ([("model_type", "qwen3")], "config is a list"),
])  # fmt: skip
def test_a_config_that_is_not_read_is_refused(config, words):
    is_mapping = isinstance(config, dict)
    with pytest.raises(sieve.SieveError) as error:
        layers.of_config({**SIZES, **config} if is_mapping else config, config.get("index", 0) if is_mapping else 0)
    assert words in str(error.value)


def test_a_config_without_a_size_is_refused():
    """Qwen3's own default of head_dim is 128, whatever hidden_size is."""
    with pytest.raises(sieve.SieveError, match="config has no num_key_value_heads, no head_dim"):
        layers.of_config({"model_type": "qwen3", "hidden_size": 128, "num_attention_heads": 2})


def test_an_indexers_loss_of_a_packed_row_is_that_of_its_documents():
    _, ours, _ = both("msa")
    x = hidden(tokens=70, batch=1)
    parts = [x[:, :40], x[:, 40:69]]
    for warmup in (False, True):
        expected = sum(ours.indexer_loss(part, warmup=warmup) * part.shape[1] for part in parts) / 70
        got = ours.indexer_loss(x, documents=torch.tensor([0, 40, 69, 70]), warmup=warmup)
        torch.testing.assert_close(got, expected)
        assert abs(got - ours.indexer_loss(x, warmup=warmup)) > 1e-3
    got.backward()
    assert ours.index_q_proj.weight.grad.abs().sum() > 0


WRONG_KEYWORDS = {
    "MSA.__init__() got an unexpected keyword argument 'keep'\n  hint: it is keep_window_size of DynamicMaskAttention":
        lambda: layers.MSA(256, 4, 2, keep=3),
    "MoBA.__init__() got unexpected keyword arguments 'num_heads', 'select_block_sise' and 'dropout'\n"
    "  hint: num_heads: it is num_attention_heads here\n  hint: select_block_sise: did you mean select_block_size?\n"
    "  hint: dropout: no kernel drops": lambda: layers.MoBA(256, num_heads=4, select_block_sise=3, dropout=0.1),
    "LatentAttention.__init__() got an unexpected keyword argument 'qkv_bias'": lambda: layers.LatentAttention(
        256, 4, 64, kv_lora_rank=32, qk_rope_head_dim=32, qkv_bias=True
    ),
    "DenseAttention.__init__() got an unexpected keyword argument 'window_size'\n  hint: it is window_size of Window":
        lambda: layers.DenseAttention(256, 4, window_size=3),
    "DynamicMaskAttention.__init__() got an unexpected keyword argument 'attention_sinks'\n  hint: sinks are of Dense":
        lambda: layers.DynamicMaskAttention(256, 4, attention_sinks=True),
    "MSA.forward() got an unexpected keyword argument 'cu_seqlens'\n  hint: pass documents=cu_seqlens": lambda: (
        layers.MSA(256, 4, 2)(hidden(), cu_seqlens=torch.tensor([0, 40]))
    ),
    "LatentAttention.forward() got an unexpected keyword argument 'document'\n  hint: did you mean documents?":
        lambda: layers.LatentAttention(256, 4, 64, kv_lora_rank=32, qk_rope_head_dim=32)(hidden(), document=None),
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG_KEYWORDS)
def test_keywords_that_a_layer_does_not_take_are_answered_in_its_name(sentence):
    with pytest.raises(TypeError) as error:
        WRONG_KEYWORDS[sentence]()
    assert str(error.value).startswith(sentence)


def test_a_class_of_ones_own_takes_its_own_keywords():
    class Mine(layers.MoBA):
        def __init__(self, config, **keys):
            super().__init__(*config)
            self.mine = keys["mine"]

    assert Mine((256, 4), mine=3).mine == 3


def test_heads_that_no_kernel_has_are_refused_when_a_layer_is_made():
    for layer in (layers.MSA, layers.MoBA, layers.InfLLMv2Attention, layers.NativeSparseAttention):
        with pytest.raises(sieve.SieveError, match=f"{layer.__name__}: heads of 32 have no kernel"):
            layer(128, 4, 2)
        assert layer(128, 4, 2, head_dim=64)(random(1, 40, 128, device="cpu", seed=1).float()).shape == (1, 40, 128)
        with sieve.on_cpu(strict=False):
            assert layer(128, 4, 2).head_dim == 32
    with pytest.raises(sieve.SieveError, match="DenseAttention: 3 KV heads do not divide 4 heads"):
        layers.DenseAttention(256, 4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_says_what_it_is(kind):
    """By the sizes and keys of a constructor's call that makes it again."""
    _, ours, _ = both(kind)
    said = ours.extra_repr()
    assert said.startswith("hidden_size=64, num_attention_heads=4, ") and said in str(ours)
    given = eval(f"dict({said})")
    own = {name: value for name, value in KINDS[kind].items() if name not in layers.OF_HEADS + ("no_rope_layers",)}
    assert own.items() <= {"compress_hidden_size": own.get("compress_hidden_size"), **given}.items()
    again = type(ours)(**given)
    assert again.extra_repr() == said and type(again) is type(ours)


def test_a_layer_is_asked_of():
    x = random(1, 96, 256, device="cpu", seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        for layer in (layers.DynamicMaskAttention(256, 4, 2), layers.MSA(256, 4, 2), layers.DenseAttention(256, 4)):
            for more in ({}, {"documents": torch.tensor([0, 50, 96])}):
                is_supported, why = sieve.supports(layer.to(dtype), x.to(dtype), device="cuda", **more)
                assert is_supported == (dtype == torch.bfloat16) and is_supported == ("expected bf16" not in why)
                assert all(w.device.type == "cpu" for w in layer.parameters())
    wrong = layers.MoBA(256, 4, 2, select_block_size=100).bfloat16()
    assert "moba: block 100 is not supported" in sieve.supports(wrong, x.bfloat16(), device="cuda")[1]
    with pytest.raises(sieve.SieveError, match='a layer is not asked by definitions\n  hint: device="cuda"'):
        sieve.supports(wrong, x.bfloat16())


def test_bands_that_no_layer_has_are_refused():
    assert layers.CoWindowAttention(256, 4, 2).bands == sieve.Bands(64, 8128, 2)
    for keys, words in (
        ({"num_bands": 3}, "CoWindowAttention: 3 bands do not divide 2 KV heads\n  hint: leave num_bands out"),
        ({"num_bands": 0}, "0 bands do not divide"),
        ({"near_window": 30, "far_reach": 31}, "far_reach 31 has no room for 2 bands behind near_window = 30"),
    ):
        with pytest.raises(sieve.SieveError, match=words):
            layers.CoWindowAttention(256, 4, 2, **keys)
    with pytest.raises(TypeError, match="argument 'window_size'\n  hint: it is window_size of WindowAttention, near_"):
        layers.CoWindowAttention(256, 4, 2, window_size=9)
    with pytest.raises(TypeError, match="hint: they are sink_tokens, far_reach and num_bands of CoWindowAttention"):
        layers.WindowAttention(256, 4, 2, bands=(2, 20, 2))
    with pytest.raises(TypeError, match="hint: sinks are of DenseAttention"):
        layers.CoWindowAttention(256, 4, 2, attention_sinks=True)


def test_what_a_layer_does_not_do_is_refused():
    _, ours, _ = both("mha")
    with pytest.raises(sieve.SieveError, match="a row of several documents has no cache"):
        ours(hidden(batch=1), documents=torch.tensor([0, 40]), cache=layers.Cache(64))
    with pytest.raises(sieve.SieveError, match="a cache of 8 tokens gets 40"):
        ours(hidden(), cache=layers.Cache(8))
    config = exported().SieveConfig(**SIZES, attention_kind="msa", indexer="qsa")
    with pytest.raises(sieve.SieveError, match="layer 0 is of kind msa, qsa, which has no layer here"):
        layers.of_config(config)
    assert transformers is not None
