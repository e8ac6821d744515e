"""Steps with the bits of whole rows: what runs on the emulator, which kernels an H100 gets, and what is refused. On a
GPU gpu_same_bits.py compares the bits of Hopper's kernels."""

import gpu_same_bits
import pytest
import torch
from conftest import DEVICE
from parity import random

import sieve_attention as sieve
from sieve_attention import _library, ops

TOKENS = 150


def qkv(batch, tokens, heads=4, kv_heads=2, width=64, device=DEVICE):
    sizes = [(heads, 1), (kv_heads, 2), (kv_heads, 3)]
    return [random(batch, tokens, n, width, device=device, seed=seed) for n, seed in sizes]


@pytest.mark.parametrize("block", [16, 64, 128])
@torch.no_grad()
def test_a_step_over_chosen_blocks_has_the_bits_of_its_row(block):
    """Rows of different lengths, caches with room and NaN behind them; without same_bits elements differ."""
    (q, k, v), rows = qkv(3, TOKENS), torch.arange(3, device=DEVICE)
    differ = {True: 0, False: 0}
    for same_bits in differ:
        # The other kernel takes no lists that lack a query's own block.
        indices = gpu_same_bits.blocks_of(3, TOKENS, 2, block, DEVICE, count=3, some_lack=same_bits)
        whole = sieve.selected_attention(q, k, v, indices, block=block)
        for lengths in ((0, 15, 16), (63, 64, 65), (127, 128, 129), (TOKENS - 1, 100, 1)):
            at = torch.tensor(lengths, device=DEVICE)
            caches = torch.full((2, 3, 2, TOKENS + 7, 64), torch.nan, dtype=q.dtype, device=DEVICE)
            for row, n in enumerate(lengths):
                for cache, x in zip(caches, (k, v)):
                    cache[row, :, : n + 1] = x[row, : n + 1].transpose(0, 1)
            given = q[rows, at][:, None], None, None, *caches, at.int()
            o = sieve.decode(*given, chosen=indices[rows, at], block=block, same_bits=same_bits)
            differ[same_bits] += int((o[:, 0] != whole[rows, at]).sum())
    assert differ[True] == 0 and differ[False] > 0, differ


@torch.no_grad()
def test_a_step_over_no_block_is_zero_and_traced():
    q, k, v = qkv(2, 20)
    caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
    chosen = torch.tensor([[[-1, -1], [0, -1]], [[0, 1], [-1, -1]]], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([19, 16], dtype=torch.int32, device=DEVICE)

    def step(q):
        return sieve.decode(q, None, None, *caches, length, chosen=chosen, block=16, same_bits=True)

    o = step(q[:, -1:])
    assert (o[0, 0, :2] == 0).all() and (o[1, 0, 2:] == 0).all() and o[0, 0, 2:].abs().min() > 0
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q[:, -1:]), o)


def on_hopper(name, tensors, *settings):
    """Kernels of an operator's plan for an H100, without those that clear counters."""
    plan, _ = ops.IMPLEMENTATIONS[name].plan(tensors, settings, _library.ARCHITECTURES["sm_90a"])
    return [kernel for kernel in plan.launches if kernel != "fill_zero"]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("width", [64, 128])
def test_an_h100_gets_the_kernels_in_order(width):
    """Dense attention, windows, bands and sinks behind long caches; DMA's rows, with their backward pass, and steps."""
    token = [meta(2, 1, heads, width) for heads in (4, 2, 2)]
    length, cache = meta(2, dtype=torch.int32), meta(2, 2, 100_000, width)
    for sinks in (None, meta(4)):
        for window, bands in ((None, None), (300, None), (300, (4, 90_000, 2))):
            given = (*token, cache, cache, length, sinks), 0.1, window, bands
            assert on_hopper("attention_decode", *given, True) == ["hopper_attention_token"]
            if window is None:
                assert on_hopper("attention_decode", *given, False) == ["attention_decode"]
    slots = (meta(2, 2, 256, width), meta(2, 2, 256, width), meta(2, 2, 256, dtype=torch.float32),
             meta(2, 2, 256, dtype=torch.int32))  # fmt: skip
    given = (*token, meta(2, 2, dtype=torch.float32), *slots, length), 0.1, 32, True
    assert on_hopper("dma_decode", *given, True) == ["dma_token", "hopper_dma_attention_token"]
    assert on_hopper("dma_decode", *given) == ["dma_decode"]
    row = [meta(2, 700, heads, width) for heads in (4, 2, 2)]
    given = (*row, meta(2, 2 * width, dtype=torch.float32), meta(2, dtype=torch.float32), None, None), 0.1
    for keep, only_o, lists in (
        (256, True, {"dma_ordered_lists"}), (256, False, {"dma_ordered_lists", "dma_lists"}), (900, False, set()),
    ):  # fmt: skip
        kernels = on_hopper("dma_forward", *given, keep, 32, (), True, only_o, True)
        assert lists == {kernel for kernel in kernels if kernel.endswith("lists")}, kernels


