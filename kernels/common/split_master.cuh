// split_master: an f32 as a bf16 and the 16 bits that the bf16 lacks. The bf16 weight is the master rounded to nearest,
// ties away from zero; the rest is the low half of the master's bits, read as a signed number, so that bits(bf16) *
// 2^16 + rest always gives the master's bits. Ties go away from zero, not to even: only then do the two parts determine
// whether the master was rounded up.
#pragma once
#include "common/types.cuh"

DEVICE float join_master(u32 leaf, u32 rest) {
  return __uint_as_float((leaf << 16) + (u32)(int)(short)(rest & 0xffffu));
}

DEVICE void split_master(float master, u32& leaf, u32& rest) {
  // Every NaN becomes the same NaN: rounding would turn the largest payloads into -0.
  const u32 bits = master == master ? __float_as_uint(master) : 0x7fc00000u;
  leaf = (bits + 0x8000u) >> 16;
  rest = bits & 0xffffu;
}

// Two neighbours in a word; the first is the lower half.
DEVICE void join_pair(u32 leaf, u32 rest, float& first, float& second) {
  first = join_master(leaf & 0xffffu, rest), second = join_master(leaf >> 16, rest >> 16);
}
DEVICE void split_pair(float first, float second, u32& leaf, u32& rest) {
  u32 leaf_high, rest_high;
  split_master(first, leaf, rest);
  split_master(second, leaf_high, rest_high);
  leaf |= leaf_high << 16, rest |= rest_high << 16;
}
