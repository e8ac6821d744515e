"""Oracles: who sees whom (one heap per document), the gathered lists, and attention with its gradients as full matrices."""

import heapq

import numpy as np
import torch

from attention_kernels import SUPER_BLOCK, TILE_QUERIES, ceil_div


def documents(rng, batch, seq_len, kind):
    """Returns doc_start, doc_end i32 [batch, seq_len]; kind: "one", "few", "tokens" (one-token documents) or "mixed"."""
    start = np.zeros((batch, seq_len), np.int32)
    end = np.zeros((batch, seq_len), np.int32)
    for b in range(batch):
        at = 0
        while at < seq_len:
            longest = {"one": seq_len, "few": max(1, seq_len // 2), "tokens": 1, "mixed": max(1, seq_len // 4)}[kind]
            length = seq_len if kind == "one" else int(rng.integers(1, longest + 1))
            if kind == "mixed" and rng.random() < 0.3:
                length = 1
            stop = min(at + length, seq_len)
            start[b, at:stop], end[b, at:stop] = at, stop
            at = stop
    return start, end


def expire_oracle(z, doc_start, doc_end, window):
    """expire i32 [batch, heads, seq_len] of scores z [batch, heads, seq_len]: a heap of the `window` largest (z, j) per document."""
    batch, heads, seq_len = z.shape
    expire = np.zeros(z.shape, np.int32)
    for b in range(batch):
        for h in range(heads):
            heap = []
            for j in range(seq_len):
                if doc_start[b, j] == j:
                    heap = []
                expire[b, h, j] = doc_end[b, j]
                heapq.heappush(heap, (float(z[b, h, j]) + 0.0, j))
                if len(heap) > window:
                    _, popped = heapq.heappop(heap)
                    expire[b, h, popped] = j
    return expire


class Lists:
    """The gathered lists of `expire` as dma_lists writes them, on a device."""

    def __init__(self, expire, window, device, tile_queries=TILE_QUERIES):
        batch, heads, n = expire.shape
        blocks = ceil_div(n, SUPER_BLOCK)
        self.tile_queries = tile_queries
        self.capacity = ceil_div(min(window + SUPER_BLOCK, n), 128) * 128
        entries = np.full((batch, heads, blocks, self.capacity, 2), 0x7FFFFFFF, np.int32)  # unwritten entries are poison
        length = np.zeros((batch, heads, blocks), np.int32)
        entering = np.zeros((batch, heads, blocks), np.int32)
        windows = np.zeros((batch, heads, ceil_div(n, tile_queries), 2), np.int32)
        at = np.arange(n)
        for b in range(batch):
            for h in range(heads):
                e = expire[b, h]
                for s in range(blocks):
                    first, last = s * SUPER_BLOCK, min((s + 1) * SUPER_BLOCK, n) - 1
                    keys = at[(at <= last) & (e > np.maximum(at, first))]
                    new = keys[keys >= first][::-1]
                    old = keys[keys < first]
                    old = old[np.lexsort((-old, -e[old]))]
                    order = np.concatenate([new, old])
                    length[b, h, s], entering[b, h, s] = len(order), len(new)
                    assert 1 <= len(order) <= self.capacity
                    entries[b, h, s, : len(order), 0], entries[b, h, s, : len(order), 1] = order, e[order]
                    pad = ceil_div(len(order), 128) * 128
                    entries[b, h, s, len(order) : pad] = (order[0], 0)
                    for tile in range(first // tile_queries, last // tile_queries + 1):
                        i0, i1 = tile * tile_queries, min((tile + 1) * tile_queries, n) - 1
                        windows[b, h, tile] = (np.sum(new > i1), len(new) + np.sum(e[old] > i0))
        to = lambda x: torch.from_numpy(x).to(device)
        self.list, self.list_len, self.num_entering, self.tile_window = to(entries), to(length), to(entering), to(windows)


def mask_of(expire):
    """active[b, h, i, j] = j <= i < expire[b, h, j]."""
    n = expire.shape[-1]
    i, j = torch.arange(n, device=expire.device)[:, None], torch.arange(n, device=expire.device)[None, :]
    return (j <= i) & (i < expire[:, :, None, :])


def attention(q, k, v, delta, active, scale, dtype):
    """Plain attention in `dtype` as full matrices. q [b, n, h, d], k, v [b, n, hkv, .], delta [b, hkv, n] or None, active [b, hkv, n, n].
    Returns o [b, n, h, dv] and lse [b, h, n], with a bias less the largest bias that each query sees; differentiable."""
    group = q.shape[2] // k.shape[2]
    qh = q.to(dtype).transpose(1, 2)
    kh = k.to(dtype).transpose(1, 2).repeat_interleave(group, 1)
    vh = v.to(dtype).transpose(1, 2).repeat_interleave(group, 1)
    logits = (qh @ kh.transpose(2, 3)).to(torch.promote_types(dtype, torch.float32)) * scale
    if delta is not None:
        # Less the row's largest bias, in f64: what large biases leave between them counts, and q . k beside it.
        base = delta.detach().double()[:, :, None, :].masked_fill(~active, float("-inf")).amax(-1, keepdim=True)
        bias = (delta.double()[:, :, None, :] - base.masked_fill(torch.isinf(base), 0.0)).masked_fill(~active, 0.0)
        logits = logits + bias.to(logits.dtype).repeat_interleave(group, 1)
    seen = active.repeat_interleave(group, 1)
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)[..., None])
    p = torch.where(seen, p, torch.zeros_like(p))
    o = p.to(dtype) @ vh
    return o.transpose(1, 2), lse


def gradients(q, k, v, delta, active, scale, do, dtype):
    """o, lse, dq, dk, dv, ddelta of `attention`, all f32."""
    leaves = [x.detach().to(dtype).clone().requires_grad_() for x in (q, k, v)]
    bias = None if delta is None else delta.detach().clone().requires_grad_()
    o, lse = attention(*leaves, bias, active, scale, dtype)
    o.backward(do.to(dtype))
    grads = [x.grad.float() for x in leaves]
    return [o.detach().float(), lse.detach(), *grads, None if bias is None else bias.grad.float()]
