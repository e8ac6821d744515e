// fill_zero: clears an f32 buffer before kernels that add to it.
// Math       x = 0
// Layout     f32 [num_elements], contiguous, 16-byte aligned
// Buffers    x
// Defines    none
// Tiling     grid (ceil(num_elements / 1024)); 256 threads, four elements each; no shared memory
// Numerics   exact; memory-bound
// Edges      num_elements need not be a multiple of four
#include "common/types.cuh"

struct FillZeroParams {
  u64 num_elements;
};

// A thread clears four consecutive elements, or what is left of them at the end.
extern "C" __global__ void __launch_bounds__(256) fill_zero(float* x, const __grid_constant__ FillZeroParams params) {
  const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
  if (at + 4 <= params.num_elements) {
    *(float4*)(x + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  } else {
    for (u64 i = at; i < params.num_elements; ++i) x[i] = 0.0f;
  }
}
