"""Checks that attention with sinks is that of gpt-oss in transformers, on random weights, dense and with a window:
definitions.py of the package in f64, and a layer of modeling_sieve.py. Outputs and gradients, by norm and by row.

    python tests/python/test_sinks.py          # needs torch and transformers
"""

import importlib
import pathlib
import sys
import types
import unittest

import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, WIDTH, HIDDEN, TOKENS, WINDOW = 6, 3, 16, 40, 33, 7


def modules():
    """definitions.py and modeling_sieve.py as an export has them: side by side in a package."""
    package = types.ModuleType("exported")
    package.__path__ = [str(ROOT / "crates/sieve-hf/src/export"), str(ROOT / "python/sieve_attention")]
    sys.modules["exported"] = package
    return [importlib.import_module(f"exported.{name}") for name in ("definitions", "modeling_sieve")]


def mask_of(window):
    """What gpt-oss adds to the logits, [1, 1, tokens, tokens]."""
    index = torch.arange(TOKENS)
    visible = index <= index[:, None]
    if window:
        visible &= index > index[:, None] - window
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.double)
    return mask.masked_fill(~visible, torch.finfo(torch.double).min)


class Sinks(unittest.TestCase):
    def assert_close(self, what, got, wanted, most):
        """Of the whole tensor, and of its worst row."""
        for size in (lambda x: x.norm(), lambda x: x.reshape(-1, x.shape[-1]).norm(dim=-1).max()):
            worst = (size(got - wanted) / size(wanted)).item()
            self.assertLess(worst, most, f"{what}: {worst}")

    def compare_definitions(self, window):
        torch.manual_seed(2)
        definitions, _ = modules()
        heads = [(HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH)]
        inputs = [torch.randn(2, TOKENS, *size, dtype=torch.double, requires_grad=True) for size in heads]
        sinks = torch.randn(HEADS, dtype=torch.double, requires_grad=True)
        layer = types.SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=False)
        given = [x.transpose(1, 2) for x in inputs]
        wanted, _ = eager_attention_forward(layer, *given, mask_of(window), WIDTH**-0.5, s_aux=sinks)
        got = definitions.attention(*inputs, window=window, sinks=sinks)
        seed = torch.randn_like(got)
        results = [[o, *torch.autograd.grad(o, [*inputs, sinks], seed)] for o in (got, wanted)]
        for what, a, b in zip(("o", "dq", "dk", "dv", "dsinks"), *results):
            self.assert_close(f"{what}, window {window}", a, b, 1e-13)

    def test_definitions_are_those_of_gpt_oss_in_f64(self):
        for window in (None, WINDOW):
            self.compare_definitions(window)

    def compare(self, window):
        torch.manual_seed(1)
        _, sieve = modules()
        sizes = {
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": WIDTH,
        }
        name = "sliding_attention" if window else "full_attention"
        config = GptOssConfig(
            num_hidden_layers=1, layer_types=[name], sliding_window=window or 128, attention_bias=False, **sizes
        )
        config._attn_implementation = "eager"
        theirs = GptOssAttention(config, 0).double()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(std=0.5)
        own_config = sieve.SieveConfig(attention_kind="mha", qk_norm=False, attention_sinks=True, rotates=True, **sizes)
        ours = sieve.DenseAttention(own_config, window).double()
        ours.load_state_dict(theirs.state_dict())
        mask, index = mask_of(window), torch.arange(TOKENS)
        angles = torch.ones(2, TOKENS, WIDTH // 2, dtype=torch.double)
        rows = types.SimpleNamespace(first=0, count=TOKENS, positions=index[None], rotate=lambda x: x)
        x, seed = torch.randn(2, 2, TOKENS, HIDDEN, dtype=torch.double)

        def run(module, call):
            leaf = x.clone().requires_grad_()
            o = call(leaf)
            return [o, *torch.autograd.grad(o, [leaf, module.sinks, module.q_proj.weight], seed)]

        wanted = run(theirs, lambda x: theirs(x, (angles, 0 * angles), mask)[0])
        got = run(ours, lambda x: ours(x, rows, None))
        # modeling_sieve.py computes the softmax in f32.
        for what, a, b in zip(("o", "dx", "dsinks", "dq_proj"), got, wanted):
            self.assert_close(f"{what}, window {window}", a, b, 2e-6)

    def test_dense_attention_is_that_of_gpt_oss(self):
        self.compare(None)

    def test_window_attention_is_that_of_gpt_oss(self):
        self.compare(WINDOW)


if __name__ == "__main__":
    unittest.main()
