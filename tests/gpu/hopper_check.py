"""Checks and times the Hopper kernels: those of attention_check.py with HopperRuntime under them, head_dim 64 and 128.

    python3 tests/gpu/hopper_check.py --build NVCC --cubins DIR [--variants NAME,...]     (no GPU: compiles what the rest launches)
    python3 tests/gpu/hopper_check.py --cubins DIR --cases 80 --variants forward --json OUT

Cubins of the portable kernels that stand beside them (row sums, prepare, convert, deterministic dq) are in the same folder.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import sys

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import attention_build
import attention_check
import hopper_bench
from hopper_kernels import HopperRecorder, HopperRuntime

HEAD_DIMS = [(128, 128), (128, 128), (64, 64)]


def build(nvcc, out, names, jobs):
    """Compiles every specialisation that checks and the variants named launch."""
    rt = HopperRecorder()
    attention_check.HEAD_DIMS = sorted(set(HEAD_DIMS))
    attention_build.record_shared(rt)
    for rt.residual in (True, False):
        for rt.query_at_128 in (True, False):
            attention_build.record_checks(rt)
    hopper_bench.record(rt, names)
    os.makedirs(out, exist_ok=True)
    root = os.path.join(attention_build.ROOT, "kernels")
    newest = max(os.path.getmtime(os.path.join(f, x)) for f, _, files in os.walk(root) for x in files if x.endswith((".cu", ".cuh")))
    stale = lambda name: not os.path.exists(os.path.join(out, name)) or os.path.getmtime(os.path.join(out, name)) < newest
    todo = {n: s for n, s in rt.seen.items() if stale(n)}
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(attention_build.compile_one, nvcc, "90a", out, n, f, d) for n, (f, d, _) in sorted(todo.items())]
        for task in concurrent.futures.as_completed(tasks):
            name, registers, spilled = task.result()
            failed += registers is None
            if registers is None or spilled or name.startswith("hopper"):
                print(f"FAILED {name}\n{spilled}" if registers is None else f"{registers:4d} registers {spilled:5d} bytes spilled {rt.seen[name][2]:7d} bytes shared  {name[:-6]}", flush=True)
    for name in os.listdir(out):
        if name.endswith(".cubin") and name not in rt.seen:
            os.remove(os.path.join(out, name))
    print(f"{len(rt.seen)} specialisations, {len(todo)} compiled, {failed} failed")
    return failed == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build")
    parser.add_argument("--cubins", required=True)
    parser.add_argument("--json", default="/dev/null")
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", default="")
    parser.add_argument("--kinds", default="forward,backward")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--portable-query-at-128", action="store_true", help="the portable query-stationary dq at head_dim 128")
    parser.add_argument("--add-scores", type=float, default=0.0, help="added to every z, so that delta = exp(z) is large")
    args = parser.parse_args()
    names = [name for name in args.variants.split(",") if name]
    if args.build:
        sys.exit(0 if build(args.build, args.cubins, names, 2) else 1)
    report, good = {}, True
    make_runtime = functools.partial(HopperRuntime, args.cubins, kinds=tuple(args.kinds.split(",")), residual=args.residual, query_at_128=not args.portable_query_at_128)
    if args.cases:
        attention_check.HEAD_DIMS = HEAD_DIMS
        scores = attention_check.scores
        attention_check.scores = lambda *rest: scores(*rest) + np.float32(args.add_scores)
        report["checks"], good = attention_check.run_checks(make_runtime, args.cases, args.processes, args.longest, args.limit_s, args.seed)
    report["bench"] = hopper_bench.run(make_runtime, names, torch) if names else []
    with open(args.json, "w") as f:
        json.dump(report, f, indent=1, default=str)
    print("PASS" if good else "FAIL")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
