"""Checks and times the selection, list and decode kernels on a GPU: python3 tests/gpu/selection_check.py --cubins DIR [--json FILE].

Cubins come from tests/gpu/build_selection.sh. Each group runs in a process of its own with a time limit, so that a kernel that fails or
hangs costs its group alone; the times come last, and only what is correct is worth reading there. Needs numpy, nothing else.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np

from cuda_driver import Cuda, ceil_div
from selection_kernels import (Decode, Selection, attend_reference, decode_splits, expire_oracle, from_bf16, lists_oracle,
                               scores_shared, to_bf16)

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def documents(rng, batch, n, kind):
    start, end = np.zeros((batch, n), np.int32), np.zeros((batch, n), np.int32)
    for b in range(batch):
        at = 0
        while at < n:
            longest = {"one": n, "tokens": 1, "short": 100, "mixed": 3000}[kind]
            stop = n if kind == "one" else min(n, at + int(rng.integers(1, longest + 1)))
            start[b, at:stop], end[b, at:stop] = at, stop
            at = stop
    return start, end


def scores(rng, shape, kind):
    n = shape[-1]
    ramp = np.broadcast_to(np.arange(n, dtype=np.float32), shape)
    z = {
        "independent": lambda: rng.standard_normal(shape),
        "narrow": lambda: 0.3 * np.logaddexp(0, rng.standard_normal(shape)),
        "ties": lambda: rng.integers(-2, 3, shape),
        "equal": lambda: np.zeros(shape),
        "zeros": lambda: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "rising": lambda: ramp,
        "falling": lambda: -ramp,
        "steps": lambda: np.floor(ramp / 37) * (1 if rng.random() < 0.5 else -1),
        "drifting": lambda: np.sin(ramp / 300) + 0.1 * rng.standard_normal(shape),
    }[kind]()
    return np.ascontiguousarray(z, np.float32)


SCORES = ("independent", "narrow", "ties", "equal", "zeros", "rising", "falling", "steps", "drifting")


def check_selection(cuda, rng, batch, heads, n, window, kinds, prefix_block, tile_queries, from_expire=False):
    """Compares expire, the lists and the tile windows with the oracles; raises on the first difference."""
    start, end = documents(rng, batch, n, kinds[0])
    z = scores(rng, (batch, heads, n), kinds[1])
    what = f"batch {batch} heads {heads} n {n} w {window} {kinds} prefix {prefix_block} tile {tile_queries}"
    s = Selection(cuda, z, start, end, window, prefix_block, tile_queries)
    s.select()
    if from_expire:  # the lists must not depend on where the survivors come from
        cuda.synchronize()
        s.survivors.fill(255)
        s.lists_prefix()
    s.lists()
    cuda.synchronize()
    want, got = expire_oracle(z, start, end, window), s.expire.get()
    if not np.array_equal(want, got):
        at = tuple(np.argwhere(want != got)[0])
        raise AssertionError(f"expire at {at}: want {want[at]}, got {got[at]}; {(want != got).sum()} differ; {what}")
    entries, lengths, entering, tiles = s.list.get(), s.list_len.get(), s.num_entering.get(), s.tile_window.get()
    for b, h, block, expected, num_entering, windows in lists_oracle(want, window, tile_queries):
        where = f"list {(b, h, block)}; {what}"
        assert lengths[b, h, block] == len(expected), f"length {lengths[b, h, block]}, want {len(expected)}; {where}"
        assert entering[b, h, block] == num_entering, f"num_entering; {where}"
        row = entries[b, h, block]
        same = (row[:len(expected)] == expected).all(1)
        assert same.all(), f"entry {int(np.argmin(same))}: {row[np.argmin(same)]}, want {expected[np.argmin(same)]}; {where}"
        pad = row[len(expected):ceil_div(len(expected), 128) * 128]
        assert (pad == np.array([expected[0, 0], 0])).all(), f"padding; {where}"
        assert (row[ceil_div(len(expected), 128) * 128:] == -1).all(), f"written past the padding; {where}"
        first = block * (1024 // tile_queries)
        assert np.array_equal(tiles[b, h, first:first + len(windows)], windows), f"tile windows; {where}"


def group_select_small(cuda, rng):
    for case in range(260):
        n = int(rng.integers(1, 3500)) if case % 8 else int(rng.choice([1, 2, 31, 1023, 1024, 1025, 2047, 2048, 2049]))
        window = int(rng.choice([1, 2, 3, 7, 31, 32, 33, 64, 127, 512, 1000, 1023, 1024, 1025, 4000])) if case % 3 else int(rng.integers(1, n + 2))
        kinds = (str(rng.choice(["one", "one", "mixed", "short", "tokens"])), SCORES[case % len(SCORES)])
        check_selection(cuda, rng, int(rng.integers(1, 3)), int(rng.integers(1, 4)), n, window, kinds, [1024, 8192][case % 2],
                        int(rng.choice([32, 64, 128])), case % 5 == 0)
    return "260 cases"


def group_select_large(cuda, rng):
    for case in range(27):
        check_selection(cuda, rng, 1, 2, int(rng.integers(8000, 30000)), int(rng.choice([256, 1024, 2048, 3001, 9000])),
                        (["one", "mixed", "one"][case % 3], SCORES[case % len(SCORES)]), [4096, 8192, 16384][case % 3], 64, case % 4 == 0)
    for kind in ("independent", "narrow", "rising", "equal"):
        check_selection(cuda, rng, 1, 1, 131072 + 1, 2048, ("one", kind), 8192, 128)
    check_selection(cuda, rng, 1, 1, 300001, 1024, ("one", "drifting"), 8192, 64)  # more leaving times than one window of bits
    return "32 cases"


def group_scores(cuda, rng):
    worst = 0.0
    for case, (heads, head_dim, batch, n) in enumerate([(1, 16, 2, 5), (2, 32, 1, 63), (3, 64, 2, 130), (4, 128, 1, 257), (8, 128, 2, 1000),
                                                        (8, 64, 1, 64), (16, 128, 1, 77), (32, 64, 1, 33)]):
        width, stride, offset = heads * head_dim, heads * head_dim + 8 * (case % 3), 8 * (case % 2)
        v = to_bf16(rng.standard_normal(batch * n * stride + offset))
        w = (rng.standard_normal((width, heads)) / np.sqrt(width)).astype(np.float32)
        a = rng.standard_normal(heads).astype(np.float32) * 3
        out = [cuda.empty((batch, heads, n), np.float32) for _ in range(3)]
        cuda.prepare(f"dma_scores-NUM_KV_HEADS={heads}", "dma_scores", (ceil_div(n, 64), 1, batch), 256, scores_shared(heads, head_dim),
                     [cuda.array(v), cuda.array(w), cuda.array(a)] + out, [n, head_dim, offset, stride, n * stride])()
        cuda.synchronize()
        rows = from_bf16(v)[offset:offset + batch * n * stride].reshape(batch, n, stride)[:, :, :width].astype(np.float64)
        x = np.einsum("btc,ch->bht", rows, w.astype(np.float64))
        z = a[None, :, None] * np.where(x > 20, x, np.logaddexp(0, x))
        for got, want in zip(out, (x, z, np.exp(np.minimum(z, 60)))):
            error = np.abs(got.get() - want) / (1 + np.abs(want))
            assert np.isfinite(error).all() and error.max() < 1e-4, f"heads {heads} head_dim {head_dim}: {error.max()}"
            worst = max(worst, float(error.max()))
    return f"8 cases, worst relative error {worst:.1e}"


DIMS = [(64, 64), (128, 128), (16, 16), (32, 32), (96, 96), (192, 128), (256, 256)]


def compare(name, got, want, plain, errors):
    """The kernel may be off by twice what a plain bf16 computation is, plus a floor of one bf16 rounding of the largest output."""
    assert np.isfinite(got).all(), f"{name}: not finite"
    kernel, bf16 = np.abs(got - want).max(), np.abs(plain - want).max()
    limit = 2 * bf16 + np.abs(want).max() * 2.0 ** -8
    assert kernel <= limit, f"{name}: error {kernel}, plain bf16 {bf16}"
    errors.append(kernel / limit)


def random_packed(rng, d):
    return to_bf16(rng.standard_normal(d.packed.shape).astype(np.float32))


def unpack(packed, b, heads, kv_heads, dim, dim_v):
    row = from_bf16(packed[b])
    q, k, v = np.split(row, [heads * dim, heads * dim + kv_heads * dim])
    return q.reshape(heads, dim), k.reshape(kv_heads, dim), v.reshape(kv_heads, dim_v)


def group_dense_decode(cuda, rng):
    errors = []
    for case in range(70):
        dim, dim_v = DIMS[case % len(DIMS)]
        kv_heads, group, batch = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 8, 16, 17])), int(rng.integers(1, 4))
        heads, slots, splits = kv_heads * group, int(rng.integers(1, 700)), int(rng.integers(1, 9))
        window = slots + 1 if case % 2 else int(rng.integers(1, slots + 1))
        scale = float(dim) ** -0.5
        d = Decode(cuda, "attention_decode", batch, heads, kv_heads, dim, dim_v, slots, window, splits, scale)
        length = rng.integers(0, slots, batch).astype(np.int32)
        k = to_bf16(rng.standard_normal(d.k.shape).astype(np.float32))
        v = to_bf16(rng.standard_normal(d.v.shape).astype(np.float32))
        for b in range(batch):  # NaN wherever the kernel has no business
            first = max(0, length[b] + 1 - window)
            k[b, :, :first], v[b, :, :first] = 0x7FFF, 0x7FFF
            k[b, :, length[b]:], v[b, :, length[b]:] = 0x7FFF, 0x7FFF
        d.k.set(k), d.v.set(v), d.length.set(length)
        packed = random_packed(rng, d)
        d.packed.set(packed)
        d.run()
        cuda.synchronize()
        o, k_after, v_after = from_bf16(d.o.get()), d.k.get(), d.v.get()
        assert (d.counters.get() == 0).all(), "counters not back to zero"
        for b in range(batch):
            q, k_new, v_new = unpack(packed, b, heads, kv_heads, dim, dim_v)
            assert np.array_equal(from_bf16(k_after[b, :, length[b]]), k_new) and np.array_equal(from_bf16(v_after[b, :, length[b]]), v_new), "append"
            first = max(0, length[b] + 1 - window)
            keys, values = from_bf16(k_after[b, :, first:length[b] + 1]), from_bf16(v_after[b, :, first:length[b] + 1])
            bias = np.zeros(keys.shape[1], np.float32)
            for h in range(heads):
                arguments = (q[h], keys[h // group], values[h // group], bias, scale)
                compare(f"case {case} dims {dim}/{dim_v} group {group} splits {splits}", o[b, h], attend_reference(*arguments),
                        attend_reference(*arguments, plain_bf16=True), errors)
    return f"70 cases, worst error / limit {max(errors):.2f}"


def group_dma_decode(cuda, rng):
    errors, steps = [], 0
    for case in range(36):
        dim, dim_v = DIMS[case % len(DIMS)]
        kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4, 17])), int(rng.integers(1, 3))
        heads, splits, scale = kv_heads * group, int(rng.integers(1, 6)), float(dim) ** -0.5
        window = int(rng.choice([1, 2, 16, 17, 63, 64, 65, 200]))
        d = Decode(cuda, "dma_decode", batch, heads, kv_heads, dim, dim_v, window, window, splits, scale)
        kept = [[[] for _ in range(kv_heads)] for _ in range(batch)]  # (z, position, k, v), what the cache must hold
        length = rng.integers(0, 2 * window, batch).astype(np.int32)
        kind = SCORES[case % len(SCORES)]
        stream = scores(rng, (batch, kv_heads, int(length.max()) + 40), kind)
        k, v = d.k.get(), d.v.get()
        slot_z, slot_position = d.slot_z.get(), d.slot_position.get()
        for b in range(batch):  # a cache as some prefill left it, slots in any order
            for h in range(kv_heads):
                order = sorted((float(stream[b, h, j]) + 0.0, j) for j in range(length[b]))[-window:]
                rng.shuffle(order)
                for slot, (z, j) in enumerate(order):
                    j = int(j)
                    k[b, h, slot], v[b, h, slot] = to_bf16(rng.standard_normal(dim)), to_bf16(rng.standard_normal(dim_v))
                    slot_z[b, h, slot], slot_position[b, h, slot] = stream[b, h, j], j
                    kept[b][h].append((float(z), j, from_bf16(k[b, h, slot]), from_bf16(v[b, h, slot])))
        d.k.set(k), d.v.set(v), d.slot_z.set(slot_z), d.slot_position.set(slot_position)
        for _ in range(int(rng.integers(1, 40))):
            z_new = np.stack([stream[b, :, length[b]] for b in range(batch)])
            packed = random_packed(rng, d)
            d.packed.set(packed), d.z_new.set(z_new), d.length.set(length)
            d.o.fill(255), d.partials.fill(255)
            d.run()
            cuda.synchronize()
            o, positions = from_bf16(d.o.get()), d.slot_position.get()
            assert (d.counters.get() == 0).all(), "counters not back to zero"
            steps += 1
            for b in range(batch):
                q, k_new, v_new = unpack(packed, b, heads, kv_heads, dim, dim_v)
                for h in range(kv_heads):
                    keys = kept[b][h]
                    keys.append((float(z_new[b, h]) + 0.0, int(length[b]), k_new[h], v_new[h]))
                    if len(keys) > window:
                        keys.remove(min(keys, key=lambda key: key[:2]))
                    name = f"case {case} {kind} w {window} length {length[b]} dims {dim}/{dim_v} group {group} splits {splits}"
                    assert sorted(positions[b, h, :len(keys)].tolist()) == sorted(key[1] for key in keys), f"slots; {name}"
                    bias = np.exp(np.minimum([key[0] for key in keys], 60)).astype(np.float32)
                    matrix, values = np.stack([key[2] for key in keys]), np.stack([key[3] for key in keys])
                    for head in range(h * group, (h + 1) * group):
                        arguments = (q[head], matrix, values, bias, scale)
                        compare(name, o[b, head], attend_reference(*arguments), attend_reference(*arguments, plain_bf16=True), errors)
            length += 1
    return f"36 streams, {steps} steps, worst error / limit {max(errors):.2f}"


def group_sanitize(cuda, rng):
    """Small shapes of every kernel, for compute-sanitizer; results are checked too."""
    for n, window, kinds in ((2500, 64, ("one", "independent")), (1100, 200, ("mixed", "ties")), (2100, 1024, ("one", "rising"))):
        check_selection(cuda, rng, 1, 1, n, window, kinds, 1024, 64, n == 2500)
    for entry in ("attention_decode", "dma_decode"):
        d = Decode(cuda, entry, 1, 4, 2, 64, 64, 150, 151, 2, 0.125)
        d.packed.set(random_packed(rng, d)), d.k.set(np.zeros(d.k.shape)), d.v.set(np.zeros(d.v.shape)), d.length.set(np.array([140]))
        if entry == "dma_decode":
            d.z_new.set(np.zeros(d.z_new.shape)), d.slot_z.set(np.zeros(d.slot_z.shape))
            d.slot_position.set(np.broadcast_to(np.arange(150), d.slot_position.shape))
            for length in (140, 150):
                d.length.set(np.array([length]))
                d.run()
        d.run()
    arrays = [cuda.array(to_bf16(rng.standard_normal((100, 128)))), cuda.array(np.ones((128, 2), np.float32)), cuda.array(np.ones(2, np.float32))]
    out = [cuda.empty((1, 2, 100), np.float32) for _ in range(3)]
    cuda.prepare("dma_scores-NUM_KV_HEADS=2", "dma_scores", (2, 1, 1), 256, scores_shared(2, 64), arrays + out, [100, 64, 0, 128, 12800])()
    cuda.synchronize()
    return "ok"


def random_bytes(cuda, rng, array):
    """Fills a large array with random normal bf16, one block over and over."""
    if not hasattr(cuda, "random_block"):
        cuda.random_block = cuda.array(to_bf16(rng.standard_normal(1 << 23).astype(np.float32)))
    block, at = cuda.random_block, 0
    while at < array.nbytes:
        size = min(block.nbytes, array.nbytes - at)
        cuda.call("cuMemcpyDtoD_v2", ctypes.c_ulonglong(array.pointer.value + at), block.pointer, ctypes.c_size_t(size))
        at += size


def group_timing(cuda, rng):
    rows, flush = [], cuda.reader()

    def row(name, shape, times, gigabytes=None, ceiling=None):
        entry = {"kernel": name, "shape": shape, "us": round(times[0] * 1e3, 1), "p10": round(times[1] * 1e3, 1), "p90": round(times[2] * 1e3, 1)}
        if gigabytes is not None:
            entry["GB/s"] = round(gigabytes / times[0] * 1e3, 1)
            if ceiling:
                entry["share"] = round(entry["GB/s"] / ceiling, 3)
        rows.append(entry)
        print(" | ".join(f"{v}" for v in entry.values()), flush=True)
        return entry

    big, other = cuda.empty((1 << 31,), np.uint8, 1), cuda.empty((1 << 31,), np.uint8, 2)
    copy = row("copy", "2 GiB", cuda.time_ms(lambda: cuda.call("cuMemcpyDtoDAsync_v2", big.pointer, other.pointer, ctypes.c_size_t(1 << 31), None)),
               2 * (1 << 31) / 1e9)["GB/s"]
    del big, other

    # Selection: batch 1, 8 KV heads.
    cases = [(n, w, kind) for n in (8192, 16384, 32768, 65536, 131072) for w in (1024, 2048) for kind in ("independent", "rising", "equal")]
    cases += [(131072, 2048, "narrow"), (131072, 2048, "drifting"), (32768, 1024, "drifting")]
    for n, window, kind in cases:
        start, end = documents(rng, 1, n, "one")
        z = scores(rng, (1, 8, n), kind)
        variants = [(8192, None)]
        if kind != "equal":
            variants += [(8192, 1)]
        if kind != "equal" and n >= 32768:
            variants += [(4096, None), (16384, None)]
        for prefix_block, min_blocks in variants:
            s = Selection(cuda, z, start, end, window, prefix_block, min_blocks=min_blocks)
            shape = f"n {n} w {window} {kind}" + (f" block {prefix_block} min {min_blocks}" if (prefix_block, min_blocks) != variants[0] else "")
            row("select", shape, cuda.time_ms(s.select, flush=flush), 8 * 8 * n / 1e9, copy)
            row("  prefix", shape, cuda.time_ms(s.prefix, 15, flush=flush))
            s.lists()
            cuda.synchronize()
            row("lists", shape, cuda.time_ms(s.lists, flush=flush), (8 * int(s.list_len.get().sum()) + 4 * 8 * n) / 1e9, copy)
            if prefix_block == 8192 and kind == "independent" and min_blocks is None:
                row("  lists_prefix", shape, cuda.time_ms(s.lists_prefix, 15, flush=flush))
            row("select + lists", shape, cuda.time_ms(s.all, flush=flush))
            del s
    for batch, n, window, kinds in ((8, 2048, 2048, ("one", "independent")), (2, 8192, 1024, ("mixed", "independent")), (8, 8192, 2048, ("mixed", "narrow"))):
        start, end = documents(rng, batch, n, kinds[0])
        s = Selection(cuda, scores(rng, (batch, 8, n), kinds[1]), start, end, window)
        row("select + lists", f"batch {batch} n {n} w {window} {kinds}", cuda.time_ms(s.all, flush=flush))
        del s

    for tokens in (16384, 131072):
        v, w, a = cuda.empty((tokens, 1024), np.uint16, 1), cuda.array(rng.standard_normal((1024, 8)), np.float32), cuda.array(np.ones(8), np.float32)
        random_bytes(cuda, rng, v)
        out = [cuda.empty((1, 8, tokens), np.float32) for _ in range(3)]
        run = cuda.prepare("dma_scores-NUM_KV_HEADS=8", "dma_scores", (ceil_div(tokens, 64), 1, 1), 256, scores_shared(8, 128), [v, w, a] + out,
                           [tokens, 128, 0, 1024, 0])
        row("scores", f"{tokens} tokens, 8 x 128", cuda.time_ms(run, flush=flush), tokens * (2048 + 96) / 1e9, copy)

    # Decode, 16 query and 8 KV heads.
    for head_dim in (128, 64):
        for batch in (1, 16):
            for entry, slots in (("dma_decode", 1024), ("dma_decode", 2048), ("attention_decode", 16384), ("attention_decode", 131072)):
                if head_dim == 64 and slots in (1024, 131072):
                    continue
                best = decode_splits(cuda.multiprocessors * (2 if entry == "dma_decode" else 1), batch, 8, slots)
                tries = [(best, None)]
                if head_dim == 128:
                    tries += [(splits, None) for splits in ((1, 2, 4) if batch == 16 else (8, 16, 24, 32)) if splits != best]
                    tries += [(splits, 3) for splits in ((1, 2) if batch == 16 else (16,))]
                for splits, stages in tries:
                    d = None  # the cache of before goes first
                    d = Decode(cuda, entry, batch, 16, 8, head_dim, head_dim, slots, slots + 1, splits, head_dim ** -0.5, stages)
                    random_bytes(cuda, rng, d.k), random_bytes(cuda, rng, d.v), random_bytes(cuda, rng, d.packed)
                    if entry == "dma_decode":
                        d.length.set(np.full(batch, 131072))
                        d.z_new.set(np.ones(d.z_new.shape))
                        d.slot_z.set(rng.standard_normal(d.slot_z.shape))
                        d.slot_position.set(np.broadcast_to(np.arange(slots), d.slot_position.shape))
                    else:
                        d.length.set(np.full(batch, slots - 1))
                    gigabytes = batch * 8 * slots * head_dim * 4 / 1e9
                    row(entry, f"batch {batch} keys {slots} d {head_dim} splits {splits} stages {stages or 'default'}{' *' if splits == best and not stages else ''}",
                        cuda.time_ms(d.run, flush=flush if slots < 131072 else None), gigabytes, copy)
                del d
    return rows


def group_profile(cuda, rng):
    """One launch of each kernel at two lengths, for a profiler around this process."""
    for n in (8192, 131072):
        start, end = documents(rng, 1, n, "one")
        Selection(cuda, scores(rng, (1, 8, n), "independent"), start, end, 2048).all()
        cuda.synchronize()
    for head_dim in (128, 64):
        d = Decode(cuda, "dma_decode", 16, 16, 8, head_dim, head_dim, 2048, 2048, 2, head_dim ** -0.5)
        for array in (d.k, d.v, d.packed):
            random_bytes(cuda, rng, array)
        d.length.set(np.full(16, 131072)), d.z_new.set(np.ones(d.z_new.shape)), d.slot_z.set(rng.standard_normal(d.slot_z.shape))
        d.slot_position.set(np.broadcast_to(np.arange(2048), d.slot_position.shape))
        d.run()
        cuda.synchronize()
    return "ok"


GROUPS = {name[len("group_"):]: function for name, function in list(globals().items()) if name.startswith("group_")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cubins", required=True)
    parser.add_argument("--json")
    parser.add_argument("--group", choices=sorted(GROUPS))
    parser.add_argument("--skip", default="", help="groups and sanitizer tools to leave out, by comma")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2 ** 32)
    arguments = parser.parse_args()
    if arguments.group:
        rng = np.random.default_rng(arguments.seed)
        result = GROUPS[arguments.group](Cuda(arguments.cubins), rng)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(result, file)
        print("passed:", result if isinstance(result, str) else f"{len(result)} rows")
        return 0

    skipped = arguments.skip.split(",")
    base = [sys.executable, os.path.abspath(__file__), "--cubins", arguments.cubins, "--seed", str(arguments.seed)]
    jobs = {name: (base + ["--group", name], 60) for name in GROUPS if name not in ("timing", "sanitize", "profile")}
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if os.path.exists(sanitizer):
        for tool in TOOLS:
            jobs[tool] = ([sanitizer, "--tool", tool, "--error-exitcode", "9", *base, "--group", "sanitize"], 60)
    else:
        print("compute-sanitizer: not found, left out")
    running, failed = {}, []
    for name, (command, limit) in jobs.items():
        if name not in skipped:
            running[name] = (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), limit, time.time())
    for name, (process, limit, began) in running.items():
        try:
            output = process.communicate(timeout=max(1, limit - (time.time() - began)))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + f"\nstopped after {limit} s"
        good = process.returncode == 0
        if not good:
            failed.append(name)
        lines = [line for line in output.strip().splitlines() if line.strip()]
        print(f"{'ok  ' if good else 'FAIL'} {name} ({time.time() - began:.1f} s): " + (lines[-1] if good else "\n    ".join(lines[-14:])), flush=True)
    if "timing" not in skipped:
        command = base + ["--group", "timing"] + (["--json", arguments.json] if arguments.json else [])
        try:
            if subprocess.run(command, timeout=70).returncode:
                failed.append("timing")
        except subprocess.TimeoutExpired:
            failed.append("timing (stopped after 70 s)")
    print(f"seed {arguments.seed}:", "all passed" if not failed else "FAILED: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
