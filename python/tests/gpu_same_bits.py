"""Whole rows beside steps with `same_bits`, to the bit: a check of on_gpu.py. Each of several rows is at a length of
its own; caches hold NaN behind it. A control without `same_bits` counts differences, too.
"""

import functools

import torch
from parity import random

import sieve_attention as sieve

HEADS, KV_HEADS = 16, 8
# A later row of a batch lags so many tokens behind the row before it.
LAG = 37
# More places than the kernel in order takes unasked.
CAPACITY = 9000
WAYS = {
    "dense": {},
    "dense, width 64": {"width": 64},
    "window": {"window": 300},
    "window and sinks": {"window": 300, "sinks": True},
    "bands": {"window": 64, "bands": sieve.Bands(4, 1500, 4)},
}


class Differences:
    """Counts elements that differ, on the device, by name."""

    def __init__(self):
        self.counts, self.sizes = {}, {}

    def add(self, name, got, expected):
        self.counts[name] = self.counts.get(name, 0) + (got != expected).sum()
        self.sizes[name] = self.sizes.get(name, 0) + expected.numel()

    def say(self, name):
        """Prints what was counted under a name, so that a crash leaves the cases before it."""
        counted = {key: int(count) for key, count in self.counts.items() if key.startswith(name)}
        print(f"same_bits, elements that differ: {counted}", flush=True)

    def numbers(self):
        return {f"{name}: of {self.sizes[name]}": int(count) for name, count in self.counts.items()}


def tensors(batch, tokens, width, device):
    sizes = [(HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)]
    return [random(batch, tokens, heads, width, device=device, seed=seed) for heads, seed in sizes]


def lengths_of(turn, batch, tokens, device):
    """Tokens before the next one of each row: row 0 is at `turn`; a row waits at its first token, and at its last."""
    at = turn - LAG * torch.arange(batch, device=device)
    return at.clamp(0, tokens - 1)


def turns_of(batch, tokens):
    return range(tokens + LAG * (batch - 1))


def dense(found, name, batch, tokens, device, same_bits, width=128, sinks=False, **keys):
    """Every token of some rows by steps that fill the cache, beside their row."""
    q, k, v = tensors(batch, tokens, width, device)
    keys["sinks"] = random(HEADS, device=device, seed=4) if sinks else None
    whole, rows = sieve.attention(q, k, v, **keys), torch.arange(batch, device=device)
    if same_bits:
        found.add(f"{name}: rows alone", torch.cat([sieve.attention(q[n:n+1], k[n:n+1], v[n:n+1], **keys)
                                                    for n in range(batch)]), whole)  # fmt: skip
        tracked = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            found.add(f"{name}: with gradients", sieve.attention(*tracked, **keys).detach(), whole)
    caches = torch.full((2, batch, KV_HEADS, CAPACITY, width), torch.nan, dtype=q.dtype, device=device)
    for turn in turns_of(batch, tokens):
        at = lengths_of(turn, batch, tokens, device)
        token = [x[rows, at][:, None] for x in (q, k, v)]
        o = sieve.decode(*token, *caches, at.int(), **keys, same_bits=same_bits)
        found.add(name, o[:, 0], whole[rows, at])


