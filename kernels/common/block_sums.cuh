// block_sums: sum and maximum over the threads of a block, in an order that depends on their number alone.
#pragma once
#include "common/types.cuh"

// `places` is shared memory of NUM_THREADS / 32 words. Every thread of the block calls.
template <int NUM_THREADS, class Combine>
DEVICE float block_combined(float x, float* places, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();  // all have read the last result
  if (threadIdx.x % 32 == 0) places[threadIdx.x / 32] = x;
  __syncthreads();  // every warp's part is there
  x = places[0];
#pragma unroll
  for (int warp = 1; warp < NUM_THREADS / 32; ++warp) x = combine(x, places[warp]);
  return x;
}
template <int NUM_THREADS>
DEVICE float block_sum(float x, float* places) {
  return block_combined<NUM_THREADS>(x, places, [](float a, float b) { return a + b; });
}
template <int NUM_THREADS>
DEVICE float block_largest(float x, float* places) {
  return block_combined<NUM_THREADS>(x, places, [](float a, float b) { return fmaxf(a, b); });
}
