// pooled_scores: appends one new token per row to its key-value cache, with the pooled key that ends at it, and scores
// every pooled key with the token's queries; blocks are chosen by these scores.
// Math       pooled_c = mean of k_j over c stride <= j < c stride + size, rounded to bf16 (written where token `length`
//            is the last of these j); scores[h, c] = softmax_scale q_h . pooled_c over the c that have ended
//            (arXiv:2509.24663; arXiv:2502.13189)
// Layout     q bf16 [batch, num_heads, HEAD_DIM], k_new, v_new bf16 [batch, num_kv_heads, HEAD_DIM], each with an
//            element offset and a batch stride (slices of one packed row, multiples of 8); k_cache, v_cache bf16
//            [batch, num_kv_heads, capacity, HEAD_DIM]; pooled bf16 [batch, num_kv_heads, pooled_capacity, HEAD_DIM];
//            length i32 [batch], keys in the cache before this token; scores f32 [batch, num_heads, pooled_capacity]
// Buffers    q, k_new, v_new, k_cache, v_cache, pooled, length, scores
// Defines    HEAD_DIM (64, 128), POOLS (1; 0: the pooled key that ends at the token is there already and none is
//            written)
// Tiling     grid (splits, num_kv_heads, batch); 256 threads; a warp takes a pooled key, a lane HEAD_DIM / 32 columns;
//            block 0 of a head writes; dynamic shared bytes = 4 HEAD_DIM group_size
// Numerics   f32 sums in a fixed order; rows `length` of the caches, at most one pooled key and the scores of pooled
//            keys that have ended are written
// Edges      no pooled key has ended; size any multiple of stride; length >= capacity writes nothing out of bounds: the
//            wrapper refuses it
#include "common/attention_params.cuh"
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/pooled_keys.cuh"
#include "common/programmatic_launch.cuh"

#ifndef POOLS
#define POOLS 1
#endif

constexpr int NUM_WARPS = 8, THREADS = NUM_WARPS * 32, COLUMNS = HEAD_DIM / 32;
[[maybe_unused]] constexpr int PARTS = THREADS / HEAD_DIM;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes hold pairs of columns, and a row is two or four parts");

struct PooledScoresParams : TokenParams {
  u64 capacity, pooled_capacity, size, stride;
};

// A block scores its share of the pooled keys of one KV head for all query heads of the group: a warp has a pooled key
// at a time. Block 0 also writes the token's key and value, and the pooled key that ends at it.
extern "C" __global__ void __launch_bounds__(THREADS)
    pooled_scores(const bf16* q, const bf16* k_new, const bf16* v_new, bf16* k_cache, bf16* v_cache, bf16* pooled,
                  const i32* length, float* scores, const __grid_constant__ PooledScoresParams params) {
  extern __shared__ float queries[];  // [group_size, HEAD_DIM]
#if POOLS
  __shared__ float sums[PARTS][HEAD_DIM];
#endif
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

  // Load the queries and convert them to f32.
  const bf16* head_q = q + params.q_offset + batch * params.q_batch_stride + (i64)kv_head * group_size * HEAD_DIM;
  for (int i = threadIdx.x; i < group_size * HEAD_DIM; i += THREADS) queries[i] = bf16_to_f32(head_q[i]);

  // Store the token, and the mean of the pool that ends at it. No other thread block reads these rows in this launch.
  if (blockIdx.x == 0) {
    if (threadIdx.x < HEAD_DIM) {
      row_k[(i64)before * HEAD_DIM + threadIdx.x] = token_k[threadIdx.x];
      v_cache[(head * capacity + before) * HEAD_DIM + threadIdx.x] = token_v[threadIdx.x];
    }
#if POOLS
    if (keys.one_ends()) {
      const int part = (int)threadIdx.x / HEAD_DIM, column = (int)threadIdx.x % HEAD_DIM;
      float sum = 0.f;
      for (i32 j = keys.seen - keys.size + part; j < before; j += PARTS)
        sum += bf16_to_f32(row_k[(i64)j * HEAD_DIM + column]);
      sums[part][column] = sum;
      __syncthreads();  // the sums of all parts are stored
      if (part == 0) {
        sum = bf16_to_f32(token_k[column]);
#pragma unroll
        for (int other = 0; other < PARTS; other++) sum += sums[other][column];
        row_pooled[(i64)(keys.num() - 1) * HEAD_DIM + column].bits =
            (unsigned short)pack_bf16(sum / (float)keys.size, 0.f);
      }
    }
#endif
  }
  __syncthreads();  // the queries are in shared memory, and block 0 sees its pooled key

  // Score. The pooled key that has just been written is block 0's.
  const i32 num = keys.num(), others = num - (POOLS && keys.one_ends()), step = (i32)gridDim.x * NUM_WARPS;
  float* to = scores + (batch * params.num_heads + (i64)kv_head * group_size) * params.pooled_capacity;
  auto score = [&](i32 c) {
    const u32* words = (const u32*)(row_pooled + (i64)c * HEAD_DIM + lane * COLUMNS);
    float key[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) key[i] = bf16_low(words[i / 2]), key[i + 1] = bf16_high(words[i / 2]);
    for (int h = 0; h < group_size; h++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) sum = fmaf(queries[h * HEAD_DIM + lane * COLUMNS + i], key[i], sum);
      sum = lanes_sum<32>(sum);
      if (lane == 0) to[h * (i64)params.pooled_capacity + c] = sum * f32_word(params.softmax_scale);
    }
  };
  for (i32 c = (i32)blockIdx.x * NUM_WARPS + warp; c < others; c += step) score(c);
  if (blockIdx.x == 0 && warp == 0 && others < num) score(others);
}
