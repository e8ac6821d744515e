// select_cell_sums: the softmax of cells over blocks of keys, summed over the cells of each block of queries
// (XAttention, arXiv:2503.16428).
// Math       mass[h, i, j] = sum_a 2^(block_lse[h, a, j] - log2 sum_j' 2^block_lse[h, a, j']) over the cells a of block
//            i and the blocks j' up to a's own, with segments those before the segment of i's first query
// Layout     block_lse f32 [heads, query_cells, columns] as select_cells writes it, its first cell at position
//            first_query; mass f32 [heads, rows, columns]
// Buffers    block_lse, mass
// Defines    none
// Tiling     grid (rows, heads, 1); 128 threads; no dynamic shared memory
// Numerics   f32; cells are added in their order
// Edges      a cell that reaches before the call belongs to the first block; blocks that a row does not admit are left
//            as they are; NaN stays NaN
#include "common/select_blocks.cuh"

struct SelectCellSumsParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 segment, first_query, cell, query_cells;
};

// The sum (SUM) or the maximum of `x` over the block's 128 threads, all of which call it and get the result. `places`
// is shared memory for one number a warp.
template <bool SUM>
DEVICE float together(float x, float* places) {
  const auto combine = [](float a, float b) { return SUM ? a + b : fmaxf(a, b); };
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();  // all threads have read the last result
  if (threadIdx.x % 32 == 0) places[threadIdx.x / 32] = x;
  __syncthreads();  // every warp's part is stored
  return combine(combine(places[0], places[1]), combine(places[2], places[3]));
}

// A block has one block of queries (a row) of one head: it goes through the row's cells, and a thread has every 128th
// block of keys.
extern "C" __global__ void __launch_bounds__(128)
    select_cell_sums(const float* block_lse, float* mass, const __grid_constant__ SelectCellSumsParams params) {
  __shared__ float places[4];
  const SelectBlocks blocks = select_blocks(params);
  const int row = (int)blockIdx.x, head = (int)blockIdx.y, columns = blocks.num_columns(), cell = (int)params.cell,
            first_query = (int)params.first_query, segment = (int)params.segment;
  const int begin = row == 0 ? 0 : (blocks.first(row) - first_query) / cell,
            end = blocks.last(row) < first_query ? 0 : (blocks.last(row) - first_query) / cell + 1;
  mass += ((u64)head * blocks.num_rows() + row) * columns;
  block_lse += (u64)head * params.query_cells * columns;
  for (int j = (int)threadIdx.x; j < blocks.admissible(row); j += 128) mass[j] = 0.0f;
  for (int a = begin; a < end; ++a) {
    const float* from = block_lse + (u64)a * columns;
    // The softmax of cell `a` goes over the first `count` blocks of keys: up to the block with the cell's own first
    // position, or, with segments, all blocks of the segments before the row's.
    const int count = segment > 0 ? blocks.competing(row, segment) : (first_query + a * cell) / blocks.block + 1;
    float largest = -INFINITY_F32, sum = 0.0f;
    for (int j = (int)threadIdx.x; j < count; j += 128) largest = fmaxf(largest, from[j]);
    largest = together<false>(largest, places);
    if (largest == -INFINITY_F32) largest = 0.0f;  // a row of NaN alone, or one whose every product is minus infinity
    for (int j = (int)threadIdx.x; j < count; j += 128) sum += exp2f(from[j] - largest);
    sum = together<true>(sum, places);
    const float factor = sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f;
    for (int j = (int)threadIdx.x; j < count; j += 128) mass[j] += exp2f(from[j] - largest) * factor;
  }
}
