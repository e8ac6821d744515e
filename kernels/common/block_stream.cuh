// block_stream: a block's threads walk through an array in global memory, 16 bytes at a time where its alignment
// allows; UNROLL loads of a thread are under way at once.
#pragma once
#include "common/types.cuh"

// Calls visit(word, index) once for each index of [begin, end), in any order and from any thread. `words` is at least
// 4-byte aligned.
template <int NUM_THREADS, int UNROLL, class Visit>
DEVICE void for_each_word(const u32* __restrict__ words, i32 begin, i32 end, Visit visit) {
  const i32 thread = threadIdx.x, count = end - begin;
  if (count <= 0) return;
  const i32 lead = min((i32)(-((u64)(words + begin) >> 2) & 3), count);  // words before the first 16-byte boundary
  if (thread < lead) visit(words[begin + thread], begin + thread);
  const i32 body = begin + lead, num_vectors = (end - body) / 4, tail = body + num_vectors * 4;
  const uint4* vectors = (const uint4*)(words + body);
#pragma unroll UNROLL
  for (i32 i = thread; i < num_vectors; i += NUM_THREADS) {
    const uint4 four = vectors[i];
    visit(four.x, body + 4 * i);
    visit(four.y, body + 4 * i + 1);
    visit(four.z, body + 4 * i + 2);
    visit(four.w, body + 4 * i + 3);
  }
  if (thread < end - tail) visit(words[tail + thread], tail + thread);
}

// Calls visit(low word, high word) once for each of `count` 64-bit words, spread over the block's threads, all of which
// call it; `words` is at least 8-byte aligned, and two words are loaded at once where it is 16-byte aligned.
template <int NUM_THREADS, int UNROLL, class Visit>
DEVICE void for_each_pair(const u64* __restrict__ words, i32 count, Visit visit) {
  const i32 thread = threadIdx.x;
  if (((u64)words & 15) == 0) {
    const uint4* vectors = (const uint4*)words;
#pragma unroll UNROLL
    for (i32 i = thread; i < count / 2; i += NUM_THREADS) {
      const uint4 two = vectors[i];
      visit(two.x, two.y);
      visit(two.z, two.w);
    }
    if (thread == 0 && count % 2 == 1) visit((u32)words[count - 1], (u32)(words[count - 1] >> 32));
  } else {
#pragma unroll UNROLL
    for (i32 i = thread; i < count; i += NUM_THREADS) visit((u32)words[i], (u32)(words[i] >> 32));
  }
}
