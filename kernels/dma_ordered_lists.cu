// dma_ordered_lists: the keys that each epoch of 128 queries may see, as one list per KV head in the order of
// epoch_order.cuh, which dma_token gives a query that is decoded alone: a row's sums then have the bits of a step's.
// Math       entries {j, expire[j]}, or {a listed key, 0} where no key lies, in whole stages of 128: near keys by
//            place, then older ones, j < near_first and expire[j] > q0, by falling (rank_j, j). The entries that a
//            query tile from i0 on needs lie in [0, e): e = near places + older keys with expire > i0, rounded up to
//            128
// Method     older keys are found as by dma_lists, and sorted in shared memory
// Layout     rank f32, expire i32 [batch, num_kv_heads, seq_len]; doc_start i32 [batch, seq_len]; survivors u64 as
//            dma_select_prefix (or dma_lists_prefix) writes them; positions i32 [batch, num_kv_heads, seq_len] of the
//            keys, read below first_query alone; list int2 [batch, num_kv_heads, num_epochs, capacity], capacity a
//            multiple of 128; list_len i32 [batch, num_kv_heads, num_epochs]; tile_window int2 {0, e}
//            [batch, num_kv_heads, ceil(seq_len / tile_queries)]. All contiguous
// Buffers    rank, expire, doc_start, survivors, (CACHED_KEYS: positions,) list, list_len, tile_window
// Defines    PREFIX_BLOCK (8192, as in dma_select_prefix); MAX_OLD (1024, 2048): at least keep_window_size;
//            CACHED_KEYS 0|1: tokens before first_query are a cache's keys by rising position, and the token at
//            first_query, a multiple of 128 after its position, goes on behind them
// Tiling     grid (num_epochs, num_kv_heads, batch); 512 threads; 13 or 25 KiB static shared memory, no dynamic
// Numerics   integers only; deterministic
// Edges      tile_queries divides 128. The list of an epoch before first_query is empty
#include "common/block_stream.cuh"
#include "common/epoch_order.cuh"

constexpr int NUM_THREADS = 512;
static_assert(PREFIX_BLOCK % EPOCH == 0, "an epoch must not straddle a boundary of dma_select_prefix");

struct DmaOrderedListsParams {
  u64 seq_len, num_kv_heads, keep_window_size, near_keys, capacity, tile_queries;
  u64 first_query, first_position;  // CACHED_KEYS: the first new token, and its position in the text
};

struct Shared {
  u64 old[MAX_OLD];            // order keys of the older keys
  i32 near[MAX_OLD + EPOCH];   // near keys by place; -1: none
  u32 alive[EPOCH / 16];       // older keys that the first query of each tile sees
  u32 num_old;
  u32 last;                    // the last key + 1; 0: none
};

