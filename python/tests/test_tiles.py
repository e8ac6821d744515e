"""block_sparse beside its definition: lists by key tiles, widths, ragged lengths, unread keys, and whole masks."""

from random import Random

import pytest
import torch
from conftest import DEVICE
from parity import compare, random

import sieve_attention as sieve
from sieve_attention import _tiles, definitions, ops


def inputs(tokens, heads, kv_heads, width):
    return [random(1, tokens, n, width, device=DEVICE, seed=at) for at, n in enumerate((heads, kv_heads, kv_heads))]


def bools(heads, tokens, block, density=0.4, seed=0):
    """A random mask `[heads, blocks, blocks]`, with a row and a column of nothing where there are several."""
    count = -(-tokens // block)
    mask = torch.rand(heads, count, count, generator=torch.Generator().manual_seed(seed)) < density
    if count > 1:
        mask[0, count // 2] = False
        mask[:, :, count // 3] = False
    return mask.to(DEVICE)


def definition(mask, block):
    """Attention under a mask of each query head by plain torch."""

    def each(q, k, v):
        tokens, group = q.shape[1], q.shape[2] // k.shape[2]
        visible = mask.repeat_interleave(block, 1).repeat_interleave(block, 2)[None, :, :tokens, :tokens]
        visible = visible & torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        heads = [
            (q[:, :, [h]], k[:, :, [h // group]], v[:, :, [h // group]], visible[:, [h]]) for h in range(q.shape[2])
        ]
        return torch.cat([definitions.masked_attention(*x) for x in heads], 2)

    return each


def ours(mask, block, deterministic):
    return lambda *x: sieve.block_sparse(*x, sieve.block_mask(mask, block), deterministic=deterministic)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("shape", [(700, 4, 2, 64), (257, 3, 1, 128), (1, 2, 2, 64), (130, 6, 2, 80)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(shape, block, deterministic):
    tokens, heads, *_ = shape
    mask = bools(heads, tokens, block)
    compare("tiles", ours(mask, block, deterministic), definition(mask, block), inputs(*shape))


BOUNDS = [0, 100, 100, 357, 364, 620]


def of_documents(device):
    """The row's documents, a mask that counts their blocks of 128, and what plain torch attends to, `[heads, 620, 620]`."""
    lengths = [100, 257, 7, 256]
    blocks = [-(-length // 128) for length in lengths]
    mask = torch.rand(4, sum(blocks), sum(blocks), generator=torch.Generator().manual_seed(8)) < 0.6
    visible = torch.zeros(4, 620, 620, dtype=torch.bool)
    begin, at = 0, 0
    for length, count in zip(lengths, blocks):
        part = mask[:, at : at + count, at : at + count].repeat_interleave(128, 1).repeat_interleave(128, 2)
        visible[:, begin : begin + length, begin : begin + length] = part[:, :length, :length].tril()
        begin, at = begin + length, at + count
    documents = sieve.documents(torch.tensor(BOUNDS, device=device), 620)
    return documents, mask.to(device), visible.to(device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_documents(deterministic):
    documents, mask, visible = of_documents(DEVICE)
    tiles = sieve.block_mask(mask, 128, documents)

    def plain(q, k, v):
        heads = [(q[:, :, [h]], k[:, :, [h // 2]], v[:, :, [h // 2]], visible[None, [h]]) for h in range(4)]
        return torch.cat([definitions.masked_attention(*x) for x in heads], 2)

    given = inputs(620, 4, 2, 64)
    compare("documents", lambda *x: sieve.block_sparse(*x, tiles, deterministic=deterministic), plain, given)


def test_documents_that_end_at_blocks_take_no_copies_and_others_are_refused_by_their_blocks():
    whole = sieve.documents(torch.tensor([0, 256, 384], device=DEVICE), 384)
    mask = torch.ones(2, 3, 3, device=DEVICE)
    assert sieve.block_mask(mask, 128, whole).places is None
    # Two blocks of the second document's row of blocks see none of the first.
    assert len(sieve.block_mask(mask, 128, whole).words) == 3 + 2 * 3 + 2 * 4
    with pytest.raises(sieve.SieveError, match="3 x 3 blocks; the documents have 4 of 128"):
        sieve.block_mask(mask, 128, sieve.documents(torch.tensor([0, 200, 384], device=DEVICE), 384))
    documents, mask, _ = of_documents(DEVICE)
    with pytest.raises(sieve.SieveError, match="the mask is one of 620 tokens, and q has 500"):
        sieve.block_sparse(*inputs(500, 4, 2, 64), sieve.block_mask(mask, 128, documents))


def mask_row(mask, head, row):
    """How many blocks of keys a row of the mask names."""
    at = 1 + head * mask.shape[1] + row
    return mask.words[at + 1] - mask.words[at]


def parts_of(words, lists):
    """Of a mask by key tiles: the lists that each block goes through, and each list's steps, as (query tile, halves,
    head, turn)."""
    blocks, starts = int(words[0]), words[1 : lists + 2].tolist()
    places = -(-lists // blocks) * blocks
    order = words[lists + 2 : lists + 2 + places].tolist()
    at = lists + 2 + places
    pairs = [(x >> 2, x & 3, y >> 16, y & 0xFFFF) for x, y in words[at + at % 2 :].view(-1, 2).tolist()]
    walks = [[x for x in order[block::blocks] if x >= 0] for block in range(blocks)]
    return walks, [pairs[begin:end] for begin, end in zip(starts, starts[1:])]


@pytest.mark.parametrize("heads", [6, 8])
@pytest.mark.parametrize("block", [64, 128])
def test_lists_name_each_query_tile_of_a_key_tile_once(block, heads):
    kv_heads, tokens = 2, 1000
    mask = sieve.block_mask(bools(heads, tokens, block, seed=5), block)
    words = mask.by_keys(kv_heads, deterministic=False).cpu()
    assert mask.by_keys(kv_heads) is mask.by_keys(kv_heads)
    count, steps = -(-tokens // 128), -(-tokens // block) * block // 64
    shares = kv_heads * _tiles.head_shares(heads // kv_heads)
    walks, listed = parts_of(words, shares * count)
    assert sorted(x for walk in walks for x in walk) == list(range(shares * count))
    # By hand, from the words that the forward pass reads.
    rows = mask.words[1 : 2 + heads * mask.shape[1]].tolist()
    tiles = mask.words[2 + heads * mask.shape[1] : -1].tolist()
    kept = {(row, tile) for row in range(len(rows) - 1) for tile in tiles[rows[row] : rows[row + 1]]}
    for share in range(shares):
        for tile in range(count):
            wanted = []
            for step in reversed(range(steps)):
                for head in range(heads // shares):
                    row = (share * heads // shares + head) * mask.shape[1] + step * 64 // block
                    halves = [(row, (tile * 128 + half * 64) // block) in kept for half in (0, 1)]
                    before = {x * block // 128 for r, x in kept if r == row and x * block // 128 < tile}
                    if any(halves):
                        wanted.append((step, halves[0] + 2 * halves[1], head, len(before)))
            assert listed[share * count + tile] == wanted, (share, tile)


@pytest.mark.parametrize("heads_at_once", [1, 2, 6, None])
def test_blocks_that_wait_for_their_turns_come_to_an_end_at_any_speed(heads_at_once):
    heads, kv_heads, tokens, blocks = 6, 2, 2000, 7
    mask = sieve.block_mask(bools(heads, tokens, 128, seed=6).cpu(), 128)
    count = -(-tokens // 128)
    schedule = heads_at_once and (lambda *x: _tiles._rounds(*x, tiles=count, heads_at_once=heads_at_once))
    words = _tiles._tile_lists(mask.words, 128, mask.shape, kv_heads, blocks, schedule)
    walks, listed = parts_of(words, heads * count)
    assert sorted(x for walk in walks for x in walk) == list(range(heads * count))
    todo = [[(at // count, step, turn) for at in walk for step, _, _, turn in listed[at]] for walk in walks]
    loads = [len(each) for each in todo]
    assert schedule is None or max(loads) <= 1.2 * min(loads), loads
    drawn, added = Random(heads_at_once), {}
    while any(todo):
        moved = False
        for each in drawn.sample(todo, blocks):
            if not each:
                continue
            head, step, turn = each[0]
            own = added.get((head, step), 0) == turn
            if own and drawn.random() < 0.5:
                added[head, step] = turn + 1
                each.pop(0)
            moved |= own
        assert moved, "every block waits"
    for head, step in added:
        assert added[head, step] == int(mask_row(mask, head, step * 64 // 128))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_of_blocks_that_are_not_read_may_hold_anything(block, deterministic):
    tokens, heads, kv_heads = 640, 4, 2
    q, k, v = inputs(tokens, heads, kv_heads, 64)
    mask = bools(heads, tokens, block, density=0.5, seed=2)
    # No head reads block 1, whose neighbour in a tile of 128 keys is read.
    mask[:, :, 1], mask[:, 1:, 0] = False, True
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    nan = [q.clone().requires_grad_(), *(x.clone() for x in (k, v))]
    for x in nan[1:]:
        x[:, block : 2 * block] = float("nan")
        x.requires_grad_()
    o, other = (ours(mask, block, deterministic)(*x) for x in (clean, nan))
    d_o = random(*o.shape, device=DEVICE, seed=9)
    gradients, others = (torch.autograd.grad(a, b, d_o) for a, b in ((o, clean), (other, nan)))
    assert torch.equal(o, other)
    for name, x, y in zip("qkv", gradients, others):
        close = torch.equal(x, y) if deterministic else (x.float() - y.float()).norm() <= 1e-2 * x.float().norm()
        assert close and torch.isfinite(y).all(), name
    assert all((x[:, block : 2 * block] == 0).all() for x in others[1:])


@pytest.mark.parametrize("block", [64, 128])
def test_queries_without_a_key_get_no_gradient(block):
    tokens = 500
    q, k, v = (x.requires_grad_() for x in inputs(tokens, 4, 2, 128))
    count = -(-tokens // block)
    mask = torch.ones(4, count, count, dtype=torch.bool, device=DEVICE)
    mask[1, 2] = False
    for deterministic in (False, True):
        tiles = sieve.block_mask(mask, block)
        o, lse = ops.block_sparse(*(x.detach() for x in (q, k, v)), tiles.words, 0.1, (block, block))
        rows = slice(2 * block, min(3 * block, tokens))
        assert (o[:, rows, 1] == 0).all() and (lse[:, 1, rows] == -torch.inf).all()
        (dq,) = torch.autograd.grad(ours(mask, block, deterministic)(q, k, v), q, torch.ones_like(o))
        assert (dq[:, rows, 1] == 0).all() and (dq[:, rows, 0] != 0).any()


@pytest.mark.parametrize("block", [64, 128])
def test_all_blocks_are_dense_attention(block):
    tokens = 400
    given = [x.requires_grad_() for x in inputs(tokens, 4, 2, 64)]
    count = -(-tokens // block)
    mask = torch.ones(4, count, count, device=DEVICE)
    results = []
    for function in (ours(mask, block, True), lambda *x: sieve.attention(*x, deterministic=True)):
        o = function(*given)
        results.append((o, *torch.autograd.grad(o, given, torch.ones_like(o))))
    for name, x, y in zip(("o", "dq", "dk", "dv"), *results):
        assert (x.float() - y.float()).norm() <= 3e-3 * y.float().norm(), name


def test_a_fixed_order_repeats_to_the_bit():
    tokens, repeats = (3000, 200) if DEVICE == "cuda" else (300, 2)
    given = [x.requires_grad_() for x in inputs(tokens, 4, 2, 64)]
    mask = sieve.block_mask(bools(4, tokens, 64), 64)
    first = None
    for _ in range(repeats):
        o = sieve.block_sparse(*given, mask, deterministic=True)
        gradients = torch.autograd.grad(o, given, torch.ones_like(o))
        first = first or gradients
        assert all(torch.equal(x, y) for x, y in zip(first, gradients))


@pytest.mark.parametrize("has_documents", [False, True])
def test_compiled_without_a_break(has_documents):
    given = [x.requires_grad_() for x in inputs(620 if has_documents else 300, 4, 2, 64)]
    documents, of_each, _ = of_documents(DEVICE)
    mask = sieve.block_mask(of_each, 128, documents) if has_documents else sieve.block_mask(bools(4, 300, 128), 128)

    def model(q, k, v):
        return sieve.block_sparse(q, k, v, mask, deterministic=True)

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        o = function(*given)
        results.append((o, *torch.autograd.grad(o, given, torch.ones_like(o))))
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_flops_are_those_of_the_tiles():
    from torch.utils.flop_counter import FlopCounterMode

    tokens, block = 512, 128
    given = [x.requires_grad_() for x in inputs(tokens, 4, 2, 64)]
    mask = torch.eye(4, dtype=torch.bool, device=DEVICE).expand(4, 4, 4).clone()
    mask[:, :, 0] = True
    with FlopCounterMode(display=False) as counter:
        o = sieve.block_sparse(*given, sieve.block_mask(mask, block))
        torch.autograd.grad(o, given, torch.ones_like(o))
    tiles = 4 * 7
    assert counter.get_total_flops() == 7 * 2 * 64 * tiles * block * block
