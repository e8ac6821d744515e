"""Lists of kept blocks of seven selectors, by their definitions, in numpy float64.

Written from the methods' papers alone, one plain function each, to compare with.
Usage: python make_lists.py OUT.safetensors CAPTURED.safetensors
"""
import json
import struct
import sys
from statistics import NormalDist

import numpy as np


def made_up(kind, heads, kv_heads, rng, n=230, d=8):
    """q [n, heads, d], k [n, kv_heads, d]; `structured` has a sink, columns many queries want, and topics that return."""
    q, k = rng.standard_normal((n, heads, d)), rng.standard_normal((n, kv_heads, d))
    if kind == "structured":
        topics = rng.standard_normal((5, d)) * 1.2
        for t in range(n):
            q[t] = 0.6 * q[t] + topics[t // 37 % 5]
            k[t] = 0.6 * k[t] + topics[t // 37 % 5]
        q[:, :, 0] = 2.0
        k[:, :, 0] = 0.0
        k[0, :, 0] = 6.0
        k[rng.choice(n, 6, replace=False), :, 0] = 4.0
    return q.astype(np.float32), k.astype(np.float32)


class Call:
    """Rows `context..end` as a chunk over all keys before its end."""

    def __init__(self, q, k, context, end):
        self.q, self.k = q[context:end].astype(np.float64), k[:end].astype(np.float64)
        self.context, self.rows, self.keys = context, end - context, end
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.m, self.d = self.heads // self.kv_heads, q.shape[2]

    def probabilities(self, head, first):
        """Causal softmax of rows `first..`, [rows, keys]."""
        x = self.q[first:, head] @ self.k[:, head // self.m].T / np.sqrt(self.d)
        a = self.context + np.arange(first, self.rows)
        x[np.arange(self.keys)[None, :] > a[:, None]] = -np.inf
        return softmax(x)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def order(x):
    """By falling value, equal ones ascending."""
    return np.argsort(-np.asarray(x), kind="stable")


def keep_mass(p, gamma, forced=()):
    kept, total = list(forced), sum(p[j] for j in forced)
    if gamma >= 1:
        return set(range(len(p)))
    for j in order(p):
        if kept and total >= gamma * p.sum():
            break
        if j not in kept:
            kept.append(int(j))
            total += p[j]
    return set(kept)


def query_tiles(call, size, lead=0):
    """Rows of each tile; the first is `lead` rows shorter."""
    tiles, start = [], -lead
    while start < call.rows:
        tiles.append(range(max(start, 0), min(start + size, call.rows)))
        start += size
    return tiles


def blocks(call, size):
    return [range(s, min(s + size, call.keys)) for s in range(0, call.keys, size)]


def ends(call, tile):
    return call.context + tile[0], call.context + tile[-1]


def bfla(call, b, g, tile, gamma, local, eta, seed):
    nq, nk, per = -(-call.rows // b), -(-call.keys // b), b // g
    pad = lambda x, n: np.concatenate([x, np.zeros((n * b - len(x), call.d))]).reshape(n, per, g * call.d)
    heads = []
    for p in range(call.heads):
        q, k = pad(call.q[:, p], nq), pad(call.k[:, p // call.m], nk)
        s = np.einsum("iux,jvx->ijuv", q, k, optimize=True).max(axis=(2, 3)) / np.sqrt(call.d)
        kept = []
        for i in range(nq):
            last = call.context + min((i + 1) * b, call.rows) - 1
            kept.append(keep_mass(softmax(s[i, : last // b + 1]), gamma))
            # Diagonal blocks stay.
            kept[-1] |= set(range((call.context + i * b) // b, last // b + 1))
        heads.append(kept)
    lists = []
    for h in range(call.kv_heads):
        rows = []
        for index, rows_of in enumerate(query_tiles(call, tile)):
            first, last = ends(call, rows_of)
            row = set()
            for p in range(h * call.m, (h + 1) * call.m):
                for block in heads[p][index * tile // b]:
                    row |= set(range(block * b // tile, (block + 1) * b // tile))
            row |= set(range(max(0, (first - local)) // tile, last // tile + 1)) | {0}
            for j in range(last // tile + 1):
                if j not in row and (131 * (first // tile) + 17 * j + seed) % eta == 0:
                    row.add(j)
            rows.append({j for j in row if j <= last // tile})
        lists.append(rows)
    return lists


def momo(call, gamma, beta, chi, k, k_exact, variant, normalised=False):
    lists = []
    for p in range(call.heads):
        x = call.q[:, p] @ call.k[:, p // call.m].T / np.sqrt(call.d)
        rows = []
        for tile in query_tiles(call, chi):
            first, last = ends(call, tile)
            probes = [t for t in tile if (call.context + t) % gamma == 0 or t == 0]
            complete = (call.context + probes[0] + 1) // beta
            found = {}
            for t in probes:
                a = call.context + t
                lse = np.log(np.exp(x[t, : a + 1]).sum()) if normalised else 0.0
                stream = [j for j in range(1, max(complete - 1, 1)) if j < complete - 1]
                s = [np.log(np.exp(x[t, j * beta : (j + 1) * beta]).sum()) for j in stream]
                for at in choose(s, k, k_exact, variant):
                    found.setdefault(stream[at], []).append(s[at] - lse)
            mean = {j: sum(s) / len(s) for j, s in sorted(found.items())}
            names = list(mean)
            row = {names[at] for at in order([mean[j] for j in names])[:k]}
            row |= {0} | set(range(max(complete - 1, 0), last // beta + 1))
            rows.append(row)
        lists.append(rows)
    return lists


def choose(s, k, k_exact, variant):
    if len(s) <= k:
        return list(range(len(s)))
    if variant == "exact":
        return [int(j) for j in order(s)[:k]]
    buffer, kept = [], []
    slots, seen = k - (k_exact if variant == "hybrid" else 0), []
    for j, score in enumerate(s):
        offered = (score, j)
        if variant == "hybrid":
            buffer.append((score, -j))
            if len(buffer) <= k_exact:
                continue
            worst = min(buffer)
            buffer.remove(worst)
            offered = (worst[0], -worst[1])
        seen.append(offered[0])
        share = 1 - slots / (len(s) - j) if slots else 2
        if share > 1:
            continue
        limit = np.mean(seen) + np.std(seen) * NormalDist().inv_cdf(share) if share > 0 else -np.inf
        if offered[0] > limit:
            kept.append(offered[1])
            slots -= 1
    return kept + [-j for _, j in buffer]


def cell_products(q, k, s):
    """X[n, m]: sum over c of q[n s + s - 1 - c] . k[m s + c]; lengths are padded with zeros."""
    d = q.shape[1]
    pad = lambda x: np.concatenate([x, np.zeros((-len(x) % s, d))]).reshape(-1, s, d)
    return np.einsum("ncx,mcx->nm", pad(q)[:, ::-1], pad(k), optimize=True)


def xattention(call, b, s, tau):
    lists = []
    lead = call.context % s
    for p in range(call.heads):
        q = np.concatenate([np.zeros((lead, call.d)), call.q[:, p]])
        x = cell_products(q, call.k[:, p // call.m], s) / (np.sqrt(call.d) * s)
        cell = call.context // s + np.arange(len(x))
        x[np.arange(x.shape[1])[None, :] > cell[:, None]] = -np.inf
        w = softmax(x)
        rows = []
        for tile in query_tiles(call, b, call.context % b):
            last = ends(call, tile)[1]
            mine = w[cell * s // b == last // b].sum(axis=0)
            p_block = np.array([mine[j * b // s : (j + 1) * b // s].sum() for j in range(last // b + 1)])
            rows.append(keep_mass(p_block, tau, forced=sorted({0, last // b})))
        lists.append(rows)
    return lists


def pbs(call, b, segment, tau, s, select):
    orders = []
    for h in range(call.kv_heads):
        first = max(0, call.rows - b)
        mean = sum(call.probabilities(p, first).sum(axis=0) for p in range(h * call.m, (h + 1) * call.m))
        pi = np.arange(call.keys)
        for start in range(0, call.keys // segment * segment, segment):
            pi[start : start + segment] = start + order(mean[start : start + segment])
        orders.append(pi)
    lists = []
    for p in range(call.heads):
        pi = orders[p // call.m]
        k = call.k[pi, p // call.m]
        rows = []
        for tile in query_tiles(call, b):
            first, last = ends(call, tile)
            earlier = first // segment * segment // b
            row = set()
            if earlier:
                q = call.q[list(tile), p]
                if select == "meanpool":
                    kbar = k[: earlier * b].reshape(earlier, b, call.d).mean(axis=1)
                    score = softmax(kbar @ q.mean(axis=0) / np.sqrt(call.d))
                else:
                    w = softmax(cell_products(q, k[: earlier * b], s) / (np.sqrt(call.d) * s))
                    score = w.sum(axis=0).reshape(earlier, b // s).sum(axis=1)
                row |= keep_mass(score, tau)
            row |= set(range(earlier, min((last // segment + 1) * segment, call.keys + b - 1) // b))
            row.add(int(np.where(pi == 0)[0][0]) // b)
            # A block without a key up to the last row is no work.
            rows.append({j for j in row if j * b < call.keys and pi[j * b : (j + 1) * b].min() <= last})
        lists.append(rows)
    return lists, orders


def vertical_slash(call, vertical, slash, t=64):
    lists, columns = [], []
    for p in range(call.heads):
        first = max(0, call.rows - 64)
        probabilities = call.probabilities(p, first)
        col, diag = probabilities.sum(axis=0), np.zeros(call.keys)
        for r, row in enumerate(probabilities):
            a = call.context + first + r
            diag[: a + 1] += row[: a + 1][::-1]
        col[:30], diag[:100] = np.inf, np.inf
        v, o = order(col)[: max(vertical, 30)], order(diag)[: max(slash, 50)]
        rows, singles = [], []
        for tile in query_tiles(call, t):
            lo, hi = ends(call, tile)
            row = {j // t for off in o for j in range(max(lo - off, 0), hi - off + 1)}
            row |= set(range(lo // t, hi // t + 1))
            rows.append(row)
            singles.append({int(j) for j in v if j <= hi and j // t not in row})
        lists.append(rows)
        columns.append(singles)
    return lists, columns


def flexprefill(call, b, gamma, min_budget, tau):
    lists = []
    for p in range(call.heads):
        first = max(0, call.rows - b)
        a = call.probabilities(p, first)
        col, diag = a.mean(axis=0), np.zeros(call.keys)
        for r, row in enumerate(a):
            at = call.context + first + r
            diag[: at + 1] += row[: at + 1][::-1] / len(a)
        pool = lambda x: np.array([x[list(block)].sum() for block in blocks(call, b)])
        kbar = np.array([call.k[list(block), p // call.m].mean(axis=0) for block in blocks(call, b)])
        estimate = softmax(kbar @ call.q[first:, p].mean(axis=0) / np.sqrt(call.d))
        m = (estimate + pool(col)) / 2
        kl = lambda x: np.sum(np.where(x > 0, x * np.log(np.maximum(x, 1e-300) / m), 0))
        aware = np.sqrt((kl(estimate) + kl(pool(col))) / 2) < tau
        least = min_budget // b

        def number(x):
            tokens = int((np.cumsum(x[order(x)]) <= gamma).sum()) + 1
            return max(tokens // b + 1, least)

        n_col, n_diag = (least, least) if aware else (number(col), number(diag))
        pcol, pdiag = pool(col), pool(diag)
        pcol[0], pdiag[0] = np.inf, np.inf
        cols, diags = order(pcol)[:n_col], order(pdiag)[:n_diag]
        tiles = query_tiles(call, b)
        rows = []
        for tile in tiles:
            lo, hi = ends(call, tile)
            row = {int(j) for j in cols if j <= hi // b}
            for own in range(lo // b, hi // b + 1):
                row |= {own} | {own - int(o) for o in diags if own >= o}
            rows.append(row)
        if aware:
            entries = np.zeros((len(tiles), len(kbar)))
            for i, tile in enumerate(tiles):
                n = ends(call, tile)[1] // b + 1
                entries[i, :n] = softmax(kbar[:n] @ call.q[list(tile), p].mean(axis=0) / np.sqrt(call.d))
            total = 0.0
            for at in order(entries.ravel()):
                if total >= gamma * len(tiles):
                    break
                total += entries.ravel()[at]
                rows[at // len(kbar)].add(int(at % len(kbar)))
        lists.append([{j for j in row if j <= ends(call, tile)[1] // b} for row, tile in zip(rows, tiles)])
    return lists


def quest(q, k, t, page, budget):
    """Keys that token t reads, per KV head."""
    m = q.shape[1] // k.shape[1]
    lists = []
    for h in range(k.shape[1]):
        keys = k[: t + 1, h].astype(np.float64)
        pages = [keys[s : s + page] for s in range(0, t + 1, page)]
        score = np.array([
            sum(np.maximum(q[t, p] * x.min(axis=0), q[t, p] * x.max(axis=0)).sum() for p in range(h * m, (h + 1) * m))
            for x in pages
        ])
        score[-1] = np.inf
        kept = sorted(order(score)[: max(3, budget // page)])
        lists.append([set(j for x in kept for j in range(x * page, min((x + 1) * page, t + 1)))])
    return lists


def write(path, tensors):
    """A safetensors file."""
    header, data = {}, b""
    for name, x in tensors.items():
        x = np.ascontiguousarray(x)
        kind = {"float32": "F32", "int32": "I32", "uint16": "BF16"}[str(x.dtype)]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def flat(lists):
    """CSR of all rows of all lists."""
    rows = [sorted(row) for rows in lists for row in rows]
    ptr = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    return ptr, np.array([j for row in rows for j in row], np.int32)


def read(path):
    """Arrays of a safetensors file of bfloat16."""
    data = open(path, "rb").read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        first, end = entry["data_offsets"]
        bits = np.frombuffer(data[start + first : start + end], np.uint16).astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


# Settings of each method: small ones for the short made-up inputs, larger ones for the captured ones.
SMALL = {
    "bfla": dict(b=32, g=8, tile=8, gamma=0.6, local=16, eta=7, seed=3),
    "momo": dict(gamma=4, beta=8, chi=16, k=4, k_exact=1),
    "xattention": dict(b=16, s=4, tau=0.6),
    "pbs": dict(b=16, segment=32, tau=0.5, s=4),
    "vertical_slash": dict(vertical=40, slash=112),
    "flexprefill": dict(b=16, gamma=0.6, min_budget=32),
    "quest": dict(page=16, budget=64),
}
TRAINED = {
    "bfla": dict(b=64, g=16, tile=16, gamma=0.9, local=32, eta=16, seed=3),
    "momo": dict(gamma=8, beta=16, chi=32, k=8, k_exact=2),
    "xattention": dict(b=32, s=8, tau=0.7),
    "pbs": dict(b=32, segment=128, tau=0.7, s=8),
    "vertical_slash": dict(vertical=40, slash=112),
    "flexprefill": dict(b=32, gamma=0.8, min_budget=64),
    "quest": dict(page=16, budget=128),
}
# How a setting is called on the flag.
KEYS = {
    "bfla": dict(b="block", g="group", gamma="keep_mass", local="local_tokens", eta="stride"),
    "xattention": dict(b="block", s="stride"),
    "pbs": dict(b="block", s="stride"),
    "flexprefill": dict(b="block"),
}


def flag(method, settings, *more):
    names = KEYS.get(method, {})
    items = [f"{names.get(key, key)}={value}" for key, value in settings.items()]
    return f"{method}:" + ",".join(items + list(more))


def lists_of(q, k, places, settings):
    """Name and arrays of every list of one pair of inputs."""
    for context, end in places:
        call, where = Call(q, k, context, end), f"{context}-{end}"
        yield f"{where}/{flag('bfla', settings['bfla'])}", bfla(call, **settings["bfla"]), {}
        for variant in ("exact", "gauss", "hybrid"):
            text = flag("momo", settings["momo"], "first_dense_layers=0", f"topk={variant}")
            yield f"{where}/{text}", momo(call, variant=variant, **settings["momo"]), {}
            if variant == "exact":
                lists = momo(call, variant=variant, normalised=True, **settings["momo"])
                yield f"{where}/{text},score=normalised", lists, {}
        yield f"{where}/{flag('xattention', settings['xattention'])}", xattention(call, **settings["xattention"]), {}
        for select in ("meanpool", "xattention"):
            lists, orders = pbs(call, select=select, **settings["pbs"])
            text = flag("pbs", settings["pbs"], f"select={select}")
            yield f"{where}/{text}", lists, {"order": np.array(orders, np.int32)}
        lists, columns = vertical_slash(call, **settings["vertical_slash"])
        ptr, idx = flat(columns)
        yield f"{where}/{flag('vertical_slash', settings['vertical_slash'])}", lists, {"col_ptr": ptr, "col_idx": idx}
        for tau in ("0", "0.3", "1"):
            lists = flexprefill(call, tau=float(tau), **settings["flexprefill"])
            yield f"{where}/{flag('flexprefill', settings['flexprefill'], f'tau={tau}')}", lists, {}
    for t in (len(q) // 5, len(q) * 2 // 3, len(q) - 1):
        text = flag("quest", settings["quest"], "dense_layers=0")
        yield f"token-{t}/{text}", quest(q, k, t, **settings["quest"]), {}


def main():
    rng = np.random.default_rng(20)
    captured = read(sys.argv[2])
    tensors = {}

    def add(name, q, k, places, settings):
        for case, lists, extra in lists_of(q, k, places, settings):
            ptr, idx = flat(lists)
            for key, x in {"ptr": ptr, "idx": idx, **extra}.items():
                tensors[f"{name}/{case}/{key}"] = x

    for kind in ("random", "structured"):
        for heads, kv_heads in ((2, 2), (4, 2), (8, 1)):
            name = f"{kind}.{heads}.{kv_heads}"
            q, k = made_up(kind, heads, kv_heads, rng)
            tensors[f"{name}/q"], tensors[f"{name}/k"] = q, k
            add(name, q, k, ((0, 230), (77, 230), (100, 200)), SMALL)
    for name in ("trained.2.2", "trained.4.2", "trained.8.1"):
        # Groups of one: the first query head of each KV head.
        source, step = ("trained.4.2", 2) if name == "trained.2.2" else (name, 1)
        q, k = captured[f"{source}/q"][:, ::step], captured[f"{source}/k"]
        add(name, q, k, ((0, 768), (277, 768), (100, 700)), TRAINED)
    write(sys.argv[1], tensors)


if __name__ == "__main__":
    main()
