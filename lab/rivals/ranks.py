"""Times training steps of transformers' Qwen3 on several GPUs, by torch's DDP or FSDP2: the rivals of `sieve launch`.

    torchrun --nproc-per-node 4 lab/rivals/ranks.py ddp|fsdp [--case 1.7B-2K] [--micro 1,4]
    torchrun --nproc-per-node 2 lab/rivals/ranks.py ddp --tiny       (no GPU: every line once, by gloo)

As step.py: every layer compiled, SDPA by cuDNN, AdamW in f32, gradients clipped at 1. Gradients are summed in f32 in the last micro-batch.
DDP: bf16 autocast over f32 weights. FSDP2: bf16 weights gathered for each layer's forward and backward pass, f32 shards.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from step import CASES, TINY, config_of, head_loss, inputs_of, measured, update
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


class Net(torch.nn.Module):
    def __init__(self, sizes, compiled):
        """Qwen3 of `sizes`, an entry of CASES, and its loss; `compiled`: each layer's
        forward pass and the loss by torch.compile."""
        super().__init__()
        self.lm = AutoModelForCausalLM.from_config(config_of(sizes), attn_implementation="sdpa").train()
        self.loss = head_loss
        if compiled:
            for layer in self.lm.model.layers:
                # The forward pass alone: what FSDP does before and after it stays outside.
                layer.forward = torch.compile(layer.forward, dynamic=False)
            self.loss = torch.compile(head_loss, dynamic=False)

    def forward(self, tokens):
        hidden = self.lm.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        return self.loss(hidden, self.lm.lm_head.weight, tokens[:, 1:])


def main():
    """Prints from rank 0 a line a number of micro-batches: tokens/s of all GPUs, ms a step, most GiB of tensors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["ddp", "fsdp"])
    parser.add_argument("--case", default="1.7B-2K", choices=CASES)
    parser.add_argument("--micro", default="1,4")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    sizes = TINY if args.tiny else CASES[args.case]
    with torch.device(device):
        net = Net(sizes, device == "cuda")
    if args.kind == "ddp":
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        precision = lambda: torch.autocast(device, torch.bfloat16)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device, (world,))
        for layer in net.lm.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        model = fully_shard(net, mesh=mesh, mp_policy=policy)
        precision = contextlib.nullcontext
    tokens, optimizer = inputs_of(sizes, model, device)
    seq_len, rows = sizes[-2:]
    backends = [SDPBackend.CUDNN_ATTENTION] if device == "cuda" else [SDPBackend.MATH]

    def step(micro):
        """A step of `micro` micro-batches of the same tokens; ranks sum gradients in the last one alone."""
        for place in range(micro):
            is_last = place + 1 == micro
            quiet = contextlib.nullcontext()
            if args.kind == "fsdp":
                model.set_requires_gradient_sync(is_last)
            elif not is_last:
                quiet = model.no_sync()
            with quiet:
                with precision(), sdpa_kernel(backends):
                    loss = model(tokens)
                (loss / micro).backward()
        update(model, optimizer)

    for micro in map(int, args.micro.split(",")):
        warm, steps = (0, 2) if args.tiny else (3, 4)
        seconds, peak = measured(lambda: step(micro), device, warm, steps)
        if rank == 0:
            rate = world * micro * rows * seq_len / seconds
            print(f"torch {args.kind} {world} GPUs, {micro} micro-batches: {rate:9.0f} tokens/s, {1e3 * seconds:.1f} ms a step, at most {peak:.1f} GiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
