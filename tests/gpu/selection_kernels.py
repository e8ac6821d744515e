"""Selection, list and decode kernels as Python calls, by the heads of kernels/dma_*.cu and kernels/attention_decode.cu, and their oracles."""

import heapq

import numpy as np

from cuda_driver import ceil_div, f32_word

SUPER_BLOCK = 1024


def list_capacity(seq_len, window):
    return ceil_div(min(window + SUPER_BLOCK, seq_len), 128) * 128


def num_blocks(seq_len, prefix_block):
    return ceil_div(seq_len, prefix_block)


class Selection:
    """Buffers and launches of the selection and the lists for one shape."""

    def __init__(self, cuda, z, doc_start, doc_end, window, prefix_block=8192, tile_queries=64, min_blocks=None):
        batch, heads, n = z.shape
        window = min(window, n)
        blocks = num_blocks(n, prefix_block)
        self.capacity, self.num_super = list_capacity(n, window), ceil_div(n, SUPER_BLOCK)
        self.z, self.start, self.end = cuda.array(z, np.float32), cuda.array(doc_start, np.int32), cuda.array(doc_end, np.int32)
        self.expire = cuda.empty((batch, heads, n), np.int32)
        self.survivors = cuda.empty((batch, heads, max(blocks - 1, 1), window), np.uint64)
        self.list = cuda.empty((batch, heads, self.num_super, self.capacity, 2), np.int32)
        self.list_len = cuda.empty((batch, heads, self.num_super), np.int32)
        self.num_entering = cuda.empty((batch, heads, self.num_super), np.int32)
        self.tile_window = cuda.empty((batch, heads, ceil_div(n, tile_queries), 2), np.int32)
        words = [n, heads, window]
        name = f"-PREFIX_BLOCK={prefix_block}"
        busy = name if min_blocks is None else f"{name}-MIN_BLOCKS={min_blocks}"
        self.is_long = n > 2 * prefix_block
        shared = 8 * prefix_block - 4096
        self.prefix = cuda.prepare("dma_select_prefix" + name, "dma_select_prefix", (max(blocks - 1, 1), heads, batch), 1024, 0,
                                   [self.z, self.start, self.survivors], words) if self.is_long else lambda: None
        self.leave = cuda.prepare("dma_select" + busy, "dma_select", (self.num_super, heads, batch), 1024, shared,
                                  [self.z, self.start, self.end, self.survivors, self.expire], words + [0])
        self.lists_prefix = cuda.prepare("dma_lists_prefix" + name, "dma_lists_prefix", (max(blocks - 1, 1), heads, batch), 1024, 0,
                                         [self.expire, self.start, self.survivors], words)
        self.lists = cuda.prepare("dma_lists" + busy, "dma_lists", (self.num_super, heads, batch), 1024, 0,
                                  [self.expire, self.start, self.end, self.survivors, self.list, self.list_len, self.num_entering,
                                   self.tile_window], words + [self.capacity, tile_queries])

    def select(self):
        self.prefix()
        self.leave()

    def all(self):
        self.prefix()
        self.leave()
        self.lists()


