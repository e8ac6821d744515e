// block_sort: one 64-bit key per thread, sorted ascending over the block's first `size` threads.
// Bitonic inside a warp, then merges: a key's place in two joined runs is its place in its own run plus the number of
// keys of the other run below it, by binary search; one barrier a merge.
#pragma once
#include "common/types.cuh"

// Sorts the keys of a warp's 32 lanes, one each: lane l gets the l-th smallest. All lanes call it.
DEVICE u64 warp_bitonic_sort(u64 key) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) {
    const bool ascending = run == 32 || (lane & run) == 0;
#pragma unroll
    for (int distance = run / 2; distance > 0; distance /= 2) {
      const u64 other = __shfl_xor_sync(0xffffffffu, key, distance);
      const bool keep_smaller = ((lane & distance) == 0) == ascending;
      if (keep_smaller == (other < key)) key = other;
    }
  }
  return key;
}

// Returns the key of rank threadIdx.x to the first `size` threads, an unspecified value to the others, whose keys are
// ignored. `size` is a power of two from 32 to the block's, the same for all threads; `front` and `back` are shared
// memory of one u64 per thread each. Every thread of the block calls; a barrier must lie between earlier uses of
// `front`, `back` and the call, and another before they are written again.
DEVICE u64 block_sort(u64 key, u64* front, u64* back, int size) {
  const int thread = threadIdx.x;
  const bool takes_part = thread < size;  // uniform in a warp
  if (takes_part) {
    key = warp_bitonic_sort(key);
    if (size > 32) front[thread] = key;
  }
#pragma unroll 1
  for (int run = 32; run < size; run *= 2) {
    __syncthreads();  // the runs are in `front`; no thread reads `back` any more
    if (takes_part) {
      const bool is_right = thread & run;
      const u64* other = front + ((thread & ~(run - 1)) ^ run);
      int below = 0;  // keys of the other run before mine; of equal ones the left run's come first
#pragma unroll 1
      for (int step = run / 2; step > 0; step /= 2)
        if (is_right ? other[below + step - 1] <= key : other[below + step - 1] < key) below += step;
      if (is_right ? other[below] <= key : other[below] < key) below++;
      back[(thread & ~(2 * run - 1)) + (thread & (run - 1)) + below] = key;
    }
    __syncthreads();  // the merged runs are complete
    if (takes_part) key = back[thread];
    u64* merged = back;
    back = front;
    front = merged;
  }
  return key;
}
