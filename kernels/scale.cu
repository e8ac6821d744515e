// scale: a tensor times a scalar in device memory, in place.
// Math       x *= factor[0]
// Layout     x [rows, width], rows stride apart; bf16 or f32; factor f32 [1]
// Buffers    factor, x
// Defines    IS_BF16, VECTOR (set by sieve-gpu/src/step/scale.rs)
// Tiling     grid (rows, ceil(width / (256 VECTOR))); 256 threads; VECTOR consecutive columns each
// Numerics   f32 inside, one rounding; memory-bound
// Edges      the last block of columns may be short
#include "common/row_vector.cuh"

struct ScaleParams { u64 width, stride; };

// A thread has VECTOR consecutive columns of one row.
extern "C" __global__ void __launch_bounds__(256)
scale(const float* factor, element* x, const __grid_constant__ ScaleParams params) {
  const u64 row = blockIdx.x, column = ((u64)blockIdx.y * 256 + threadIdx.x) * VECTOR;
  if (column >= params.width) return;
  element* at = x + row * params.stride + column;
  const float by = factor[0];
  float value[VECTOR];
  load_vector(at, value);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) value[i] *= by;
  store_vector(at, value);
}
