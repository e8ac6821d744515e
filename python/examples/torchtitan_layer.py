"""A model of torchtitan with a layer of this package in place of its attention: the losses of both, step by step.

    pip install torchtitan==0.3.0
    python examples/torchtitan_layer.py                       # Qwen3's debug model and DMA: two minutes on a CPU
    python examples/torchtitan_layer.py --layer dense         # the same attention: equal losses from equal weights
    python examples/torchtitan_layer.py --layer dma window --depth 8 --context 4096 --read 1024         # on a GPU

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
    """`layer` as torchtitan builds and calls attention: sizes from its config, the batch as one packed row."""

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
# Each takes the number of tokens that a query reads, which the blocks of some do not follow.
LAYERS = {
    "dense": lambda read: exchanged(layers.DenseAttention),
    "window": lambda read: exchanged(layers.WindowAttention, window_size=read),
    "dma": lambda read: exchanged(layers.DynamicMaskAttention, keep_window_size=read),
    "nsa": lambda read: exchanged(layers.NativeSparseAttention, window_size=read // 2, **NSA),
    "infllm_v2": lambda read: exchanged(layers.InfLLMv2Attention, num_local_blocks=1, **NSA),
    "moba": lambda read: exchanged(layers.MoBA, **BLOCKS),
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
    """Trains both models from equal weights where they have the same ones, and prints their losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layer", choices=LAYERS, nargs="+", default=["dma"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    numbers = ("steps", 50), ("batch", 4), ("context", 128), ("depth", 2), ("read", 64), ("seed", 0)
    for name, number in numbers:
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
    results = [train(own, given, cast)]
    for name in given.layer:
        other = built(LAYERS[name](given.read), given.depth, given.device)
        # All begin with the same weights; those that the layer alone has, as it makes them.
        other.load_state_dict(weights, strict=False)
        results.append(train(other, given, cast))
    print("step  own attention  " + "  ".join(f"{name:>9}" for name in given.layer))
    for step in sorted({*range(0, given.steps, 10), given.steps - 1}):
        own_loss, *losses = (losses[step] for losses, _ in results)
        print(f"{step + 1:4}  {own_loss:13.4f}  " + "  ".join(f"{loss:9.4f}" for loss in losses))
    print("tokens/s: " + " and ".join(f"{speed:.0f}" for _, speed in results))


if __name__ == "__main__":
    main()
