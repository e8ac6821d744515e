"""Outputs and gradients of every function beside its definition."""

import pytest
import torch
from parity import assert_close, compare, marked, random

import sieve_attention as sieve
from sieve_attention import _library, definitions, functional


def qkv(batch, tokens, heads, kv_heads, width, width_v=None, *, device, scale=1.0):
    shape = (batch, tokens)
    q = random(*shape, heads, width, device=device, scale=scale, seed=1)
    k = random(*shape, kv_heads, width, device=device, scale=scale, seed=2)
    return q, k, random(*shape, kv_heads, width_v or width, device=device, seed=3)


def two_documents(tokens, device, at=(0, 23, 24)):
    return sieve.documents(torch.tensor([*at, tokens], device=device), tokens)


DENSE = {
    "group 2": ((2, 63, 6, 3, 64), {}),
    "one token": ((1, 1, 1, 1, 16), {}),
    "window": ((1, 130, 4, 2, 80), {"window": 17}),
    "window of 1": ((2, 65, 5, 1, 64), {"window": 1}),
    "MLA": ((1, 70, 2, 2, 192, 128), {}),
    "scale": ((1, 129, 3, 3, 128), {"scale": 0.3}),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention(name, deterministic, device):
    shape, settings = DENSE[name]
    ours = lambda *x, **s: sieve.attention(*x, **s, deterministic=deterministic)  # noqa: E731
    compare(name, ours, definitions.attention, qkv(*shape, device=device), settings)


def test_documents(device):
    tokens = 100
    bounds = two_documents(tokens, device)
    assert bounds[0][0, [0, 22, 23, 24, 99]].tolist() == [0, 0, 23, 24, 24]
    assert bounds[1][0, [0, 22, 23, 24, 99]].tolist() == [23, 23, 24, 100, 100]
    inputs = qkv(1, tokens, 4, 2, 64, device=device)
    o, *_ = compare("packed", sieve.attention, definitions.attention, inputs, {"documents": bounds})
    second_document = sieve.attention(*(x[:, 24:] for x in inputs))
    assert (o[:, 24:].float() - second_document.float()).abs().max() < 0.02


BANDS = {
    "two heads": ((1, 130, 4, 2, 64), 9, sieve.Bands(3, 90, 2)),
    "more heads than bands, a reach behind the row": ((2, 65, 3, 3, 32), 5, sieve.Bands(0, 200, 2)),
    "first keys alone": ((1, 70, 2, 1, 128), 7, sieve.Bands(20, 7, 1)),
}


def banded(q, k, v, *, window, bands, documents=None):
    """`attention` with bands by its definition: a mask of all pairs."""
    place, (first, reach, count) = torch.arange(q.shape[1], device=q.device), bands
    start = torch.zeros_like(place)[None] if documents is None else documents[0]
    start, key = start[:, None, :, None], place - start[:, None, :, None]
    mask = definitions.band_mask(place[:, None] - start, key, k.shape[2], first, window, reach, count) & (key >= 0)
    return definitions.masked_attention(q, k, v, mask)


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_bands(name, deterministic, device):
    shape, window, bands = BANDS[name]
    settings, inputs = {"window": window, "bands": bands}, qkv(*shape, device=device)
    ours = lambda *x, **s: sieve.attention(*x, **s, deterministic=deterministic)  # noqa: E731
    compare(name, ours, banded, inputs, settings)
    compare("packed", ours, banded, inputs, settings | {"documents": two_documents(shape[1], device)} if shape[0] == 1
            else settings)  # fmt: skip


def test_a_band_decodes_as_its_row(device):
    (batch, tokens, *sizes), window, bands = BANDS["two heads"]
    q, k, v = qkv(batch, tokens, *sizes, device=device)
    o = sieve.attention(q, k, v, window=window, bands=bands)
    caches = torch.full((2, batch, sizes[1], tokens + 2, sizes[2]), torch.nan, dtype=torch.bfloat16, device=device)
    for at in (0, 1, 10, 63, tokens - 3):
        caches[0, :, :, :at], caches[1, :, :, :at] = (x[:, :at].transpose(1, 2) for x in (k, v))
        new = [x[:, at : at + 2] for x in (q, k, v)]
        length = torch.full((batch,), at, dtype=torch.int32, device=device)
        got = sieve.decode(*new, *caches, length, window=window, bands=bands)
        assert (got.float() - o[:, at : at + 2].float()).abs().max() < 0.02, at
        assert torch.equal(caches[0][:, :, at], k[:, at]), at


def test_bands_without_a_kernel_are_refused(device):
    q, k, v = qkv(1, 30, 2, 1, 64, device=device)
    caches = torch.zeros(2, 1, 1, 40, 64, dtype=torch.bfloat16, device=device)
    length, bands = torch.full((1,), 30, dtype=torch.int32, device=device), sieve.Bands(2, 20, 1)
    bias = torch.zeros(1, 1, 30, device=device)
    for call, words in (
        (lambda: sieve.attention(q, k, v, bands=bands), "without a window"),
        (lambda: sieve.attention(q, k, v, window=4, bands=bands, bias=bias), "with a bias"),
        (lambda: sieve.attention(q, k, v, window=4, bands=(2, 20)), "Bands(first, reach, number)"),
        (lambda: sieve.decode(q[:, :1], None, None, *caches, length, window=4, bands=bands), "without k and v"),
    ):
        with pytest.raises(sieve.SieveError, match=words.replace("(", r"\(").replace(")", r"\)")):
            call()


def test_large_scores(device):
    compare("large", sieve.attention, definitions.attention, qkv(1, 96, 2, 1, 64, device=device, scale=12.0))


def test_bias(device):
    added = random(2, 2, 75, device=device, dtype=torch.float32, scale=3, seed=4)
    inputs = (*qkv(2, 75, 4, 2, 64, device=device), added)
    ours = lambda q, k, v, bias: sieve.attention(q, k, v, bias=bias.float())  # noqa: E731
    plain = lambda q, k, v, bias: definitions.attention(q, k, v, bias=bias)  # noqa: E731
    compare("bias", ours, plain, inputs, names=("q", "k", "v", "bias"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"documents": (0, 37, 38)}])
