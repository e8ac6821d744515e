// order_key: the total order DMA ranks keys by, as one unsigned comparison.
// (z, position) -> 64 bits: the high word grows with z (-0 counts as +0), the low word is the position, so of equal
// scores the more recent key is the larger. Zero lies below every key and serves as "minus infinity".
#pragma once
#include "common/types.cuh"

// Maps the bits of an f32 score to 32 bits whose unsigned order is the order of the scores. NaN has a place too, but no
// meaning.
DEVICE u32 order_of_bits(u32 bits) {
  const u32 canonical = bits == 0x80000000u ? 0u : bits;  // -0 takes the place of +0
  return canonical ^ ((u32)((i32)canonical >> 31) | 0x80000000u);
}
DEVICE u32 order_of_score(float z) { return order_of_bits(__float_as_uint(z)); }

DEVICE u64 order_key(u32 order, u32 position) { return (u64)order << 32 | position; }
