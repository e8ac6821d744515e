// pooled_scores: appends one new token per row to its key-value cache, with the pooled key that ends at it, and scores
// every pooled key with the token's queries; blocks are chosen by these scores.
// Math       pooled_c = mean of k_j over c stride <= j < c stride + size, rounded to bf16 (written where token `length`
//            is the last of these j); scores[h, c] = softmax_scale q_h . pooled_c over the c that have ended
//            (arXiv:2509.24663; arXiv:2502.13189). ROTATE: q and k_new are first rotated to position `length`
//            (ROTATE=2: after a norm of each head), as by qk_norm_rope_forward
// Layout     q bf16 [batch, num_heads, HEAD_DIM], k_new, v_new bf16 [batch, num_kv_heads, HEAD_DIM], each with an
//            element offset and a batch stride (slices of one packed row, multiples of 8); k_cache, v_cache bf16
//            [batch, num_kv_heads, capacity, HEAD_DIM]; pooled bf16 [batch, num_kv_heads, pooled_capacity, HEAD_DIM];
//            q_weight, k_weight bf16 [HEAD_DIM]; cos, sin f32 [max_positions, HEAD_DIM / 2], rows table_stride apart (a
//            multiple of 4), a position past them takes the last row; length i32 [batch], keys in the cache before this
//            token; rotated_q bf16 [batch, num_heads, HEAD_DIM]; scores f32 [batch, num_heads, pooled_capacity]
// Buffers    q, k_new, v_new, k_cache, v_cache, pooled, q_weight, k_weight, cos, sin, rotated_q, length, scores;
//            ROTATE=0: without the weights, cos, sin and (but with STORES_Q) rotated_q, ROTATE=1: without the weights
// Defines    HEAD_DIM (64, 128), ROTATE 0|1|2, POOLS (1; 0: the pooled key that ends at the token is there already and
//            none is written), STORES_Q (0; 1, with ROTATE=0: rotated_q receives the queries as they are)
// Tiling     grid (splits, num_kv_heads, batch); 256 threads; a warp has KEYS pooled keys in flight, a lane HEAD_DIM /
//            32 columns; block 0 of a head writes; dynamic shared bytes = 4 HEAD_DIM group_size
// Numerics   pooled keys have the bits of nsa_blocks: f32 sums in the order of the tokens; scores have sums in the
//            order of lanes_sum<32>; rows `length` of the caches, at most one pooled key and, with `scored`, the
//            scores of pooled keys that have ended are written
// Edges      no pooled key has ended; size any multiple of stride; length >= capacity writes nothing out of bounds: the
//            wrapper refuses it
#include "common/attention_params.cuh"
#include "common/pooled_keys.cuh"
#include "common/programmatic_launch.cuh"
#include "common/rotary_head.cuh"

#ifndef POOLS
#define POOLS 1
#endif
#ifndef ROTATE
#define ROTATE 0
#endif
#ifndef STORES_Q
#define STORES_Q 0
#endif

constexpr int KEYS = 8;  // pooled keys that a warp loads at once
constexpr int NUM_WARPS = 8, THREADS = NUM_WARPS * 32, COLUMNS = HEAD_DIM / 32;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold pairs of columns, and a row has a thread a column");

struct PooledScoresParams : TokenParams {
  u64 capacity, pooled_capacity, size, stride;
  u64 scored;  // 0: the token joins the caches alone
  u64 max_positions, table_stride, epsilon;  // ROTATE; epsilon: f32 bits
};

// A block scores its share of the pooled keys of one KV head for all query heads of the group, a warp KEYS of them
// at a time. Block 0 also writes the token's key and value, and the pooled key that ends at it.
// Three blocks a multiprocessor: for four the compiler would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    pooled_scores(const bf16* q, const bf16* k_new, const bf16* v_new, bf16* k_cache, bf16* v_cache, bf16* pooled,
#if ROTATE == 2
                  const bf16* q_weight, const bf16* k_weight,
#endif
#if ROTATE
                  const float* cos, const float* sin,
#endif
#if ROTATE || STORES_Q
                  bf16* rotated_q,
