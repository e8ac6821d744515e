"""Steps behind a cache beside whole rows, to the bit: a check of on_gpu.py."""

import collections
import types

import torch
from parity import random

import sieve_attention as sieve
from sieve_attention import exported, layers
from sieve_attention import transformers as integration

HIDDEN = 1024
# The number of a token whose step is compared: on both sides of stages of 128 keys, and of windows.
PLACES = (1, 17, 127, 128, 129, 700, 1023, 1500, 2047, 2048, 2999)


def steps_of(layer, q, k, v, at):
    """Attention of token `at` behind those before, `[1, 1, heads, width]`: by the layer, as an export asks, as
    transformers does, and from a cache that has the token's key already."""
    settings = {"window": layer.window_size, "scale": layer.scale, "sinks": layer.sinks}
    token = [x[:, at : at + 1] for x in (q, k, v)]
    cache = layers.Cache(at + 5)
    layer.keep(cache, k=k[:, :at], v=v[:, :at])
    cache.length = at
    caches = [x[:, : at + 1].transpose(1, 2).contiguous() for x in (k, v)]
    rows = types.SimpleNamespace(first=at, positions=torch.full((1, 1), at, device=q.device), tables={})
    length = torch.full((len(q),), at + 1, dtype=torch.int32, device=q.device)
    heads_first = {"sliding_window": layer.window_size, "scaling": layer.scale, "s_aux": layer.sinks}
    query = token[0].transpose(1, 2)
    return {
        "layer": layer.join(*token, cache, sinks=layer.sinks),
        "export": exported.attention(query, *[x.clone() for x in caches], rows, **settings).transpose(1, 2),
        "transformers": integration.attention_forward(layer, query, *caches, length, **heads_first)[0],
        "cached": sieve.decode(token[0], None, None, *caches, length, **settings),
    }


def made_layers(device):
    """Layers of dense attention and of a window in bf16."""
    made = {
        "dense": layers.DenseAttention(HIDDEN, 16, 8, 128),
        "window": layers.WindowAttention(HIDDEN, 16, 8, 128, window_size=1000),
        "sinks": layers.WindowAttention(HIDDEN, 16, 8, 128, window_size=1000, attention_sinks=True),
        "width 64": layers.DenseAttention(HIDDEN, 16, 4, 64),
    }
    torch.nn.init.normal_(made["sinks"].sinks, std=2.0)
    return {name: layer.to(device, torch.bfloat16).eval() for name, layer in made.items()}


@torch.no_grad()
def steps_of_layers():
    """How many elements differ between a token's step and its row, by who asks: on a Hopper GPU none where `decode` gets
    the token's key and value. A whole layer's output has products of matrices before and behind the attention, which
    are others for a row than for a token.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = PLACES if device == "cuda" else PLACES[:2]
    differ, count = collections.Counter(), collections.Counter()
    for name, layer in made_layers(device).items():
        x = random(1, max(places) + 1, HIDDEN, device=device, seed=1)
        positions = torch.arange(x.shape[1], device=device)[None]
        q = layer.rotary(layer.q_norm(layer.heads(layer.q_proj(x))), positions)
        k, v = layer.keys(x, positions)
        whole, output = layer.whole(x, q, positions, None, None), layer(x)
        for at in places:
            cache = layers.Cache(at + 5)
            layer(x[:, :at], cache=cache)
            pairs = {way: (o, whole[:, at : at + 1]) for way, o in steps_of(layer, q, k, v, at).items()}
            pairs["with projections"] = layer(x[:, at : at + 1], cache=cache), output[:, at : at + 1]
            for way, (got, expected) in pairs.items():
                differ[f"{name}, {way}"] += int((got != expected).sum())
                count[f"{name}, {way}"] += expected.numel()
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        wrong = {way: n for way, n in differ.items() if n and way.endswith(("layer", "export", "transformers"))}
        assert not wrong, wrong
    return {f"{way}: differ of {count[way]}": n for way, n in differ.items()}
