// index_scores: one new token per row joins MSA's caches, its heads normed and rotated, and its index queries score the
// blocks of keys before it; blocks are chosen by these scores.
// Math       y = the norm and the rotation of qk_norm_rope_forward at position `length`, for the token's queries and
//            keys and the indexer's (QK_NORM=0: without the norm of the first); importance[h, b] = max over the tokens
//            c of block b of index_q_h . index_c, over the blocks among which nsa_choose takes the largest
//            (arXiv:2606.13392)
// Layout     q bf16 [batch, num_heads, HEAD_DIM], k_new, v_new bf16 [batch, num_kv_heads, HEAD_DIM], index_q bf16
//            [batch, index_heads, HEAD_DIM], index_k bf16 [batch, HEAD_DIM], each with an element offset and a batch
//            stride (slices of packed rows, multiples of 8); weights bf16 [HEAD_DIM]; cos, sin f32 [max_positions,
//            HEAD_DIM / 2], rows table_stride apart (a multiple of 4), a position past them takes the last row; length
//            i32 [batch], tokens before this one; k_cache, v_cache bf16 [batch, num_kv_heads, capacity, HEAD_DIM];
//            index_cache bf16 [batch, index_capacity, HEAD_DIM]; rotated_q bf16 [batch, num_heads, HEAD_DIM];
//            importance f32 [batch, index_heads, num_blocks]
// Buffers    q, k_new, v_new, index_q, index_k, q_weight, k_weight, index_q_weight, index_k_weight, cos, sin, length,
//            k_cache, v_cache, index_cache, rotated_q, importance; QK_NORM=0: without q_weight and k_weight
// Defines    HEAD_DIM (64, 128), QK_NORM 0|1
// Tiling     grid (scorers + joiners, batch); 256 threads; a scoring block has a block of keys at a time, a warp KEYS
//            of them in flight; a joining block stores NUM_WARPS * HEADS_PER_WARP heads; dynamic shared bytes = 4
//            index_heads (HEAD_DIM + NUM_WARPS)
// Numerics   f32 inside; rotated heads are rounded to bf16 as by qk_norm_rope_forward; sums in the order of
//            lanes_sum<32>, whatever the tiling; writes row `length` of the caches, and the importance of the blocks
//            that a choice compares
// Edges      a row in which every block is read: no importance is written; select_size a multiple of KEYS; length >=
//            capacity writes nothing out of bounds: the wrapper refuses it
#include "common/attention_params.cuh"
#include "common/programmatic_launch.cuh"
#include "common/rotary_head.cuh"

constexpr int NUM_WARPS = 8, THREADS = NUM_WARPS * 32, COLUMNS = HEAD_DIM / 32;
constexpr int KEYS = 8;  // keys that a warp loads at once
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold pairs of columns");

struct IndexScoresParams : TokenParams {
  u64 index_heads, index_q_offset, index_q_batch_stride, index_k_offset, index_k_batch_stride;  // elements
  u64 capacity, index_capacity, num_blocks, select_size, num_selected, num_first, num_local, scorers;
  u64 max_positions, table_stride, epsilon, index_epsilon;  // epsilons: f32 bits
};

