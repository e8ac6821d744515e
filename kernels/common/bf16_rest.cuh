// bf16_rest: the low part of an f32 that its bf16 rounding lacks, as a signed 16-bit difference of their bit patterns
// (`o_low`).
#pragma once
#include "common/types.cuh"

// Low parts of two f32 and the pair of bf16 nearest to them. A tie rounded down would need a 17th bit; it is stored one
// unit short of the f32.
DEVICE u32 bf16_rest(u32 pair, float first, float second) {
  const int low = min((int)(__float_as_uint(first) - (pair << 16)), 0x7fff),
            high = min((int)(__float_as_uint(second) - (pair & 0xffff0000u)), 0x7fff);
  return __byte_perm((u32)low, (u32)high, 0x5410);
}

// The f32 of the lower and of the higher half of a pair of bf16 and their low parts.
DEVICE float join_low(u32 pair, u32 rest) { return __uint_as_float((pair << 16) + (u32)(int)(short)(rest & 0xffffu)); }
DEVICE float join_high(u32 pair, u32 rest) { return __uint_as_float((pair & 0xffff0000u) + (u32)((int)rest >> 16)); }
