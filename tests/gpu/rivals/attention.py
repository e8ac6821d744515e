"""Times PyTorch's attention on the shapes of `sieve kernels bench`, and puts the two side by side. Run both in one sitting:

    sieve kernels bench --json OURS && python3 tests/gpu/rivals/attention.py --ours OURS --json OUT

Dense: SDPA with cuDNN and with FlashAttention-2. Windows: FlexAttention, compiled. Decoding: cuDNN. bf16, 16 query and 8 KV heads;
`--only table2`: the rows of `sieve kernels bench --table2`, SDPA under a mask as a tensor, which is how the paper times its rival, and cuDNN dense.
`--only sparse`: the rows of `sieve kernels bench --sparse`, 32 query and 8 KV heads, FlexAttention under random blocks of 128, cuDNN dense.
`--only nsa_check,nsa`: the rows of `sieve kernels bench --nsa`, cuDNN dense and, where the package fla can be imported, its Triton kernels without the
window branch (it refuses groups under 16); the check holds them against f32 products first and prints relative errors.
`--only heads`: the rows of `sieve kernels bench --heads 16/8,16/16,32/8,32/4,64/8,64/4,16/2,16/1 --lengths 4096,8192,32768` and of
`--heads 9/3,14/2,32/8 --width 64`, cuDNN and, where it can be imported (pack.sh brings it to a machine without a network), FlashAttention-4.
`--only mla`: the rows of `sieve kernels bench --mla` with keys of 192 and values of 128 columns, cuDNN.
CUDA events, the L2 flushed by reads before each run, the launches queued before the GPU is free, medians. A ratio is the rival's time over ours.
"""

import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS = 16, 8
DENSE = [(2, 8192, 128), (8, 2048, 128), (1, 16384, 128), (1, 32768, 128), (2, 8192, 64), (8, 2048, 64), (1, 32768, 64), (1, 8192, 128), (1, 16384, 64), (1, 131072, 128)]
WINDOWS = [(16384, 128, 1024), (16384, 128, 2048), (65536, 128, 1024), (65536, 128, 2048)]
DECODE = [(16, 131072, 128), (1, 131072, 128)]
SPARSE_HEADS, SPARSE = 32, [(8192, []), (32768, [0.125]), (131072, [0.125, 0.0625])]
NSA_HEADS, NSA_LENGTHS, NSA_BLOCK, NSA_CHOSEN = [(16, 8), (64, 4)], (8192, 32768, 65536), 64, 16
WIDE_HEADS, NARROW_HEADS = [(16, 8), (16, 16), (32, 8), (32, 4), (64, 8), (64, 4), (16, 2), (16, 1)], [(9, 3), (14, 2), (32, 8)]
HEAD_SHAPES = [(*heads, width, n) for width, shapes in ((128, WIDE_HEADS), (64, NARROW_HEADS)) for heads in shapes for n in (4096, 8192, 32768)]
MLA = [(2, 8192), (8, 2048), (1, 32768)]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}


class Timer:
    """Rows `(what, batch, seq_len, head_dim, rival, phase) -> ms`."""

    def __init__(self, heads=()):
        self.heads, self.rows, self.flush = heads, {}, torch.zeros(128 << 20, device="cuda", dtype=torch.int32)

    def time(self, key, run, repetitions):
        for _ in range(3):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
        for begin, end in events:
            self.flush.sum()
            torch.cuda._sleep(400_000)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        self.rows[key] = statistics.median(b.elapsed_time(e) for b, e in events)