def test_sinks(settings, dtype, device):
    """Outputs and gradients; a sink of -inf is none, and a very large one leaves nothing to the keys."""
    tokens, bounds = 75, settings.get("documents")
    if bounds is not None:
        settings = {"documents": two_documents(tokens, device, bounds)}
    inputs = qkv(1 if bounds else 2, tokens, 4, 2, 64, device=device)
    sinks = random(4, device=device, dtype=torch.float32, scale=2, seed=5).to(dtype)
    ours = lambda q, k, v, sinks, **s: sieve.attention(q, k, v, sinks=sinks, **s)  # noqa: E731
    plain = lambda q, k, v, sinks, **s: definitions.attention(q, k, v, sinks=sinks, **s)  # noqa: E731
    compare("sinks", ours, plain, (*inputs, sinks), settings, names=("q", "k", "v", "sinks"))
    with torch.no_grad():
        none = sieve.attention(*inputs, **settings)
        assert torch.equal(sieve.attention(*inputs, sinks=torch.full_like(sinks, -torch.inf), **settings), none)
        assert (sieve.attention(*inputs, sinks=torch.full_like(sinks, 1e30), **settings) == 0).all()


def test_strides_are_walked_or_copied(device):
    packed = random(2, 40, 8, 64, device=device, seed=5)
    q, k, v = packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]
    expected = sieve.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(sieve.attention(q, k, v), expected)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(sieve.attention(*heads_first), expected)
    op = functional.ops.IMPLEMENTATIONS["attention_forward"]
    copies = lambda *x: op.plan((*x, None, None, None), (0.1, None), _library.EMULATED)[1]  # noqa: E731
    assert copies(q, k, v) == [] and copies(*heads_first) == [0, 1, 2]