// A block makes the list of one epoch and KV head; keys are spread over the threads.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
    dma_ordered_lists(const float* __restrict__ rank, const i32* __restrict__ expire, const i32* __restrict__ doc_start,
                      const u64* __restrict__ survivors,
#if CACHED_KEYS
                      const i32* __restrict__ positions,
#endif
                      int2* __restrict__ list, i32* __restrict__ list_len, int2* __restrict__ tile_window,
                      const __grid_constant__ DmaOrderedListsParams params) {
  __shared__ Shared shared;
  const int thread = threadIdx.x;
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.keep_window_size;
  const i32 tile_queries = (i32)params.tile_queries;
  const i64 head = (i64)blockIdx.z * params.num_kv_heads + blockIdx.y;
  const float* row_rank = rank + head * seq_len;
  const i32* row_expire = expire + head * seq_len;
  const i32 q0 = blockIdx.x * EPOCH, q1 = min(q0 + EPOCH, seq_len);
  const i64 list_idx = head * gridDim.x + blockIdx.x;
  int2* out = list + list_idx * (i64)params.capacity;
  const i32 num_tiles = (q1 - q0 + tile_queries - 1) / tile_queries;
  int2* windows = tile_window + head * ((seq_len + tile_queries - 1) / tile_queries) + q0 / tile_queries;

#if CACHED_KEYS
  const i32 first_query = (i32)params.first_query, shift = (i32)params.first_position - first_query;
  const i32* row_positions = positions + head * seq_len;
  auto position_of = [&](i32 key) { return key < first_query ? row_positions[key] : key + shift; };
  if (q1 <= first_query) {  // no query is here
    if (thread < num_tiles) windows[thread] = make_int2(0, 0);
    if (thread == 0) out[0] = make_int2(q0, 0), list_len[list_idx] = 0;
    return;
  }
  const i32 document = doc_start[(i64)blockIdx.z * seq_len + first_query];
  const EpochOrder order(q0 + shift, 0, window, (i32)params.near_keys);
#else
  auto position_of = [&](i32 key) { return key; };
  const i32 document = doc_start[(i64)blockIdx.z * seq_len + q0];
  const EpochOrder order(q0, document, window, (i32)params.near_keys);
#endif

  // Place the near keys and collect the older ones: all keys that some query of the epoch sees.
  if (thread == 0) shared.num_old = shared.last = 0;
  if (thread < EPOCH / 16) shared.alive[thread] = 0;
  for (i32 place = thread; place < order.near_total; place += NUM_THREADS) shared.near[place] = -1;
  __syncthreads();  // no key is there yet
  auto visit = [&](i32 key, i32 leaves) {
    if (leaves <= max(key, q0)) return;
    const i32 position = position_of(key);
    if (order.is_near(position)) {
      const i32 place = order.place(position);
      if (0 <= place && place < order.near_total) shared.near[place] = key;
    } else {
      const u32 slot = atomicAdd(&shared.num_old, 1u);
      if (slot < MAX_OLD) shared.old[slot] = order_key(order_of_score(row_rank[key]), (u32)key);
    }
    atomicMax(&shared.last, (u32)key + 1);
  };
  const i32 prefix_block = seq_len > 2 * PREFIX_BLOCK ? q0 / PREFIX_BLOCK : 0, boundary = prefix_block * PREFIX_BLOCK;
  const i64 num_boundaries = (seq_len + PREFIX_BLOCK - 1) / PREFIX_BLOCK - 1;
  const bool from_survivors = boundary - document > window;
  const u64* kept = survivors + (head * num_boundaries + prefix_block - 1) * window;
  for_each_pair<NUM_THREADS, 2>(kept, from_survivors ? window : 0, [&](u32 key, u32) {
    if (key < (u32)boundary) visit((i32)key, row_expire[key]);  // places that dma_lists_prefix did not fill hold ~0
  });
  for_each_word<NUM_THREADS, 2>((const u32*)row_expire, from_survivors ? boundary : document, q1,
                                [&](u32 leaves, i32 key) { visit(key, (i32)leaves); });
  __syncthreads();  // all keys are there
  const i32 num_old = min((i32)shared.num_old, MAX_OLD), size = sorted_size(num_old), filler = (i32)shared.last - 1;
  for (i32 at = num_old + thread; at < size; at += NUM_THREADS) shared.old[at] = 0;  // below every key
  __syncthreads();  // the rest is filled
  if (num_old > 1) sort_falling<NUM_THREADS>(shared.old, nullptr, size);

  // Write the list in whole stages. A place without a key holds one that is seen by another query, so that its rows of
  // K and V are numbers.
  const i32 length = filler < 0 ? 0 : order.near_total + (num_old + EPOCH - 1) / EPOCH * EPOCH;
  for (i32 place = thread; place < length; place += NUM_THREADS) {
    const i32 at = place - order.near_total;
    const i32 key = at < 0 ? shared.near[place] : at < num_old ? (i32)(u32)shared.old[at] : -1;
    const i32 leaves = key < 0 ? 0 : row_expire[key];
    if (place < (i32)params.capacity) out[place] = make_int2(key < 0 ? filler : key, leaves);
    if (at < 0 || key < 0) continue;
    for (i32 tile = 0; tile < num_tiles; tile++)
      if (leaves > q0 + tile * tile_queries) atomicAdd(&shared.alive[tile], 1u);
  }
  if (thread == 0) {
    if (length == 0) out[0] = make_int2(q0, 0);
    list_len[list_idx] = min(length, (i32)params.capacity);
  }
  __syncthreads();  // every tile's older keys are counted
  if (thread < num_tiles) {
    const i32 alive = ((i32)shared.alive[thread] + EPOCH - 1) / EPOCH * EPOCH;
    windows[thread] = make_int2(0, length == 0 ? 0 : order.near_total + alive);
  }
}