def inputs(batch, seq_len, width, queries=None):
    """q, k and v as `[batch, heads, seq_len, width]`, and a gradient of o."""
    new = lambda heads, n: torch.randn(batch, n, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    q, k, v = new(HEADS, queries or seq_len), new(KV_HEADS, seq_len), new(KV_HEADS, seq_len)
    return q, k, v, torch.randn_like(q)


def both(timer, key, call, inputs, gradient, repetitions):
    """Forward, and backward from a kept graph."""
    timer.time((*key, "forward"), call, repetitions)
    o = call()
    timer.time((*key, "backward"), lambda: torch.autograd.grad(o, inputs, gradient, retain_graph=True), repetitions)


def dense(timer):
    for batch, n, width in DENSE:
        for name, backend in BACKENDS.items():
            if n > 100_000 and name == "FA2":
                continue
            q, k, v, gradient = inputs(batch, n, width)
            with sdpa_kernel(backend):
                call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                both(timer, ("dense", batch, n, width, name), call, (q, k, v), gradient, 3 if n > 100_000 else 15)


def window_mask(n, window, block=128):
    """The block mask of a window without an n x n tensor."""
    from torch.nn.attention.flex_attention import BlockMask

    at = torch.arange(n // block, device="cuda")
    first, last = at * block, at * block + block - 1
    some = (first[None, :] <= last[:, None]) & (first[:, None] - last[None, :] < window)
    whole = (last[None, :] <= first[:, None]) & (last[:, None] - first[None, :] < window)
    listed = lambda blocks: (blocks.sum(-1).to(torch.int32)[None, None], torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)[None, None])
    mask = lambda b, h, q, k: (q >= k) & (q - k < window)
    return BlockMask.from_kv_blocks(*listed(some & ~whole), *listed(whole), BLOCK_SIZE=block, mask_mod=mask, seq_lengths=(n, n))


def windows(timer):
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # so that a graph can be walked again
    flex = torch.compile(flex_attention, dynamic=False)
    for n, width, window in WINDOWS:
        q, k, v, gradient = inputs(1, n, width)
        mask = window_mask(n, window)
        both(timer, (f"window {window}", 1, n, width, "FlexAttention"), lambda: flex(q, k, v, block_mask=mask, enable_gqa=True), (q, k, v), gradient, 15)


def decoding(timer):
    for batch, n, width in DECODE:
        q, k, v, _ = inputs(batch, n, width, queries=1)
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            timer.time(("decode", batch, n, width, "cuDNN", "forward"), lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), 15)


# Batch, tokens, query and KV heads, width: as `sieve kernels bench --table2`.
TABLE2 = (
    [(1, 1 << power, 2, 1, 128) for power in range(8, 16)]
    + [(batch, 4096, 2, 1, 32) for batch in (1, 2, 4, 8)]
    + [(1, 4096, *heads, 32) for heads in ((1, 1), (4, 1), (8, 2))]
    + [(1, 4096, 2, 1, width) for width in (64, 96, 128)]
)
TABLE2_DECODE = [(1, 1 << power, 2, 1, 128) for power in range(8, 17)]
TABLE2_KEPT = 2048


def table2(timer):
    """SDPA under a mask of kept keys as a `[batch, heads, queries, keys]` tensor, which no back-end but the memory-efficient one takes; KV heads
    repeated before, which is not timed."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for phase, shapes in (("table2", TABLE2), ("table2 decode", TABLE2_DECODE)):
        for batch, n, heads, kv_heads, width in shapes:
            queries = 1 if phase.endswith("decode") else n
            new = lambda heads, n: torch.randn(batch, n, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            q, k, v = new(heads, queries), new(kv_heads, n), new(kv_heads, n)
            group = heads // kv_heads
            wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            kept = torch.rand(batch, kv_heads, 1, n, device="cuda") < TABLE2_KEPT / n
            at = torch.arange(n, device="cuda")
            seen = (at[None, :] <= at[n - queries:, None]) & kept | (at[None, :] == at[n - queries:, None])
            mask = torch.zeros(seen.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~seen, float("-inf")).repeat_interleave(group, 1)
            name = f"{batch}x{n} h{heads}/{kv_heads}"
            with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                timer.time((name, batch, n, width, "SDPA + mask", phase), lambda: sdpa(q, wide_k, wide_v, attn_mask=mask), 15)
            if width >= 64:
                with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    causal = queries == n
                    timer.time((name, batch, n, width, "cuDNN dense", phase), lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True), 15)


def random_blocks(n, density, block=128):
    """The diagonal block of each row and random others before it, for each head."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = n // block
    at = torch.arange(blocks, device="cuda")
    wanted = (density * (at + 1)).round().clamp(min=1) - 1
    rank = torch.rand(SPARSE_HEADS, blocks, blocks, device="cuda").masked_fill_(at[None, :] >= at[:, None], 2.0).argsort(-1)
    # The first `wanted` of a random order of the earlier blocks.
    count = wanted.to(torch.int32)[None, None].expand(1, SPARSE_HEADS, -1).contiguous()
    own = at.to(torch.int32)[:, None].expand(-1, blocks)[None, None].expand(1, SPARSE_HEADS, -1, -1).contiguous()
    return BlockMask.from_kv_blocks(torch.ones_like(count), own, count, rank.to(torch.int32)[None], BLOCK_SIZE=block, mask_mod=lambda b, h, q, k: q >= k,
                                    seq_lengths=(n, n), compute_q_blocks=False)


