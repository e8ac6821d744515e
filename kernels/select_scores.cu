// select_scores: dot products of block means, in f32.
// Math       score[h, i, j] = (adds: itself +) scale * q_mean[h, i] . k_mean[h / group, j] for blocks of keys j that
//            begin no later than the last query of block i
// Layout     q_mean f32 [num_heads, rows, head_dim], k_mean f32 [num_kv_heads, columns, head_dim], score f32
//            [heads, rows, columns] of the heads from first_head on, all contiguous
// Buffers    q_mean, k_mean, score
// Defines    none
// Tiling     grid (ceil(columns / 64), ceil(rows / 64), heads); 256 threads, each 4 x 4 scores; no dynamic shared
//            memory
// Numerics   f32 products and sums by rising column of the heads: selections must not depend on rounding to bf16
// Edges      any sizes; head_dim a multiple of 16. Scores of later blocks are left as they are
#include "common/select_blocks.cuh"

struct SelectScoresParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 num_heads, num_kv_heads, head_dim, first_head;
  u64 scale;  // f32 bits
  u64 adds;   // 1: adds to the stored scores
};

constexpr int SIDE = 64, DEPTH = 16, PITCH = SIDE + 4;

// DEPTH columns of up to SIDE vectors, transposed.
DEVICE void load_side(float* to, const float* from, int vectors, int head_dim, int depth) {
  for (int at = (int)threadIdx.x; at < SIDE * DEPTH; at += 256) {
    const int vector = at / DEPTH, d = at % DEPTH;
    to[d * PITCH + vector] = vector < vectors ? from[(u64)vector * head_dim + depth + d] : 0.0f;
  }
}

// A block computes 64 x 64 scores of one head, a thread 4 x 4 of them.
extern "C" __global__ void __launch_bounds__(256) select_scores(const float* q_mean, const float* k_mean, float* score,
                                                                const __grid_constant__ SelectScoresParams params) {
  __shared__ float q[DEPTH * PITCH], k[DEPTH * PITCH];
  const SelectBlocks blocks = select_blocks(params);
  const int rows = blocks.num_rows(), columns = blocks.num_columns(), head_dim = (int)params.head_dim;
  const int first_row = (int)blockIdx.y * SIDE, first_column = (int)blockIdx.x * SIDE,
            head = (int)params.first_head + (int)blockIdx.z;
  const int num_rows = min(SIDE, rows - first_row), num_columns = min(SIDE, columns - first_column);
  if (first_column >= blocks.admissible(first_row + num_rows - 1)) return;
  const int kv_head = head / ((int)params.num_heads / (int)params.num_kv_heads);
  q_mean += ((u64)head * rows + first_row) * head_dim;
  k_mean += ((u64)kv_head * columns + first_column) * head_dim;
  const int row = (int)threadIdx.x / 16 * 4, column = (int)threadIdx.x % 16 * 4;
  float sum[4][4] = {};
  for (int depth = 0; depth < head_dim; depth += DEPTH) {
    load_side(q, q_mean, num_rows, head_dim, depth);
    load_side(k, k_mean, num_columns, head_dim, depth);
    __syncthreads();  // both tiles are stored
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      float a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = q[d * PITCH + row + i];
        b[i] = k[d * PITCH + column + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += a[i] * b[j];
    }
    __syncthreads();  // all threads have read them
  }
  const float scale = f32_word(params.scale);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i < num_rows && column + j < num_columns) {
        float* to = score + ((u64)blockIdx.z * rows + first_row + row + i) * columns + first_column + column + j;
        *to = (params.adds ? *to : 0.0f) + sum[i][j] * scale;
      }
}