def long_prompt(found, name, device, same_bits, tokens=CAPACITY - 1):
    """A few tokens behind thousands, and several at once."""
    q, k, v = tensors(2, tokens, 128, device)
    whole = sieve.attention(q, k, v)
    for at in (tokens // 2, tokens - 128, tokens - 5):
        caches = torch.full((2, 2, KV_HEADS, CAPACITY, 128), torch.nan, dtype=q.dtype, device=device)
        caches[0, :, :, :at], caches[1, :, :, :at] = (x[:, :at].transpose(1, 2) for x in (k, v))
        length = torch.full((2,), at, dtype=torch.int32, device=device)
        token = [x[:, at : at + 3] for x in (q, k, v)]
        found.add(name, sieve.decode(*token, *caches, length, same_bits=same_bits), whole[:, at : at + 3])


def blocks_of(batch, tokens, choosers, block, device, count=5, some_lack=False):
    """Ascending blocks of each query and chooser at random, its own the last, as many as there are up to `count`, then
    -1; with `some_lack` a tenth of the queries lack their own block, and some have none."""
    draw = torch.Generator().manual_seed(5)
    numbers = torch.rand(batch, tokens, choosers, -(-tokens // block), generator=draw).to(device)
    own = (torch.arange(tokens, device=device) // block)[None, :, None, None]
    each = torch.arange(numbers.shape[-1], device=device)
    numbers = torch.where(each == own, 2.0, numbers).masked_fill(each > own, -1.0)
    drawn = numbers.topk(min(count, len(each)), -1)
    lacks = (torch.rand(batch, tokens, choosers, 1, generator=draw).to(device) < 0.1) & some_lack
    is_none = (drawn.values < 0) | (lacks & (drawn.indices == own))
    chosen = drawn.indices.masked_fill(is_none, tokens).sort(-1).values
    return torch.where(chosen == tokens, -1, chosen).int()


def selected(found, name, batch, tokens, device, same_bits, block=64, width=128):
    """Chosen blocks of a cache beside those of a row; without same_bits lists lack nothing, as that kernel wants."""
    q, k, v = tensors(batch, tokens, width, device)
    indices = blocks_of(batch, tokens, KV_HEADS, block, device, some_lack=same_bits)
    whole, rows = sieve.selected_attention(q, k, v, indices, block=block), torch.arange(batch, device=device)
    caches = torch.full((2, batch, KV_HEADS, tokens + 5, width), torch.nan, dtype=q.dtype, device=device)
    for turn in turns_of(batch, tokens):
        at = lengths_of(turn, batch, tokens, device)
        for cache, x in zip(caches, (k, v)):
            cache[rows, :, at] = x[rows, at]
        given = q[rows, at][:, None], None, None, *caches, at.int()
        o = sieve.decode(*given, chosen=indices[rows, at], block=block, same_bits=same_bits)
        found.add(name, o[:, 0], whole[rows, at])


def dma(found, name, batch, tokens, device, same_bits, keep, width=128, **form):
    """A row of `dma_attention` beside `dma_decode`, with gradients and without: to keep `o_low` would change bits."""
    q, k, v = tensors(batch, tokens, width, device)
    w_dt = random(KV_HEADS, KV_HEADS * width, device=device, dtype=torch.float32, scale=0.05, seed=6)
    a, rows = random(KV_HEADS, device=device, dtype=torch.float32, seed=7).abs(), torch.arange(batch, device=device)
    whole_of = functools.partial(sieve.dma_attention, keep=keep, same_bits=same_bits, **form)
    whole = whole_of(q, k, v, w_dt, a)
    if same_bits:
        found.add(f"{name}: with gradients", _with_gradients(whole_of, q, k, v, w_dt, a), whole)
    slopes = None if form else torch.tensor(sieve.dma_slopes(keep, KV_HEADS), device=device)
    scores = sieve.dma_scores(v, w_dt, a)
    slots = [torch.full((batch, KV_HEADS, keep, width), torch.nan, dtype=q.dtype, device=device) for _ in range(2)]
    slots.append(torch.zeros(batch, KV_HEADS, keep, device=device))
    slots.append(torch.zeros(batch, KV_HEADS, keep, dtype=torch.int32, device=device))
    for turn in turns_of(batch, tokens):
        at = lengths_of(turn, batch, tokens, device)
        token = [x[rows, at][:, None] for x in (q, k, v)]
        z = sieve.dma_scores(token[2], w_dt, a)[:, :, 0]
        if same_bits:
            found.add(f"{name}: scores", z, scores[rows, :, at])
        if slopes is not None:
            z = z + at[:, None].float() * slopes
        # A row that waits at its last token would take a second slot for it.
        is_new = turn - LAG * torch.arange(batch, device=device) < tokens
        o = sieve.dma_decode(*token, z, *slots, at.int(), same_bits=same_bits, **form)
        found.add(name, torch.where(is_new[:, None, None], o[:, 0], whole[rows, at]), whole[rows, at])


def _with_gradients(whole_of, *inputs):
    """The output of a pass that keeps what its gradients read; these are near those of the usual order of keys."""
    results = []
    for same_bits in (True, False):
        tracked = [x.detach().clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            o = whole_of(*tracked, same_bits=same_bits)
        results.append((o.detach(), *torch.autograd.grad(o, tracked, torch.ones_like(o))))
    for ours, usual in zip(*results):
        assert (ours.float() - usual.float()).norm() <= 2e-2 * usual.float().norm(), "a gradient"
    return results[0][0]


def packed(found, name, call, *inputs, tokens, device):
    """A document that begins at a multiple of 128 beside a row of its own."""
    first = tokens // 2 // 128 * 128
    o = call(*inputs, documents=torch.tensor([0, first, tokens], device=device))
    found.add(name, o[:, first:], call(*(x[:, first:] for x in inputs[:3]), *inputs[3:]))


def refusals(device):
    """Calls that have no such kernel are refused by name."""
    q, k, v = (x[:, :1] for x in tensors(1, 3, 80, device))
    caches, length = torch.zeros(2, 1, KV_HEADS, 40, 80, device=device).bfloat16(), torch.zeros(1, device=device).int()
    call = functools.partial(sieve.decode, q, k, v, *caches, length, same_bits=True)
    for arch, words in (("sm_90a", "of 64 or of 128 columns, and these have 80"), ("sm_80", "this GPU has 8.0")):
        fits, why = sieve.supports(call.func, *call.args, arch=arch, **call.keywords)
        assert not fits and words in why, why


@torch.no_grad()
def all_of(found, device, same_bits, tokens, batches):
    """Every kind of keys in every batch."""
    for batch in batches:
        for name, keys in WAYS.items():
            dense(found, f"{name}, {batch}", batch, tokens, device, same_bits, **keys)
            found.say(f"{name}, {batch}")
        for block, width in ((64, 128), (128, 64), (16, 128)):
            name = f"blocks of {block}, {batch}"
            selected(found, name, batch, tokens, device, same_bits, block, width)
            found.say(name)
        for name, keep, width, form in (
            ("dma", 256, 128, {}), ("dma, width 64", 100, 64, {}), ("dma as published", 256, 128, {"preset": "paper"}),
            ("dma, every key kept", 2048, 128, {}),
        ):  # fmt: skip
            dma(found, f"{name}, {batch}", batch, tokens, device, same_bits, keep, width, **form)
            found.say(f"{name}, {batch}")


def same_bits():
    """No element of a step with `same_bits` differs from its row, at lengths from 1 to 2,000 in batches of 1, 3 and 16;
    without it elements of steps over long caches, blocks and DMA's keys do, or the check would show nothing.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refusals(device)
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return "no H100 or H200"
    tokens, batches = (2000, (1, 3, 16)) if device == "cuda" else (6, (1, 2))
    found, control = Differences(), Differences()
    all_of(found, device, True, tokens, batches)
    with torch.no_grad():
        long_prompt(found, "long prompt", device, True, CAPACITY - 1 if device == "cuda" else 300)
        q, k, v = tensors(1, tokens, 128, device)
        packed(found, "dense, packed", sieve.attention, q, k, v, tokens=tokens, device=device)
        w_dt = random(KV_HEADS, KV_HEADS * 128, device=device, dtype=torch.float32, scale=0.05, seed=6)
        call = functools.partial(sieve.dma_attention, keep=256, same_bits=True)
        packed(found, "dma, packed", call, q, k, v, w_dt, w_dt[:, 0].contiguous(), tokens=tokens, device=device)
    all_of(control, device, False, tokens, batches[:1])
    numbers = {**found.numbers(), **{f"without same_bits, {name}": n for name, n in control.numbers().items()}}
    wrong = {name: int(n) for name, n in found.counts.items() if n}
    assert not wrong, f"elements that differ: {wrong}; all: {numbers}"
    if device == "cuda":
        equal = [name for name, n in control.counts.items() if not n and name.startswith(("dense", "blocks", "dma"))]
        assert not equal, f"equal without same_bits, too: {equal}; all: {numbers}"
    return numbers