def sparse(timer):
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    for n, densities in SPARSE:
        new = lambda heads: torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        q, k, v = new(SPARSE_HEADS), new(KV_HEADS), new(KV_HEADS)
        with torch.no_grad():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                timer.time(("dense", 1, n, 128, "cuDNN", "forward 32/8"), call, 5)
            for density in densities:
                mask = random_blocks(n, density)
                timer.time((f"blocks {density}", 1, n, 128, "FlexAttention", "forward 32/8"), lambda: flex(q, k, v, block_mask=mask, enable_gqa=True), 5)
    for (what, _, n, _, rival, phase), ms in timer.rows.items():
        if phase == "forward 32/8":
            print(f"{rival} {what} 1 x {n} h{SPARSE_HEADS}/{KV_HEADS}: {ms:.3f} ms", flush=True)


def nsa_inputs(n, heads, kv_heads):
    """q, k, v as `[1, n, heads, 128]`, and a gradient of o."""
    new = lambda heads: torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q = new(heads)
    return q, new(kv_heads), new(kv_heads), torch.randn_like(q)


def visible(q, k, v, mask):
    """Attention in f32 over the pairs of mask `[kv_heads, n, keys]`; a query that sees none gets 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x[0].transpose(0, 1).float() for x in (q, k, v))
    mask = mask.repeat_interleave(group, 0)
    scores = q @ k.repeat_interleave(group, 0).mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    return (weights @ v.repeat_interleave(group, 0)).transpose(0, 1)[None]


def nsa_check(_, n=2048, heads=64, kv_heads=4):
    """fla's two branches over blocks of 64 and their gradients."""
    from fla.ops.nsa import parallel_nsa
    from fla.ops.nsa.compression import parallel_nsa_compression

    torch.backends.cuda.matmul.allow_tf32 = False
    q, k, v, gradient = nsa_inputs(n, heads, kv_heads)
    token = torch.arange(n, device="cuda")
    # Distinct blocks up to each token's own, which is always there; -1 for none.
    weight = torch.rand(n, kv_heads, n // NSA_BLOCK, device="cuda")
    own = token[:, None, None] // NSA_BLOCK
    block = torch.arange(n // NSA_BLOCK, device="cuda")
    weight = weight.masked_fill(block == own, 2).masked_fill(block > own, -1)
    best = weight.topk(NSA_CHOSEN, -1)
    chosen = best.indices.masked_fill(best.values < 0, -1).sort(-1).values[None]
    is_chosen = torch.zeros(n, kv_heads, n // NSA_BLOCK + 1, device="cuda", dtype=torch.bool).scatter_(-1, chosen[0] % (n // NSA_BLOCK + 1), True)[..., :-1]
    selected = is_chosen.transpose(0, 1).repeat_interleave(NSA_BLOCK, -1) & (token[:, None] >= token)
    compressed = ((block + 1) * NSA_BLOCK - 1 <= token[:, None]).expand(kv_heads, -1, -1)
    means = lambda x: x.unflatten(1, (-1, NSA_BLOCK)).float().mean(2).bfloat16().detach().requires_grad_()
    ones = torch.ones(1, n, heads, device="cuda", dtype=torch.bfloat16)
    scale = 128**-0.5
    theirs = lambda q, k, v: parallel_nsa(q, k, v, g_slc=ones, block_indices=chosen, block_counts=NSA_CHOSEN, block_size=NSA_BLOCK)
    coarse = lambda q, k, v: parallel_nsa_compression(q, k, v, TK=n, block_size=NSA_BLOCK, scale=scale)[0]
    for what, call, mask, inputs in [("selected", theirs, selected, (q, k, v)), ("compressed", coarse, compressed, (q, means(k), means(v)))]:
        exact = visible(*inputs, mask)
        expected = (exact, *torch.autograd.grad(exact, inputs, gradient.float()))
        o = call(*inputs)
        found = (o, *torch.autograd.grad(o, inputs, gradient))
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected)]
        print(f"fla {what} n {n} h{heads}/{kv_heads}: " + ", ".join(f"{name} {error:.1e}" for name, error in zip(("o", "dq", "dk", "dv"), errors)), flush=True)


def nsa(timer):
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        parallel_nsa = None
        print(f"fla is not timed: {error}", flush=True)
    for n in NSA_LENGTHS:
        for heads, kv_heads in NSA_HEADS:
            q, k, v, gradient = nsa_inputs(n, heads, kv_heads)
            repetitions, label = 9 if n < 10_000 else 3, f"h{heads}/{kv_heads}"
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
                call = lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
                both(timer, (f"dense {label}", 1, n, 128, "cuDNN"), call, heads_first, gradient.transpose(1, 2), repetitions)
            if parallel_nsa and heads // kv_heads >= 16:
                gates = [torch.rand(1, n, heads, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
                call = lambda: parallel_nsa(q, k, v, *gates, block_counts=NSA_CHOSEN, block_size=NSA_BLOCK)
                both(timer, (f"nsa {label}", 1, n, 128, "fla"), call, (q, k, v, *gates), gradient, 3)
    for (what, _, n, _, rival, phase), ms in timer.rows.items():
        if phase == "forward" and what.split()[0] in ("dense", "nsa"):
            backward = timer.rows[(what, 1, n, 128, rival, "backward")]
            print(f"{rival} {what} 1 x {n}: {ms:.3f} + {backward:.3f} = {ms + backward:.3f} ms", flush=True)


def heads(timer):
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        flash_attn_func = None
        print(f"FlashAttention-4 is not timed: {error}", flush=True)
    for heads, kv_heads, width, n in HEAD_SHAPES:
        if timer.heads and f"{heads}/{kv_heads}" not in timer.heads:
            continue
        new = lambda heads: torch.randn(1, n, heads, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        q, k, v = new(heads), new(kv_heads), new(kv_heads)
        gradient, repetitions, what = torch.randn_like(q), 5 if n > 16_000 else 9, f"dense h{heads}/{kv_heads}"

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                inner = [x.transpose(1, 2) for x in (q, k, v)]
                return torch.nn.functional.scaled_dot_product_attention(*inner, is_causal=True, enable_gqa=True).transpose(1, 2)

        both(timer, (what, 1, n, width, "cuDNN"), cudnn, (q, k, v), gradient, repetitions)
        for rival, deterministic in (("FA4", False), ("FA4 fixed order", True)) if flash_attn_func else ():
            result = lambda: flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
            first = lambda: r[0] if isinstance(r := result(), (tuple, list)) else r
            both(timer, (what, 1, n, width, rival), first, (q, k, v), gradient, repetitions)
        found = {key[4:]: ms for key, ms in timer.rows.items() if key[:4] == (what, 1, n, width)}
        print(what, n, width, *(f"{rival} {phase} {ms:.4f}" for (rival, phase), ms in found.items()), flush=True)


def mla(timer):
    for batch, n in MLA:
        new = lambda width: torch.randn(batch, n, HEADS, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        q, k, v = new(192), new(192), new(128)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            both(timer, ("mla", batch, n, 192, "cuDNN"), call, (q, k, v), torch.randn_like(v), 5)
        forward, backward = (timer.rows[("mla", batch, n, 192, "cuDNN", phase)] for phase in ("forward", "backward"))
        pairs = batch * HEADS * n * (n + 1) / 2
        rates = 2 * (192 + 128) * pairs / forward / 1e9, 2 * (3 * 192 + 2 * 128) * pairs / backward / 1e9
        print(f"cuDNN mla {batch} x {n}: {forward:.3f} ({rates[0]:.0f} TFLOP/s) + {backward:.3f} ms ({rates[1]:.0f})", flush=True)


def side_by_side(rows, ours):
    """Lines `what, shape, ours, rival, ratio` for everything that both timed."""
    found = {(row["name"], row["shape"]): row.get("median_ms") for row in ours["rows"]}
    shape_of = lambda batch, n, width: f"{batch}x{n} h{HEADS}/{KV_HEADS} d{width}"
    time = lambda name, batch, n, width: found.get((name, shape_of(batch, n, width)))

    def line(what, rival, mine, theirs):
        if mine and theirs:
            print(f"{what:64} {mine:9.4f} {rival:>14} {theirs:9.4f} {theirs / mine:8.2f}x", flush=True)

    print(f"{'what':64} {'ours, ms':>9} {'rival':>14} {'its ms':>9} {'ratio':>9}")
    for (what, batch, n, width, rival, phase), ms in rows.items():
        if what.startswith("dense h"):
            order = ", fixed order" if rival.endswith("fixed order") and phase == "backward" else ""
            label = what.removeprefix("dense ")
            line(f"dense {phase}{order} {label} {batch} x {n} d{width}", rival, found.get((f"dense {phase}{order}", f"{batch}x{n} {label} d{width}")), ms)
            continue
        name = what if what == "decode" else f"{what} {phase}"
        line(f"{name} {batch} x {n} d{width}", rival, time(name, batch, n, width), ms)
    for (what, batch, n, width, rival, phase), ms in rows.items():
        if what != "dense" or phase != "forward":
            continue
        whole = ms + rows[(what, batch, n, width, rival, "backward")]
        full = f"dma w {n} (nothing masked)"
        parts = [time(f"{full} {p}", batch, n, width) for p in ("forward", "backward")]
        if all(parts):
            line(f"{full} forward + backward {batch} x {n} d{width}", f"{rival} dense", sum(parts), whole)
        for (name, shape), mine in found.items():
            if name.startswith("dma w") and name.endswith("select, lists, forward, backward") and shape == shape_of(batch, n, width):
                line(f"{name} {batch} x {n} d{width}", f"{rival} dense", mine, whole)
    for (shape, batch, n, width, rival, phase), ms in rows.items():
        if phase.startswith("table2"):
            for (name, of), mine in found.items():
                is_dma = name.startswith("dma_decode") if phase.endswith("decode") else name.startswith("dma w") and name.endswith("select, forward")
                if is_dma and of == f"{shape} d{width}":
                    line(f"{name} {of}", rival, mine, ms)
    for batch, n, width in DECODE:
        dense_ms = rows.get(("decode", batch, n, width, "cuDNN", "forward"))
        for (name, shape), mine in found.items():
            if name.startswith("dma_decode") and shape == shape_of(batch, n, width):
                line(f"{name} {batch} x {n} d{width}", "cuDNN dense", mine, dense_ms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", help="JSON of `sieve kernels bench`")
    parser.add_argument("--json", default="/dev/null", help="where the rival's rows go")
    parser.add_argument("--only", default="dense,windows,decoding")
    parser.add_argument("--heads", help="of the rows of --only heads those with these query and KV heads alone: 16/8,64/4")
    args = parser.parse_args()
    groups = {"dense": dense, "windows": windows, "decoding": decoding, "table2": table2, "sparse": sparse}
    groups |= {"nsa_check": nsa_check, "nsa": nsa, "mla": mla, "heads": heads}
    wanted = args.only.split(",")
    for name in wanted:
        if name not in groups:
            parser.error(f"--only {name}: not known; one of {', '.join(groups)}")
    timer = Timer(args.heads.split(",") if args.heads else ())
    for name in wanted:
        groups[name](timer)
    names = ("what", "batch", "seq_len", "head_dim", "rival", "phase")
    with open(args.json, "w") as file:
        json.dump({"torch": torch.__version__, "rows": [dict(zip(names, key), ms=ms) for key, ms in timer.rows.items()]}, file, indent=1)
    if args.ours:
        with open(args.ours) as file:
            side_by_side(timer.rows, json.load(file))


if __name__ == "__main__":
    main()
