// column_sums: adds up partial sums of a gradient that blocks left behind, column by column, in a fixed order.
// Math       out[c] = (accumulate ? out[c] : 0) + sum over p of partials[p, offset + c]
// Layout     partials f32 [num_partials, stride]; out f32 [width] contiguous
// Buffers    partials, out
// Defines    none
// Tiling     grid (ceil(width / 32)); 256 threads: 32 columns, eight threads each that take every eighth partial
// Numerics   f32, in a fixed order; latency-bound: the partials are a few MB and lie in the L2
// Edges      width not a multiple of 32; num_partials of any size
#include "common/types.cuh"

constexpr int COLUMNS = 32, SHARES = 8;

struct ColumnSumsParams { u64 num_partials, stride, offset, width, accumulate; };

extern "C" __global__ void __launch_bounds__(COLUMNS * SHARES)
column_sums(const float* partials, float* out, const __grid_constant__ ColumnSumsParams params) {
  __shared__ float sums[SHARES][COLUMNS];
  const int lane = threadIdx.x % COLUMNS, share = threadIdx.x / COLUMNS;
  const u64 column = (u64)blockIdx.x * COLUMNS + lane;
  const bool exists = column < params.width;

  // Load and accumulate
  float sum = 0.f;
  if (exists) {
    const float* at = partials + params.offset + column;
#pragma unroll 8
    for (u64 p = share; p < params.num_partials; p += SHARES) sum += at[p * params.stride];
  }
  sums[share][lane] = sum;
  __syncthreads();  // all eight shares of a column must be there

  // Store
  if (share == 0 && exists) {
    sum = params.accumulate ? out[column] : 0.f;
#pragma unroll
    for (int i = 0; i < SHARES; i++) sum += sums[i][lane];
    out[column] = sum;
  }
}