@pytest.mark.parametrize("keep, local", [(20, 0), (20, 5), (7, 7), (1, 0), (500, 3)])
def test_selection_is_exact(keep, local, device):
    tokens = 150
    rank = random(2, 3, tokens, device=device, dtype=torch.float32, seed=6)
    rank = (rank * 3).round() / 3  # ties
    for bounds in (None, [x.expand(2, -1).contiguous() for x in two_documents(tokens, device)]):
        selection = sieve.select(rank, keep=keep, local=local, documents=bounds)
        i = torch.arange(tokens, device=device)
        visible = (i <= i[:, None]) & (i[:, None] < selection.expire[:, :, None, :])
        kept = definitions.kept_keys(rank, keep=keep, local=local, documents=bounds)
        assert torch.equal(visible, kept)
        assert (selection.lists is None) == (keep >= tokens)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("keep, local, documents", [(24, 0, False), (24, 8, True), (300, 0, False)])
def test_expiring_attention(keep, local, documents, deterministic, device):
    tokens = 140
    bounds = two_documents(tokens, device) if documents else None
    rank = random(1, 2, tokens, device=device, dtype=torch.float32, seed=7)
    selection = sieve.select(rank, keep=keep, local=local, documents=bounds)
    kept = definitions.kept_keys(rank, keep=keep, local=local, documents=bounds)
    added = random(1, 2, tokens, device=device, dtype=torch.float32, seed=8)
    inputs = (*qkv(1, tokens, 4, 2, 64, device=device), added)
    ours = lambda q, k, v, bias: sieve.expiring_attention(  # noqa: E731
        q, k, v, bias.float(), selection, deterministic=deterministic
    )
    plain = lambda q, k, v, bias: definitions.masked_attention(q, k, v, kept, bias)  # noqa: E731
    got = compare("expiring", ours, plain, inputs, names=("q", "k", "v", "bias"))
    unseen = ~kept.any(2)
    assert unseen.any() or keep >= tokens or local
    for gradient in (got[2].transpose(1, 2), got[3].transpose(1, 2), got[4][..., None]):
        assert (gradient[unseen] == 0).all()
    unbiased = sieve.expiring_attention(*inputs[:3], None, selection)
    exact = definitions.masked_attention(*(x.float() for x in inputs[:3]), kept)
    assert_close("no bias", unbiased, exact, definitions.masked_attention(*inputs[:3], kept))


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("bias, slopes", [("exp", None), ("linear", [0.25, 0.03125])])
def test_dma_attention(bias, slopes, scale, device):
    tokens = 130
    inputs = (
        *qkv(2, tokens, 4, 2, 64, device=device, scale=scale),
        random(2, 128, device=device, scale=0.1, dtype=torch.float32, seed=9),
        random(2, device=device, dtype=torch.float32, seed=10).abs(),
    )
    settings = {"keep": 33, "local": 4, "slopes": slopes, "bias": bias}
    rank = sieve.dma_scores(*inputs[2:], slopes=slopes).detach()
    exact = definitions.dma_scores(*(x.float() for x in inputs[2:]), slopes=slopes)
    assert (rank - exact).abs().max() <= 1e-5 * exact.abs().max()
    ours = lambda *x, **s: sieve.dma_attention(x[0], x[1], x[2], x[3].float(), x[4].float(), **s)  # noqa: E731
    form = {"keep": 33, "local": 4, "slopes": slopes, "linear": bias == "linear", "rank": rank}
    plain = lambda *x, **_: definitions.dma_attention(*x[:3], x[3].to(x[2].dtype), x[4], **form)  # noqa: E731
    compare("dma", ours, plain, inputs, settings, names=("q", "k", "v", "w_dt", "a"))


BLOCKS = sieve.NsaBlocks(16, 8, 32, 3)


