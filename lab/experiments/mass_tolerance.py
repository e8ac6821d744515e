"""How much of attention could tiles of little softmax mass skip, and what would be left out?

    python3 lab/experiments/mass_tolerance.py CAPTURED... [--tolerances 1 0.1 0.01] [--tile 128] [--out FILE]

CAPTURED is what `sieve kernels capture` wrote of a dense model: q, k and v of a text. For each tolerance t the script
skips a tile as MassAlloc (arXiv:2609.32712) does in flash-sparse-attn 2.0.6: a query with n visible keys may lose a key
whose weight is below t / n, so that it loses less than t in all, and a tile is skipped where all keys of all its queries
may go. The forward pass knows each query's running maximum and sum, from the diagonal to the first key; it saves the
product with the values, one of two. The backward pass knows the whole sum, and saves four of five products. A line a
file and tolerance: skipped tiles of the forward and of the backward pass, the share of both passes' products that this
saves, the mass left out in the mean and at most, and the output's error in the mean and at most, relative to a row's
norm. Needs torch.
"""

import argparse
import json
import math
import pathlib

import torch
from safetensors.torch import load_file

FORWARD_SAVED, BACKWARD_SAVED, PRODUCTS = 1, 4, 7


def by_tiles(values, tile, fill):
    """[rows, keys] as [rows, tiles, tile], padded."""
    padding = -values.shape[1] % tile
    return torch.nn.functional.pad(values, (0, padding), value=fill).unflatten(1, (-1, tile))


def logits_of(q, k, first, tile):
    """Logits of the queries from `first` on, in base e; keys behind a query are masked."""
    last = min(first + tile, q.shape[0])
    logits = q[first:last] @ k[:last].T / math.sqrt(q.shape[1])
    positions = torch.arange(last, device=q.device)
    return logits.masked_fill_(positions[None] > positions[first:, None], -math.inf)


def skipped(largest, sums, whole, bound):
    """Which tiles the forward and the backward pass skip, [query tiles, tiles]: for all tiles of queries at once, from the
    diagonal, which stays, to the first key. `largest` and `sums` are [query tiles, rows, tiles], of logits."""
    count = largest.shape[0]
    at = torch.arange(count, device=largest.device)
    running, forward = sums[at, :, at], torch.zeros(count, count, dtype=torch.bool, device=largest.device)
    for distance in range(1, count):
        queries, keys = at[distance:], at[:count - distance]
        of_tile = sums[queries, :, keys]
        gone = (largest[queries, :, keys] - running[queries] < bound[queries]).all(1)
        forward[queries, keys] = gone
        running[queries] = torch.where(gone[:, None], running[queries], torch.logaddexp(running[queries], of_tile))
    below = (largest - whole[:, :, None] < bound[:, :, None]).all(1)
    return forward, below & (at[None] < at[:, None])


def head(q, k, v, tolerances, tile):
    """Per tolerance: tiles, those skipped forward and backward, and per query the mass left out and the output's error.
    The number of tokens is a multiple of `tile`."""
    count = q.shape[0] // tile
    largest, sums = (torch.full((count, tile, count), -math.inf, device=q.device) for _ in range(2))
    for at in range(count):
        tiles = by_tiles(logits_of(q, k, at * tile, tile), tile, -math.inf)
        largest[at, :, :at + 1], sums[at, :, :at + 1] = tiles.amax(2), tiles.logsumexp(2)
    whole, found = sums.logsumexp(2), {}
    visible = torch.arange(1, q.shape[0] + 1, device=q.device).float().view(count, tile)
    for t in tolerances:
        forward, backward = skipped(largest, sums, whole, (t / visible).clamp(max=1.0).log())
        mass = ((sums - whole[:, :, None]).exp() * forward[:, None]).sum(2)
        found[t] = {"tiles": count * (count + 1) // 2, "forward": int(forward.sum()), "backward": int(backward.sum()),
                    "mass": mass.flatten(), "kept": ~forward, "error": []}
    for at in range(count):
        logits = logits_of(q, k, at * tile, tile)
        values = v[:logits.shape[1]]
        output = logits.softmax(1) @ values
        for t in tolerances:
            keys = found[t]["kept"][at, :at + 1].repeat_interleave(tile)
            cut = logits.masked_fill(~keys, -math.inf).softmax(1) @ values
            found[t]["error"].append((cut - output).norm(dim=1) / output.norm(dim=1))
    for row in found.values():
        row["error"] = torch.cat(row["error"])
    return found


def measured(path, arguments):
    """The lines of a file, one a tolerance."""
    tensors = {name: tensor.to(arguments.device).float() for name, tensor in load_file(path).items()}
    tokens = tensors["q"].shape[0] // arguments.tile * arguments.tile
    q, k, v = (tensors[name][:tokens].transpose(0, 1).contiguous() for name in "qkv")  # [heads, tokens, head_dim]
    group = q.shape[0] // k.shape[0]
    heads = [head(q[at], k[at // group], v[at // group], arguments.tolerances, arguments.tile)
             for at in range(0, q.shape[0], arguments.every)]
    for t in arguments.tolerances:
        of_heads = [found[t] for found in heads]
        tiles = sum(found["tiles"] for found in of_heads)
        forward, backward = (sum(found[name] for found in of_heads) / tiles for name in ("forward", "backward"))
        mass, error = (torch.cat([found[name] for found in of_heads]) for name in ("mass", "error"))
        yield {"file": path.name, "tokens": tokens, "heads": len(heads), "tile": arguments.tile, "tolerance": t,
               "forward_skipped": round(forward, 4), "backward_skipped": round(backward, 4),
               "products_saved": round((FORWARD_SAVED * forward + BACKWARD_SAVED * backward) / PRODUCTS, 4),
               "head_most": round(max(found["backward"] / found["tiles"] for found in of_heads), 4),
               "mass_mean": float(mass.mean()), "mass_most": float(mass.max()),
               "error_mean": float(error.mean()), "error_most": float(error.max())}


def main():
    """Prints the lines as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captured", nargs="+", type=pathlib.Path)
    parser.add_argument("--tolerances", nargs="+", type=float, default=[1.0, 0.3, 0.1, 0.03, 0.01])
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="read every so many heads alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    for path in arguments.captured:
        for row in measured(path, arguments):
            line = json.dumps(row)
            print(line, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
