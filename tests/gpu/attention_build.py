"""Compiles every specialisation that attention_check.py and attention_bench.py launch, and prints registers, spills and shared memory.

    python3 tests/gpu/attention_build.py --nvcc PATH --out DIR [--arch 90a|80] [--only check|bench]
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import attention_bench
import attention_check
import attention_kernels as kernels
from attention_kernels import Heads

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")


class Recorder:
    """A runtime that launches nothing and remembers what it was asked for."""

    device = "cpu"

    def __init__(self):
        self.seen = {}

    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        self.seen[kernels.spec_name(entry, defines)] = (file, defines, shared)

    def synchronize(self):
        pass


class FakeLists:
    capacity, tile_queries = 128, 64
    list = list_len = tile_window = torch.zeros(1)


def record_checks(rt):
    for d, dv in attention_check.HEAD_DIMS:
        for group in attention_check.GROUPS:
            for bias in (False, True, "dma"):
                q, k, v = (Heads(torch.zeros(1, 1, heads * dim), 0, heads, dim) for heads, dim in ((group, d), (1, d), (1, dv)))
                x = torch.zeros(1)
                o = torch.zeros(1, 1, group, dv)
                for deterministic in (False, True):
                    if bias == "dma":
                        kernels.dma_attention_forward(rt, q, k, v, x, FakeLists, 1.0, o, x)
                        kernels.dma_attention_backward(rt, q, k, v, o, x, o, x, FakeLists, 1.0, q, k, v, x, deterministic)
                    else:
                        delta = x if bias else None
                        kernels.attention_forward(rt, q, k, v, x, 1, 1.0, o, x, delta)
                        kernels.attention_backward(rt, q, k, v, o, x, o, x, x, 1, 1.0, q, k, v, delta, delta, deterministic)


def record_shared(rt):
    """What only launches in several parts ask for."""
    for d, _ in attention_check.HEAD_DIMS:
        kernels.convert_dq(rt, torch.zeros(1), 1024, 0, Heads(torch.zeros(1, 1, d), 0, 1, d), 1.0, True)


def compile_one(nvcc, arch, out, name, file, defines):
    target = os.path.join(out, name)
    command = [nvcc, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-O3", "-std=c++17", "-I", os.path.join(ROOT, "kernels"), "-Xptxas", "-v", "-cubin",
               "-o", target, os.path.join(ROOT, "kernels", file)] + [f"-D{k}={v}" for k, v in defines.items()]
    env = dict(os.environ, PATH=os.path.dirname(nvcc) + ":" + os.environ["PATH"])
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    if done.returncode or not registers:
        return name, None, done.stderr[-1500:]
    return name, int(registers[1]), int(spills[1]) + int(spills[2]) if spills else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--only", choices=["check", "bench"])
    parser.add_argument("--bench", default="all")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    rt = Recorder()
    record_shared(rt)
    if args.only != "bench":
        record_checks(rt)
    if args.only != "check":
        attention_bench.record(rt, args.bench)
    os.makedirs(args.out, exist_ok=True)
    newest = max(os.path.getmtime(os.path.join(folder, f)) for folder, _, files in os.walk(os.path.join(ROOT, "kernels")) for f in files if "attention" in f or "common" in folder)
    todo = {n: s for n, s in rt.seen.items() if not os.path.exists(os.path.join(args.out, n)) or os.path.getmtime(os.path.join(args.out, n)) < newest}
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(compile_one, args.nvcc, args.arch, args.out, n, f, d) for n, (f, d, _) in sorted(todo.items())]
        for job in concurrent.futures.as_completed(jobs):
            name, registers, spilled = job.result()
            if registers is None:
                failed += 1
                print(f"FAILED {name}\n{spilled}")
            else:
                print(f"{registers:4d} registers {spilled:5d} bytes spilled {rt.seen[name][2]:7d} bytes shared  {name[:-6]}", flush=True)
    print(f"{len(rt.seen)} specialisations, {len(todo)} compiled, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
