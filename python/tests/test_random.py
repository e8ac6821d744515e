"""Random shapes of InfLLM-V2, MoBA and MSA beside their definitions: choices, outputs and gradients.

Groups of 1 to 16 heads of 64 or 128, packed documents, any length. Three small draws on the emulator, 200 with
`SIEVE_TEST_DEVICE=cuda`.
"""

from random import Random

import pytest
import torch
from conftest import DEVICE
from parity import compare, marked, random

import sieve_attention as sieve
from sieve_attention import definitions, functional

NUM_DRAWS, LONGEST = (200, 700) if DEVICE == "cuda" else (3, 60)
RULES = {"infllm_v2": "largest_probability", "moba": "mean_key", "msa": "largest_score"}


def drawn(seed):
    """Kind, sizes of q and k, the first token of each document and the end, sizes of blocks, and local blocks."""
    draw = Random(seed)
    kind = list(RULES)[seed % 3]
    group, width, tokens = draw.randint(1, 16), draw.choice([64, 128]), draw.randint(1, LONGEST)
    kv_heads = draw.randint(1, 3 if group < 6 else 1)
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(draw.randint(0, 3)))})
    count, size = draw.randint(2, 8), draw.choice([16, 32, 64])
    if kind == "infllm_v2":
        stride = draw.choice([8, 16])
        blocks = sieve.NsaBlocks(stride * draw.randint(1, 2), stride, size, count)
        return kind, (tokens, group * kv_heads, kv_heads, width), cuts, blocks, draw.randint(1, count - 1)
    size *= draw.choice([1, 1, 64 // size * 2])  # or 128, which attention reads in two pieces
    pooled, local = (size, 1) if kind == "moba" else (1, draw.randint(1, count))
    return kind, (tokens, group * kv_heads, kv_heads, width), cuts, sieve.NsaBlocks(pooled, pooled, size, count), local


def is_firm(importance, count):
    """Queries whose choice no rounding changes: the last chosen block is ahead of the next by 2 % of the largest."""
    finite = importance.masked_fill(importance.isinf(), 0.0).abs().amax(-1)
    ranked = torch.nn.functional.pad(importance.sort(-1, descending=True).values, (0, count + 1), value=-torch.inf)
    ahead = (ranked[..., count - 1] - ranked[..., count]).nan_to_num(torch.inf)  # -inf less -inf: all are chosen
    return ahead > 0.02 * finite


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_random_shape(seed, device):
    kind, (tokens, heads, kv_heads, width), cuts, blocks, local = drawn(seed)
    rule, first = RULES[kind], kind == "infllm_v2"
    sizes = [(heads, 1), (kv_heads, 2), (kv_heads, 3), (kv_heads, 4), (1, 5)]
    q, k, v, *index = (random(1, tokens, n, width, device=device, seed=5 * seed + i) for n, i in sizes)
    by = index if kind == "msa" else (q, k)
    documents = sieve.documents(torch.tensor(cuts, device=device), tokens)
    settings = {"documents": documents, "deterministic": seed % 2 == 0}
    if kind == "infllm_v2":
        ours = lambda q, k, v: sieve.infllm_v2(q, k, v, blocks=blocks, local=local, **settings)  # noqa: E731
    else:
        settings |= {"block": blocks.selected, "num_selected": blocks.num_selected}
        more = index if kind == "msa" else ()
        settings |= {"local": local} if kind == "msa" else {}
        ours = lambda q, k, v: getattr(sieve, kind)(q, k, v, *more, **settings)  # noqa: E731

    choice = width**-0.5, blocks.sizes(), rule, first, local
    (indices,) = functional.ops.choose_blocks(*by, *documents, *choice)
    parts, got = list(zip(cuts, cuts[1:])), []
    for begin, end in parts:
        sizes = blocks, rule, first, local, choice[0]
        importance = definitions.block_importance(*(x[:, begin:end].double() for x in by), *sizes)
        expected = definitions.chosen_blocks(*(x[:, begin:end].double() for x in by), *sizes)
        got.append(marked(indices[:, begin:end], expected))
        assert torch.equal(got[-1].sum(-1), expected.sum(-1)), "numbers of chosen blocks"
        wrong = (got[-1] != expected).any(-1) & is_firm(importance, blocks.num_selected)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} queries chose other blocks"

    def plain(q, k, v):
        rows = [[x[:, begin:end] for x in (q, k, v)] for begin, end in parts]
        o = [definitions.block_attention(*row, chosen, blocks.selected) for row, chosen in zip(rows, got)]
        return torch.cat(o, 1)

    compare(f"{kind} {(tokens, heads, kv_heads, width)} {cuts} {blocks} {local}", ours, plain, (q, k, v))
