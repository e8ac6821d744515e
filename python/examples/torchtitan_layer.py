"""A model of torchtitan with a layer of this package in place of its attention: the losses of both, step by step.

    pip install torchtitan==0.3.0
    python examples/torchtitan_layer.py                       # Qwen3's debug model and DMA: two minutes on a CPU
    python examples/torchtitan_layer.py --layer dense         # the same attention: equal losses from equal weights

What a model of one's own needs is `Exchanged` and the line that names it, GQAttention.Config._owner. torchtitan packs
documents into rows; the masks of its backend "varlen" have their offsets, which the layer takes. Its own attention is
SDPA here, which runs on every device, and each row one document.
"""

import argparse
import contextlib
import time

import torch
from small_gpt import batches, text_of
from torch import nn
from torchtitan.models.common.attention import BaseAttention, GQAttention, ScaledDotProductAttention
from torchtitan.models.qwen3 import qwen3_configs

import sieve_attention as sieve
from sieve_attention import layers


def exchanged(layer, **settings):
    class Exchanged(layer, BaseAttention):
        def __init__(self, config):
            sizes = config.dim, config.n_heads, config.n_kv_heads, config.head_dim
            super().__init__(*sizes, rope_theta=config.rope.theta, **settings)

        def forward(self, x, attention_masks, positions=None):
            packed = x.flatten(0, 1)[None]
            return super().forward(packed, documents=attention_masks.cu_seq_q).view_as(x)

    return Exchanged


BLOCKS = {"select_block_size": 16, "num_selected_blocks": 4}
NSA = {"compress_block_size": 16, "compress_stride": 8, **BLOCKS}
LAYERS = {
    "dense": exchanged(layers.DenseAttention),
    "window": exchanged(layers.WindowAttention, window_size=64),
    "dma": exchanged(layers.DynamicMaskAttention, keep_window_size=64),
    "nsa": exchanged(layers.NativeSparseAttention, window_size=32, **NSA),
    "infllm_v2": exchanged(layers.InfLLMv2Attention, num_local_blocks=1, **NSA),
    "moba": exchanged(layers.MoBA, **BLOCKS),
}
# torchtitan's names of weights, and the layers' names.
NAMES = {"qkv_linear.wq": "q_proj", "qkv_linear.wk": "k_proj", "qkv_linear.wv": "v_proj", ".wo.": ".o_proj."}


def built(attention, depth, device):
    """Qwen3's debug model of torchtitan with its own attention, or with the layer that takes its place."""
    config = qwen3_configs["debugmodel_non_fused_qkv"](attn_backend="varlen")
    config.layers = config.layers[:depth]
    if attention is GQAttention:
        for block in config.layers:
            block.attention.inner_attention = ScaledDotProductAttention.Config()
    GQAttention.Config._owner = attention
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device(device))
    return model


def train(model, given, cast):
    """The loss of each step, and tokens a second after the first two."""
    data = torch.frombuffer(bytearray(text_of(None)), dtype=torch.uint8)
    rows = batches(data, given.batch, given.context, given.seed)
    positions = torch.arange(given.context, device=given.device).expand(given.batch, -1)
    is_own = isinstance(model.layers["0"].attention, GQAttention)
    masks = None if is_own else model.get_attention_masks(positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses, began = [], 0.0
    for step in range(given.steps):
        if step == 2:
            began = time.perf_counter()
        row = next(rows).to(given.device)
        with cast:
            logits = model(row[:, :-1], positions, masks)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), row[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    speed = (given.steps - 2) * given.batch * given.context / (time.perf_counter() - began) if given.steps > 2 else 0.0
    return losses, speed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layer", choices=LAYERS, default="dma")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, number in (("steps", 50), ("batch", 4), ("context", 128), ("depth", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given, cast = parser.parse_args(), contextlib.nullcontext()
    if given.device == "cpu":
        sieve.on_cpu()
    else:
        cast = torch.autocast("cuda", torch.bfloat16)
    torch.manual_seed(given.seed)
    own = built(GQAttention, given.depth, given.device)
    weights = {name: x.clone() for name, x in own.state_dict().items()}
    for theirs, ours in NAMES.items():
        weights = {name.replace(theirs, ours): x for name, x in weights.items()}
    other = built(LAYERS[given.layer], given.depth, given.device)
    # Both begin with the same weights; those that the layer alone has, as it makes them.
    other.load_state_dict(weights, strict=False)
    found = [train(model, given, cast) for model in (own, other)]
    print(f"step  own attention  {given.layer}")
    for step in sorted({*range(0, given.steps, 10), given.steps - 1}):
        print(f"{step + 1:4}  {found[0][0][step]:13.4f}  {found[1][0][step]:.4f}")
    print(f"tokens/s: {found[0][1]:.0f} and {found[1][1]:.0f}")


if __name__ == "__main__":
    main()
