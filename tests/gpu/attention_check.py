"""Checks the attention kernels against f32 references on random shapes, then times them beside SDPA's FlashAttention-2 and cuDNN.

    python3 tests/gpu/attention_build.py --out DIR
    python3 tests/gpu/attention_check.py --cubins DIR --json OUT [--only check|bench] [--cases N]
    python3 tests/gpu/attention_check.py --emulate --cases 10 --longest 150          (no GPU: tests/gpu/emulator)
    compute-sanitizer --tool memcheck python3 tests/gpu/attention_check.py --cubins DIR --only check --cases 5 --processes 0 --longest 150

A result passes when err(kernel, f32) <= 2 * err(plain bf16, f32) + floor, err being the largest absolute difference; from 64 tokens on the
norm of the difference must pass without a floor too. The floor of a gradient is 2^-8 of its largest element, 2^-7 below 64 tokens: rowsum(do * o) is taken from the
rounded o, and among a handful of numbers the plain computation may round to the exact result by luck. Cases run in several processes with a
time limit, so that one kernel's crash costs its own group only. Exit code 0 only if everything passed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from queue import Empty

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import attention_kernels as kernels
from attention_kernels import Heads
from attention_reference import Lists, documents, expire_oracle, gradients, mask_of

HEAD_DIMS = [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
GROUPS = [1, 2, 3, 4, 8]
NAN = float("nan")


def scores(rng, kind, shape):
    n = shape[-1]
    z = {"independent": lambda: rng.standard_normal(shape) * 0.7,
         "rising": lambda: np.broadcast_to(np.linspace(-1.0, 1.5, n), shape) + 0.01 * rng.standard_normal(shape),
         "falling": lambda: np.broadcast_to(np.linspace(1.5, -1.0, n), shape) + 0.01 * rng.standard_normal(shape),
         "tied": lambda: np.zeros(shape),
         "few values": lambda: rng.integers(-1, 2, shape) * 0.5,
         "signed zeros": lambda: np.where(rng.random(shape) < 0.5, 0.0, -0.0)}[kind]()
    return z.astype(np.float32)


def random_case(rng, mode, longest):
    d, dv = HEAD_DIMS[rng.integers(len(HEAD_DIMS))]
    group = int(GROUPS[rng.integers(len(GROUPS))])
    kv_heads = int(rng.integers(1, 4)) if group < 4 else 1
    n = int(rng.choice([1, 2, 15, 63, 64, 65, 127, 129, 191, int(rng.integers(2, longest)), int(rng.integers(2, longest))]))
    if mode == "dma" and rng.random() < 0.25:
        n = int(rng.integers(1025, 1025 + 2 * longest))
    return dict(mode=mode, batch=int(rng.integers(1, 4)) if n < 300 else 1, seq_len=n, kv_heads=kv_heads, heads=kv_heads * group, d=d, dv=dv,
                window=int(rng.choice([1, 2, 7, 33, 64, 100, max(1, n // 2), n, 5 * n])) if mode != "dense" else 4 * n,
                documents=str(rng.choice(["one", "one", "few", "mixed", "tokens"])), packed=bool(rng.random() < 0.5),
                scores=str(rng.choice(["independent", "independent", "rising", "falling", "tied", "few values", "signed zeros"])),
                seed=int(rng.integers(1 << 30)))


def gap(a, b):
    """Largest absolute difference; NaN counts as infinite, equal infinities as 0."""
    diff = torch.where(a == b, torch.zeros_like(b), (a - b).abs())
    return float("inf") if torch.isnan(diff).any() else diff.max().item()


def check_case(rt, case):
    """Returns a list of failures and the largest ratio err / allowed."""
    rng = np.random.default_rng(case["seed"])
    dev, b, n, h, hkv, d, dv = rt.device, case["batch"], case["seq_len"], case["heads"], case["kv_heads"], case["d"], case["dv"]
    generator = torch.Generator(device="cpu").manual_seed(case["seed"])
    make = lambda heads, dim: torch.randn(b, n, heads, dim, generator=generator).to(torch.bfloat16)
    q, k, v, do = make(h, d), make(hkv, d), make(hkv, dv), make(h, dv).to(dev)
    doc_start, doc_end = documents(rng, b, n, case["documents"])
    window, scale, at = case["window"], d**-0.5, np.arange(n)
    delta = lists = None
    if case["mode"] == "dma":
        z = scores(rng, case["scores"], (b, hkv, n))
        expire = expire_oracle(z, doc_start, doc_end, window)
        lists = Lists(expire, window, dev, int(rng.choice([32, 64, 64, 128])))
        delta = torch.from_numpy(np.exp(np.minimum(z, 60))).to(dev)
    else:
        expire = np.minimum(doc_end, at + window)[:, None, :].repeat(hkv, 1)
        if case["mode"] == "bias":
            delta = torch.rand(b, hkv, n, generator=generator).to(dev)
    expire = torch.from_numpy(expire).to(dev)
    active = mask_of(expire)
    clean = [x.to(dev) for x in (q, k, v)]
    reference = gradients(*clean, delta, active, scale, do, torch.float32)
    plain = gradients(*clean, delta, active, scale, do, torch.bfloat16)

    # Never-active keys: their K, V and delta are NaN for the kernels, their gradients must be exactly zero.
    never = (~active.any(2)).transpose(1, 2)  # [b, n, hkv]
    k, v, kernel_delta = clean[1].clone(), clean[2].clone(), delta
    if case["mode"] == "dma":
        k[never], v[never] = NAN, NAN
        kernel_delta = delta.masked_fill(never.transpose(1, 2), NAN)
    q = clean[0]
    if case["packed"] and d == dv:
        packed = torch.cat([q, k, v], 2).reshape(b, n, (h + 2 * hkv) * d)
        packed = torch.cat([torch.full((b, n, 8), NAN, device=dev, dtype=packed.dtype), packed], 2)  # an offset and a wider row
        qkv = [Heads(packed, 8, h, d), Heads(packed, 8 + h * d, hkv, d), Heads(packed, 8 + (h + hkv) * d, hkv, d)]
    else:
        qkv = [Heads(x.reshape(b, n, -1), 0, x.shape[2], x.shape[3]) for x in (q, k, v)]

    def grads():
        if case["packed"] and d == dv:
            out = torch.full_like(qkv[0].packed, NAN)
            return [Heads(out, x.offset, x.num_heads, d) for x in qkv]
        return [Heads(torch.full_like(x.packed, NAN), 0, x.num_heads, x.head_dim) for x in qkv]

    failures, worst = [], 0.0

    def compare(name, got, index, floor=2e-4):
        nonlocal worst
        want = reference[index]
        largest = want[torch.isfinite(want)].abs().max().item() if torch.isfinite(want).any() else 0.0
        error, allowed = gap(got.float(), want), 2 * gap(plain[index], want) + floor + (1e-4 if index < 2 else 2.0**-8 if n >= 64 else 2.0**-7) * largest
        worst = max(worst, error / allowed)
        if not error <= allowed:
            failures.append(f"{name}: error {error:.3e}, allowed {allowed:.3e}")
        if n >= 64 and index != 1:
            error, allowed = (got.float() - want).norm().item(), 2 * (plain[index] - want).norm().item() + 1e-6 * want.norm().item() + 1e-5 * want.numel() ** 0.5
            worst = max(worst, error / allowed)
            if not error <= allowed:
                failures.append(f"{name}: norm of the error {error:.3e}, allowed {allowed:.3e}")

    o = torch.full((b, n, h, dv), NAN, device=dev, dtype=torch.bfloat16)
    lse = torch.full((b, h, n), NAN, device=dev)
    start, end = torch.from_numpy(doc_start).to(dev), torch.from_numpy(doc_end).to(dev)
    if lists is not None:
        kernels.dma_attention_forward(rt, *qkv, kernel_delta, lists, scale, o, lse)
    else:
        kernels.attention_forward(rt, *qkv, start, window, scale, o, lse, kernel_delta)
    rt.synchronize()
    compare("o", o, 0)
    compare("lse", lse, 1, 1e-4)

    for deterministic in (False, True):
        runs = []
        for _ in range(2 if deterministic else 1):
            dq, dk, dv_ = grads()
            ddelta = torch.full((b, hkv, n), NAN, device=dev)
            if lists is not None:
                kernels.dma_attention_backward(rt, *qkv, o, lse, do, kernel_delta, lists, scale, dq, dk, dv_, ddelta, deterministic,
                                               super_blocks=int(rng.integers(1, 4)))
            else:
                kernels.attention_backward(rt, *qkv, o, lse, do, start, end, window, scale, dq, dk, dv_, kernel_delta,
                                           ddelta if delta is not None else None, deterministic)
            rt.synchronize()
            runs.append([dq.view(), dk.view(), dv_.view(), ddelta])
        tag = "deterministic " if deterministic else ""
        for name, got, index in zip(("dq", "dk", "dv"), runs[0], (2, 3, 4)):
            compare(tag + name, got, index)
        if delta is not None:
            compare(tag + "ddelta", runs[0][3], 5)
        if lists is not None:
            for name, got in (("dk", runs[0][1]), ("dv", runs[0][2]), ("ddelta", runs[0][3].transpose(1, 2))):
                if not (got[never] == 0).all():
                    failures.append(f"{tag}{name}: a never-active key has a gradient")
        if deterministic and not all(torch.equal(x, y) for x, y in zip(*runs) if x is not runs[0][3] or delta is not None):
            failures.append("deterministic: two runs differ")
    return failures, worst


def check_group(make_runtime, seed, count, longest, modes, queue):
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        rt, rng = make_runtime(), np.random.default_rng(seed)
        for index in range(count):
            case = random_case(rng, modes[index % len(modes)], longest)
            begin = time.time()
            try:
                failures, worst = check_case(rt, case)
            except torch.OutOfMemoryError as e:
                failures, worst = [str(e)[:200]], float("inf")
            queue.put(dict(case=case, failures=failures, worst=worst, seconds=time.time() - begin))
    except Exception:
        queue.put(dict(case=dict(group=seed), failures=[traceback.format_exc(limit=-4)], worst=float("inf"), seconds=0))


def run_checks(make_runtime, cases, processes, longest, limit_s, seed):
    modes = ["dma", "dense", "dma", "window", "bias"]
    context, results = multiprocessing.get_context("fork"), []
    queue = context.Queue()
    counts = [cases // max(processes, 1) + (i < cases % max(processes, 1)) for i in range(processes)]
    workers = [context.Process(target=check_group, args=(make_runtime, seed * 1000 + i, c, longest, modes[i % 5 :] + modes[: i % 5], queue)) for i, c in enumerate(counts)]
    for w in workers:
        w.start()
    if processes == 0:  # in this process, for tools that watch one
        check_group(make_runtime, seed * 1000, cases, longest, modes, queue)
    deadline = time.time() + limit_s
    while len(results) < cases if processes == 0 else any(w.is_alive() for w in workers) or not queue.empty():
        try:
            results.append(queue.get(timeout=0.5))  # raises Empty
            if results[-1]["failures"]:
                print("FAIL", json.dumps(results[-1]["case"]), *results[-1]["failures"], sep="\n  ", flush=True)
        except Empty:
            pass
        if time.time() > deadline:
            for w in workers:
                if w.is_alive():
                    w.kill()
    dead = [i for i, w in enumerate(workers) if w.exitcode != 0]
    failed = sum(bool(r["failures"]) for r in results)
    by_mode = {}
    for r in results:
        by_mode.setdefault(r["case"].get("mode", "?"), []).append(r)
    for mode, rows in sorted(by_mode.items()):
        print(f"{mode}: {len(rows)} cases, {sum(bool(r['failures']) for r in rows)} failed, largest error / allowed {max(r['worst'] for r in rows):.2f}")
    print(f"checked {len(results)} of {cases} cases, {failed} failed, {len(dead)} processes died")
    return results, failed == 0 and not dead and len(results) == cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--json", default="/dev/null")
    parser.add_argument("--only", choices=["check", "bench"])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bench", default="all")
    args = parser.parse_args()
    if args.emulate:
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "emulator"))
        from emulate import EmulatorRuntime as make_runtime
    else:
        make_runtime = lambda: kernels.CubinRuntime(args.cubins)
    report, good = {}, True
    if args.only != "bench":
        report["checks"], good = run_checks(make_runtime, args.cases, args.processes, args.longest, args.limit_s, args.seed)
    if args.only != "check" and not args.emulate:
        import attention_bench

        report["bench"] = attention_bench.run(make_runtime, args.bench)
    with open(args.json, "w") as f:
        json.dump(report, f, indent=1, default=str)
    print("PASS" if good else "FAIL")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
