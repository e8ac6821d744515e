"""Times training steps of a Qwen3 model under torch's FSDP2 (weights, gradients and AdamW sharded), the rival of ZeRO-3.

    torchrun --nproc-per-node 4 lab/experiments/fsdp2/fsdp2.py [--size 14.8B|1.7B] [MODE:EVERY:ROWS,ROWS…[:STEPS] …]
    torchrun --nproc-per-node 2 lab/experiments/fsdp2/fsdp2.py --size tiny        (no GPU: every line once, by gloo)

Plain torch, without transformers, drawn on the devices shard by shard: no host holds the model. Each layer is an FSDP
unit; bf16 weights are gathered for its forward and its backward pass, gradients are reduced in f32, shards, moments and
masters are f32. 14.8B reduces gradients in each micro-batch, because whole gradients do not fit; 1.7B does not. MODE
`compiled` compiles every layer and the loss by torch.compile, `eager` nothing. One layer in EVERY is recomputed in the
backward pass, with 0 none. Attention is SDPA by the fastest of its backends, which is measured first. Micro-batches of
each number of ROWS are measured, STEPS (--steps) of each; one that would not fit, by the memory that fewer rows took, is left out. Tokens are
random, new ones in each micro-batch. Prints a line and a JSON object for each measurement: tokens/s of all GPUs together,
the median of the steps after the warm ones, and the fastest and slowest of them; and the most memory that tensors took on
a GPU.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time

# As torchtitan sets it: sizes of activations change from measurement to measurement.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

# Layers, width, query heads, KV heads, width of a head and of the feed-forward layer, vocabulary, tied; tokens of a row;
# whether each micro-batch reduces its gradients.
SIZES = {
    "14.8B": (40, 5120, 40, 8, 128, 17408, 151936, False, 4096, True),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 50304, True, 2048, False),
    "tiny": (3, 64, 4, 2, 16, 96, 500, False, 32, True),
    "tiny-tied": (3, 64, 4, 2, 16, 96, 500, True, 32, False),
}
RUNS = {"14.8B": "compiled:1:3,6,3 compiled:2:3,4 eager:1:3", "1.7B": "compiled:0:8 eager:0:8",
        "tiny": "compiled:1:1,3,2 compiled:2:1 eager:1:2", "tiny-tied": "compiled:0:2 eager:0:2"}
RECOMPUTED = {0: "none", 1: "all", 2: "every second"}
# A measurement may need this share of a GPU's memory, by the estimate.
MOST_MEMORY = 0.95


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Layer(nn.Module):
    def __init__(self, sizes, attention):
        """A layer of Qwen3. `sizes`: an entry of SIZES; `attention`: a function of
        q, k and v `[rows, heads, tokens, width]`."""
        super().__init__()
        _, width, heads, kv_heads, head_dim, ff, *_ = sizes
        self.heads, self.kv_heads, self.head_dim, self.attention = heads, kv_heads, head_dim, attention
        self.norm, self.ff_norm = RmsNorm(width), RmsNorm(width)
        self.q_norm, self.k_norm = RmsNorm(head_dim), RmsNorm(head_dim)
        linear = lambda rows, columns: nn.Linear(columns, rows, bias=False)
        self.q, self.k = linear(heads * head_dim, width), linear(kv_heads * head_dim, width)
        self.v, self.o = linear(kv_heads * head_dim, width), linear(width, heads * head_dim)
        self.gate, self.up, self.down = linear(ff, width), linear(ff, width), linear(width, ff)

    def forward(self, x, cos, sin):
        """The layer's output for x `[rows, tokens, width]`; cos, sin `[tokens, head_dim]` of the rotation."""
        batch, tokens, _ = x.shape
        normed = self.norm(x)
        split = lambda y, heads: y.view(batch, tokens, heads, self.head_dim).transpose(1, 2)
        q = rotated(self.q_norm(split(self.q(normed), self.heads)), cos, sin)
        k = rotated(self.k_norm(split(self.k(normed), self.kv_heads)), cos, sin)
        o = self.attention(q, k, split(self.v(normed), self.kv_heads))
        x = x + self.o(o.transpose(1, 2).reshape(batch, tokens, -1))
        normed = self.ff_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Net(nn.Module):
    def __init__(self, sizes, attention):
        """The whole model; a tied one has the embedding as its head."""
        super().__init__()
        layers, width, *_, vocabulary, tied, _, _ = sizes
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(sizes, attention) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = head_loss

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.loss(self.norm(x), self.head.weight, tokens[:, 1:])


