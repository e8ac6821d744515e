// order_key: the total order DMA ranks keys by, as one unsigned comparison.
// (z, position) -> 64 bits: the high word grows with z (-0 counts as +0), the low word is the position, so of equal scores
// the more recent key is the larger. Zero lies below every key and serves as "minus infinity".
#pragma once
#include "common/types.cuh"

/// Maps an f32 score to 32 bits whose unsigned order is the order of the scores. NaN has a place too, but no meaning.
DEVICE u32 order_of_score(float z) {
  const u32 bits = __float_as_uint(z);
  if (bits == 0x80000000u) return 0x80000000u;  // -0 takes the place of +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE u64 order_key(u32 order, u32 position) { return (u64)order << 32 | position; }