#endif
                  const i32* length, float* scores, const __grid_constant__ PooledScoresParams params) {
  extern __shared__ float queries[];  // [group_size, HEAD_DIM]
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kv_head = blockIdx.y,
            group_size = (int)(params.num_heads / params.num_kv_heads);
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + kv_head, capacity = params.capacity;
  const i32 before = min(length[batch], (i32)capacity - 1);
  const PooledKeys keys = {before + 1, (i32)params.size, (i32)params.stride};
  const bf16* token_k = k_new + params.k_offset + batch * params.k_batch_stride + (i64)kv_head * HEAD_DIM;
  const bf16* token_v = v_new + params.v_offset + batch * params.v_batch_stride + (i64)kv_head * HEAD_DIM;
  bf16* row_k = k_cache + head * capacity * HEAD_DIM;
  bf16* row_pooled = pooled + head * (i64)params.pooled_capacity * HEAD_DIM;

  // Load the queries as f32.
  const i64 first_head = batch * params.num_heads + (i64)kv_head * group_size;
  const bf16* head_q = q + params.q_offset + batch * params.q_batch_stride + (i64)kv_head * group_size * HEAD_DIM;
#if ROTATE
  // A group of lanes a head; block 0 also rotates the key, and stores what it rotates.
  __shared__ __align__(16) bf16 rotated_key[HEAD_DIM];
  const int column = lane % GROUP * LANE_COLUMNS, num_rotated = group_size + (blockIdx.x == 0);
  const i64 last_position = (i64)params.max_positions - 1, asked = length[batch];
  const i64 angle = (asked < 0 ? 0 : asked > last_position ? last_position : asked) * (i64)params.table_stride;
  for (int base = warp * HEADS_PER_WARP; base < num_rotated; base += NUM_WARPS * HEADS_PER_WARP) {
    const int row = base + lane / GROUP;
    const bool is_key = row == group_size, holds = lane % GROUP < LANES && row < num_rotated;
#if ROTATE == 2
    const bf16* weight = is_key ? k_weight : q_weight;
#else
    const bf16* weight = nullptr;
#endif
    const HeadColumns y = rotated_head(is_key ? token_k : head_q + row * HEAD_DIM, ROTATE == 2, weight,
                                       f32_word(params.epsilon), cos, sin, angle, holds);
    if (holds && is_key) store_head(rotated_key, column, y);
    if (holds && !is_key) {
      store_rounded(queries + row * HEAD_DIM, column, y);
      if (blockIdx.x == 0) store_head(rotated_q + (first_head + row) * HEAD_DIM, column, y);
    }
  }
  if (blockIdx.x == 0) __syncthreads();  // the rotated key is in shared memory
  token_k = rotated_key;
#else
  for (int i = threadIdx.x; i < group_size * HEAD_DIM; i += THREADS) queries[i] = bf16_to_f32(head_q[i]);
#if STORES_Q
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < group_size * HEAD_DIM; i += THREADS) rotated_q[first_head * HEAD_DIM + i] = head_q[i];
#endif
#endif

  // Store the token, and the mean of the pool that ends at it. No other thread block reads these rows in this launch.
  if (blockIdx.x == 0) {
    if (threadIdx.x < HEAD_DIM) {
      row_k[(i64)before * HEAD_DIM + threadIdx.x] = token_k[threadIdx.x];
      v_cache[(head * capacity + before) * HEAD_DIM + threadIdx.x] = token_v[threadIdx.x];
    }
#if POOLS
    if (keys.one_ends() && threadIdx.x < HEAD_DIM) {
      const int column = (int)threadIdx.x;
      float sum = 0.f;
#pragma unroll 16
      for (i32 j = keys.seen - keys.size; j < before; j++) sum += bf16_to_f32(row_k[(i64)j * HEAD_DIM + column]);
      sum += bf16_to_f32(token_k[column]);
      row_pooled[(i64)(keys.num() - 1) * HEAD_DIM + column].bits =
          (unsigned short)pack_bf16(sum * (1.f / (float)keys.size), 0.f);
    }
#endif
  }
  __syncthreads();  // the queries are in shared memory, and block 0 sees its pooled key

  if (!params.scored) return;
  // Score. The pooled key that has just been written is block 0's.
  const i32 num = keys.num(), others = num - (POOLS && keys.one_ends()), step = (i32)gridDim.x * NUM_WARPS;
  float* to = scores + first_head * params.pooled_capacity;
  // The keys first, first + step, .. before end.
  auto score = [&](i32 first, i32 end) {
    for (i32 c = first; c < end; c += KEYS * step) {
      u32 words[KEYS][COLUMNS / 2];
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        const u32* key = (const u32*)(row_pooled + (i64)min(c + i * step, end - 1) * HEAD_DIM + lane * COLUMNS);
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j++) words[i][j] = key[j];
      }
      const i32 mine = c + lane / (32 / KEYS) * step;
      for (int h = 0; h < group_size; h++) {
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
        const float sum = lanes_sums(sums);
        if (lane % (32 / KEYS) == 0 && mine < end)
          to[h * (i64)params.pooled_capacity + mine] = sum * f32_word(params.softmax_scale);
      }
    }
  };
  score((i32)blockIdx.x * NUM_WARPS + warp, others);
  if (blockIdx.x == 0 && warp == 0 && others < num) score(others, num);
}