def head_loss(hidden, weight, labels):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def tables(tokens, head_dim, device):
    """cos and sin of the rotary embedding, [tokens, head_dim], bf16 as the weights are computed with."""
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(tokens, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def of_groups(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def of_copies(q, k, v):
    """As transformers does where a backend takes no groups."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fastest_attention(sizes, device):
    """(name, SDPA backend, function) with the fastest forward and backward pass on rank 0."""
    if device == "cpu":
        return "math", SDPBackend.MATH, of_groups
    _, _, heads, kv_heads, head_dim, _, _, _, tokens, _ = sizes
    ways = [("cudnn, groups", SDPBackend.CUDNN_ATTENTION, of_groups), ("cudnn", SDPBackend.CUDNN_ATTENTION, of_copies),
            ("flash, groups", SDPBackend.FLASH_ATTENTION, of_groups)]
    times = []
    for _, backend, attention in ways:
        try:
            draw = lambda count: torch.randn(1, count, tokens, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
            with sdpa_kernel(backend):
                for place in range(6):
                    if place == 2:
                        torch.cuda.synchronize()
                        started = time.perf_counter()
                    attention(q, k, v).backward(torch.ones_like(q))
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        except RuntimeError as error:
            print(f"attention by {backend}: {str(error).splitlines()[0]}", file=sys.stderr)
            times.append(math.inf)
    choice = [times.index(min(times))]
    dist.broadcast_object_list(choice, src=0)
    return ways[choice[0]]


def sharded(sizes, attention, device, compiled, every):
    """The model with its shards drawn on the devices."""
    is_tied = sizes[-3]
    # `to_empty` would part a tied embedding and output; the sizes that have them fit a device whole.
    with torch.device(device if is_tied else "meta"):
        net = Net(sizes, attention)
    # torchtitan's order: recomputation, compilation, sharding.
    kept = lambda place: every == 0 or place % every != every - 1
    wrapped = (layer if kept(place) else checkpoint_wrapper(layer, preserve_rng_state=False) for place, layer in enumerate(net.layers))
    net.layers = nn.ModuleList(wrapped)
    if compiled:
        for layer in net.layers:
            layer.compile(dynamic=False)
        net.loss = torch.compile(head_loss, dynamic=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if not is_tied:
        net.to_empty(device=device)
    assert (net.head.weight is net.embedding.weight) == is_tied
    with torch.no_grad():
        for parameter in net.parameters():
            shard = parameter.to_local()
            shard.fill_(1) if parameter.dim() == 1 else shard.normal_(std=0.02)
    return net


def measured(net, optimizer, sizes, rows, steps, args, device):
    """Seconds of each step after the warm ones, the last loss, and the most GiB that tensors took."""
    *_, head_dim, _, vocabulary, _, tokens_of_row, reduces_each = sizes
    cos, sin = tables(tokens_of_row, head_dim, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.warm + steps):
        # Repeated rows would be learnt by heart, and GEMMs of gradients that are nearly zero take less power.
        batches = torch.randint(0, vocabulary, (args.micro, rows, tokens_of_row + 1), device=device)
        started = time.perf_counter()
        for place, tokens in enumerate(batches):
            net.set_requires_gradient_sync(reduces_each or place + 1 == args.micro)
            loss = net(tokens, cos, sin)
            (loss / args.micro).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return times[args.warm :], loss.item(), peak


def agreed(value):
    """The largest of the ranks' values."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def run(args, sizes, words, device, name, backend, attention):
    """Measures the model at each number of rows of `words`, MODE:EVERY:ROWS[:STEPS]; rank 0 prints a line and a JSON
    object for each. Stops at the first number for which too little time or memory is left. `name`, `backend` and
    `attention` are what `fastest_attention` returns."""
    mode, every, all_rows, *own_steps = words.split(":")
    every, steps = int(every), int(own_steps[0]) if own_steps else args.steps
    net = sharded(sizes, attention, device, mode == "compiled", every)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    world, peaks, tokens_of_row, what = dist.get_world_size(), {}, sizes[-2], f"{args.size} {mode}, recomputed {RECOMPUTED.get(every, every)}"
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if device == "cuda" else math.inf
    for rows in map(int, all_rows.split(",")):
        late = agreed(time.monotonic() - args.began) > args.seconds
        # From one number of rows: activations may be all of it but the shards (16 bytes a parameter); from two, by a line.
        needed = peaks.get(rows, 0.0)
        if len(peaks) == 1:
            [(fewer, peak)], shards = peaks.items(), 16 * sum(p.numel() for p in net.parameters()) / world / 2**30
            needed = shards + (peak - shards) * rows / fewer
        elif peaks and not needed:
            (few, low), (many, high) = sorted(peaks.items())[-2:]
            needed = high + (high - low) * (rows - many) / (many - few)
        if late or needed > MOST_MEMORY * total:
            reason = f"after {args.seconds} s" if late else f"about {needed:.1f} of {total:.1f} GiB"
            if dist.get_rank() == 0:
                print(f"fsdp2 {what}, {rows} rows: left out, {reason}", flush=True)
            break
        with sdpa_kernel(backend):
            times, loss, peak = measured(net, optimizer, sizes, rows, steps, args, device)
        peaks[rows] = peak = agreed(peak)
        count = world * args.micro * rows * tokens_of_row
        rate, slowest, fastest = (round(count / seconds) for seconds in (statistics.median(times), max(times), min(times)))
        result = dict(program="fsdp2", size=args.size, mode=mode, recomputed=RECOMPUTED.get(every, every), gpus=world, rows=rows,
                      micro_batches=args.micro, tokens_per_second=rate, slowest=slowest, fastest=fastest,
                      step_ms=round(1e3 * statistics.median(times), 1), gib=round(peak, 2), loss=round(loss, 4), attention=name,
                      torch=torch.__version__, gpu=torch.cuda.get_device_name() if device == "cuda" else "cpu")
        if dist.get_rank() == 0:
            print(f"fsdp2 {what}, {args.micro} micro-batches of {rows} rows, {world} GPUs: {rate} tokens/s ({slowest} to {fastest}), "
                  f"{result['step_ms']} ms a step, at most {peak:.2f} GiB, loss {loss:.4f}", flush=True)
            print(json.dumps(result), flush=True)


def main():
    """Measures the runs one after another; a rank without memory ends at once, and torchrun the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="14.8B", choices=SIZES)
    parser.add_argument("runs", nargs="*", metavar="MODE:EVERY:ROWS,ROWS…[:STEPS]", help=f"by size: {RUNS}")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180, help="no measurement begins later than this")
    args = parser.parse_args()
    args.began, args.runs = time.monotonic(), args.runs or RUNS[args.size].split()
    device = "cpu" if args.size.startswith("tiny") else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    sizes = SIZES[args.size]
    try:
        way = fastest_attention(sizes, device)
        for words in args.runs:
            run(args, sizes, words, device, *way)
            torch._dynamo.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        # The other ranks wait in a collective: torchrun ends them.
        print(f"fsdp2 {args.size}: out of memory: {str(error).splitlines()[0]}", flush=True)
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