def test_chosen_blocks_take_the_kernels_of_whole_rows():
    q, cache = meta(2, 1, 4, 128), meta(2, 2, 900, 128)
    lists = meta(2, dtype=torch.int32), meta(2, 2, 3, dtype=torch.int32)
    first, *step = on_hopper("selected_decode", (q, cache, cache, *lists), 0.1, 128)
    assert first == "nsa_token_lists" and step == ["hopper_nsa_selected_attention_forward", "nsa_selected_combine"]
    row = [meta(2, 900, heads, 128) for heads in (4, 2, 2)]
    given = meta(2, 900, 2, 3, dtype=torch.int32), None, None, None
    assert on_hopper("selected_forward", (*row, *given), 0.1, 128, True)[-2:] == step


def test_what_has_no_such_kernel_is_refused_by_name():
    q, k, v = (x[:, :1] for x in qkv(1, 3))
    q80, k80, v80 = (x[:, :1] for x in qkv(1, 3, width=80))
    caches, length = torch.zeros(2, 1, 2, 40, 64).to(DEVICE, q.dtype), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    caches80, chosen = torch.zeros(2, 1, 2, 40, 80).to(DEVICE, q.dtype), torch.zeros(1, 2, 1, dtype=torch.int32)
    slots = [torch.zeros(1, 2, keep, *end) for keep in (4096,) for end in ((64,), (64,), (), ())]
    slots = [x.to(dtype) for x, dtype in zip(slots, (q.dtype, q.dtype, torch.float32, torch.int32))]
    w_dt, a, same = torch.ones(2, 128), torch.ones(2), {"same_bits": True}
    for words, arch, function, given, settings in (
        ("an H100 or H200, compute capability 9.0, and this GPU has 8.0", "sm_80", "decode",
         (q, k, v, *caches, length), {}),
        ("this GPU has 10.0", "sm_100a", "dma_attention", (q, k, v, w_dt, a), {"keep": 64}),
        ("this GPU has 8.9", "sm_89", "dma_decode", (q, k, v, torch.ones(1, 2), *slots, length), {}),
        ("of 64 or of 128 columns, and these have 80 and 80", "sm_90a", "decode",
         (q80, k80, v80, *caches80, length), {}),
        ("same_bits needs keep of at most 2048, and it is 4096", "sm_90a", "dma_decode",
         (q, k, v, torch.ones(1, 2), *slots, length), {}),
        ("same_bits needs keep of at most 2048, and it is 3000", "sm_90a", "dma_attention", (q, k, v, w_dt, a),
         {"keep": 3000}),
        ("q is f32, expected bf16", "sm_90a", "decode", (q.float(), k.float(), v.float(), *caches, length), {}),
        ("same_bits without k and v, or chosen", "sm_90a", "decode", (q, None, None, *caches, length), {}),
        ("same_bits with block=48", "sm_90a", "decode", (q, None, None, *caches, length),
         {"chosen": chosen, "block": 48}),
        ("4 choosers, and the caches have 2 KV heads", "sm_90a", "decode", (q, None, None, *caches, length),
         {"chosen": chosen.repeat(1, 2, 1), "block": 64}),
    ):  # fmt: skip
        fits, why = sieve.supports(function, *given, device="cuda", arch=arch, **settings, **same)
        assert not fits and words in why and why.startswith(f"{function}: "), why
        fits, why = sieve.supports(function, *given, device="cuda", arch=arch, **{**settings, "same_bits": False})
        assert fits or words in why or "chosen" in settings, why


def test_a_cpu_has_no_such_definition(no_emulator):
    q, k, v = (x[:, :1].float().cpu() for x in qkv(1, 3))
    caches, length = torch.zeros(2, 1, 2, 40, 64), torch.zeros(1, dtype=torch.int32)
    for strict in (True, False):
        with sieve.on_cpu(strict=strict):
            sieve.decode(q, k, v, *caches, length)
            assert not sieve.supports("decode", q, k, v, *caches, length, same_bits=True)[0]
            with pytest.raises(sieve.SieveError, match="decode: same_bits has no definition on a CPU"):
                sieve.decode(q, k, v, *caches, length, same_bits=True)
            with pytest.raises(sieve.SieveError, match="dma_attention: same_bits has no definition on a CPU"):
                sieve.dma_attention(q, k, v, torch.ones(2, 128), torch.ones(2), keep=8, same_bits=True)
