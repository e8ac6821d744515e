"""Tokens a second of small_gpt.py with each layer, beside the same model with torch's own attention.

    python speed_of_layers.py [--context 128 4096] [--only LAYER ..] [--device cuda]

The rival has what a model of one's own would have: torch's RMSNorm, rotations by a table, SDPA. A line a layer: tokens
a second, and their ratio to the rival's.
"""

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python/examples")]
os.environ.setdefault("SIEVE_ATTENTION_LIBRARY", str(ROOT / "target/release/libsieve_capi.so"))

import small_gpt  # noqa: E402
import torch  # noqa: E402
from small_gpt import HEAD_WIDTH, HEADS, KV_HEADS, WIDTH  # noqa: E402
from torch import nn  # noqa: E402

import sieve_attention as sieve  # noqa: E402


class TorchAttention(nn.Module):
    """Causal attention with the sizes of the layers, for rows of at most `context` tokens."""

    def __init__(self, context):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_WIDTH) for _ in range(2))
        frequencies = 10000.0 ** (-torch.arange(HEAD_WIDTH // 2) / (HEAD_WIDTH // 2))
        angles = torch.arange(context)[:, None] * frequencies
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])

    def rotated(self, x):
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * self.cos - x2 * self.sin, x2 * self.cos + x1 * self.sin], -1)

    def forward(self, x, cache=None):
        q, k, v = (y(x).unflatten(-1, (-1, HEAD_WIDTH)) for y in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotated(self.q_norm(q)).to(v.dtype), self.rotated(self.k_norm(k)).to(v.dtype)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=HEADS != KV_HEADS)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def speed_of(layer, data, given):
    torch.manual_seed(given.seed)
    model = small_gpt.SmallGpt(layer).to(given.device)
    with contextlib.redirect_stdout(io.StringIO()):
        return small_gpt.train(model, small_gpt.batches(data, given.batch, given.context, given.seed), given)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--only", nargs="+", choices=small_gpt.LAYERS, default=list(small_gpt.LAYERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, number in (("steps", 100), ("batch", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    if given.device == "cpu":
        sieve.on_cpu()
    data = torch.frombuffer(bytearray(small_gpt.text_of(None)), dtype=torch.uint8)
    for given.context in given.context:
        small_gpt.LAYERS["torch"] = lambda: TorchAttention(given.context)
        rival = speed_of("torch", data, given)
        print(f"{given.context} tokens a row, torch's own attention: {rival:.0f} tokens/s", flush=True)
        for layer in given.only:
            try:
                speed = speed_of(layer, data, given)
                said = f"{speed:.0f} tokens/s, {speed / rival:.2f} of it"
            except Exception as error:  # noqa: BLE001: the other layers still have numbers
                said = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{given.context} tokens a row, {layer}: {said}", flush=True)


if __name__ == "__main__":
    main()