def test_nsa(device):
    tokens, heads = 200, 4
    q, k, v = qkv(1, tokens, heads, 2, 64, device=device)
    pooled = sieve.nsa_mean_pool(k, v, blocks=BLOCKS)
    for got, exact in zip(pooled, definitions.nsa_mean_pool(k.float(), v.float(), BLOCKS.stride, BLOCKS.compressed)):
        whole = tokens // BLOCKS.stride - 1
        assert (got[:, :whole].float() - exact[:, :whole]).abs().max() < 0.01
    ck, cv = (x.detach() for x in pooled)
    _, indices = sieve.nsa_compressed(q, ck, cv, blocks=BLOCKS)
    _, expected = definitions.nsa_branches(*(x.float() for x in (q, k, v, ck, cv)), BLOCKS, window=24)
    chosen = marked(indices, expected)
    assert (chosen == expected).float().mean() > 0.99, "rounding may swap blocks of nearly equal importance"
    gates, bias = random(1, tokens, heads, 3, device=device, seed=20), random(heads, 3, device=device, seed=21)

    def ours(q, k, v, ck, cv, gates, bias):
        return sieve.nsa(q, k, v, ck, cv, gates, gate_bias=bias.float(), blocks=BLOCKS, window=24)

    def plain(q, k, v, ck, cv, gates, bias):
        branches, _ = definitions.nsa_branches(q, k, v, ck, cv, BLOCKS, window=24, chosen=chosen)
        weights = (gates + bias.to(gates.dtype)).sigmoid()
        return sum(weights[..., n, None] * o for n, o in enumerate(branches))

    names = ("q", "k", "v", "compressed_k", "compressed_v", "gates", "gate_bias")
    compare("nsa", ours, plain, (q, k, v, ck, cv, gates, bias), names=names)
    with torch.no_grad():
        without = sieve.nsa(q, k, v, ck, cv, gates, blocks=BLOCKS, window=24)
        zero = sieve.nsa(q, k, v, ck, cv, gates, gate_bias=0.0 * bias.float(), blocks=BLOCKS, window=24)
    assert torch.equal(without, zero)


CHOOSERS = {
    "infllm_v2": (sieve.NsaBlocks(16, 8, 32, 4), "largest_probability", True, 2),
    "moba": (sieve.NsaBlocks(32, 32, 32, 3), "mean_key", False, 1),
    "moba in pieces": (sieve.NsaBlocks(128, 128, 128, 2), "mean_key", False, 1),
    "msa": (sieve.NsaBlocks(1, 1, 32, 3), "largest_score", False, 2),
    "msa of blocks of 64": (sieve.NsaBlocks(1, 1, 64, 2), "largest_score", False, 1),
    "msa in pieces": (sieve.NsaBlocks(1, 1, 128, 2), "largest_score", False, 1),
}


LARGE = [("infllm_v2", 12.0), ("moba in pieces", 12.0), ("msa", 12.0)]


@pytest.mark.parametrize("name, scale", [*((name, 1.0) for name in CHOOSERS), *LARGE])
def test_chosen_blocks(name, scale, device):
    blocks, rule, first, local = CHOOSERS[name]
    tokens = 500 if blocks.selected > 64 else 200
    q, k, v = qkv(1, tokens, 4, 2, 64, device=device, scale=scale)
    by = q, k
    if name == "infllm_v2":
        ours = lambda q, k, v: sieve.infllm_v2(q, k, v, blocks=blocks, local=local)  # noqa: E731
    else:
        settings = {"block": blocks.selected, "num_selected": blocks.num_selected}
        ours = lambda q, k, v: sieve.moba(q, k, v, **settings)  # noqa: E731
        if rule == "largest_score":
            by = random(1, tokens, 2, 64, device=device, seed=4), random(1, tokens, 1, 64, device=device, seed=5)
            ours = lambda q, k, v: sieve.msa(q, k, v, *by, local=local, **settings)  # noqa: E731
    chosen = definitions.chosen_blocks(*(x.float() for x in by), blocks, rule, first, local)
    (indices,) = sieve.functional.ops.choose_blocks(*by, None, None, 0.125, blocks.sizes(), rule, first, local)
    got = marked(indices, chosen)
    assert (got == chosen).float().mean() > 0.99, "rounding may swap blocks of nearly equal importance"
    plain = lambda q, k, v: definitions.block_attention(q, k, v, got, blocks.selected)  # noqa: E731
    compare(name, ours, plain, (q, k, v), names="qkv")


