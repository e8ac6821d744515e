// bf16x8: eight consecutive bf16 or f32, loaded and stored by 16-byte accesses, as f32 in registers.
#pragma once
#include "common/types.cuh"

DEVICE uint4 load_16_bytes(const void* from) { return *reinterpret_cast<const uint4*>(from); }
DEVICE void store_16_bytes(void* to, const uint4& words) {
  // Written as assembly, because nvcc 13.0 sometimes splits the assignment of a uint4 into four stores.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

DEVICE void unpack_bf16x8(const uint4& words, float (&to)[8]) {
  to[0] = bf16_low(words.x), to[1] = bf16_high(words.x);
  to[2] = bf16_low(words.y), to[3] = bf16_high(words.y);
  to[4] = bf16_low(words.z), to[5] = bf16_high(words.z);
  to[6] = bf16_low(words.w), to[7] = bf16_high(words.w);
}
DEVICE uint4 pack_bf16x8(const float (&from)[8]) {
  return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                    pack_bf16(from[6], from[7]));
}

DEVICE void load_f32x8(const float* from, float (&to)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
DEVICE void store_f32x8(float* to, const float (&from)[8]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(from[4], from[5], from[6], from[7]);
}
