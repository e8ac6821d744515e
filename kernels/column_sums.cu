// column_sums: adds up partial sums of one or two gradients that blocks left behind, column by column, in a fixed
// order.
// Math       out[c] = sum over p of partials[p, c]; columns from `split` on belong to the second output
// Layout     partials f32 [num_partials, width]; first f32 [split], second f32 [width - split], contiguous
// Buffers    partials, first, second (any where split = width)
// Defines    none
// Tiling     grid (ceil(width / 32)); 1024 threads: 32 columns, 32 threads each that take every 32nd partial
// Numerics   f32, in a fixed order; latency-bound: the partials are a few MB and lie in the L2
// Edges      width not a multiple of 32; num_partials of any size
#include "common/types.cuh"

constexpr int COLUMNS = 32, SHARES = 32;

struct ColumnSumsParams { u64 num_partials, width, split; };

// A block adds up 32 columns: thread (share, lane) adds every 32nd partial of a column, and the threads of share 0 add
// the shares.
extern "C" __global__ void __launch_bounds__(COLUMNS * SHARES)
column_sums(const float* partials, float* first, float* second, const __grid_constant__ ColumnSumsParams params) {
  __shared__ float sums[SHARES][COLUMNS];
  const int lane = threadIdx.x % COLUMNS, share = threadIdx.x / COLUMNS;
  const u64 column = (u64)blockIdx.x * COLUMNS + lane;
  const bool exists = column < params.width;

  // Load the partial sums of a column and add them up.
  float sum = 0.f;
  if (exists) {
#pragma unroll 8
    for (u64 p = share; p < params.num_partials; p += SHARES) sum += partials[p * params.width + column];
  }
  sums[share][lane] = sum;
  __syncthreads();  // all partial sums of a column are stored

  // Add up the shares of each column in a fixed order, and store the sum.
  if (share == 0 && exists) {
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < SHARES; i++) sum += sums[i][lane];
    *(column < params.split ? first + column : second + (column - params.split)) = sum;
  }
}
