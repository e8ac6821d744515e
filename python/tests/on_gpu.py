"""What only a GPU shows: streams, graphs, compilation, memory, time. `python on_gpu.py [NAME ..]`: a line a check.

`python on_gpu.py --dry [NAME ..]` needs no GPU: each check makes all its calls with plans for an H100 whose launches are
left out, on small tensors. It shows that imports, arguments and names are right, and nothing of numbers. Rivals are
left out.
"""

import contextlib
import gc
import json
import os
import sys
import time
import traceback

import torch
from empty_launch import empty_launch
from gpu_generate import generate
from gpu_same_bits import same_bits
from gpu_steps import steps_of_layers
from no_gpu import Nothing, traced_without_a_gpu
from parity import random
from speed_of_tiles import speed_of_block_sparse

import sieve_attention as sieve
from sieve_attention import _library, definitions

DEVICE = "cuda"
# Whether launches are left out, see above.
DRY = False


def few(count, dry=2):
    """So many turns or tokens; without launches `dry` of them."""
    return min(count, dry) if DRY else count


def qkv(tokens, batch=1, heads=16, kv_heads=8, width=128, grad=False):
    # v has a seed of its own: a kernel that took one of k and v for the other would pass with equal ones.
    sizes = [(heads, heads), (kv_heads, kv_heads), (kv_heads, kv_heads + 100)]
    made = [random(batch, tokens, n, width, device=DEVICE, seed=seed) for n, seed in sizes]
    return [x.requires_grad_(grad) for x in made]


def rank_of(tokens, kv_heads=8):
    return random(1, kv_heads, tokens, device=DEVICE, dtype=torch.float32, seed=5)