def in_a_packed_row(device):
    """Functions of q, k, v, gates, an indexer's queries and its keys."""
    w_dt = random(2, 128, device=device, scale=0.1, dtype=torch.float32, seed=9)
    a = random(2, device=device, dtype=torch.float32, seed=10).abs()
    ranks = {"keep": 20, "local": 4, "slopes": [0.25, 0.03125]}
    infllm = {"blocks": sieve.NsaBlocks(16, 8, 32, 3), "local": 1}
    sizes = {"block": 32, "num_selected": 2}

    def nsa(q, k, v, gates, index_q, index_k, **documents):
        pooled = sieve.nsa_mean_pool(k, v, blocks=BLOCKS, **documents)
        return sieve.nsa(q, k, v, *pooled, gates, blocks=BLOCKS, window=24, **documents)

    return {
        "dma_attention": lambda q, k, v, *_, **documents: sieve.dma_attention(q, k, v, w_dt, a, **ranks, **documents),
        "nsa": nsa,
        "infllm_v2": lambda q, k, v, *_, **documents: sieve.infllm_v2(q, k, v, **infllm, **documents),
        "moba": lambda q, k, v, *_, **documents: sieve.moba(q, k, v, **sizes, **documents),
        "msa": lambda q, k, v, _, *by, **documents: sieve.msa(q, k, v, *by, **sizes, **documents),
    }


KINDS = in_a_packed_row("cpu")


@pytest.mark.parametrize("name, scale", [*((name, 1.0) for name in KINDS), ("dma_attention", 12.0), ("msa", 12.0)])
def test_documents_of_sparse_kinds(name, scale, device):
    """Each document alone equals its part of the packed row, in the gradients too."""
    tokens, ends = 150, (0, 61, 62, 150)
    call = in_a_packed_row(device)[name]
    more = [random(1, tokens, *size, device=device, seed=30 + at) for at, size in enumerate([(4, 3), (2, 64), (1, 64)])]
    inputs = [*qkv(1, tokens, 4, 2, 64, device=device, scale=scale), *more]
    d_o = random(1, tokens, 4, 64, device=device, seed=99)

    def passes(first, end, **documents):
        part_inputs = [x[:, first:end].detach().clone().requires_grad_() for x in inputs]
        o = call(*part_inputs, **documents)
        return o.detach(), *torch.autograd.grad(o, part_inputs[:3], d_o[:, first:end])

    packed = passes(0, tokens, documents=two_documents(tokens, device, ends[:-1]))
    for first, end in zip(ends, ends[1:]):
        for part, whole, by_itself in zip(("o", "dq", "dk", "dv"), packed, passes(first, end)):
            whole, by_itself = whole[:, first:end].float(), by_itself.float()
            # The rounding of P and of partial results depends on which tile a key is in.
            worst, size = (whole - by_itself).norm(dim=-1).max(), by_itself.norm(dim=-1).max()
            assert worst <= 0.02 * size + 1e-5, f"{name}, tokens {first} to {end}, {part}: {worst:.3g} of {size:.3g}"


def test_nsa_mean_pool_gradient(device):
    _, k, v = qkv(2, 100, 2, 2, 64, device=device)
    # The last blocks of the definition are cut by the row's end; ours hold no gradient there.
    whole = lambda pooled: torch.cat(pooled)[:, :11]  # noqa: E731
    ours = lambda k, v: whole(sieve.nsa_mean_pool(k, v, blocks=BLOCKS))  # noqa: E731
    plain = lambda k, v: whole(definitions.nsa_mean_pool(k, v, BLOCKS.stride, BLOCKS.compressed))  # noqa: E731
    compare("pool", ours, plain, (k, v), names="kv")


