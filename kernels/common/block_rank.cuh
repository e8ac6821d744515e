// block_rank: sorts one 64-bit key per thread (all different): thread r receives the key of rank r. Keys go to
// equal-width buckets, then ranks within a bucket by comparison: a few barriers in all where keys are spread, instead
// of one for each doubling as in a merge sort.
#pragma once
#include "common/block_scan.cuh"
#include "common/block_sort.cuh"

constexpr int RANK_BUCKETS = 2048;
constexpr u32 MOST_IN_BUCKET = 32;  // more in one bucket: the keys are sorted instead

// The shared memory that ranking the values of a block needs.
struct RankMemory {
  u32* counts;     // [RANK_BUCKETS], zero; 16-byte aligned, left with anything in it
  u32* starts;     // [RANK_BUCKETS], 8-byte aligned
  u64* keys;       // [1024]
  u32* warp_sums;  // [32]
  u32* ranges;     // [128]
};

// The smallest and the largest of the values of threads that take part. `memory`: 64 words.
DEVICE void block_range(bool takes_part, u32 value, u32* memory, u32& least, u32& most) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  least = __reduce_min_sync(0xffffffffu, takes_part ? value : ~0u);
  most = __reduce_max_sync(0xffffffffu, takes_part ? value : 0u);
  if (lane == 0) memory[warp] = least, memory[32 + warp] = most;
  __syncthreads();  // every warp's range is there
  least = __reduce_min_sync(0xffffffffu, memory[lane]);
  most = __reduce_max_sync(0xffffffffu, memory[32 + lane]);
}

// Returns the key of rank threadIdx.x to the first `size` threads, an unspecified value to the others; the first `size`
// threads pass a key each. Keys are (score, position), positions below 2^31. Every thread of a block of 1024 calls; a
// barrier must lie between earlier uses of the memory and the call, and another before it is written again.
DEVICE u64 block_rank(u64 key, int size, RankMemory memory) {
  const int thread = threadIdx.x;
  const bool takes_part = thread < size;
  if (size <= 32) return thread < 32 ? warp_bitonic_sort(takes_part ? key : ~0ull) : key;  // uniform over the block

  // The range of scores; where all are one, of positions.
  u32 least, most;
  block_range(takes_part, (u32)(key >> 32), memory.ranges, least, most);
  u64 lowest = (u64)least << 32, highest = (u64)most << 32 | 0xffffffffu;
  if (least == most) {
    block_range(takes_part, (u32)key, memory.ranges + 64, least, most);
    lowest |= least;
    highest = lowest - least + most;
  }
  const int shift = max(0, 64 - __clzll((long long)(highest - lowest)) - 11);
  const u32 bucket = takes_part ? (u32)((key - lowest) >> shift) : 0;

  u32 slot = 0;
  if (takes_part) slot = atomicAdd(&memory.counts[bucket], 1u);
  __syncthreads();  // all are counted
  const uint2 mine = ((const uint2*)memory.counts)[thread];
  if (__syncthreads_or(mine.x > MOST_IN_BUCKET || mine.y > MOST_IN_BUCKET)) {
    int sort_size = 64;
    while (sort_size < size) sort_size *= 2;
    return block_sort(takes_part ? key : ~0ull, memory.keys, (u64*)memory.counts, sort_size);
  }
  u32 total;
  const u32 start = block_exclusive_sum<1024>(mine.x + mine.y, memory.warp_sums, total);
  ((uint2*)memory.starts)[thread] = make_uint2(start, start + mine.x);
  __syncthreads();  // every bucket's place is known
  u32 first = 0, count = 0;
  if (takes_part) {
    first = memory.starts[bucket];
    count = memory.counts[bucket];
    memory.keys[first + slot] = key;
  }
  __syncthreads();  // the buckets' keys lie side by side; counts are read
  if (takes_part) {
    u32 rank = first;
#pragma unroll 1
    for (u32 i = 0; i < count; i++) rank += memory.keys[first + i] < key;
    ((u64*)memory.counts)[rank] = key;
  }
  __syncthreads();  // the keys lie in order
  return takes_part ? ((const u64*)memory.counts)[thread] : key;
}
