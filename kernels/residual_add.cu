// residual_add: sum of two tensors.
// Math       y = a + b
// Layout     a, b [rows, width], rows a_stride and b_stride apart; y [rows, width] contiguous; all bf16
// Buffers    a, b, y; y may be a or b where that is contiguous
// Defines    IS_BF16 (1), VECTOR (1, 8) (set by sieve-gpu/src/step/residual_add.rs)
// Tiling     grid (rows, ceil(width / (256 VECTOR))); 256 threads; VECTOR consecutive columns each
// Numerics   f32 inside, one rounding; memory-bound
// Edges      the last block of columns may be short
#include "common/row_vector.cuh"

struct ResidualAddParams { u64 width, a_stride, b_stride; };

// A thread adds VECTOR consecutive columns of one row.
extern "C" __global__ void __launch_bounds__(256)
residual_add(const element* a, const element* b, element* y, const __grid_constant__ ResidualAddParams params) {
  const u64 row = blockIdx.x, column = ((u64)blockIdx.y * 256 + threadIdx.x) * VECTOR;
  if (column >= params.width) return;
  float left[VECTOR], right[VECTOR];
  load_vector(a + row * params.a_stride + column, left);
  load_vector(b + row * params.b_stride + column, right);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) left[i] += right[i];
  store_vector(y + row * params.width + column, left);
}
