// bitonic_sort: one 64-bit key per thread, sorted ascending over aligned groups of `size` threads.
#pragma once
#include "common/types.cuh"

/// Returns the key of rank (threadIdx.x mod size) in the thread's group. `size` is a power of two of at least 2, the same for
/// all threads; `exchange` is shared memory of one u64 per thread. Every thread of the block calls.
DEVICE u64 block_bitonic_sort(u64 key, u64* exchange, int size) {
  const int thread = threadIdx.x;
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
    const bool ascending = run == size || (thread & run) == 0;
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      u64 other;
      if (distance >= 32) {
        __syncthreads();  // the reads of the step before are done
        exchange[thread] = key;
        __syncthreads();  // keys visible to the partner warp
        other = exchange[thread ^ distance];
      } else {
        other = __shfl_xor_sync(0xffffffffu, key, distance);
      }
      const bool keep_smaller = ((thread & distance) == 0) == ascending;
      if (keep_smaller == (other < key)) key = other;
    }
  }
  return key;
}
