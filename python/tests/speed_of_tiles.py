"""Times of block_sparse under random masks, in either order of sums, for on_gpu.py."""

import torch

import sieve_attention as sieve


def speed_of_block_sparse(tokens, qkv, milliseconds):
    """32 query heads over 8 under random masks: the diagonal block and a share `density` of the earlier ones."""
    measured, (q, k, v) = {}, qkv(tokens, heads=32)
    device = q.device
    for block, density in ((128, 1.0), (128, 0.125), (128, 0.0625), (64, 0.125)):
        count = tokens // block
        row = torch.arange(count, device=device)
        number = torch.rand(32, count, count, generator=torch.Generator(device).manual_seed(5), device=device)
        # The place of each earlier block in a random order.
        place = number.masked_fill(row >= row[:, None], 2.0).argsort(-1).argsort(-1)
        wanted = (density * (row + 1)).round().clamp(min=1) - 1
        mask = sieve.block_mask((place < wanted[:, None]) | (row == row[:, None]), block)
        name = f"block_sparse, blocks of {block}, density {density}"
        measured[name] = milliseconds(lambda: sieve.block_sparse(q, k, v, mask))
        copies = [x.detach().requires_grad_() for x in (q, k, v)]
        for order in (False, True):
            both = lambda: torch.autograd.grad(  # noqa: E731
                sieve.block_sparse(*copies, mask, deterministic=order), copies, q
            )
            measured[f"{name}, both{', fixed order' if order else ''}"] = milliseconds(both, 7)
    return measured
