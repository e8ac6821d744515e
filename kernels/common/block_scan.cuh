// block_scan: prefix sums over the threads of a warp and of a block of NUM_THREADS (a multiple of 32, at most 1024).
#pragma once
#include "common/types.cuh"

/// Sum of `value` over this lane and the lanes below it.
DEVICE u32 warp_inclusive_sum(u32 value) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

/// Exclusive prefix sum over the block in thread order; `total` receives the block's sum.
/// `warp_sums` is shared memory of 32 words; every thread of the block must call, with a barrier between two calls that
/// share it (the caller's next barrier will do).
template <int NUM_THREADS>
DEVICE u32 block_exclusive_sum(u32 value, u32* warp_sums, u32& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 inclusive = warp_inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();  // every warp's sum must be there before any warp reads them
  const u32 sum = lane < NUM_THREADS / 32 ? warp_sums[lane] : 0;
  total = __reduce_add_sync(0xffffffffu, sum);
  return inclusive - value + __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0);
}
