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


def rows_of(q, k, v, first, tile):
    """Logits in base e of a tile of queries from `first` on, keys behind them masked, and the number of keys each sees."""
    last = min(first + tile, q.shape[0])
    logits = q[first:last] @ k[:last].T / math.sqrt(q.shape[1])
    positions = torch.arange(first, last, device=q.device)
    logits.masked_fill_(torch.arange(last, device=q.device)[None] > positions[:, None], -math.inf)
    return logits, (positions + 1).float()


def by_tiles(values, tile, fill):
    """[rows, keys] as [rows, tiles, tile], padded."""
    padding = -values.shape[1] % tile
    return torch.nn.functional.pad(values, (0, padding), value=fill).unflatten(1, (-1, tile))


def head(q, k, v, tolerances, tile):
    """Per tolerance: tiles, those skipped forward and backward, and per query the mass left out and the output's error."""
    found = {t: {"tiles": 0, "forward": 0, "backward": 0, "mass": [], "error": []} for t in tolerances}
    for first in range(0, q.shape[0], tile):
        logits, visible = rows_of(q, k, v, first, tile)
        tiles = by_tiles(logits, tile, -math.inf)
        largest, sums = tiles.amax(2), tiles.logsumexp(2)  # [rows, tiles]
        whole = logits.logsumexp(1)
        weights = (logits - whole[:, None]).exp()
        output = weights @ v[:logits.shape[1]]
        of_tile = by_tiles(weights, tile, 0.0).sum(2)
        for t in tolerances:
            bound = (t / visible).clamp(max=1.0).log()
            running, kept = sums[:, -1].clone(), torch.ones(tiles.shape[1], dtype=torch.bool, device=q.device)
            for at in range(tiles.shape[1] - 2, -1, -1):
                if bool((largest[:, at] - running < bound).all()):
                    kept[at] = False
                else:
                    running = torch.logaddexp(running, sums[:, at])
            backward = (largest - whole[:, None] < bound[:, None]).all(0)
            row = found[t]
            row["tiles"] += tiles.shape[1]
            row["forward"] += int((~kept).sum())
            row["backward"] += int(backward.sum())
            row["mass"].append(of_tile[:, ~kept].sum(1))
            keys = kept.repeat_interleave(tile)[:logits.shape[1]]
            left = weights * keys
            cut = (left / left.sum(1, keepdim=True)) @ v[:logits.shape[1]]
            row["error"].append((cut - output).norm(dim=1) / output.norm(dim=1))
    return found


def measured(path, arguments):
    """The lines of a file, one a tolerance."""
    tensors = {name: tensor.to(arguments.device).float() for name, tensor in load_file(path).items()}
    q, k, v = (tensors[name].transpose(0, 1) for name in "qkv")  # [heads, tokens, head_dim]
    group = q.shape[0] // k.shape[0]
    heads = [head(q[at], k[at // group], v[at // group], arguments.tolerances, arguments.tile) for at in range(q.shape[0])]
    for t in arguments.tolerances:
        of_heads = [found[t] for found in heads]
        tiles = sum(found["tiles"] for found in of_heads)
        forward, backward = (sum(found[name] for found in of_heads) / tiles for name in ("forward", "backward"))
        mass, error = (torch.cat([part for found in of_heads for part in found[name]]) for name in ("mass", "error"))
        yield {"file": path.name, "tokens": q.shape[1], "heads": q.shape[0], "tile": arguments.tile, "tolerance": t,
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
