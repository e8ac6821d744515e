// block_scores: how important each block of keys is to the queries of one new token, from the scores of pooled keys.
// Math       p[c] = sum over heads h of a group of softmax_c(scores[h, c]);
//            RULE 0: importance[b] = sum over c of w(c, b) p[c], w the strides that pooled key c and block b share
//            (arXiv:2502.11089, eq. 9, 10);
//            RULE 1: max over c with w(c, b) > 0 of p[c], 0 without any (arXiv:2509.24663);
//            RULE 2: scores[h, b] of one head, 0 for a block that has not ended (arXiv:2502.13189)
// Layout     scores f32 [batch, num_heads, pooled_capacity]; length i32 [batch], tokens before the new one; importance
//            f32 [batch, choosers, num_blocks]
// Buffers    scores, length, importance
// Defines    RULE 0|1|2
// Tiling     grid (choosers, batch); 512 threads; the warps share the heads' softmaxes, NUM_WARPS / group_size (rounded
//            down to a power of two, at least 1) a head; a thread takes a pooled key and then a block
// Numerics   f32 in a fixed order; writes the blocks up to the token's own; p takes the place of the first head's
//            scores
// Edges      no pooled key has ended: importances of 0; RULE 2: a chooser is a head, a block a pooled key; at most
//            64 heads a chooser
#include "common/fixed_sum.cuh"
#include "common/pooled_keys.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 16, THREADS = NUM_WARPS * 32;

struct BlockScoresParams {
  u64 num_heads, choosers, pooled_capacity, num_blocks, size, stride, select_size;
};

// A block computes the importances of one chooser (a head that chooses blocks) for the new token of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    block_scores(float* scores, const i32* length, float* importance,
                 const __grid_constant__ BlockScoresParams params) {
  wait_for_previous();
  const int group_size = (int)(params.num_heads / params.choosers);
  const i64 chooser = (i64)blockIdx.y * params.choosers + blockIdx.x, capacity = params.pooled_capacity;
  const i32 before = length[blockIdx.y], stride = (i32)params.stride, size = (i32)params.size;
  const PooledKeys keys = {before + 1, size, stride};
  const i32 num = min(keys.num(), (i32)capacity);
  // The token's own block: the last one that gets an importance.
  const i32 own = min(before / (i32)params.select_size, (i32)params.num_blocks - 1);
  float* rows = scores + chooser * group_size * capacity;
  float* to = importance + chooser * params.num_blocks;
#if RULE == 2
  // A pooled key is a block.
  for (i32 block = threadIdx.x; block <= own; block += THREADS) to[block] = block < num ? rows[block] : 0.f;
#else
  constexpr int MAX_GROUP = 64;
  __shared__ float largest[MAX_GROUP], inverse[MAX_GROUP], parts[2][MAX_GROUP];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  // Softmax: the factor of each head's exponentials. Each of a head's num_parts warps has a part of its keys.
  int num_parts = NUM_WARPS;
  while (num_parts > 1 && num_parts * group_size > NUM_WARPS) num_parts /= 2;
  const int part = warp % num_parts, step = num_parts * 32;
  for (int h = warp / num_parts; h < group_size; h += NUM_WARPS / num_parts) {
    const float* row = rows + h * capacity;
    float most = -INFINITY_F32;
#pragma unroll 8
    for (i32 c = part * 32 + lane; c < num; c += step) most = fmaxf(most, row[c]);
    most = warp_max(most);
    if (lane == 0) parts[0][h * num_parts + part] = most;
  }
  __syncthreads();  // the maxima of all parts are stored
  for (int h = warp / num_parts; h < group_size; h += NUM_WARPS / num_parts) {
    const float* row = rows + h * capacity;
    float most = -INFINITY_F32, sum = 0.f;
    for (int other = 0; other < num_parts; other++) most = fmaxf(most, parts[0][h * num_parts + other]);
#pragma unroll 8
    for (i32 c = part * 32 + lane; c < num; c += step) sum += expf(row[c] - most);
    sum = lanes_sum<32>(sum);
    if (lane == 0) parts[1][h * num_parts + part] = sum;
    if (lane == 0 && part == 0) largest[h] = most;
  }
  __syncthreads();  // the sums of all parts are stored
  if ((int)threadIdx.x < group_size) {
    float sum = 0.f;
    for (int other = 0; other < num_parts; other++) sum += parts[1][threadIdx.x * num_parts + other];
    inverse[threadIdx.x] = 1.f / sum;
  }
  __syncthreads();  // every head's maximum and inverse sum are stored
  for (i32 c = threadIdx.x; c < num; c += THREADS) {
    float p = 0.f;
    for (int h = 0; h < group_size; h++) p += expf(rows[h * capacity + c] - largest[h]) * inverse[h];
    rows[c] = p;
  }
  __syncthreads();  // every probability is stored

  // Blocks: a pooled key counts for a block by the number of strides that both cover.
  const i32 per_select = (i32)params.select_size / stride, per_pooled = size / stride;
  for (i32 block = threadIdx.x; block <= own; block += THREADS) {
    const i32 first = max(block * per_select - per_pooled + 1, 0), end = min((block + 1) * per_select, num);
    float score = 0.f;
    for (i32 c = first; c < end; c++) {
      const i32 offset = c - block * per_select;  // strides from the block's start to the pooled key's
      const i32 shared = min(per_select - 1, offset + per_pooled - 1) - max(offset, 0) + 1;
      score = RULE == 0 ? score + (float)shared * rows[c] : fmaxf(score, rows[c]);
    }
    to[block] = score;
  }
#endif
}
