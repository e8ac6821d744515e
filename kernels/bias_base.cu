// bias_base: for each query the largest bias among the keys that it sees. Attention with a bias takes it from every
// bias of the row before it adds q . k:
// the softmax is the same, and an f32 of the size of q . k holds the logits that count, however large the biases are.
// Math       base_i = max of delta_j over the keys j <= i < expire_j of its list (GATHER), or max(doc_start_i, i -
//            window + 1) <= j <= i; 0 where a query sees nothing, and in the padding
// Layout     delta f32 [batch, num_kv_heads, seq_len]; list, list_len as dma_lists writes them; doc_start i32
//            [batch, seq_len]; base f32 [batch, num_kv_heads, padded_len]; all contiguous
// Buffers    delta, (GATHER: list, list_len, else doc_start,) base
// Defines    GATHER 0|1; LIST_QUERIES (1024, or 128): queries that share a list
// Tiling     grid (ceil(seq_len / LIST_QUERIES), num_kv_heads, batch): a block takes LIST_QUERIES queries, a thread
//            each; 44 KiB of static shared memory, or 4
// Numerics   exact; NaN of a key that some query sees is the base of all queries that see it; writes every element of
//            base
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64; keys that no query sees are not read (GATHER)
#include "common/order_key.cuh"

#ifndef LIST_QUERIES
#define LIST_QUERIES 1024
#endif
constexpr int BLOCK_QUERIES = LIST_QUERIES, LEVELS = LIST_QUERIES == 1024 ? 10 : 7;
static_assert(LIST_QUERIES == 1 << LEVELS, "ranges of every length have their level");
constexpr int LOADS = 3;  // loads that a thread has in flight

struct BiasBaseParams {
  u64 seq_len, padded_len;
  u64 reach;  // GATHER: entries a list has room for; else keys a query sees at most, itself included
};

// Sparse table of maxima: entry p of level l is the largest bias that the queries p .. p + 2^l - 1 see. A key updates
// two entries that together cover the queries that see it. Biases are stored as order keys (order_key.cuh): unsigned
// integers in the order of the floats, 0 below all of them.
struct Ranges {
  u32 largest[LEVELS][BLOCK_QUERIES];

  // Enters a key's bias for the queries `first` to `end` - 1 of the block, which see it.
  DEVICE void add(int first, int end, u32 order) {
    const int level = min(31 - __clz(end - first), LEVELS - 1);
    atomicMax(&largest[level][first], order);
    atomicMax(&largest[level][end - (1 << level)], order);
  }
};

// The float of an order key: the inverse of order_of_score.
DEVICE float score_of_order(u32 order) { return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

// A block finds the bases of the 1024 queries of a super-block for one KV head. Keys are spread over the threads, each
// of which enters the bias of its keys into the ranges of queries that see them; at the end thread t stores query t.
extern "C" __global__ void __launch_bounds__(BLOCK_QUERIES, 1)
    bias_base(const float* delta,
#if GATHER
              const int2* list, const i32* list_len,
#else
              const i32* doc_start,
#endif
              float* base, const __grid_constant__ BiasBaseParams params) {
  __shared__ Ranges ranges;
  const int thread = (int)threadIdx.x, seq_len = (int)params.seq_len, first_query = (int)blockIdx.x * BLOCK_QUERIES;
  const int num_queries = min(BLOCK_QUERIES, seq_len - first_query);
  const u64 row = (u64)blockIdx.z * gridDim.y + blockIdx.y;
  delta += row * seq_len;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) ranges.largest[level][thread] = 0;
#if GATHER
  const u64 list_idx = row * gridDim.x + blockIdx.x;
  const int num_entries = list_len[list_idx];
  list += list_idx * params.reach;
#else
  __shared__ int starts[BLOCK_QUERIES];
  starts[thread] = thread < num_queries ? doc_start[(u64)blockIdx.z * seq_len + first_query + thread] : seq_len;
#endif
  __syncthreads();  // the ranges are cleared and the document starts stored

  // Load: 1024 keys at a time, several loads in flight. Most keys are seen by every query of the block; their maximum
  // is kept in a register.
  u32 seen_by_all = 0;
  // Enters the bias of a key that the queries `first` to `end` - 1 of the block see.
  auto add = [&](int first, int end, float bias) {
    if (first >= end) return;
    const u32 order = bias == bias ? order_of_score(bias) : ~0u;  // a NaN of either sign wins
    if (end - first == BLOCK_QUERIES) seen_by_all = max(seen_by_all, order);
    else ranges.add(first, end, order);
  };
#if GATHER
  for (int at = thread; at < num_entries; at += LOADS * BLOCK_QUERIES) {
    int2 entries[LOADS];
    float biases[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      entries[i] = at + i * BLOCK_QUERIES < num_entries ? list[at + i * BLOCK_QUERIES] : make_int2(0, 0);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) biases[i] = entries[i].y > 0 ? delta[entries[i].x] : 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      add(max(entries[i].x - first_query, 0), min(entries[i].y - first_query, BLOCK_QUERIES), biases[i]);
  }
#else
  const i64 window = (i64)min(params.reach, params.seq_len);
  const int lowest = max(starts[0], (int)(first_query - window + 1)), end_key = first_query + num_queries;
  for (int first_key = lowest + thread; first_key < end_key; first_key += LOADS * BLOCK_QUERIES) {
    float biases[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      biases[i] = first_key + i * BLOCK_QUERIES < end_key ? delta[first_key + i * BLOCK_QUERIES] : 0.0f;
    for (int i = 0; i < LOADS; ++i) {
      const int key = first_key + i * BLOCK_QUERIES, low = max(key - first_query, 0);
      if (key >= end_key) break;
      // The first query of a later document: the first of the sorted starts that is after the key.
      int end = BLOCK_QUERIES;
      if (starts[num_queries - 1] > key) {
        end = num_queries - 1;
        for (int at = low; at < end;) {
          const int middle = (at + end) / 2;
          if (starts[middle] > key) end = middle; else at = middle + 1;
        }
      }
      add(low, (int)min((i64)end, key + window - first_query), biases[i]);
    }
  }
#endif
  seen_by_all = __reduce_max_sync(~0u, seen_by_all);
  if (thread % 32 == 0 && seen_by_all > 0) ranges.add(0, BLOCK_QUERIES, seen_by_all);
  __syncthreads();  // all keys have been counted

  // Each range passes its maximum to its halves, down to single queries.
#pragma unroll
  for (int level = LEVELS - 1; level > 0; --level) {
    const int half = 1 << (level - 1);
    u32 largest = max(ranges.largest[level - 1][thread], ranges.largest[level][thread]);
    if (thread >= half) largest = max(largest, ranges.largest[level][thread - half]);
    ranges.largest[level - 1][thread] = largest;
    __syncthreads();  // the next level reads what this level wrote
  }

  // Store the largest bias that each query of the block sees; 0 for a query without a key and for padding.
  const u32 order = ranges.largest[0][thread];
  if (first_query + thread < (int)params.padded_len)
    base[row * params.padded_len + first_query + thread] =
        thread < num_queries && order > 0 ? score_of_order(order) : 0.0f;
}
