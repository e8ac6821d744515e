// select_softmax: turns rows of scores into softmax probabilities, for the heads that need it.
// Math       x[h, i, j] = softmax_j(x[h, i, j]) over the blocks that row i admits, 0 beyond
// Layout     x f32 [heads, rows, columns] of the heads from first_head on, in place; wanted i32 [num_heads]: below 0,
//            the head's rows are left as they are
// Buffers    x, wanted, nan
// Defines    none
// Tiling     grid (rows, heads, 1); 128 threads; no dynamic shared memory
// Numerics   f32
// Edges      a row with NaN or plus infinity: nan of its head grows
#include "common/block_sums.cuh"
#include "common/select_blocks.cuh"

struct SelectSoftmaxParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 first_head;
};

// A block turns one row of one head into probabilities; its columns are spread over the threads.
extern "C" __global__ void __launch_bounds__(128)
    select_softmax(float* x, const i32* wanted, i32* nan, const __grid_constant__ SelectSoftmaxParams params) {
  __shared__ float places[4];
  const SelectBlocks blocks = select_blocks(params);
  const int row = (int)blockIdx.x, head = (int)params.first_head + (int)blockIdx.y, columns = blocks.num_columns(),
            admissible = blocks.admissible(row);
  if (wanted[head] < 0) return;
  x += ((u64)blockIdx.y * blocks.num_rows() + row) * columns;
  float largest = -INFINITY_F32, bad = 0.0f, sum = 0.0f;
  for (int j = (int)threadIdx.x; j < admissible; j += 128) {
    if (x[j] != x[j] || x[j] == INFINITY_F32) bad = 1.0f;
    largest = fmaxf(largest, x[j]);
  }
  largest = block_largest<128>(largest, places);
  if (block_sum<128>(bad, places) > 0.0f && threadIdx.x == 0) atomicAdd(nan + head, 1);
  if (largest == -INFINITY_F32) largest = 0.0f;
  for (int j = (int)threadIdx.x; j < admissible; j += 128) sum += exp2f((x[j] - largest) * LOG2_E);
  sum = block_sum<128>(sum, places);
  const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
  for (int j = (int)threadIdx.x; j < columns; j += 128)
    x[j] = j < admissible ? exp2f((x[j] - largest) * LOG2_E) * factor : 0.0f;
}