@pytest.mark.parametrize("block", [64, 128])
def test_block_sparse(block, device):
    tokens = 300
    q, k, v = qkv(1, tokens, 4, 2, 64, device=device)
    count = -(-tokens // block)
    mask = torch.rand(4, count, count, generator=torch.Generator().manual_seed(3)).to(device) < 0.5
    whole = mask.repeat_interleave(block, 1).repeat_interleave(block, 2)[None, :, :tokens, :tokens]
    whole = whole & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    with torch.no_grad():
        o = sieve.block_sparse(q, k, v, sieve.block_mask(mask, block))

    def each(q, k, v):
        """Head by head: KV heads' own masks are what the definition takes."""
        o = [(q[:, :, [h]], k[:, :, [h // 2]], v[:, :, [h // 2]], whole[:, [h]]) for h in range(4)]
        return torch.cat([definitions.masked_attention(*x) for x in o], 2)

    assert_close("blocks", o, each(*(x.float() for x in (q, k, v))), each(q, k, v))
    for deterministic in (False, True):
        ours = lambda *x: sieve.block_sparse(  # noqa: E731
            *x, sieve.block_mask(mask, block), deterministic=deterministic
        )
        got = compare("blocks", ours, each, (q, k, v))
        assert torch.equal(got[0], o)
    # Query block 1 of head 0 keeps nothing: its queries have no gradient.
    mask[0, 1] = False
    leaf = q.clone().requires_grad_()
    o = sieve.block_sparse(leaf, k, v, sieve.block_mask(mask, block))
    (dq,) = torch.autograd.grad(o, leaf, torch.ones_like(o))
    of_block = dq[:, block : 2 * block]
    assert (of_block[:, :, 0] == 0).all() and (of_block[:, :, 1] != 0).any() == mask[1, 1, :2].any()


def test_decode(device):
    batch, capacity, heads, kv_heads, width = 2, 48, 4, 2, 64
    q, k, v = qkv(batch, 20, heads, kv_heads, width, device=device)
    caches = [torch.zeros(batch, kv_heads, capacity, width, dtype=torch.bfloat16, device=device) for _ in range(2)]
    sinks = random(heads, device=device, scale=2, seed=5)
    for window, sinks in ((None, None), (5, None), (None, sinks), (5, sinks)):
        exact = definitions.attention(*(x.float() for x in (q, k, v)), window=window, sinks=sinks)
        plain = definitions.attention(q, k, v, window=window, sinks=sinks)
        for t in range(20):
            length = torch.full((batch,), t, dtype=torch.int32, device=device)
            token = [x[:, t : t + 1] for x in (q, k, v)]
            o = sieve.decode(*token, *caches, length, window=window, sinks=sinks)
            assert_close(f"token {t}", o, exact[:, t : t + 1], plain[:, t : t + 1], floor=4e-3)


@pytest.mark.parametrize("has_own", [False, True])
def test_decode_in_a_cache_that_grows(has_own, device):
    """Caches of transformers, one key longer each call: one plan for all; the token's key is there, or comes too."""
    tokens, op = 270, functional.ops.IMPLEMENTATIONS["attention_decode" if has_own else "cached_decode"]
    q, k, v = qkv(2, tokens, 4, 2, 64, device=device)
    before = len(op.plans)
    for window, sinks in ((None, None), (100, random(4, device=device, scale=2, seed=5))):
        exact = definitions.attention(*(x.float() for x in (q, k, v)), window=window, sinks=sinks)
        plain = definitions.attention(q, k, v, window=window, sinks=sinks)
        for t in (0, 5, 128, 253, 255, 256):
            caches = [x[:, : t + 1].transpose(1, 2).contiguous() for x in (k, v)]
            length = torch.full((2,), t + 1 - has_own, dtype=torch.int32, device=device)
            token = [x[:, t : t + 1] for x in (k, v)] if has_own else [None, None]
            o = sieve.decode(q[:, t : t + 1], *token, *caches, length, window=window, sinks=sinks)
            assert_close(f"token {t}", o, exact[:, t : t + 1], plain[:, t : t + 1], floor=4e-3)
            for cache, x in zip(caches, (k, v)):
                assert torch.equal(cache, x[:, : t + 1].transpose(1, 2))
    assert len(op.plans) - before == 4, "a plan for up to 256 keys and one for more, with a window and sinks and without"


def step_over_blocks(lists, device):
    """A step over the listed blocks of 16 keys behind 69 and 7 tokens: its arguments, o, and o as defined, exact and in
    bf16."""
    q, k, v = qkv(2, 80, 4, 2, 64, device=device)
    length = torch.tensor([69, 7], dtype=torch.int32, device=device)
    chosen = torch.tensor(lists, dtype=torch.int32, device=device)
    token = torch.stack([q[0, 69], q[1, 7]])[:, None]
    given = token, None, None, *(x.transpose(1, 2).contiguous() for x in (k, v)), length
    key = torch.arange(80, device=device)
    visible = ((chosen[..., None] == key // 16).any(2) & (key <= length[:, None, None]))[:, :, None]
    exact = definitions.masked_attention(*(x.float() for x in (token, k, v)), visible)
    plain = definitions.masked_attention(token, k, v, visible)
    return given, chosen, sieve.decode(*given, chosen=chosen, block=16), exact, plain


def test_decode_over_chosen_blocks(device):
    """Of 5 blocks two for each of two choosers, own block last; rows of different lengths."""
    given, chosen, o, exact, plain = step_over_blocks([[[1, 4], [3, 4]], [[0, -1], [0, -1]]], device)
    assert_close("chosen", o, exact, plain, floor=4e-3)
    for block, sentence in ((24, "multiples of 16"), (None, "given together with block")):
        with pytest.raises(sieve.SieveError, match=sentence):
            sieve.decode(*given, chosen=chosen, block=block)


@pytest.mark.parametrize("lists", [
    [[[1, -1, -1], [0, 2, -1]], [[0, -1, -1], [-1, -1, -1]]], [[[0, 3, -1], [2, 4, -1]], [[-1, -1, -1], [0, 1, 4]]],
    [[[4, -1, -1], [4, 5, 9]], [[1, 2, 3], [0, 9, -1]]], [[[-1] * 3] * 2] * 2, [[[1_000_000, -1, -1]] * 2] * 2,
])
def test_decode_over_any_blocks(lists, device):
    """Lists without the own block, shorter ones than there are blocks, blocks behind the query's own, and none."""
    _, _, o, exact, plain = step_over_blocks(lists, device)
    assert_close("listed", o, exact.nan_to_num(), plain.nan_to_num(), floor=4e-3)


def test_dma_decode(device):
    batch, keep, tokens = 1, 8, 30
    q, k, v = qkv(batch, tokens, 4, 2, 64, device=device)
    z = random(batch, 2, tokens, device=device, dtype=torch.float32, seed=11)
    kept = definitions.kept_keys(z, keep=keep, local=3)
    exact = definitions.masked_attention(q.float(), k.float(), v.float(), kept, z.exp())
    plain = definitions.masked_attention(q, k, v, kept, z.exp())
    caches = [torch.zeros(batch, 2, keep, 64, dtype=torch.bfloat16, device=device) for _ in range(2)]
    caches.append(torch.zeros(batch, 2, keep, device=device))
    caches.append(torch.zeros(batch, 2, keep, dtype=torch.int32, device=device))
    for t in range(tokens):
        token = [x[:, t : t + 1] for x in (q, k, v)]
        length = torch.full((batch,), t, dtype=torch.int32, device=device)
        o = sieve.dma_decode(*token, z[:, :, t].contiguous(), *caches, length, local=3, bias="exp")
        assert_close(f"token {t}", o, exact[:, t : t + 1], plain[:, t : t + 1], floor=4e-3)


def test_mla_decode(device):
    q, latents = random(2, 3, 4, 96, device=device, seed=12), random(2, 50, 96, device=device, seed=13)
    o = sieve.mla_decode(q, latents, 64, scale=0.1)

    def plain(q, latents):
        keys = latents[:, :, None]
        mask = torch.ones(3, 50, dtype=torch.bool, device=device).tril(47)[None, None]
        return definitions.masked_attention(q, keys, keys[..., :64], mask, scale=0.1)

    assert_close("latents", o, plain(q.float(), latents.float()), plain(q, latents))
    # The same in a cache with room behind its 50 latents.
    room = torch.cat([latents, latents.new_full((2, 14, 96), float("nan"))], 1)
    length = torch.full((2,), 47, dtype=torch.int32, device=device)
    assert torch.equal(sieve.mla_decode(q, room, 64, scale=0.1, length=length), o)