def scores_shared(heads, head_dim):
    return 32 * heads * min(heads * head_dim // 8, 1536 // heads)


def expire_oracle(z, doc_start, doc_end, window):
    """One heap per document, as the algorithm is defined."""
    batch, heads, n = z.shape
    expire = np.empty(z.shape, np.int32)
    for b in range(batch):
        starts = doc_start[b] == np.arange(n)
        for h in range(heads):
            row, heap = expire[b, h], []
            row[:] = doc_end[b]
            scores = (z[b, h].astype(np.float64) + 0.0).tolist()
            for j in range(n):
                if starts[j]:
                    heap = []
                if len(heap) < window:
                    heapq.heappush(heap, (scores[j], j))
                else:
                    row[heapq.heappushpop(heap, (scores[j], j))[1]] = j
    return expire


def lists_oracle(expire, window, tile_queries):
    """Yields (b, h, s, entries, num_entering, tile windows) for every list, straight from the definition."""
    batch, heads, n = expire.shape
    keys = np.arange(n)
    for b in range(batch):
        for h in range(heads):
            leaves = expire[b, h].astype(np.int64)
            for s in range(ceil_div(n, SUPER_BLOCK)):
                first, last = s * SUPER_BLOCK, min((s + 1) * SUPER_BLOCK, n)
                entering = keys[first:last][leaves[first:last] > keys[first:last]][::-1]
                old = keys[:first][leaves[:first] > first]
                old = old[np.lexsort((-old, -leaves[old]))]
                entries = np.concatenate([entering, old])
                tiles = []
                for i0 in range(first, last, tile_queries):
                    i1 = min(i0 + tile_queries, n) - 1
                    tiles.append((int((entering > i1).sum()), len(entering) + int((leaves[old] > i0).sum())))
                yield b, h, s, np.stack([entries, leaves[entries]], 1), len(entering), np.array(tiles)


def to_bf16(x):
    """f32 to the bits of bf16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x):
    return from_bf16(to_bf16(x))


def decode_stages(head_dim, head_dim_v):
    return 4 if head_dim <= 64 and head_dim_v <= 64 else 2


def decode_threads(head_dim, head_dim_v):
    return 64 if max(head_dim, head_dim_v) > 128 else 128


def decode_shared(head_dim, head_dim_v, stages):
    return 16 * (2 * head_dim + 16) + decode_threads(head_dim, head_dim_v) // 32 * stages * (32 * head_dim + 32 * head_dim_v + 576)


def decode_splits(blocks, batch, grid_y, keys):
    return max(1, min(blocks // (batch * grid_y), ceil_div(keys, 64)))


def decode_name(entry, head_dim, head_dim_v, stages=None):
    name = f"{entry}-HEAD_DIM={head_dim}-HEAD_DIM_V={head_dim_v}"
    return name if stages is None else f"{name}-NUM_STAGES={stages}"


def attend_reference(q, k, v, bias, scale, plain_bf16=False):
    """One query head: q [d], k, v [keys, ..], bias [keys]; f64, or rounded wherever a plain bf16 computation rounds."""
    if plain_bf16:
        logits = rounded((rounded(k @ q) * np.float32(scale)).astype(np.float32)) + bias.astype(np.float32)
        p = np.exp(logits - logits.max(), dtype=np.float32)
        return rounded(rounded(p / p.sum()) @ v)
    logits = (k.astype(np.float64) @ q.astype(np.float64)) * scale + bias
    p = np.exp(logits - logits.max())
    return (p / p.sum()) @ v.astype(np.float64)


class Decode:
    """Buffers and launch of one decode step; `window` is the sliding window (dense kernel) or keep_window_size (DMA)."""

    def __init__(self, cuda, entry, batch, heads, kv_heads, head_dim, head_dim_v, slots, window, splits, scale, stages=None):
        self.entry, self.cuda, self.splits = entry, cuda, splits
        group = heads // kv_heads
        grid_y = kv_heads * ceil_div(group, 16)
        width = heads * head_dim + kv_heads * (head_dim + head_dim_v)
        self.packed = cuda.empty((batch, width), np.uint16)
        self.k, self.v = cuda.empty((batch, kv_heads, slots, head_dim), np.uint16), cuda.empty((batch, kv_heads, slots, head_dim_v), np.uint16)
        self.length = cuda.empty((batch,), np.int32, 0)
        self.o = cuda.empty((batch, heads, head_dim_v), np.uint16)
        self.partials = cuda.empty((batch, heads, splits, head_dim_v + 2), np.float32)
        self.counters = cuda.empty((batch, kv_heads), np.uint32, 0)
        arrays = [self.packed, self.packed, self.packed]
        words = [heads, kv_heads]
        if entry == "dma_decode":
            self.z_new = cuda.empty((batch, kv_heads), np.float32)
            self.slot_z, self.slot_position = cuda.empty((batch, kv_heads, slots), np.float32), cuda.empty((batch, kv_heads, slots), np.int32)
            arrays += [self.z_new, self.k, self.v, self.slot_z, self.slot_position]
            words += [slots]
        else:
            arrays += [self.k, self.v]
            words += [slots, window]
        k_offset = heads * head_dim
        words += [splits, f32_word(scale), 0, width, k_offset, width, k_offset + kv_heads * head_dim, width]
        shared = decode_shared(head_dim, head_dim_v, stages or decode_stages(head_dim, head_dim_v))
        self.run = cuda.prepare(decode_name(entry, head_dim, head_dim_v, stages), entry, (splits, grid_y, batch), decode_threads(head_dim, head_dim_v),
                                shared, arrays + [self.length, self.o, self.partials, self.counters], words)
