"""selected_attention beside its definition: order, repeats, counts, documents, unread keys, and random draws.

Four small draws on the emulator, 300 with `SIEVE_TEST_DEVICE=cuda`, or as many as SIEVE_TEST_DRAWS says.
"""

import os
from random import Random

import pytest
import torch
from conftest import DEVICE
from parity import compare, random

import sieve_attention as sieve
from sieve_attention import definitions, ops

NUM_DRAWS, LONGEST = (300, 700) if DEVICE == "cuda" else (4, 70)
NUM_DRAWS = int(os.environ.get("SIEVE_TEST_DRAWS", NUM_DRAWS))
# Of every tenth draw, on a GPU: its longest row, and the pairs of queries and keys that the definition has memory for.
LONG_ROW, PAIRS = 20_000, 4 * 10**8
LARGEST = 2**31 - 1


def inputs(batch, tokens, heads, kv_heads, width, seed=0):
    sizes = [(heads, 1), (kv_heads, 2), (kv_heads, 3)]
    return [random(batch, tokens, n, width, device=DEVICE, seed=100 * seed + at) for n, at in sizes]


def blocks_of(batch, tokens, choosers, count, block, seed=0):
    """Random indices, of them some later, some given twice, some below 0, and some no block at all."""
    generator = torch.Generator().manual_seed(seed)
    last = -(-tokens // block)
    indices = torch.randint(-1, last + 1, (batch, tokens, choosers, count), generator=generator, dtype=torch.int32)
    strange = torch.tensor([-LARGEST - 1, -7, LARGEST, 1 << 20], dtype=torch.int32)
    odd = torch.rand(indices.shape, generator=generator) < 0.05
    indices[odd] = strange[torch.randint(0, 4, (int(odd.sum()),), generator=generator)]
    return indices.to(DEVICE)


def bounds_of(tokens, cuts, batch=1):
    bounds = sieve.documents(torch.tensor(cuts, device=DEVICE), tokens)
    return [x.expand(batch, -1).contiguous() for x in bounds]


CASES = {
    "blocks of 64": ((1, 150, 4, 2, 64), 2, 3, 64, {}),
    "blocks of 32, a chooser for each head": ((2, 90, 4, 2, 64), 4, 2, 32, {}),
    "blocks of 16, two choosers of a KV head": ((1, 70, 4, 1, 64), 2, 3, 16, {"documents": (0, 31, 32, 70)}),
    "blocks of 128, group of 3, width 128": ((1, 270, 3, 1, 128), 1, 2, 128, {"documents": (0, 140, 270)}),
    "a number of blocks": ((2, 100, 2, 2, 64), 2, 5, 16, {"counts": True, "documents": (0, 3, 60, 100)}),
}


def made(name):
    shape, choosers, count, block, more = CASES[name]
    batch, tokens = shape[:2]
    settings = {"block": block}
    if "documents" in more:
        settings["documents"] = bounds_of(tokens, more["documents"], batch)
    if "counts" in more:
        generator = torch.Generator().manual_seed(7)
        counts = torch.randint(-1, count + 2, (batch, tokens, choosers), generator=generator, dtype=torch.int32)
        settings["counts"] = counts.to(DEVICE)
    return inputs(*shape), blocks_of(batch, tokens, choosers, count, block), settings


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_definition(name, deterministic):
    qkv, indices, settings = made(name)
    ours = lambda *x, **s: sieve.selected_attention(*x, indices, **s, deterministic=deterministic)  # noqa: E731
    compare(name, ours, lambda *x, **s: definitions.selected_attention(*x, indices, **s), qkv, settings)


def passes(qkv, indices, **settings):
    """Output and gradients."""
    copies = [x.detach().clone().requires_grad_() for x in qkv]
    o = sieve.selected_attention(*copies, indices, **settings)
    return [o.detach(), *torch.autograd.grad(o, copies, random(*o.shape, device=DEVICE, seed=9))]


def test_order_repeats_and_what_is_no_block_change_no_bit():
    qkv, _, _ = made("blocks of 64")
    position = torch.arange(150, device=DEVICE)
    plain = torch.stack([position // 64, torch.where(position < 64, -1, 0)], -1).int()
    plain = plain[None, :, None].expand(1, -1, 2, -1).contiguous()
    expected = passes(qkv, plain)
    none = torch.full_like(plain, -1)
    for changed in (
        plain.flip(-1), torch.cat([none, plain], -1), torch.cat([plain, plain.flip(-1)], -1),
        torch.cat([plain, none + 4, none + LARGEST], -1), torch.cat([none - 6, plain], -1).contiguous(),
        plain.long(), torch.cat([plain.long(), none.long() + (1 << 32)], -1),
    ):  # fmt: skip
        for x, y in zip(expected, passes(qkv, changed)):
            assert torch.equal(x, y)
    # The first of six indices.
    more = torch.cat([plain, torch.full_like(plain, 1), none], -1)
    counts = torch.full((1, 150, 2), 2, dtype=torch.int32, device=DEVICE)
    for x, y in zip(expected, passes(qkv, more, counts=counts)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("block", [16, 128])
def test_all_blocks_are_dense_attention(block):
    qkv = inputs(1, 140, 4, 2, 64, seed=3)
    count = -(-140 // block)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    indices = order.expand(1, 140, 2, count).contiguous()
    bounds = bounds_of(140, (0, 41, 140))
    ours = lambda *x: sieve.selected_attention(*x, indices, block=block, documents=bounds)  # noqa: E731
    compare("all blocks", ours, lambda *x: definitions.attention(*x, documents=bounds), qkv)


def test_without_a_block_there_is_no_output_and_no_gradient():
    qkv = inputs(1, 80, 4, 2, 64, seed=4)
    indices = blocks_of(1, 80, 2, 2, 64, seed=4)
    counts = torch.zeros(1, 80, 2, dtype=torch.int32, device=DEVICE)
    counts[:, 70:, 1] = 2
    indices[:, 70:, 1] = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    o, dq, dk, dv = passes(qkv, indices, counts=counts)
    assert (o[:, :70] == 0).all() and (dq[:, :70] == 0).all()
    assert (o[:, :, :2] == 0).all() and (dq[:, :, :2] == 0).all()
    assert (dk[:, :, 0] == 0).all() and (dv[:, :, 0] == 0).all()
    assert (o[:, 70:, 2:] != 0).any() and (dk[:, :, 1] != 0).any()
    _, lse, chosen = ops.selected_forward(*qkv, indices, counts, None, None, 0.125, 64)
    empty = (counts == 0).transpose(1, 2).repeat_interleave(2, 1)
    assert (lse[empty] == -torch.inf).all() and torch.isfinite(lse[~empty]).all()
    assert (chosen[counts == 0] == -1).all()
    none = torch.full((1, 80, 2, 3), -1, dtype=torch.int32, device=DEVICE)
    assert all((x == 0).all() for x in passes(qkv, none))


def test_gradients_of_the_definition_are_finite_differences():
    """In f64, where a difference is exact enough; that the kernels have the definition's gradients is tested above."""
    generator = torch.Generator().manual_seed(8)
    qkv = [torch.randn(1, 22, n, 4, dtype=torch.float64, generator=generator).requires_grad_() for n in (4, 2, 2)]
    indices = blocks_of(1, 22, 2, 2, 16, seed=8).cpu()
    counts = torch.randint(0, 3, (1, 22, 2), generator=generator, dtype=torch.int32)
    given = {"block": 16, "counts": counts, "documents": [x.cpu() for x in bounds_of(22, (0, 3, 22))]}
    assert torch.autograd.gradcheck(lambda *x: definitions.selected_attention(*x, indices, **given), qkv)


def test_a_step_along_the_gradient_changes_the_output_by_its_norm():
    """A central difference of the kernels themselves, whose outputs are rounded to 2^-9."""
    qkv, indices, settings = made("blocks of 64")
    d_o = random(*qkv[0].shape, device=DEVICE, seed=9)
    gradients = passes(qkv, indices, **settings)[1:]
    for at, gradient in enumerate(gradients):
        step = (gradient.float() * (4 / gradient.float().norm())).to(gradient.dtype)
        moved = []
        for sign in (1, -1):
            there = [x + sign * step if n == at else x for n, x in enumerate(qkv)]
            o = sieve.selected_attention(*there, indices, **settings)
            moved.append((o.double() * d_o.double()).sum())
        taken = (qkv[at] + step).double() - (qkv[at] - step).double()
        expected = (taken * gradient.double()).sum()
        assert abs(moved[0] - moved[1] - expected) <= 0.01 * expected, at


def test_keys_that_no_query_has_are_not_read():
    q, k, v = inputs(1, 200, 4, 2, 64, seed=5)
    indices = torch.tensor([2, 0, -1], dtype=torch.int32, device=DEVICE).expand(1, 200, 2, 3).contiguous()
    expected = passes((q, k, v), indices, block=64)
    poisoned = [x.clone() for x in (k, v)]
    for x in poisoned:
        x[:, 64:128] = x[:, 192:] = float("nan")
    got = passes((q, *poisoned), indices, block=64)
    for x, y in zip(expected, got):
        assert torch.equal(x, y)
    for x in got[2:]:
        assert (x[:, 64:128] == 0).all() and (x[:, 192:] == 0).all() and (x[:, :64] != 0).any()


@pytest.mark.parametrize("name", CASES)
def test_block_sums(name):
    (q, k, v), indices, settings = made(name)
    exact = definitions.selected_block_sums(q.double(), k.double(), indices, **settings)
    with torch.no_grad():
        o, sums = sieve.selected_attention(q, k, v, indices, block_sums=True, **settings)
        assert torch.equal(o, sieve.selected_attention(q, k, v, indices, **settings))
    assert sums.shape == indices.shape and sums.dtype == torch.float32
    assert (sums - exact).abs().max() <= 2e-5 * exact.max()
    # Beside gradients, which do not flow through the sums.
    leaf = q.clone().requires_grad_()
    o, again = sieve.selected_attention(leaf, k, v, indices, block_sums=True, **settings)
    assert torch.equal(again, sums) and not again.requires_grad
    assert torch.autograd.grad(o, leaf, torch.ones_like(o))[0].isfinite().all()


def drawn(seed):
    draw = Random(seed)
    group, width = draw.randint(1, 64 if seed % 2 else 6), draw.choice([64, 128])
    tokens = draw.randint(30, LONGEST)
    kv_heads = draw.randint(1, 4 if group < 6 else 1)
    heads, block, batch = group * kv_heads, draw.choice([16, 32, 64, 128]), draw.randint(1, 2)
    if DEVICE == "cuda":
        if is_long := seed % 10 == 0:
            tokens = round(LONGEST * (LONG_ROW / LONGEST) ** draw.random())
        group = min(group, max(PAIRS // tokens**2, 1))
        kv_heads = draw.randint(1, min(128, max(PAIRS // tokens**2, 1)) // group)
        heads, batch = group * kv_heads, 1 if is_long else batch
    choosers = kv_heads * draw.choice([n for n in range(1, group + 1) if group % n == 0])
    if DEVICE == "cpu":
        heads, kv_heads, choosers, width = (2, 1, draw.randint(1, 2), 64) if seed % 2 else (2, 2, 2, 64)
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(draw.randint(0, 3)))})
    count = draw.choice([1, 2, draw.randint(1, 9), -(-tokens // block)])
    return (batch, tokens, heads, kv_heads, width), choosers, count, block, cuts, draw.random() < 0.5


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_random_shape(seed):
    shape, choosers, count, block, cuts, has_counts = drawn(seed)
    batch, tokens = shape[:2]
    indices = blocks_of(batch, tokens, choosers, count, block, seed)
    settings = {"block": block, "documents": bounds_of(tokens, cuts, batch)}
    if has_counts:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, count + 1, (batch, tokens, choosers), generator=generator, dtype=torch.int32)
        settings["counts"] = counts.to(DEVICE)
    ours = lambda *x, **s: sieve.selected_attention(*x, indices, **s, deterministic=seed % 3 > 0)  # noqa: E731
    plain = lambda *x, **s: definitions.selected_attention(*x, indices, **s)  # noqa: E731
    compare(f"{shape} {choosers} {count} {block} {cuts}", ours, plain, inputs(*shape, seed=seed), settings)


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_few_tokens(tokens):
    """dq is the small difference of large terms there, so its error is compared with these: of o, rounded by 2^-9."""
    qkv = inputs(2, tokens, 4, 2, 64, seed=6)
    indices = torch.zeros(2, tokens, 2, 1, dtype=torch.int32, device=DEVICE)
    copies = [x.float().requires_grad_() for x in qkv]
    o = definitions.selected_attention(*copies, indices, block=16)
    exact = o, *torch.autograd.grad(o, copies, random(*o.shape, device=DEVICE, seed=9).float())
    for name, x, y in zip(("o", "dq", "dk", "dv"), passes(qkv, indices, block=16), exact):
        assert (x.float() - y).abs().max() <= 2**-6 * max(y.abs().max(), 1), name


def given(choosers=2, count=2, tokens=32, width=64, heads=4, **settings):
    q = torch.zeros(1, tokens, heads, width, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(1, tokens, 2 if heads == 4 else 1, width, dtype=torch.bfloat16, device=DEVICE)
    indices = settings.pop("indices", torch.zeros(1, tokens, choosers, count, dtype=torch.int32, device=DEVICE))
    return sieve.selected_attention(q, k, k, indices, **settings)


def at(place, value, **settings):
    indices = torch.full((1, 32, 2, 2), -1, dtype=torch.int32, device=DEVICE)
    indices[:, :, :, 0] = 0
    indices[place] = value
    return given(indices=indices, validate=True, block=16, **settings)


def counts_of(*values, count=2):
    counts = torch.full((1, 32, 2), count, dtype=torch.int32, device=DEVICE)
    counts[0, 5, 0] = values[0] if values else count
    return counts


WRONG = {
    "block is 48; it must be 16, 32, 64 or 128": lambda: given(block=48),
    "block is None; it must be 16, 32, 64 or 128": lambda: given(block=None),
    "window is 9, which has no kernel; they must be window=None and causal=True": lambda: given(window=9),
    "causal is False, which has no kernel": lambda: given(causal=False),
    "indices has shape [1, 32, 3, 2], expected [1, 32, 2, 2]": lambda: given(choosers=3),
    "number of indices 0 is not supported": lambda: given(count=0),
    "indices is a tensor [4]; it must be a tensor of 4 axes": lambda: given(
        indices=torch.zeros(4, dtype=torch.int32, device=DEVICE)
    ),
    "indices is f32, expected i32": lambda: given(indices=torch.zeros(1, 32, 2, 2, device=DEVICE)),
    "counts has shape [1, 32, 1], expected [1, 32, 2]": lambda: given(counts=counts_of()[..., :1]),
    "counts is 3; it must be a tensor of 3 axes, or None": lambda: given(counts=3),
    "heads of 96 is not supported (supported: heads of 64 and 128)": lambda: given(width=96),
    "65 query heads a KV head": lambda: given(heads=65, choosers=1),
    "indices[0, 20, 1, 1] is 2: a block after the query's own": lambda: at((0, 20, 1, 1), 2),
    "indices[0, 20, 1, 1] is -2: it must be a block, or -1 for none": lambda: at((0, 20, 1, 1), -2),
    "indices[0, 20, 1, 1] is 0: a block given before": lambda: at((0, 20, 1, 1), 0),
    "counts[0, 5, 0] is 3: it must be from 0 to 2, the indices": lambda: at((0, 0, 0, 0), 0, counts=counts_of(3)),
    "counts[0, 5, 0] is -1": lambda: at((0, 0, 0, 0), 0, counts=counts_of(-1)),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_has_no_kernel_is_said_in_a_sentence(sentence):
    with pytest.raises(sieve.SieveError) as error:
        WRONG[sentence]()
    assert sentence in str(error.value) and str(error.value).startswith("selected_attention: ")


def test_valid_indices_pass():
    at((0, 20, 1, 1), 1)
    # An index behind the count is not looked at.
    at((0, 5, 0, 1), 9, counts=counts_of(1))


@pytest.mark.parametrize("block_sums", [False, True])
def test_compiled_without_a_break(block_sums):
    qkv, indices, settings = made("a number of blocks")
    call = lambda *x: sieve.selected_attention(*x, indices, **settings, block_sums=block_sums)  # noqa: E731
    inputs, results = [x.requires_grad_() for x in qkv], []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        o, *sums = function(*inputs) if block_sums else (function(*inputs),)
        results.append((o, *sums, *torch.autograd.grad(o, inputs, torch.ones_like(o))))
    for ours, compiled in zip(*results):
        assert torch.equal(ours, compiled)


def test_opcheck():
    qkv, indices, settings = made("blocks of 64")
    counts = torch.full((1, 150, 2), 2, dtype=torch.int32, device=DEVICE)
    for number in (None, counts):
        torch.library.opcheck(
            torch.ops.sieve.selected_forward.default, (*qkv, indices, number, None, None, 0.125, 64, number is None, True)
        )


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    qkv = [x.requires_grad_() for x in inputs(1, 150, 4, 2, 64)]
    with FlopCounterMode(display=False) as counter:
        o = sieve.selected_attention(*qkv, blocks_of(1, 150, 2, 2, 16), block=16)
        torch.autograd.grad(o, qkv, torch.ones_like(o))
    # The first 32 queries see all keys before them, the others 32.
    assert counter.get_total_flops() == (2 + 5) * 2 * 4 * 64 * (32 * 33 // 2 + 118 * 32)
