"""Checks the kernels around attention against torch in f64 and times them: step_check.py CUBIN_DIR (from build_step.sh).

A check passes when its error is at most twice that of the same formula computed by torch in plain bf16, plus a floor. Timings
follow, of the shapes of a 1.7B step, with the L2 flushed; nothing is timed when a check fails.
"""

import sys

import torch
import torch.nn.functional as F

from step_kernels import StepKernels, run_all

torch.manual_seed(20)
kernels = StepKernels(sys.argv[1])
failures, checks = [], 0
EPSILON = 1e-6


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def pitched(rows, width, pad=24, **kw):
    return randn(rows, width + pad, **kw)[:, :width]


def nan_like(shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def check(name, got, exact, plain=None, floor=1e-6):
    """`plain` is the plain bf16 result; without one the result must be within `floor` of the largest exact value."""
    global checks
    checks += 1
    exact = exact.double()
    error = (got.double() - exact).abs().max().item()
    scale = max(exact.abs().max().item(), 1e-30)
    bar = floor * scale + (2 * (plain.double() - exact).abs().max().item() if plain is not None else 0.0)
    if not error <= bar:
        failures.append(name)
        print(f"FAIL {name}: error {error:.3e}, bar {bar:.3e}")


def must(name, condition):
    global checks
    checks += 1
    if not condition:
        failures.append(name)
        print(f"FAIL {name}")


def gradients(function, inputs, dy):
    """(value, gradients) of a function of tensors."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach()] + list(torch.autograd.grad(y, inputs, dy))


def norm(x, weight, epsilon=EPSILON):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def rms_checks():
    for rows, width in [(1, 8), (777, 1024), (2049, 768), (4096, 2048), (301, 5120), (7, 8192), (63, 2056)]:
        x, residual, dy, beside = (pitched(rows, width) for _ in range(4))
        weight = (1 + 0.3 * torch.randn(width, device="cuda")).bfloat16()
        y, total = nan_like((rows, width)), nan_like((rows, width))
        run_all(kernels.rms_norm_forward(x, weight, y, EPSILON))
        check(f"rms_norm {rows}x{width}", y, norm(x.double(), weight.double()), norm(x, weight))
        run_all(kernels.rms_norm_forward(x, weight, y, EPSILON, residual, total))
        must(f"rms_norm sum {rows}x{width}", torch.equal(total, x + residual))
        check(f"rms_norm residual {rows}x{width}", y, norm(total.double(), weight.double()), norm(total, weight))
        exact = gradients(norm, [x.double(), weight.double()], dy.double())
        plain = gradients(norm, [x, weight], dy)
        dx, dweight = nan_like((rows, width)), nan_like((width,), torch.float32)
        run_all(kernels.rms_norm_backward(x, weight, dy, dx, dweight, EPSILON))
        check(f"rms_norm dx {rows}x{width}", dx, exact[1], plain[1])
        check(f"rms_norm dweight {rows}x{width}", dweight, exact[2], None, 1e-5)
        before = torch.randn(width, device="cuda")
        accumulated = before.clone()
        d_total = beside.contiguous().clone()  # dx in place of the gradient beside
        run_all(kernels.rms_norm_backward(x, weight, dy, d_total, accumulated, EPSILON, d_total, 1))
        check(f"rms_norm dx + beside {rows}x{width}", d_total, exact[1] + beside.double(), plain[1] + beside)
        check(f"rms_norm dweight accumulated {rows}x{width}", accumulated, exact[2] + before.double(), None, 1e-5)
        y, both, dweight_again = nan_like((rows, width)), nan_like((rows, width)), nan_like((width,), torch.float32)
        run_all(kernels.rms_norm_backward(x, weight, dy, both, dweight_again, EPSILON, beside, output=y))
        must(f"rms_norm with output {rows}x{width}", torch.equal(both, d_total) and torch.equal(dweight_again, dweight))
        check(f"rms_norm y once more {rows}x{width}", y, exact[0], plain[0])
        again, repeat = nan_like((width,), torch.float32), nan_like((rows, width))
        run_all(kernels.rms_norm_backward(x, weight, dy, repeat, again, EPSILON))
        must(f"rms_norm repeats {rows}x{width}", torch.equal(again, dweight) and torch.equal(repeat, dx))


def swiglu_checks():
    for rows, d_ff in [(1, 8), (777, 1032), (4096, 6144)]:
        gate_up, dy = randn(rows, 2 * d_ff), randn(rows, d_ff)

        def swiglu(gate_up):
            return F.silu(gate_up[:, :d_ff]) * gate_up[:, d_ff:]

        exact, plain = gradients(swiglu, [gate_up.double()], dy.double()), gradients(swiglu, [gate_up], dy)
        dx, y = nan_like((rows, 2 * d_ff)), nan_like((rows, d_ff))
        run_all(kernels.swiglu_backward(gate_up, dy, dx, y))
        check(f"swiglu dx {rows}x{d_ff}", dx, exact[1], plain[1])
        check(f"swiglu y {rows}x{d_ff}", y, exact[0], plain[0])
        run_all(kernels.swiglu_backward(gate_up, dy, gate_up, dy))
        must(f"swiglu in place {rows}x{d_ff}", torch.equal(gate_up, dx) and torch.equal(dy, y))


def tables(positions, half, dtype=torch.float32):
    angle = torch.arange(positions, device="cuda", dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(half, device="cuda", dtype=torch.float64) / half)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def qk(qkv, q_weight, k_weight, positions, cos, sin, kv_heads):
    heads = qkv.shape[1] - 2 * kv_heads
    cos, sin = cos[positions.long()][:, None].to(qkv.dtype), sin[positions.long()][:, None].to(qkv.dtype)

    def rotate(x):
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return torch.cat([rotate(norm(q, q_weight)), rotate(norm(k, k_weight)), v], 1)


def qk_checks():
    for tokens, heads, kv_heads, head_dim in [(1, 1, 1, 16), (77, 5, 3, 96), (1001, 12, 4, 64), (4099, 16, 8, 128), (33, 7, 2, 128)]:
        packed = heads + 2 * kv_heads
        qkv, dy = (randn(tokens, packed + 1, head_dim)[:, :packed] for _ in range(2))
        q_weight, k_weight = ((1 + 0.3 * torch.randn(head_dim, device="cuda")).bfloat16() for _ in range(2))
        positions = torch.randint(0, 5000, (tokens,), device="cuda", dtype=torch.int32)
        cos, sin = tables(5000, head_dim // 2)
        name = f"{tokens} {heads}/{kv_heads} d{head_dim}"

        def f(x, a, b):
            return qk(x, a, b, positions, cos, sin, kv_heads)

        exact = gradients(f, [qkv.double(), q_weight.double(), k_weight.double()], dy.double())
        plain = gradients(f, [qkv, q_weight, k_weight], dy)
        out = nan_like((tokens, packed, head_dim))
        args = ([q_weight, k_weight], positions, [cos, sin])
        run_all(kernels.qk_forward(qkv, *args, out, kv_heads, EPSILON))
        check(f"qk_norm_rope {name}", out, exact[0], plain[0])
        must(f"qk_norm_rope values {name}", torch.equal(out[:, -kv_heads:], qkv[:, -kv_heads:]))
        in_place = qkv.clone()
        run_all(kernels.qk_forward(in_place, *args, in_place, kv_heads, EPSILON))
        must(f"qk_norm_rope in place {name}", torch.equal(in_place, out))
        dqkv, dweights = nan_like((tokens, packed, head_dim)), [nan_like((head_dim,), torch.float32) for _ in range(2)]
        run_all(kernels.qk_backward(qkv, *args, dy, dqkv, dweights, kv_heads, EPSILON))
        check(f"qk_norm_rope dqkv {name}", dqkv, exact[1], plain[1])
        check(f"qk_norm_rope dq_weight {name}", dweights[0], exact[2], None, 2e-5)
        check(f"qk_norm_rope dk_weight {name}", dweights[1], exact[3], None, 2e-5)
        in_place = dy.clone()
        run_all(kernels.qk_backward(qkv, *args, in_place, in_place, dweights, kv_heads, EPSILON))
        must(f"qk_norm_rope backward in place {name}", torch.equal(in_place, dqkv))


def cross_entropy_checks():
    for rows, vocab in [(1, 1), (7, 13), (333, 50257), (64, 50280), (19, 151936), (5, 4096)]:
        stride = (vocab + 7) // 8 * 8
        buffer = randn(rows, stride, scale=3.0)
        buffer[:, vocab:] = float("nan")
        logits = buffer[:, :vocab].double()
        labels = torch.randint(0, vocab, (rows,), device="cuda", dtype=torch.int32)
        labels[::5] = -100
        ignored, target = labels < 0, labels.clamp_min(0).long()
        lse = torch.logsumexp(logits, -1)
        z_loss, scale = 1e-2, 0.37
        losses = lse - logits.gather(1, target[:, None])[:, 0] + z_loss * lse * lse
        grads = (logits - lse[:, None]).exp() * (1 + 2 * z_loss * lse[:, None]) - F.one_hot(target, vocab)
        losses, grads = losses.masked_fill(ignored, 0), (grads * scale).masked_fill(ignored[:, None], 0)
        for inputs in (buffer, buffer.float()):
            kind = f"{rows}x{vocab} {inputs.dtype}".replace("torch.", "")
            got, out = nan_like((rows,), torch.float32), nan_like((rows, stride))
            run_all(kernels.cross_entropy(inputs, labels, got, vocab, out, z_loss, scale))
            check(f"cross_entropy loss {kind}", got, losses, None, 1e-5)
            check(f"cross_entropy gradient {kind}", out[:, :vocab], grads, grads.bfloat16())
            alone = nan_like((rows,), torch.float32)
            run_all(kernels.cross_entropy(inputs, labels, alone, vocab))
            plain = (torch.logsumexp(logits, -1) - logits.gather(1, target[:, None])[:, 0]).masked_fill(ignored, 0)
            check(f"cross_entropy loss alone {kind}", alone, plain, None, 1e-5)
        run_all(kernels.cross_entropy(buffer, labels, got, vocab, buffer, z_loss, scale))
        check(f"cross_entropy in place {rows}x{vocab}", buffer[:, :vocab], grads, grads.bfloat16())
    wrong = torch.full((3,), 9, device="cuda", dtype=torch.int32)
    got = torch.zeros(3, device="cuda")
    run_all(kernels.cross_entropy(randn(3, 8), wrong, got, 8))
    must("cross_entropy label outside the vocabulary", got.isnan().all().item())


def sum_checks():
    for size in (1, 5, 65536, 65537, 1234567):
        for dtype in (torch.float32, torch.bfloat16):
            x = randn(size, dtype=dtype)
            count = (size + 65535) // 65536
            for square in (0, 1):
                partials, out = nan_like((count + 1,), torch.float32), nan_like((1,), torch.float32)
                partials[0] = 3.0
                run_all(kernels.sum_partials(x, partials, 1, square))
                run_all(kernels.finish_sum(partials, out))
                exact = (x.double() ** 2 if square else x.double()).sum() + 3
                must(f"sum {size} {dtype} {square}", abs(out.item() - exact.item()) <= 1e-5 * (x.double().abs().sum().item() + 3))
    partials, out, scale = torch.tensor([9.0, 16.0], device="cuda"), nan_like((1,), torch.float32), nan_like((1,), torch.float32)
    run_all(kernels.finish_sum(partials, out, scale, 1.0))
    must("clip", abs(out.item() - 5) < 1e-6 and abs(scale.item() - 1 / (5 + 1e-6)) < 1e-6)
    run_all(kernels.finish_sum(partials, out, scale, 7.0))
    must("no clip", scale.item() == 1)
    for bad in (float("nan"), float("inf")):
        run_all(kernels.finish_sum(torch.tensor([1.0, bad], device="cuda"), out, scale, 1.0))
        must(f"gate for {bad}", scale.item() == 0)


def adamw_checks():
    args = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, c1=1 - 0.9**7, c2=1 - 0.95**7)
    for size in (1, 1027, 1 << 20):
        for leaf in (None, nan_like((size,))):
            p, m, g = (randn(size, dtype=torch.float32) for _ in range(3))
            v = randn(size, dtype=torch.float32) ** 2
            scale = torch.tensor([0.5], device="cuda")
            state = [t.clone() for t in (p, m, v)]
            run_all(kernels.adamw(p, m, v, g, scale, leaf, **args))
            old_p, old_m, old_v = (t.double() for t in state)
            grad = g.double() * 0.5
            new_m = old_m * 0.9 + grad * 0.1
            new_v = old_v * 0.95 + grad * grad * 0.05
            new_p = old_p * (1 - args["lr"] * 0.1) - args["lr"] / args["c1"] * new_m / ((new_v / args["c2"]).sqrt() + 1e-8)
            for name, got, exact in (("p", p, new_p), ("m", m, new_m), ("v", v, new_v)):
                check(f"adamw {name} {size}", got, exact, None, 1e-6)
            if leaf is not None:
                must(f"adamw leaf {size}", torch.equal(leaf, p.bfloat16()))
            for gate in (0.0, float("nan"), float("inf"), float("-inf")):
                before = [t.clone() for t in (p, m, v)]
                mark = nan_like((size,)) if leaf is not None else None
                run_all(kernels.adamw(p, m, v, g * float("nan"), torch.tensor([gate], device="cuda"), mark, **args))
                same = all(torch.equal(a, b) for a, b in zip(before, (p, m, v)))
                must(f"adamw gate {gate} {size}", same and (mark is None or mark.isnan().all().item()))
        # The same update on a leaf and what it lacks of the master: equal to the last bit.
        p, m, g = (randn(size, dtype=torch.float32) for _ in range(3))
        v, scale = randn(size, dtype=torch.float32) ** 2, torch.tensor([0.5], device="cuda")
        leaf, rest, joined = nan_like((size,)), nan_like((size,)), nan_like((size,), torch.float32)
        run_all(kernels.split_master(p, leaf, rest))
        run_all(kernels.split_master(joined, leaf, rest, join=1))
        must(f"split master {size}", torch.equal(joined, p))
        must(f"split leaf {size}", (leaf != p.bfloat16()).float().mean().item() < 1e-3)
        moments = m.clone(), v.clone()
        run_all(kernels.adamw(rest, *moments, g, scale, leaf, **args))
        run_all(kernels.adamw(p, m, v, g, scale, None, **args))
        run_all(kernels.split_master(joined, leaf, rest, join=1))
        must(f"adamw of a split master {size}", torch.equal(joined, p) and torch.equal(moments[0], m) and torch.equal(moments[1], v))
        for gate in (0.0, float("nan")):
            run_all(kernels.adamw(rest, *moments, g, torch.tensor([gate], device="cuda"), leaf, **args))
            run_all(kernels.split_master(joined, leaf, rest, join=1))
            must(f"adamw gate {gate} of a split master {size}", torch.equal(joined, p))


def embedding_checks():
    for tokens, vocab, width, kind in [(1, 5, 8, "any"), (4097, 50280, 768, "zipf"), (16384, 50280, 2048, "zipf"), (5000, 300, 2056, "zipf"),
                                       (3000, 7, 64, "same"), (777, 257, 1024, "wild"), (31, 100000, 4096, "any")]:
        weight, dy = randn(vocab, width), pitched(tokens, width, 8)
        ids = torch.randint(0, vocab, (tokens,), device="cuda")
        if kind == "zipf":
            ids = (vocab ** torch.rand(tokens, device="cuda") - 1).long().clamp(0, vocab - 1)
        if kind == "same":
            ids[:] = 3
        ids = ids.int()
        if kind == "wild":
            ids[::7], ids[1::7] = -1, vocab
        valid = (ids >= 0) & (ids < vocab)
        y = nan_like((tokens, width))
        run_all(kernels.embedding_forward(weight, ids, y))
        must(f"embedding {tokens}x{width} {kind}", torch.equal(y[valid], weight[ids[valid].long()]) and y[~valid].isnan().all().item())
        before = torch.randn(vocab, width, device="cuda")
        dweight = before.clone()
        run_all(kernels.embedding_backward(dy, ids, dweight))
        exact = before.double().index_add(0, ids[valid].long(), dy[valid].double())
        check(f"embedding backward {tokens}x{width} {kind}", dweight, exact, None, 2e-6)
        again = before.clone()
        run_all(kernels.embedding_backward(dy, ids, again))
        must(f"embedding backward repeats {tokens} {kind}", torch.equal(again, dweight))


def add_checks():
    for dtype in (torch.bfloat16, torch.float32):
        a, b = pitched(77, 2056, dtype=dtype), pitched(77, 2056, 8, dtype=dtype)
        y = nan_like((77, 2056), dtype)
        run_all(kernels.residual_add(a, b, y))
        must(f"residual_add {dtype}", torch.equal(y, a + b))


def score_checks():
    for batch, seq_len, heads, kv_heads, head_dim in [(1, 1, 4, 4, 64), (2, 63, 8, 8, 128), (3, 1001, 6, 3, 96), (2, 4100, 16, 8, 128), (1, 257, 32, 32, 128)]:
        packed = heads + 2 * kv_heads
        qkv, dqkv = (randn(batch, seq_len, packed, head_dim) for _ in range(2))
        w_dt, a = randn(kv_heads * head_dim, kv_heads, dtype=torch.float32, scale=0.2), randn(kv_heads, dtype=torch.float32)
        dz = randn(batch, kv_heads, seq_len, dtype=torch.float32)
        v = qkv[:, :, -kv_heads:].reshape(batch, seq_len, -1).double()

        def z(v, w, a):
            return F.softplus(v @ w, threshold=20).transpose(1, 2) * a[:, None]

        _, dv, dw, da = gradients(z, [v, w_dt.double(), a.double()], dz.double())
        x = (v @ w_dt.double()).transpose(1, 2).float().contiguous()
        exact = dqkv.double()
        exact[:, :, -kv_heads:] += dv.reshape(batch, seq_len, kv_heads, head_dim)
        got, dw_dt, d_a = dqkv.clone(), nan_like(w_dt.shape, torch.float32), nan_like(a.shape, torch.float32)
        run_all(kernels.dma_scores_backward(qkv, got, w_dt, a, x, dz, dw_dt, d_a))
        name = f"{batch}x{seq_len} {heads}/{kv_heads} d{head_dim}"
        check(f"dma_scores dv {name}", got, exact, exact.bfloat16())
        check(f"dma_scores dW_dt {name}", dw_dt, dw, None, 1e-5)
        check(f"dma_scores dA {name}", d_a, da, None, 2e-5)


def timings():
    flush = kernels.cuda.reader()
    source, target = (torch.empty(1 << 30, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy_ms = kernels.cuda.time_ms(lambda: target.copy_(source), flush=flush)[0]
    copy = 2 * source.numel() / copy_ms / 1e6
    print(f"copy {copy:.0f} GB/s")
    del source, target

    def row(name, launches, nbytes):
        ms, low, high = kernels.cuda.time_ms(lambda: run_all(launches), flush=flush)
        rate = nbytes / ms / 1e6
        print(f"{name:44} {ms * 1e3:8.1f} us ({low * 1e3:.1f}-{high * 1e3:.1f}) {rate:6.0f} GB/s {100 * rate / copy:4.0f} %")

    for tokens, width in ((16384, 2048), (65536, 768)):
        n = tokens * width
        x, r, y, s, dy = (randn(tokens, width) for _ in range(5))
        weight, dweight = randn(width), torch.zeros(width, device="cuda")
        row(f"rms_norm forward {tokens}x{width}", kernels.rms_norm_forward(x, weight, y, EPSILON), 4 * n)
        row(f"rms_norm + residual {tokens}x{width}", kernels.rms_norm_forward(x, weight, y, EPSILON, r, s), 8 * n)
        row(f"rms_norm backward {tokens}x{width}", kernels.rms_norm_backward(x, weight, dy, y, dweight, EPSILON), 6 * n)
        row(f"rms_norm backward + residual {tokens}x{width}", kernels.rms_norm_backward(x, weight, dy, y, dweight, EPSILON, r), 8 * n)
        row(f"rms_norm backward + residual + output {tokens}x{width}", kernels.rms_norm_backward(x, weight, dy, y, dweight, EPSILON, r, output=s), 10 * n)
        row(f"residual_add {tokens}x{width}", kernels.residual_add(x, r, y), 6 * n)
        ids = (50280 ** torch.rand(tokens, device="cuda") - 1).int()
        table, sums = randn(50280, width), torch.zeros(50280, width, device="cuda")
        unique = ids.unique().numel()
        row(f"embedding forward {tokens}x{width}", kernels.embedding_forward(table, ids, y), 2 * n + 2 * unique * width)
        order, add, carry = kernels.embedding_backward(dy, ids, sums)
        row(f"embedding order {tokens}", order, 16 * tokens)
        row(f"embedding backward {tokens}x{width} ({unique} ids)", [add, carry], 2 * n + 8 * unique * width)
        ids[:] = 7
        row(f"embedding backward {tokens}x{width}, one id", kernels.embedding_backward(dy, ids, sums), 2 * n)
        del table, sums
    for tokens, heads, kv_heads, head_dim in ((16384, 16, 8, 128), (65536, 12, 4, 64)):
        packed = heads + 2 * kv_heads
        n = tokens * packed * head_dim
        moved = tokens * (heads + kv_heads) * head_dim
        qkv, dy, out = (randn(tokens, packed, head_dim) for _ in range(3))
        weights, dweights = [randn(head_dim) for _ in range(2)], [torch.zeros(head_dim, device="cuda") for _ in range(2)]
        positions = (torch.arange(tokens, device="cuda") % 2048).int()
        args = (weights, positions, list(tables(2048, head_dim // 2)))
        name = f"{tokens} {heads}/{kv_heads} d{head_dim}"
        row(f"qk_norm_rope forward {name}", kernels.qk_forward(qkv, *args, out, kv_heads, EPSILON), 4 * n)
        row(f"qk_norm_rope backward {name}", kernels.qk_backward(qkv, *args, dy, out, dweights, kv_heads, EPSILON), 4 * n + 2 * moved)
        row(f"qk_norm_rope backward in place {name}", kernels.qk_backward(qkv, *args, dy, dy, dweights, kv_heads, EPSILON), 6 * moved)
    for rows, vocab in ((4096, 50280), (1664, 151936)):
        logits, labels, losses = randn(rows, vocab), torch.randint(0, vocab, (rows,), device="cuda", dtype=torch.int32), torch.zeros(rows, device="cuda")
        row(f"cross_entropy in place {rows}x{vocab}", kernels.cross_entropy(logits, labels, losses, vocab, logits), 4 * rows * vocab)
        logits = logits.float()
        row(f"cross_entropy losses, f32 {rows}x{vocab}", kernels.cross_entropy(logits, labels, losses, vocab), 4 * rows * vocab)
        del logits
    size = 50280 * 2048
    p, m, v, g = (torch.rand(size, device="cuda") for _ in range(4))
    leaf, scale = torch.zeros(size, device="cuda", dtype=torch.bfloat16), torch.ones(1, device="cuda")
    row(f"adamw {size}", kernels.adamw(p, m, v, g, scale, leaf, 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.1), 30 * size)
    rest = torch.zeros(size, device="cuda", dtype=torch.bfloat16)
    row(f"adamw split {size}", kernels.adamw(rest, m, v, g, scale, leaf, 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.1), 28 * size)
    del rest
    partials, total = torch.zeros((size + 65535) // 65536, device="cuda"), torch.zeros(1, device="cuda")
    row(f"sum of squares {size}", kernels.sum_partials(g, partials, 0, 1), 4 * size)
    many = torch.rand(27000, device="cuda")
    row("finish_sum of 27000", kernels.finish_sum(many, total, torch.zeros(1, device="cuda"), 1.0), 4 * 27000)
    row("adamw 2048", kernels.adamw(p[:2048], m[:2048], v[:2048], g[:2048], scale, leaf[:2048], 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.1), 30 * 2048)
    del p, m, v, g
    for batch, seq_len, heads, kv_heads, head_dim in ((8, 2048, 16, 8, 128), (32, 2048, 12, 4, 64)):
        qkv, dqkv = (randn(batch, seq_len, heads + 2 * kv_heads, head_dim) for _ in range(2))
        w_dt, a = randn(kv_heads * head_dim, kv_heads, dtype=torch.float32), randn(kv_heads, dtype=torch.float32)
        x, dz = (randn(batch, kv_heads, seq_len, dtype=torch.float32) for _ in range(2))
        launches = kernels.dma_scores_backward(qkv, dqkv, w_dt, a, x, dz, torch.zeros_like(w_dt), torch.zeros_like(a))
        tokens = batch * seq_len
        row(f"dma_scores backward {tokens} {kv_heads} d{head_dim}", launches, tokens * kv_heads * (6 * head_dim + 8))


for part in (rms_checks, swiglu_checks, qk_checks, cross_entropy_checks, sum_checks, adamw_checks, embedding_checks, add_checks, score_checks):
    try:
        part()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001: one broken part must not hide the others
        failures.append(part.__name__)
        print(f"FAIL {part.__name__}: {type(error).__name__}: {error}")
print(f"{checks} checks, {len(failures)} failed")
if failures:
    sys.exit(1)
timings()
