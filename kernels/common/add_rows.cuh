// add_rows: adds a block's gradients of keys to f32 sums in memory.
// Defines    as attention_backward.cuh; DETERMINISTIC 0|1: with 1 without atomics, for a launch in which no other block
//            adds to the same keys
#pragma once
#include "common/attention_backward.cuh"

// Adds four f32 at a 16-byte aligned address.
DEVICE void add_f32x4(float* to, float a, float b, float c, float d) {
#if DETERMINISTIC
  // A key is in a super-block's list once, so within a launch no other thread touches its row.
  float4 old = *(const float4*)to;
  *(float4*)to = make_float4(old.x + a, old.y + b, old.z + c, old.w + d);
#else
  reduce_add_f32x4(to, a, b, c, d);
#endif
}

// Adds the warp's half of the columns for the 32 keys that two warps share; padding entries (expire 0) are skipped. A
// quad writes 64 contiguous bytes: the columns of a group of 16 stay in the order of the fragment.
template <int ROW, int HALF_PAIRS>
DEVICE void add_rows(float* to, const float (&sums)[2][2 * HALF_PAIRS][4], const int2* entries) {
  const int lane = (int)threadIdx.x % 32, half = (int)threadIdx.x / 32 % 2, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 entry = entries[m * 16 + h * 8 + g];
      if (entry.y <= 0) continue;
      float* row = to + (u64)entry.x * ROW + half * HALF_PAIRS * 16 + t * 4;
#pragma unroll
      for (int n = 0; n < HALF_PAIRS; ++n) {
        if (half * HALF_PAIRS + n >= ROW / 16) break;
        add_f32x4(row + n * 16, sums[m][2 * n][2 * h], sums[m][2 * n][2 * h + 1], sums[m][2 * n + 1][2 * h],
                  sums[m][2 * n + 1][2 * h + 1]);
      }
    }
}
