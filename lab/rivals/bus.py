"""Bus rates of NCCL at the sizes of a 1.7B step, and what NCCL's kernels cost a GEMM and an attention beside them.

    torchrun --nproc-per-node 4 lab/rivals/bus.py [--ctas 0,8,16]      (0: NCCL's own choice; else its maxCTAs)

Rates are nccl-tests' bus rates: bytes a rank holds over time, times (n - 1) / n, for a sum of all twice that.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional

BLOCK = 50_333_696  # parameters of a block of 28 x 2048
TOKENS = 32_768  # of one of four parts of a row of 131,072
PACKED = 32 * 128  # columns of q, k and v, 16/8 heads


def group(ctas):
    if ctas == 0:
        return dist.new_group()
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    return dist.new_group(pg_options=options)


def milliseconds(work, repeats, warm=3, beside=lambda: None):
    """Milliseconds of one of `repeats` runs of `work` on the GPU, after `warm` untimed ones. `beside()` is called
    before the clock starts: it queues work on a stream of its own, which runs at the same time."""
    for _ in range(warm):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    beside()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def main():
    """Prints from rank 0, for each number of CTAs, a line a collective with its bus rate, and how much longer a GEMM
    and an attention take beside the two collectives of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ctas", default="0,8,16")
    args = parser.parse_args()
    start = time.time()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    of_device = {"device": "cuda"}
    whole = torch.randn(BLOCK // size * size, **of_device)
    piece = torch.empty(BLOCK // size, **of_device)
    weights = torch.empty(BLOCK // size * size, dtype=torch.bfloat16, **of_device)
    own = torch.randn(BLOCK // size, **of_device).to(torch.bfloat16)
    heads = torch.randn(TOKENS * PACKED, **of_device).to(torch.bfloat16)
    found = torch.empty_like(heads)
    numbers = torch.ones(2, **of_device)
    # A GEMM of a block's width, and dense attention of 8 rows.
    left = torch.randn(16384, 2048, **of_device).to(torch.bfloat16)
    right = torch.randn(2048, 6144, **of_device).to(torch.bfloat16)
    q, k, v = (torch.randn(8, 16, 2048, 128, **of_device).to(torch.bfloat16) for _ in range(3))
    beside = {
        "GEMM": lambda: torch.matmul(left, right),
        "attention": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    alone = {name: milliseconds(work, 100) for name, work in beside.items()}
    side = torch.cuda.Stream()
    for ctas in map(int, args.ctas.split(",")):
        ranks = group(ctas)
        ops = {
            "reduce-scatter f32": (whole, lambda: dist.reduce_scatter_tensor(piece, whole, group=ranks)),
            "all-gather bf16": (weights, lambda: dist.all_gather_into_tensor(weights, own, group=ranks)),
            "all-to-all bf16": (heads, lambda: dist.all_to_all_single(found, heads, group=ranks)),
            "all-reduce f32": (numbers, lambda: dist.all_reduce(numbers, group=ranks)),
        }
        for name, (tensor, work) in ops.items():
            ms = milliseconds(work, 20)
            size_bytes = tensor.numel() * tensor.element_size()
            share = (2 if name == "all-reduce f32" else 1) * (size - 1) / size
            say(f"maxCTAs {ctas or 'unset':>5}  {name:18}  {size_bytes / 1e6:8.1f} MB  {ms:7.3f} ms  bus {size_bytes * share / ms / 1e6:6.1f} GB/s")
        for sum_name in ("reduce-scatter f32", "all-gather bf16"):
            _, work = ops[sum_name]

            def sums():
                with torch.cuda.stream(side):
                    # So many that the GEMMs end first.
                    for _ in range(160):
                        work()

            for name, compute in beside.items():
                ms = milliseconds(compute, 40, warm=0, beside=sums)
                say(f"maxCTAs {ctas or 'unset':>5}  {name} beside {sum_name}: {ms:.3f} ms, alone {alone[name]:.3f}, {ms / alone[name]:.2f} times")
    say(f"{time.time() - start:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