// The first scorers blocks of a row score, the others store.
extern "C" __global__ void __launch_bounds__(THREADS)
    index_scores(const bf16* q, const bf16* k_new, const bf16* v_new, const bf16* index_q, const bf16* index_k,
#if QK_NORM
                 const bf16* q_weight, const bf16* k_weight,
#endif
                 const bf16* index_q_weight, const bf16* index_k_weight, const float* cos, const float* sin,
                 const i32* length, bf16* k_cache, bf16* v_cache, bf16* index_cache, bf16* rotated_q, float* importance,
                 const __grid_constant__ IndexScoresParams params) {
  extern __shared__ __align__(16) float queries[];  // [index_heads, HEAD_DIM], then the maxima [NUM_WARPS, index_heads]
  wait_for_previous();
  const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31, column = lane % GROUP * LANE_COLUMNS,
            num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads,
            index_heads = (int)params.index_heads;
  const i64 batch = blockIdx.y, capacity = params.capacity, last_position = (i64)params.max_positions - 1;
  const i32 asked = length[batch], before = min(asked, (i32)capacity - 1);
  const i64 angle = (asked < 0 ? 0 : asked > last_position ? last_position : asked) * (i64)params.table_stride;
  const bool holds = lane % GROUP < LANES;  // whether the lane has columns of its head
  index_q += params.index_q_offset + batch * params.index_q_batch_stride;
  index_k += params.index_k_offset + batch * params.index_k_batch_stride;

  // Store: a group of lanes norms and rotates a head; block 0 copies the values.
  if (blockIdx.x >= params.scorers) {
    q += params.q_offset + batch * params.q_batch_stride;
    k_new += params.k_offset + batch * params.k_batch_stride;
    v_new += params.v_offset + batch * params.v_batch_stride;
    const int joiner = (int)(blockIdx.x - params.scorers), num_keys = num_heads + num_kv_heads;
    const int head = (joiner * NUM_WARPS + warp) * HEADS_PER_WARP + lane / GROUP;
    const bool stores = holds && head <= num_keys, is_index = head == num_keys, is_query = head < num_heads;
    const i64 kv_row = batch * num_kv_heads + (head - num_heads);
    const bf16* from = is_index ? index_k : is_query ? q + head * HEAD_DIM : k_new + (head - num_heads) * HEAD_DIM;
    bf16* to = is_index   ? index_cache + (batch * (i64)params.index_capacity + before) * HEAD_DIM
               : is_query ? rotated_q + (batch * num_heads + head) * HEAD_DIM
                          : k_cache + (kv_row * capacity + before) * HEAD_DIM;
#if QK_NORM
    const bf16* weight = is_index ? index_k_weight : is_query ? q_weight : k_weight;
#else
    const bf16* weight = index_k_weight;
#endif
    const float epsilon = f32_word(is_index ? params.index_epsilon : params.epsilon);
    const HeadColumns y = rotated_head(from, QK_NORM || is_index, weight, epsilon, cos, sin, angle, stores);
    if (stores) store_head(to, column, y);
    if (joiner > 0) return;
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = (int)threadIdx.x; i < num_kv_heads * CHUNKS; i += THREADS)
      store_16_bytes(v_cache + ((batch * num_kv_heads + i / CHUNKS) * capacity + before) * HEAD_DIM + i % CHUNKS * 8,
                     load_16_bytes(v_new + i * 8));
    return;
  }

  // The blocks among which nsa_choose takes the largest. It reads no importance where it takes them all.
  const i32 size = (i32)params.select_size, own = before / size, count = min((i32)params.num_selected, own + 1),
            last = min(count, (i32)params.num_local), first = min(count - last, (i32)params.num_first),
            end = own + 1 - last, needed = count - last - first;
  if (needed <= 0 || end - first <= needed || first + (i32)blockIdx.x >= end) return;
  const u32* keys = (const u32*)(index_cache + batch * (i64)params.index_capacity * HEAD_DIM) + lane * (COLUMNS / 2);
  u32 words[KEYS][COLUMNS / 2];
  auto load = [&](i32 key) {
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; j++) words[i][j] = keys[(i64)(key + i) * (HEAD_DIM / 2) + j];
    }
  };
  i32 block = first + (i32)blockIdx.x, at = warp * KEYS;
  if (at < size) load(block * size + at);

  // Norm and rotate the index queries while the first keys are on their way.
  for (int base = warp * HEADS_PER_WARP; base < index_heads; base += NUM_WARPS * HEADS_PER_WARP) {
    const int head = base + lane / GROUP;
    const bool stores = holds && head < index_heads;
    const HeadColumns y = rotated_head(index_q + head * HEAD_DIM, true, index_q_weight, f32_word(params.index_epsilon),
                                       cos, sin, angle, stores);
    if (stores) store_rounded(queries + head * HEAD_DIM, column, y);
  }
  __syncthreads();  // the queries are in shared memory

  // Score block after block: each warp some of its keys, then a thread a head.
  float* maxima = queries + index_heads * HEAD_DIM;
  float* to = importance + batch * index_heads * (i64)params.num_blocks;
  const int num_parts = min(size / KEYS, NUM_WARPS);
  while (block < end) {
    for (; at < size; at += NUM_WARPS * KEYS) {
      const bool is_first = at < NUM_WARPS * KEYS;
      if (!is_first) load(block * size + at);
      for (int h = 0; h < index_heads; h++) {
        float query[COLUMNS], sums[KEYS];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) query[j] = queries[h * HEAD_DIM + lane * COLUMNS + j];
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
          sums[i] = 0.f;
#pragma unroll
          for (int j = 0; j < COLUMNS; j += 2) {
            sums[i] = fmaf(query[j], bf16_low(words[i][j / 2]), sums[i]);
            sums[i] = fmaf(query[j + 1], bf16_high(words[i][j / 2]), sums[i]);
          }
        }
        float most = lanes_sums(sums);
#pragma unroll
        for (int distance = 32 / KEYS; distance < 32; distance *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        float* mine = maxima + warp * index_heads + h;
        if (lane == 0) *mine = is_first ? most : fmaxf(*mine, most);
      }
    }
    const i32 scored = block;
    block += (i32)params.scorers, at = warp * KEYS;
    if (block < end && at < size) load(block * size + at);
    __syncthreads();  // every warp's maxima are stored
    for (int h = (int)threadIdx.x; h < index_heads; h += THREADS) {
      float most = maxima[h];
      for (int part = 1; part < num_parts; part++) most = fmaxf(most, maxima[part * index_heads + h]);
      to[h * (i64)params.num_blocks + scored] = most;
    }
    __syncthreads();  // the maxima are read before the next block's are stored
  }
}
