"""Trains a GPT of about 1M parameters with any kind of attention by name: in a minute on a CPU, or on a GPU.

    python examples/small_gpt.py --layer dma
    python examples/small_gpt.py --layer nsa --device cuda --context 4096 --batch 8
    python examples/small_gpt.py --help           # names the layers

It reads bytes, of --text FILE or of Python's own help texts, prints the loss and tokens per second, and ends with a few
bytes that it writes behind a cache. Compare kinds by several --seed: two runs of one kind often differ more than two
kinds do.
"""

import argparse
import contextlib
import time

import torch
from torch import nn

import sieve_attention as sieve
from sieve_attention import layers

WIDTH, DEPTH, HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN = 128, 4, 2, 2, 64, 384
NSA = {"compress_block_size": 16, "compress_stride": 8, "select_block_size": 16, "num_selected_blocks": 4}
# Each layer of the package for rows of 128 bytes: a query reads 32 to 64 of them.
LAYERS = {
    "dense": lambda: layers.DenseAttention(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH),
    "window": lambda: layers.WindowAttention(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, window_size=32),
    "cowa": lambda: layers.CoWindowAttention(
        WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, sink_tokens=2, near_window=16, far_reach=96
    ),
    "dma": lambda: layers.DynamicMaskAttention(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, keep_window_size=32),
    "nsa": lambda: layers.NativeSparseAttention(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, window_size=32, **NSA),
    "infllm_v2": lambda: layers.InfLLMv2Attention(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, num_local_blocks=1, **NSA),
    "moba": lambda: layers.MoBA(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, select_block_size=16, num_selected_blocks=4),
    "msa": lambda: layers.MSA(WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, select_block_size=16, num_selected_blocks=4),
    "mla": lambda: layers.LatentAttention(WIDTH, HEADS, HEAD_WIDTH, kv_lora_rank=64, qk_rope_head_dim=32),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.norm, self.mlp_norm = attention, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, cache=None):
        y = self.norm(x)
        # What the indexer of MSA learns by; other layers have none.
        loss = self.attention.indexer_loss(y) if self.training and hasattr(self.attention, "indexer_loss") else 0.0
        x = x + self.attention(y, cache=cache)
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), loss


class SmallGpt(nn.Module):
    def __init__(self, layer: str):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, WIDTH), nn.RMSNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(LAYERS[layer]()) for _ in range(DEPTH))

    def forward(self, ids, caches=None):
        x, losses = self.embedding(ids), 0.0
        for n, block in enumerate(self.blocks):
            x, loss = block(x, None if caches is None else caches[n])
            losses = losses + loss
        return self.norm(x) @ self.embedding.weight.T, losses


def text_of(path):
    if path:
        with open(path, "rb") as file:
            return file.read()
    import pydoc_data.topics

    return "\n".join(pydoc_data.topics.topics.values()).encode()


def batches(data, count, context, seed):
    """Rows of context + 1 bytes from anywhere in the data."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(len(data) - context - 1, (count,), generator=generator)
        yield torch.stack([data[at : at + context + 1] for at in first.tolist()]).long()


def loss_of(model, rows):
    logits, more = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()), more


def cast_of(device):
    """The kernels take bf16, to which autocast casts queries, keys and values."""
    return torch.autocast("cuda", torch.bfloat16) if device != "cpu" else contextlib.nullcontext()


def train(model, rows, given):
    """Tokens a second; kernels are compiled, and their limits asked, in the first steps, which are left out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    began, cast = 0.0, cast_of(given.device)
    for step in range(given.steps):
        if step == 2:
            began = time.perf_counter()
        with cast:
            loss, more = loss_of(model, next(rows).to(given.device))
        optimizer.zero_grad()
        (loss + more).backward()
        optimizer.step()
        if step % 25 == 0 or step + 1 == given.steps:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    if given.device != "cpu":
        torch.cuda.synchronize()
    return (given.steps - 2) * given.batch * given.context / (time.perf_counter() - began) if given.steps > 2 else 0.0


@torch.no_grad()
def continuation(model, prompt, count, device):
    """The likeliest bytes behind a prompt, one after another behind caches."""
    caches = [layers.Cache(len(prompt) + count) for _ in model.blocks]
    ids, said = torch.tensor([list(prompt)], device=device), []
    for _ in range(count):
        logits, _ = model(ids, caches)
        ids = logits[:, -1:].argmax(-1)
        said.append(int(ids))
    return bytes(said).decode(errors="replace")


def main():
    """Trains the model on all but a twentieth of the text's bytes; prints speed, loss on that part and a text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layer", choices=LAYERS, default="dma")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="a file; without it Python's own help texts")
    for name, number in (("steps", 100), ("batch", 8), ("context", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    if given.device == "cpu":
        # A CPU has no kernels: every function by its definition, within the limits of a GPU.
        sieve.on_cpu()
    torch.manual_seed(given.seed)
    data = torch.frombuffer(bytearray(text_of(given.text)), dtype=torch.uint8)
    held_out = len(data) // 20
    model = SmallGpt(given.layer).to(given.device)
    print(f"{given.layer}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {given.device}")
    speed = train(model, batches(data[:-held_out], given.batch, given.context, given.seed), given)
    model.eval()
    with torch.no_grad(), cast_of(given.device):
        later = batches(data[-held_out:], given.batch, given.context, 1)
        loss = sum(loss_of(model, next(later).to(given.device))[0].item() for _ in range(4)) / 4
        said = continuation(model, b"The ", 24, given.device)
    print(f"held-out loss {loss:.3f}, {speed:.0f} tokens/s, 'The ' goes on: {said!r}")


if __name__ == "__main__":
    main()
