"""Lists of kept blocks and keys of the selectors, by their definitions, in numpy float64.

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
                stream = range(1, complete - 1)
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


def pooled(call, b, p):
    """Scores of the admissible blocks of each query tile: products of the means of blocks."""
    k = np.array([call.k[list(block), p // call.m].mean(axis=0) for block in blocks(call, b)])
    tiles = query_tiles(call, b)
    return [k[: ends(call, t)[1] // b + 1] @ call.q[list(t), p].mean(axis=0) / np.sqrt(call.d) for t in tiles]


def dense_mass(call, b, p):
    """Dense attention of each query tile on the admissible blocks."""
    x = call.probabilities(p, 0)
    mass = lambda t: np.array([x[list(t)][:, list(block)].sum() for block in blocks(call, b)])
    return [mass(t)[: ends(call, t)[1] // b + 1] for t in query_tiles(call, b)]


def by_score(call, b, scores, keep, gqa="per_query", first=()):
    """What `keep` leaves of each tile's scores, the blocks that meet its queries, and `first`."""
    of_heads = [scores(call, b, p) for p in range(call.heads)]
    groups = [range(h * call.m, (h + 1) * call.m) for h in range(call.kv_heads)]
    if gqa == "mean":
        of_heads = [[sum(of_heads[p][i] for p in group) / call.m for i in range(len(of_heads[0]))] for group in groups]
    lists = []
    for rows in of_heads:
        own = [range(ends(call, t)[0] // b, ends(call, t)[1] // b + 1) for t in query_tiles(call, b)]
        lists.append([{int(j) for j in keep(row)} | set(mine) | set(first) for row, mine in zip(rows, own)])
    if gqa == "union":
        lists = [[set.union(*rows) for rows in zip(*(lists[p] for p in group))] for group in groups]
    return lists


def by_norm(x, segment, partial):
    """Slots by rising norm inside each segment; `partial`: inside a short last one too."""
    slots = np.arange(len(x))
    for start in range(0, len(x), segment):
        part = slots[start : start + segment]
        if partial or len(part) == segment:
            slots[start : start + segment] = part[np.argsort((x[part] ** 2).sum(axis=1), kind="stable")]
    return slots


def ba_att(call, b, segment, sort="qk", sparsity=0.5, covariance=1.0, crossed=0.0, causal=True):
    """Whole prompts. Factors: `covariance` on var_q var_k, `crossed` on the two terms of a mean and a variance."""
    lists, n = [], call.keys
    whole = segment if causal else n
    for p in range(call.heads):
        q, k = call.q[:, p], call.k[:, p // call.m]
        sigma = by_norm(q, whole, True) if "q" in sort else np.arange(n)
        pi = by_norm(k, whole, False) if "k" in sort else np.arange(n)
        moments = lambda x: (x.mean(axis=0), x.var(axis=0))
        of_keys = [moments(k[pi[list(block)]]) for block in blocks(call, b)]
        rows = []
        for tile in query_tiles(call, b):
            mq, vq = moments(q[sigma[list(tile)]])
            terms = lambda mk, vk: covariance * (vq @ vk) + crossed * (mq**2 @ vk + vq @ mk**2)
            logits = np.array([mq @ mk / np.sqrt(call.d) + terms(mk, vk) / call.d for mk, vk in of_keys])
            # Blocks of earlier segments compete; those of the own one stay where a key is visible.
            earlier = tile[0] // segment * segment // b if causal else len(logits)
            row = {int(j) for j in order(logits[:earlier])[: int(np.ceil((1 - sparsity) * earlier - 1e-9))]}
            if causal:
                end, last = (tile[0] // segment + 1) * segment, sigma[list(tile)].max()
                own = [j for j, block in enumerate(blocks(call, b)) if j >= earlier and block[0] < end]
                row |= {j for j in own if pi[list(blocks(call, b)[j])].min() <= last}
            rows.append(row)
        lists.append(rows)
    return lists


def infinitehip(call, block, sink, window, stages):
    """Each stage samples every stride-th query, narrows each chunk to one key by halving, and keeps the best chunks."""
    lists, size = [], stages[-1][1]
    for p in range(call.heads):
        x = call.q[:, p] @ call.k[:, p // call.m].T
        rows = []
        for tile in query_tiles(call, block):
            first, last = ends(call, tile)
            high = max((first + 1 - window) // size * size if first + 1 > window else 0, sink)
            chunks = [range(s, min(s + stages[0][1], high)) for s in range(sink, high, stages[0][1])]
            for at, (stride, _, kept) in enumerate(stages):
                best = x[list(tile)[::stride]].max(axis=0)

                def narrowed(keys):
                    while len(keys) > 1:
                        half = (len(keys) + 1) // 2
                        keys = keys[half:] if best[keys[half]] > best[keys[0]] else keys[:half]
                    return best[keys[0]]

                found = [narrowed(keys) for keys in chunks]
                cut = stages[min(at + 1, 2)][1]
                chunks = [chunks[j] for j in sorted(order(found)[:kept])]
                chunks = [range(s, min(s + cut, c.stop)) for c in chunks for s in range(c.start, c.stop, cut)]
            tiles = last // size + 1
            always = set(range(min(sink // size, tiles))) | set(range(high // size, tiles))
            rows.append({c.start // size for c in chunks} | always)
        lists.append(rows)
    return lists


def query_orders(call, b, segment):
    """PBS's order of queries: pairs of a query and a block by falling cosine; a block takes at most b of a segment."""
    unit = lambda x: x / np.sqrt((x**2).sum(axis=-1, keepdims=True))
    orders = []
    for p in range(call.heads):
        means = unit(np.array([call.k[list(block), p // call.m].mean(axis=0) for block in blocks(call, b)]))
        mine = []
        for start in range(0, call.rows, segment):
            rows = range(start, min(start + segment, call.rows))
            cosine = unit(call.q[list(rows), p]) @ means[: rows[-1] // b + 1].T
            block_of, taken = {}, np.zeros(cosine.shape[1])
            for pair in order(cosine.ravel()):
                query, block = divmod(int(pair), cosine.shape[1])
                if query not in block_of and taken[block] < b:
                    block_of[query] = block
                    taken[block] += 1
            mine += [start + query for query in sorted(block_of, key=lambda query: (block_of[query], query))]
        orders.append(mine)
    return orders


def exact_top(q, k, t, top):
    """Keys that token t reads, per query head."""
    m = q.shape[1] // k.shape[1]
    number = top if top >= 1 else max(int(np.floor(top * (t + 1) + 0.5)), 1)
    logits = [k[: t + 1, p // m].astype(np.float64) @ q[t, p] for p in range(q.shape[1])]
    return [[set(int(t - j) for j in order(x[::-1])[:number])] for x in logits]


def heavy(call, kept):
    """Dense attention that each key of a prompt gets from the last `kept` rows, per KV head."""
    probabilities = [call.probabilities(p, call.rows - kept).sum(axis=0) for p in range(call.heads)]
    return [sum(probabilities[h * call.m : (h + 1) * call.m]) for h in range(call.kv_heads)]


def h2o_prompt(call, t, heavy_keys, recent):
    old = call.keys - recent
    top = [order(sums[:old])[:heavy_keys] for sums in heavy(call, call.rows)]
    return [[{int(j) for j in best} | set(range(old, t + 1))] for best in top]


def h2o_stream(q, k, t, heavy_keys, recent):
    """Token by token: what is kept gets attention, then the lightest of the older ones goes."""
    m, lists = q.shape[1] // k.shape[1], []
    for h in range(k.shape[1]):
        cache = {}
        for at in range(t + 1):
            cache[at] = 0.0
            read = sorted(cache)
            for p in range(h * m, (h + 1) * m):
                share = softmax(k[read, h].astype(np.float64) @ q[at, p].astype(np.float64) / np.sqrt(q.shape[2]))
                for key, x in zip(read, share):
                    cache[key] += x
            if len(cache) > heavy_keys + recent:
                del cache[min(read[:-recent], key=lambda key: (cache[key], key))]
        lists.append([set(read)])
    return lists


def snapkv(call, t, window, capacity, kernel, pool):
    early, half, lists = call.keys - window, kernel // 2, []
    for votes in heavy(call, window):
        near = [votes[max(0, j - half) : min(j + half + 1, early)] for j in range(early)]
        smooth = [x.sum() / kernel if pool == "avg" else x.max() for x in near]
        lists.append([{int(j) for j in order(smooth)[: capacity - window]} | set(range(early, t + 1))])
    return lists


def dam(sequences, n, density, matching, sink):
    """Rows, columns and distances of each head's map."""
    maps = []
    for p in range(sequences[0].heads):
        pairs = [(i, j) for i in range(n) for j in range(i + 1)]
        mean = sum(call.probabilities(p, 0) for call in sequences)
        on = np.zeros((n, n), bool)
        for at in order([mean[pair] for pair in pairs])[: int(np.ceil(density * len(pairs)))]:
            on[pairs[at]] = True
        for i in range(n):
            on[i, : min(sink, i)] = on[i, i] = True
        # Beyond an eighth from the end too few rows speak for a column or a distance.
        limit = n - n // 8
        columns = {j for j in range(limit) if on[j:, j].sum() >= matching * (n - j)}
        offsets = {o for o in range(limit) if np.diagonal(on, -o).sum() >= matching * (n - o)}
        maps.append([set(np.flatnonzero(row).tolist()) for row in on] + [columns, offsets])
    return maps


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
        call = Call(q, k, context, end)
        case = lambda method, *more: f"{context}-{end}/{flag(method, settings[method], *more)}"
        yield case("bfla"), bfla(call, **settings["bfla"]), {}
        for variant in ("exact", "gauss", "hybrid"):
            text = case("momo", "first_dense_layers=0", f"topk={variant}")
            yield text, momo(call, variant=variant, **settings["momo"]), {}
            if variant == "exact":
                yield f"{text},score=normalised", momo(call, variant=variant, normalised=True, **settings["momo"]), {}
        yield case("xattention"), xattention(call, **settings["xattention"]), {}
        for select in ("meanpool", "xattention"):
            lists, orders = pbs(call, select=select, **settings["pbs"])
            yield case("pbs", f"select={select}"), lists, {"order": np.array(orders, np.int32)}
        lists, columns = vertical_slash(call, **settings["vertical_slash"])
        ptr, idx = flat(columns)
        yield case("vertical_slash"), lists, {"col_ptr": ptr, "col_idx": idx}
        for tau in ("0", "0.3", "1"):
            yield case("flexprefill", f"tau={tau}"), flexprefill(call, tau=float(tau), **settings["flexprefill"]), {}
    for t in (len(q) // 5, len(q) * 2 // 3, len(q) - 1):
        text = flag("quest", settings["quest"], "dense_layers=0")
        yield f"token-{t}/{text}", quest(q, k, t, **settings["quest"]), {}


def plain_lists(call, b):
    """Methods that choose by one score of a block or key: what the flag says, and the lists."""
    top = lambda k: lambda row: order(row)[:k]
    share = lambda tau: lambda row: keep_mass(row, tau)
    soft = lambda tau: lambda row: keep_mass(softmax(row), tau)
    for tau in (0.35, 0.7):
        for gqa in ("per_query", "union", "mean"):
            lists = by_score(call, b, pooled, soft(tau), gqa, first=[0])
            yield f"meanpool:block={b},tau={tau},gqa={gqa}", lists, {}
    yield f"meanpool:block={b},top_k=3", by_score(call, b, pooled, top(3), first=[0]), {}
    for k in (1, 4):
        yield f"block_sparse:block={b},topk={k}", by_score(call, b, pooled, top(k)), {}
    yield f"oracle_topk:block={b},k=5", by_score(call, b, dense_mass, top(5)), {}
    yield f"oracle_topk:block={b},tau=0.6", by_score(call, b, dense_mass, share(0.6)), {}
    stages = [(4, b, 6), (2, b // 2, 6), (1, b // 4, 4)]
    text = (
        f"infinitehip:block={b // 2},stride_1=4,chunk_1={b},budget_2={6 * b},stride_2=2,chunk_2={b // 2},"
        f"budget_3={3 * b},stride_3=1,chunk_3={b // 4},budget={b},sink={b // 2},window={b},prefill_dense_below=0,"
        "first_dense_layers=0"
    )
    yield text, infinitehip(call, b // 2, b // 2, b, stages), {}


def whole_prompt_lists(call, b):
    """Methods that are defined here for whole prompts alone."""
    ba = lambda text, **settings: (f"ba_att:block={b},segment={4 * b},{text}", ba_att(call, b, 4 * b, **settings), {})
    yield ba("beta=1")
    yield ba("beta=2.5", covariance=2.5)
    yield ba("compensation=variance,sparsity=0.7", covariance=0.5, crossed=0.5, sparsity=0.7)
    yield ba("compensate_layers=none", covariance=0.0)
    yield ba("sort=q,compensate_layers=none", sort="q", covariance=0.0)
    yield ba("sort=k", sort="k")
    yield ba("sort=none,sparsity=0.8", sort="", sparsity=0.8)
    if call.keys % b == 0:
        yield ba("causal=false,sparsity=0.7", sparsity=0.7, causal=False)


def token_lists(q, k, t):
    yield f"token-{t}/exact_top:k=6", exact_top(q, k, t, 6), {}
    yield f"token-{t}/exact_top:k=0.2", exact_top(q, k, t, 0.2), {}
    yield f"token-{t}/h2o:heavy=5,recent=3", h2o_stream(q, k, t, 5, 3), {}
    prompt = Call(q, k, 0, t)
    yield f"prompt-{t}/h2o:heavy=9,recent=4", h2o_prompt(prompt, t, 9, 4), {}
    for pool in ("avg", "max"):
        text = f"snapkv:window=4,capacity=12,kernel=3,pool={pool}"
        yield f"prompt-{t}/{text}", snapkv(prompt, t, 4, 12, 3, pool), {}


def main():
    rng = np.random.default_rng(20)
    captured = read(sys.argv[2])
    tensors, places = {}, ((0, 230), (77, 230), (100, 200))

    def put(place, found):
        for case, lists, extra in found:
            ptr, idx = flat(lists)
            for key, x in {"ptr": ptr, "idx": idx, **extra}.items():
                tensors[f"{place}{case}/{key}"] = x

    for kind in ("random", "structured"):
        for heads, kv_heads in ((2, 2), (4, 2), (8, 1)):
            name = f"{kind}.{heads}.{kv_heads}"
            q, k = made_up(kind, heads, kv_heads, rng)
            tensors[f"{name}/q"], tensors[f"{name}/k"] = q, k
            put(f"{name}/", lists_of(q, k, places, SMALL))
            if (heads, kv_heads) != (4, 2):
                continue
            for context, end in places:
                put(f"{name}/{context}-{end}/", plain_lists(Call(q, k, context, end), 16))
            for end in (224, 230):
                put(f"{name}/0-{end}/", whole_prompt_lists(Call(q, k, 0, end), 16))
            orders = query_orders(Call(q, k, 0, 230), 16, 64)
            tensors[f"{name}/query_order/pbs:block=16,segment=64,tau=0.5,permute=queries"] = np.array(orders, np.int32)
            for t in (45, 89):
                put(f"{name}/", token_lists(q, k, t))
    for name in ("random", "structured"):
        q, k = tensors[f"{name}.2.2/q"], tensors[f"{name}.2.2/k"]
        maps = dam([Call(q[s : s + 40], k[s : s + 40], 0, 40) for s in (0, 40, 80)], 40, 0.3, 0.75, 2)
        put(f"{name}.2.2/", [("dam/dam:capture=40,density=0.3,matching=0.75,sink=2", maps, {})])
    for name in ("trained.2.2", "trained.4.2", "trained.8.1"):
        # Groups of one: the first query head of each KV head.
        source, step = ("trained.4.2", 2) if name == "trained.2.2" else (name, 1)
        q, k = captured[f"{source}/q"][:, ::step], captured[f"{source}/k"]
        put(f"{name}/", lists_of(q, k, ((0, 768), (277, 768), (100, 700)), TRAINED))
        if name == "trained.2.2":
            put(f"{name}/277-768/", plain_lists(Call(q, k, 277, 768), 32))
            put(f"{name}/0-768/", whole_prompt_lists(Call(q, k, 0, 768), 32))
    write(sys.argv[1], tensors)


if __name__ == "__main__":
    main()
