"""Steps behind a cache give `decode` the token's key and value, with which it has the bits of whole rows on a Hopper GPU
(gpu_steps.py compares them there), on the kernels or their emulator."""

import gpu_steps
import pytest
import torch
from conftest import DEVICE
from parity import assert_close, random
from test_transformers import count_runs

from sieve_attention import definitions, functional, layers
from sieve_attention._library import SieveError

TOKENS = 24
LAYERS = {
    "dense": lambda: layers.DenseAttention(96, 4, 2, 64),
    "window": lambda: layers.WindowAttention(96, 4, 2, 64, window_size=9),
    "sinks": lambda: layers.WindowAttention(96, 4, 2, 64, window_size=9, attention_sinks=True),
    "bands": lambda: layers.CoWindowAttention(96, 4, 2, 64, sink_tokens=2, near_window=5, far_reach=20),
    "NSA's window": lambda: layers.NativeSparseAttention(96, 4, 2, 64, window_size=9, compress="mean"),
}


def made(name):
    """A layer in bf16, hidden states, and its queries, keys and values of whole rows."""
    torch.manual_seed(3)
    layer = LAYERS[name]().to(DEVICE, torch.bfloat16)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    x = random(2, TOKENS, 96, device=DEVICE, scale=8.0, seed=1)
    positions = torch.arange(TOKENS, device=DEVICE)[None]
    q = layer.rotary(layer.q_norm(layer.heads(layer.q_proj(x))), positions)
    return layer, x, q, *layer.keys(x, positions)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layers_step_gives_its_key_and_value(name, monkeypatch):
    layer, x, *_ = made(name)
    whole, cache, ran = layer(x), layers.Cache(TOKENS), count_runs(monkeypatch)
    parts = [layer(part, cache=cache) for part in x.split([TOKENS - 5, *[1] * 5], 1)]
    assert (torch.cat(parts, 1) - whole).norm() <= 0.02 * whole.norm()
    assert ran["attention_decode"] == 5 and ran["cached_decode"] == 5 * (name == "NSA's window"), ran
    with pytest.raises(ValueError, match="a cache of 24 tokens gets 25"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize("name", ["dense", "window", "sinks"])
@torch.no_grad()
def test_every_asker_has_the_row_of_the_token(name, monkeypatch):
    """The layer, an export's code and transformers: one operator, one result, a cache as it was."""
    layer, _, q, k, v = made(name)
    settings = {"window": layer.window_size, "scale": layer.scale, "sinks": layer.sinks}
    exact = definitions.attention(*(x.float() for x in (q, k, v)), **settings)
    plain = definitions.attention(q, k, v, **settings)
    for at in (1, 8, 9, TOKENS - 1):
        with monkeypatch.context() as patch:
            ran = count_runs(patch)
            found = gpu_steps.steps_of(layer, q, k, v, at)
        assert ran == {"attention_decode": 3, "cached_decode": 1}, ran
        cached = found.pop("cached")
        for way, o in found.items():
            assert torch.equal(o, found["layer"]), way
        here = slice(at, at + 1)
        for o in (cached, found["layer"]):
            assert_close(f"token {at}", o, exact[:, here], plain[:, here], floor=4e-3)


@torch.no_grad()
def test_a_step_under_compilation_writes_no_input_by_an_operator():
    """PyTorch traces no operator that returns a list and writes to its inputs."""
    layer, x, *_ = made("dense")
    cache, caches = layers.Cache(TOKENS), []
    layer(x[:, : TOKENS - 1], cache=cache)
    for compile in (lambda f: f, lambda f: torch.compile(f, backend="eager", fullgraph=True)):
        copy = layers.Cache(TOKENS)
        copy.length, copy.tensors = cache.length, {name: y.clone() for name, y in cache.tensors.items()}
        caches.append((compile(layer)(x[:, TOKENS - 1 :], cache=copy), copy))
    (o, plain), (traced_o, traced) = caches
    assert (o - traced_o).norm() <= 0.02 * o.norm()
    for name, y in plain.tensors.items():
        assert torch.equal(y, traced.tensors[name]), name


@pytest.mark.parametrize("with_new", [True, False])
@pytest.mark.parametrize("sizes", [(128, 256), (256, 128), (100, 120)])
def test_caches_of_different_capacity_are_refused(sizes, with_new):
    """The kernels address both by one capacity: a smaller cache would be read and written outside."""
    q, new = (random(1, 1, heads, 64, device=DEVICE, seed=1) for heads in (4, 2))
    k_cache, v_cache = (random(1, 2, size, 64, device=DEVICE, seed=2) for size in sizes)
    k, v = (new, new) if with_new else (None, None)
    length = torch.full((1,), 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(SieveError, match="cache"):
        functional.decode(q, k, v, k_cache, v_cache, length)