def indices_of(tokens, choosers=8, count=16, block=64):
    """The own block of each query, the document's first, and others at random, in any order."""
    random_blocks = torch.rand(1, tokens, choosers, count, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    own = (torch.arange(tokens, device=DEVICE) // block)[None, :, None]
    indices = (random_blocks * (own + 1)[..., None]).int()
    indices[..., 3], indices[..., 9] = own, 0
    return indices


def calls(tokens, grad=False, **order):
    """Every function with gradients, on the same sizes; `order` may hold deterministic=True."""
    q, k, v = qkv(tokens, grad=grad)
    rank = rank_of(tokens)
    w_dt = random(8, 1024, device=DEVICE, dtype=torch.float32, scale=0.05, seed=6).requires_grad_(grad)
    a = random(8, device=DEVICE, dtype=torch.float32, seed=7).abs().requires_grad_(grad)
    gates = random(1, tokens, 16, 3, device=DEVICE, seed=8)
    *wide, _ = qkv(tokens, kv_heads=16, width=192, grad=grad)
    narrow = random(1, tokens, 16, 128, device=DEVICE, seed=10).requires_grad_(grad)
    q64, k64, v64 = qkv(tokens, width=64, grad=grad)
    keep, indices = min(1024, tokens // 4), indices_of(tokens)
    count = -(-tokens // 128)
    visible_tiles = torch.rand(16, count, count, generator=torch.Generator().manual_seed(12)) < 0.5
    tiles = sieve.block_mask(visible_tiles.to(DEVICE), 128)
    return {
        "dense": lambda: sieve.attention(q, k, v, **order),
        "window": lambda: sieve.attention(q, k, v, window=keep, **order),
        "bands": lambda: sieve.attention(q, k, v, window=keep, bands=sieve.Bands(64, 3 * keep, 4), **order),
        "dense, width 64": lambda: sieve.attention(q64, k64, v64, **order),
        "window, width 64": lambda: sieve.attention(q64, k64, v64, window=keep, **order),
        "latent": lambda: sieve.attention(*wide, narrow, **order),
        "expiring": lambda: sieve.expiring_attention(q, k, v, rank, sieve.select(rank, keep=keep), **order),
        "dma": lambda: sieve.dma_attention(q, k, v, w_dt, a, keep=keep, local=keep // 8, slopes=[0.01] * 8, **order),
        "nsa": lambda: sieve.nsa(q, k, v, *sieve.nsa_mean_pool(k, v), gates, **order),
        "infllm_v2": lambda: sieve.infllm_v2(q, k, v, blocks=sieve.NsaBlocks(), local=8, **order),
        "moba": lambda: sieve.moba(q, k, v, block=64, num_selected=16, **order),
        "msa": lambda: sieve.msa(q, k, v, v, k[:, :, :1], block=64, num_selected=16, **order),
        "selected": lambda: sieve.selected_attention(q, k, v, indices, **{"deterministic": False, **order}),
        "tiles": lambda: sieve.block_sparse(q, k, v, tiles, **order),
    }, [q, k, v, w_dt, a, *wide, narrow, q64, k64, v64]


def parts(tokens, grad=False):
    """What functions of `calls` consist of, alone; `select` has no gradient."""
    q, k, v = qkv(tokens, grad=grad)
    rank, keep = rank_of(tokens), min(1024, tokens // 4)
    gates = random(1, tokens, 16, 3, device=DEVICE, seed=8)
    pooled, selection = [x.detach() for x in sieve.nsa_mean_pool(k, v)], sieve.select(rank, keep=keep)
    return {
        "nsa_mean_pool": lambda: sieve.nsa_mean_pool(k, v)[0],
        "nsa alone": lambda: sieve.nsa(q, k, v, *pooled, gates),
        "select": lambda: sieve.select(rank, keep=keep).expire,
        "expiring alone": lambda: sieve.expiring_attention(q, k, v, rank, selection),
    }, [q, k, v]


def decoding(batch, tokens):
    """Steps behind `tokens` keys, latents or, of DMA, 2,048 kept keys, as `sieve kernels bench` has them."""
    token = [x.expand(batch, -1, -1, -1).contiguous() for x in qkv(1)]
    on = {"device": DEVICE, "dtype": torch.bfloat16}
    caches, kept = ([torch.randn(batch, 8, count, 128, **on) for _ in range(2)] for count in (tokens, 2048))
    kept.append(torch.randn(batch, 8, 2048, device=DEVICE))
    kept.append(torch.arange(2048, dtype=torch.int32, device=DEVICE).expand(batch, 8, -1).contiguous())
    length = torch.full((batch,), tokens - 1, dtype=torch.int32, device=DEVICE)
    # Above the lowest rank in the cache, whose key it evicts.
    rank = torch.full((batch, 8), 0.5, device=DEVICE)
    return {
        "decode": lambda: sieve.decode(*token, *caches, length),
        "dma_decode": lambda: sieve.dma_decode(*token, rank, *kept, length),
    }


def latent_decoding(batch, tokens):
    q, latents = random(batch, 1, 16, 576, device=DEVICE, seed=1), random(batch, tokens, 576, device=DEVICE, seed=2)
    return lambda: sieve.mla_decode(q, latents, 512, scale=0.07)


def side_stream():
    for name, call in calls(few(3000, 256))[0].items():
        expected = call()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # Behind a long wait of this stream, so that a launch elsewhere would read what is not there yet.
            torch.cuda._sleep(20_000_000)
            got = call()
        stream.synchronize()
        assert torch.equal(got, expected), name


def second_gpu():
    if torch.cuda.device_count() < 2:
        return "one GPU"
    global DEVICE
    results, first = {}, DEVICE
    for DEVICE in ("cuda:0", "cuda:1"):
        made, inputs = calls(500, grad=True, deterministic=True)
        for name, call in made.items():
            o = call()
            results[DEVICE, name] = [o, *torch.autograd.grad(o, inputs, torch.ones_like(o), allow_unused=True)]
    DEVICE = first
    assert torch.cuda.current_device() == 0
    for name in made:
        for x, y in zip(results["cuda:0", name], results["cuda:1", name]):
            assert x is None and y is None or torch.equal(x, y.to("cuda:0")), name


def cuda_graph():
    for name, call in calls(few(3000, 256), grad=True)[0].items():
        every = calls(few(3000, 256), grad=True)
        call, inputs = every[0][name], [x for x in every[1]]

        def step():
            o = call()
            return [o, *torch.autograd.grad(o, inputs, torch.ones_like(o), allow_unused=True)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                expected = step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made[0], expected[0]), f"{name}: output"
        with torch.no_grad():
            inputs[0].mul_(0.5)
        graph.replay()
        again = step()
        torch.cuda.synchronize()
        assert torch.equal(made[0], again[0]), f"{name}: output of new inputs"
        for x, y in zip(made[1:], again[1:]):
            if x is not None:
                # Sums of a free order: last bits differ from run to run.
                assert (x.float() - y.float()).norm() <= 2e-2 * y.float().norm() + 1e-6, f"{name}: a gradient"


def capture_of_new_shapes():
    graph = torch.cuda.CUDAGraph()
    q, k, v = qkv(777)
    try:
        with torch.cuda.graph(graph):
            sieve.attention(q, k, v)
    except sieve.SieveError as error:
        assert "capture" in str(error)
    else:
        assert DRY, "a plan was loaded under capture"


def graphs_of_plans():
    """Runs at the same addresses launch a CUDA graph from the fourth on: what that saves the host, equal bits, new
    values of inputs, other addresses, threads on streams of their own.
    """
    import threading

    measured = {}
    for name, call in calls(128)[0].items():
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        times = {}
        # Outputs that are kept for a while are at addresses that come again only after 16 calls.
        for kept in (1, 16):
            outputs = [None] * kept
            for turn in range(6 * kept):
                outputs[turn % kept] = call()
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            start = time.perf_counter()
            for turn in range(20):
                outputs[turn % kept] = call()
            times[kept] = (time.perf_counter() - start) / 20 * 1e6
        measured[f"{name}: host us, one output alive"], measured[f"{name}: 16 alive"] = times.values()

    made, inputs = calls(few(3000, 256))
    for name, call in made.items():
        expected = call()
        for turn in range(10):
            got = call()
            assert torch.equal(got, expected), f"{name}: run {turn}"
            del got
        with torch.no_grad():
            for x in (inputs[0], inputs[5], inputs[8]):
                x.neg_()
        got = [call() for _ in range(4)]
        # Outputs that stay alive are at other addresses, which get plain launches.
        is_new = DRY or not torch.equal(got[0], expected)
        assert is_new and all(torch.equal(x, got[0]) for x in got), f"{name}: new values"
        with torch.no_grad():
            for x in (inputs[0], inputs[5], inputs[8]):
                x.neg_()
        assert torch.equal(call(), expected), f"{name}: the first values again"

    wrong = []

    def worker(turn):
        with torch.cuda.stream(torch.cuda.Stream()):
            own_calls = calls(few(1000 + 500 * turn, 256))[0]
            for name, call in own_calls.items():
                expected = call().clone()
                for _ in range(few(200)):
                    if not torch.equal(call(), expected):
                        wrong.append((turn, name))
                        break

    threads = [threading.Thread(target=worker, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"threads: {wrong}"

    return measured


def memory_of_graphs():
    """What graphs hold of 1,000 address sets, more than are remembered: the GPU's memory after each hundred of them, run
    six times each, beyond what three runs of each take, which record no graph.
    """
    flat = torch.zeros(few(64 << 20, 8 << 20), dtype=torch.uint8, device=DEVICE)
    q, k, v = qkv(64, heads=4, kv_heads=2, width=64)
    expected, size = sieve.infllm_v2(q, k, v), q.numel() * 2
    taken = {}
    for runs in (3, 6):
        before, taken[runs] = held()["the GPU"], []
        for turn in range(few(1000, 100)):
            moved = flat[turn * size : (turn + 1) * size].view(torch.bfloat16).view(q.shape).copy_(q)
            for _ in range(runs):
                assert torch.equal(sieve.infllm_v2(moved, k, v), expected), turn
            if turn % 100 == 99:
                torch.cuda.synchronize()
                taken[runs].append((held()["the GPU"] - before) >> 20)
    assert max(taken[6]) - max(taken[3]) < 256, f"MiB by hundreds of address sets, by runs of each: {taken}"
    return {"MiB of 512 graphs": max(taken[6]), "without graphs": max(taken[3])}


def compiled():
    with traced_without_a_gpu() if DRY else contextlib.nullcontext():
        compiled_in_each_mode()


def compiled_in_each_mode():
    # Without a GPU what the compiler traces, and not its code.
    backend = "aot_eager" if DRY else "inductor"
    for mode in (None,) if DRY else (None, "reduce-overhead"):
        for name in calls(few(2048, 256))[0]:
            made, inputs = calls(few(2048, 256), grad=True)
            call = made[name]
            torch._dynamo.reset()
            fast = torch.compile(lambda: call() * 2, fullgraph=True, mode=mode, backend=backend)
            torch.compiler.cudagraph_mark_step_begin()
            o = fast()
            d_o = torch.ones_like(o)
            got = [
                o.clone(),
                *(x.clone() if x is not None else None for x in torch.autograd.grad(o, inputs, d_o, allow_unused=True)),
            ]
            o = call() * 2
            expected = [o, *torch.autograd.grad(o, inputs, d_o, allow_unused=True)]
            for x, y in zip(got, expected):
                assert (x is None) == (y is None)
                assert x is None or (x.float() - y.float()).norm() <= 2e-2 * y.float().norm() + 1e-6, f"{name}, {mode}"
        step, expected = latent_decoding(2, 500), None
        for call in (step, torch.compile(step, fullgraph=True, mode=mode, backend=backend)):
            torch.compiler.cudagraph_mark_step_begin()
            o = call().clone()
            expected = o if expected is None else expected
        assert torch.equal(o, expected), f"mla_decode, {mode}"


# What the driver may take for its own tables while a function runs.
DRIVER_BYTES = 2 << 20


def held():
    """Bytes of the tensors alive, as they were asked for, and of the GPU's memory in use.

    Not `memory_allocated`: it counts the blocks that the tensors lie in, and the allocator gives a tensor a block up to
    1 MiB too large where it has one, so that equal tensors take more bytes or fewer from one call to the next.
    """
    free, total = torch.cuda.mem_get_info()
    return {"tensors": torch.cuda.memory_stats()["requested_bytes.all.current"], "the GPU": total - free}


def growth(before, after):
    """What holds more bytes than before, in words; None where nothing does. Fewer bytes are no growth."""
    slack = {"the GPU": DRIVER_BYTES}
    more = {name: after[name] - x for name, x in before.items()}
    return "; ".join(f"{name}: {x} bytes more" for name, x in more.items() if x > slack.get(name, 0)) or None


def growth_of(call, inputs, reading=held, runs=2000):
    """`growth` from the twentieth run of a function and its gradients to the last one."""
    readings = []
    runs = few(runs, 22)
    for run in range(runs):
        o = call()
        if o.requires_grad:
            torch.autograd.grad(o, inputs, o, allow_unused=True)
        if run in (20, runs - 1):
            gc.collect()  # what waits for the collector is not held
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            readings.append(reading())
    return growth(*readings)


def no_growth():
    tokens = few(2048, 256)
    groups = [calls(tokens, grad=True), parts(tokens, grad=True), (decoding(2, 2048), [])]
    groups.append(({"mla_decode": latent_decoding(2, 2048)}, []))
    every = {name: growth_of(call, inputs) for made, inputs in groups for name, call in made.items()}
    grown = {name: words for name, words in every.items() if words}
    assert not grown, grown


def unaligned():
    """Tensors that do not begin at a multiple of 16 bytes are copied; one that is written in place is refused."""
    flat = torch.randn(1 + 128 * 8 * 64, device=DEVICE).bfloat16()
    packed = flat[1:].view(1, 128, 8, 64)
    q, k, v = packed.split([4, 2, 2], 2)
    aligned = sieve.attention(*[x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)])
    assert torch.equal(sieve.attention(q, k, v), aligned)
    caches = torch.zeros(2, 2 * 8 * 64 + 1, device=DEVICE).bfloat16()
    k_cache, v_cache = (x[1:].view(1, 2, 8, 64) for x in caches)
    length = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    try:
        sieve.decode(q[:, :1], k[:, :1], v[:, :1], k_cache, v_cache, length)
    except sieve.SieveError as error:
        assert "written in place" in str(error), error
    else:
        assert DRY, "an unaligned cache was taken"


def deterministic():
    """A thousand passes of each function beside other kernels, in bursts and pauses that move the clocks: equal bits."""
    made, inputs = calls(few(3000, 256), grad=True, deterministic=True)
    beside, other = torch.cuda.Stream(), random(4096, few(4096), device=DEVICE, seed=9)
    wrong = {}
    for name, call in made.items():
        differ, expected = torch.zeros(1 + len(inputs), dtype=torch.int64, device=DEVICE), None
        for turn in range(few(1000)):
            if turn % 100 < 60:
                with torch.cuda.stream(beside):
                    torch.mm(other[: 256 << turn % 5], other.t() if DRY else other)
            elif turn % 100 == 60:
                torch.cuda.synchronize()
                time.sleep(0.05)
            o = call()
            run = (o, *torch.autograd.grad(o, inputs, torch.ones_like(o), allow_unused=True))
            expected = expected or run
            for n, (x, y) in enumerate(zip(expected, run)):
                if x is not None:
                    differ[n] += (x != y).any()
        if differ.any():
            names = ("o", "q", "k", "v", "w_dt", "a", "wide q", "wide k", "narrow v", "q64", "k64", "v64")
            wrong[name] = dict(zip(names, differ.tolist()))
    assert not wrong, f"passes of 1,000 with other bits: {wrong}"


def long_odd():
    """12,345 tokens against torch's own attention in f32, a slice of heads at a time."""
    q, k, v = qkv(few(12_345, 345), heads=2, kv_heads=1, grad=True)
    o = sieve.attention(q, k, v)
    d_o = random(*o.shape, device=DEVICE, seed=3)
    got = (o, *torch.autograd.grad(o, (q, k, v), d_o))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x = [y.detach().to(dtype).requires_grad_() for y in (q, k, v)]
        exact = definitions.attention(*x)
        results.append([z.detach() for z in (exact, *torch.autograd.grad(exact, x, d_o.to(dtype)))])
        del exact
    for name, x, exact, plain in zip(("o", "dq", "dk", "dv"), got, *results):
        error, allowed = ((y.float() - exact).norm().item() for y in (x, plain))
        assert DRY or error <= 2 * allowed, f"{name}: {error} against {allowed}"


def opcheck():
    from sieve_attention import ops

    q, k, v = qkv(300, heads=4, kv_heads=2, width=64)
    rank, scale = rank_of(300, 2), 0.125
    blocks = (16, 8, 32, 3)
    w, a = torch.randn(2, 128, device=DEVICE), torch.randn(2, device=DEVICE)
    o, lse = ops.attention_forward(q, k, v, None, None, None, scale, None)
    expire, *lists = ops.dma_select(rank, None, None, 64, 8)
    d = ops.dma_attention_forward(q, k, v, rank, *lists, scale)
    kept = [d[0], d[1], *[None] * (4 - len(d)), *d[2:]]
    x, z = ops.dma_scores(v, w, a, None, ())
    (compressed,) = ops.nsa_mean_pool(k, v, None, None, blocks)
    c = ops.nsa_compressed_forward(q, compressed, None, None, scale, blocks)
    s = ops.nsa_selected_forward(q, k, v, c[2], None, None, scale, blocks)
    gates = (torch.randn(*q.shape[:2], 3 * q.shape[2], device=DEVICE, dtype=torch.bfloat16),
             torch.zeros(3 * q.shape[2], device=DEVICE))  # fmt: skip
    token = [y[:, :1].contiguous() for y in (q, k, v)]
    caches = [torch.zeros(1, 2, 32, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    length = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slots = [y[..., :32].contiguous() for y in (rank, expire)]
    tiles = sieve.block_mask(torch.ones(4, 5, 5, device=DEVICE), 64)
    sparse = ops.block_sparse(q, k, v, tiles.words, scale, (64, 64))
    arguments = {
        "attention_forward": (q, k, v, None, None, gates[1][:4], scale, 50),
        "attention_backward": (q, k, v, None, None, None, gates[1][:4], o, lse, None, None, o, scale, None, True),
        "dma_scores": (v, w, a, None, [0.1, 0.2]),
        "dma_scores_backward": (v, w, a, x, z),
        "dma_select": (rank, None, None, 64, 8),
        "dma_attention_forward": (q, k, v, rank, *lists, scale),
        "dma_attention_backward": (q, k, v, rank, *lists, *kept, d[0], scale, True),
        "nsa_mean_pool": (k, v, None, None, blocks),
        "nsa_mean_pool_backward": (k, None, None, compressed, blocks),
        "nsa_compressed_forward": (q, compressed, None, None, scale, blocks),
        "nsa_compressed_backward": (q, compressed, None, None, c[0], c[1], c[0], scale, blocks, True),
        "nsa_selected_forward": (q, k, v, c[2], None, None, scale, blocks),
        "nsa_gates_backward": (c[0], s[0], s[0], *gates, s[0]),
        "nsa_forward": (q, k, v, compressed, *gates, None, None, scale, blocks, 50),
        "dma_forward": (q, k, v, w, a, None, None, scale, 64, 8, [0.1, 0.2], False, True),
        "choose_blocks": (q, k, None, None, scale, blocks, "largest_probability", True, 1),
        "chosen_forward": (q, k, v, *[None] * 4, scale, blocks, "largest_probability", True, 1),
        "nsa_selected_backward": (q, k, v, c[2], None, None, s[0], s[1], s[0], scale, blocks, True),
        "selected_forward": (q, k, v, indices_of(300, 2), None, None, None, scale, 64),
        "block_sparse": (q, k, v, tiles.words, scale, [64, 64]),
        "block_sparse_backward": (q, k, v, tiles.words, tiles.by_keys(2), *sparse, sparse[0], scale, [64, 64], True),
        "attention_decode": (*token, *caches, length, None, scale, None),
        "dma_decode": (*token, rank[:, :, 0].contiguous(), *caches, *slots, length, scale, 2, False),
        "cached_decode": (token[0], *caches, length + 1, None, None, scale, None, None),
        "selected_decode": (token[0], *caches, length, indices_of(1, 2)[:, 0].contiguous(), scale, 64),
        "mla_decode": (q, torch.randn(1, 400, 64, device=DEVICE, dtype=torch.bfloat16), None, None, scale, 32),
    }
    assert set(arguments) == set(ops.TABLE)
    for name, given in arguments.items():
        # Entries of a list behind its last one are never written: two runs differ there. And torch 2.11 traces no
        # operator that writes an input in place and returns a list.
        untraced = ("dma_select", "attention_decode", "dma_decode")
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        operator = getattr(torch.ops.sieve, name).default
        try:
            # A fake tensor of a CPU has no plan.
            count = 2 if DRY else 3 if name in untraced else 4
            torch.library.opcheck(operator, given, test_utils=tests[:count])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def milliseconds(call, repeats=15, pause=1.0):
    """Median time on the GPU of calls behind each other, the L2 cache cleared and `pause` ms without work between."""
    scratch = torch.empty(few(256 << 20), dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(3):
        call()
    for _ in range(few(repeats)):
        scratch.zero_()
        torch.cuda._sleep(int(pause * 1_900_000))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def speed():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tokens, keep = few(32768, 1024), few(1024, 256)
    q, k, v = qkv(tokens, grad=True)
    d_o = torch.randn_like(q)
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    measured = {}

    def both(name, call, inputs, d_o):
        with torch.no_grad():
            measured[f"{name}, forward"] = milliseconds(call)
        o = call()
        backward = lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)  # noqa: E731
        measured[f"{name}, backward"] = milliseconds(backward)

        def step():
            torch.autograd.grad(call(), inputs, d_o)

        measured[f"{name}, both"] = milliseconds(step)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

    if DRY:
        print("speed: cudnn is a rival, left out")
    else:
        try:
            cudnn()
        except RuntimeError:
            heads_first[1:] = [x.detach().repeat_interleave(2, 1).requires_grad_() for x in heads_first[1:]]
        both("cudnn dense", cudnn, heads_first, d_o.transpose(1, 2).contiguous())

    rank = rank_of(tokens)
    w_dt = random(8, 1024, device=DEVICE, dtype=torch.float32, scale=0.05, seed=6).requires_grad_()
    a = random(8, device=DEVICE, dtype=torch.float32, seed=7).abs().requires_grad_()
    bias = rank.clone().requires_grad_()
    both("dense", lambda: sieve.attention(q, k, v), (q, k, v), d_o)
    both("window 1024", lambda: sieve.attention(q, k, v, window=1024), (q, k, v), d_o)
    selection = sieve.select(rank, keep=keep)
    measured["select"] = milliseconds(lambda: sieve.select(rank, keep=keep))
    both("expiring", lambda: sieve.expiring_attention(q, k, v, bias, selection), (q, k, v, bias), d_o)
    chosen = lambda: sieve.expiring_attention(q, k, v, bias, sieve.select(rank, keep=keep))  # noqa: E731
    both("select + expiring", chosen, (q, k, v, bias), d_o)
    published = lambda: sieve.dma_attention(q, k, v, w_dt, a, keep=keep, preset="paper")  # noqa: E731
    both("dma_attention", published, (q, k, v, w_dt, a), d_o)
    gates = random(1, tokens, 16, 3, device=DEVICE, seed=8).requires_grad_()
    ck, cv = (x.detach().requires_grad_() for x in sieve.nsa_mean_pool(k, v))
    both("nsa", lambda: sieve.nsa(q, k, v, ck, cv, gates), (q, k, v, ck, cv, gates), d_o)
    both("infllm_v2", lambda: sieve.infllm_v2(q, k, v, blocks=sieve.NsaBlocks(), local=8), (q, k, v), d_o)
    both("moba", lambda: sieve.moba(q, k, v, block=64, num_selected=16), (q, k, v), d_o)
    index_q, index_k = (random(1, tokens, n, 128, device=DEVICE, seed=20 + n) for n in (8, 1))
    both("msa", lambda: sieve.msa(q, k, v, index_q, index_k, block=64, num_selected=16), (q, k, v), d_o)
    with torch.no_grad():
        measured["moba, copies of k and v"] = milliseconds(lambda: sieve.functional._by_chooser(k, v, q))
    given = indices_of(tokens)
    both("selected_attention", lambda: sieve.selected_attention(q, k, v, given), (q, k, v), d_o)
    _, indices = sieve.nsa_compressed(q, ck, cv)
    both("nsa_compressed", lambda: sieve.nsa_compressed(q, ck, cv)[0], (q, ck, cv), d_o)
    both("nsa_selected", lambda: sieve.nsa_selected(q, k, v, indices), (q, k, v), d_o)
    if not DRY:
        measured["cudnn / (select + expiring)"] = measured["cudnn dense, both"] / measured["select + expiring, both"]
    *wide, _ = qkv(tokens, kv_heads=16, width=192, grad=True)
    narrow = random(1, tokens, 16, 128, device=DEVICE, seed=10).requires_grad_()
    both("latent", lambda: sieve.attention(*wide, narrow), (*wide, narrow), d_o)
    measured |= speed_of_block_sparse(tokens, qkv, milliseconds)
    for batch in (16, 1):
        for name, call in decoding(batch, few(131_072, 2048)).items():
            measured[f"{name}, {batch} x 131072"] = milliseconds(call)
    for batch, latents in ((1, 8192), (1, 131_072), (16, 8192)):
        measured[f"mla_decode, {batch} x {latents}"] = milliseconds(latent_decoding(batch, few(latents, 1024)))
    return measured


def micros(call):
    """us of the host for one call, the median of 20 times 20; a GPU is kept busy, so that nothing waits for it."""
    times, turns = [], few(20)
    for _ in range(turns):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        for _ in range(turns):
            call()
        times.append((time.perf_counter() - start) / turns * 1e6)
    return sorted(times)[turns // 2]


def tiles():
    """us of the host for a forward and a backward pass at 256 tokens, the GPU far behind, and ms of masks at 32,768 tokens
    in either order of sums, beside FlashAttention-4 where it is there. Without a GPU the host's part without launches.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        without_a_gpu()
    q, k, v = qkv(256, grad=True)
    d_o, given = torch.randn_like(q), indices_of(256)
    mask = sieve.block_mask(torch.ones(16, 2, 2, device=DEVICE), 128)
    made = {
        "selected_attention": lambda: sieve.selected_attention(q, k, v, given),
        "block_sparse": lambda: sieve.block_sparse(q, k, v, mask, deterministic=True),
        "attention": lambda: sieve.attention(q, k, v, deterministic=True),
    }
    try:
        from flash_attn.cute import flash_attn_func

        made["FlashAttention-4, dense"] = lambda: flash_attn_func(q, k, v, causal=True)[0]
    except ImportError:
        pass

    measured = {}
    for name, call in made.items():
        pair = lambda call=call: torch.autograd.grad(call(), (q, k, v), d_o)  # noqa: E731
        for _ in range(20):
            pair()
        measured[f"host us, {name}: forward"], measured[f"host us, {name}: a pair"] = micros(call), micros(pair)
    if has_gpu:
        measured |= speed_of_block_sparse(few(32768, 1024), qkv, milliseconds)
    return measured


def without_a_gpu():
    """Plans for an H100 on CPU tensors whose launches are left out: what Python and the allocator cost the host."""
    global DEVICE
    DEVICE = "cpu"

    def prepared(op, tensors, settings):
        device = tensors[0].device
        plan, copied = op.plan(tensors, settings, _library.gpu_of(device))
        plan.prepare(device, 0, op._absent(tensors, device))
        return plan, copied

    _library.Op._prepared, _library._run, _library._stream = prepared, lambda *_: 0, lambda index: 0
    _library._device, _library._allocate, _library._free = lambda: 0, lambda *_: 256, lambda address: None


@contextlib.contextmanager
def recorded_runs():
    """Lists the arguments of each run of a plan, which still runs, until the context ends."""
    run, runs = _library._run, []

    def run_and_record(*arguments):
        runs.append(arguments)
        return run(*arguments)

    _library._run = run_and_record
    try:
        yield runs
    finally:
        _library._run = run


def micros_of_a_launch():
    """An empty launch, us, without what Python's call of it costs."""
    launch, nothing = empty_launch()
    # Ten of them, as the queue holds about a thousand.
    ten = lambda call: lambda: [call() for _ in range(10)]  # noqa: E731
    return (micros(ten(launch)) - micros(ten(nothing))) / 10


def small_calls():
    """Calls on small tensors: every function, with gradients and without, a step of decoding, and torch's own."""
    plain, with_grad = ({**calls(128, grad)[0], **parts(128, grad)[0]} for grad in (False, True))
    del with_grad["select"]
    q, k, v = qkv(128)
    caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
    length = torch.full((1,), 100, dtype=torch.int32, device=DEVICE)
    return {
        **plain,
        **{f"{name}, autograd": call for name, call in with_grad.items()},
        "decode": lambda: sieve.decode(q[:, :1], None, None, *caches, length),
        "operator of torch": lambda: torch.ops.sieve.attention_forward(q, k, v, None, None, None, 0.1, None),
        "torch sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        ),
    }


def pieces_of_a_call():
    """What Python and torch do around a plan, each by itself."""
    q, k, v = qkv(128)
    rank, weights = rank_of(128), torch.zeros(8, 1024, device=DEVICE)
    return {
        "an output": lambda: torch.empty_strided(q.shape, q.stride(), dtype=torch.bfloat16, device=q.device),
        "scratch memory": lambda: _library._free(_library._allocate(8192, _library._stream(0))),
        "a plan's key": lambda: _library.Op._key((0.1, None, True), (q, k, v, None, None)),
        "detach": q.detach, "view": lambda: q.view(2048, 128), "clamp": lambda: rank.clamp(max=60.0), "exp_": rank.exp_,
        "transpose": lambda: weights.t().contiguous(), "cat": lambda: torch.cat((k, k), 3),
    }  # fmt: skip


def cost_of(call, launch):
    """Launches, memsets and times of a call, us: the call; and where an empty launch takes `launch`, the plans that it
    runs, alone, and as many empty launches.
    """
    for _ in range(20):
        call()
    with recorded_runs() as runs:
        call()
    operators = sieve.functional.ops.IMPLEMENTATIONS.values()
    plans = {plan.handle: plan for op in operators for plan, *_ in op.plans.values()}
    kernels = [kernel for handle, *_ in runs for kernel in plans[handle].launches]
    memsets, times = kernels.count("memset"), [micros(call)]
    if launch is not None:
        times += [micros(lambda: [_library._run(*arguments) for arguments in runs]), launch * len(kernels)]
    return len(kernels) - memsets, memsets, times


def host():
    """What one call costs the host, us, small tensors and the GPU far behind: the call; the plans that it runs, alone,
    without Python's part; and as many empty launches. Without a GPU the call without its launches.
    """
    if not torch.cuda.is_available():
        without_a_gpu()
    launch = micros_of_a_launch() if torch.cuda.is_available() else None
    print(", ".join(f"{name} {micros(call):.1f} us" for name, call in pieces_of_a_call().items()))
    print(f"{'':24} launches memsets    call   plans  empty launches, us")
    slow = 0
    for name, call in small_calls().items():
        launches, memsets, times = cost_of(call, launch)
        print(f"{name:24} {launches:8} {memsets:7} " + " ".join(f"{x:7.1f}" for x in times), flush=True)
        slow += times[0] > 25
    return {"calls above 25 us": slow}


CHECKS = (
    side_stream, second_gpu, cuda_graph, capture_of_new_shapes, unaligned, deterministic, long_odd, opcheck, speed,
    host, tiles, no_growth, compiled, generate, graphs_of_plans, memory_of_graphs, steps_of_layers, same_bits,
)  # fmt: skip


def dry():
    """Leaves out launches, streams and graphs; outputs are zeros."""
    global DRY
    DRY = True
    without_a_gpu()
    os.environ.setdefault("SIEVE_TOKENS", "64")
    os.environ.setdefault("SIEVE_SETS", " ".join((
        "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=2 model.num_attention_heads=2",
        "model.num_key_value_heads=1 model.head_dim=32 attention.keep_window_size=32 attention.local_window_size=16",
        "training.seq_len=256 training.global_batch_size=1 training.local_batch_size=1",
    )))  # fmt: skip
    made = torch.empty_strided
    torch.empty_strided = lambda *sizes, **settings: made(*sizes, **settings).zero_()
    for name in ("Stream", "Event", "CUDAGraph"):
        setattr(torch.cuda, name, Nothing)
    torch.cuda.current_stream = lambda *_: Nothing()
    torch.cuda.stream = torch.cuda.graph = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.synchronize = torch.cuda._sleep = lambda *_: None
    torch.cuda.mem_get_info = lambda *_: (1, 2)
    torch.cuda.memory_stats = lambda *_: {"requested_bytes.all.current": 0}
    torch.cuda.device_count = lambda: 1


if __name__ == "__main__":
    wanted = sys.argv[1:]
    if "--dry" in wanted:
        wanted.remove("--dry")
        dry()
    failed = 0
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        start = time.perf_counter()
        try:
            outcome = check() or "ok"
        except Exception:
            failed += 1
            outcome = "FAILED\n" + traceback.format_exc()
        if isinstance(outcome, dict):
            outcome = json.dumps({name: round(value, 4) for name, value in outcome.items()}, indent=1)
        print(f"{check.__name__}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    sys.exit(failed)
