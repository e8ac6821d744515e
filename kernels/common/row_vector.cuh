// row_vector: VECTOR consecutive elements of a row, loaded and stored as f32 in one access.
// Defines    IS_BF16 (1: bf16, 0: f32), VECTOR (1, or 16 bytes' worth: 8 bf16 or 4 f32)
// Pointers must be aligned to VECTOR elements; for pointers that may not be, launch wrappers choose VECTOR = 1.
#pragma once
#include "common/types.cuh"

#if IS_BF16
typedef bf16 element;
static_assert(VECTOR == 1 || VECTOR == 8, "a 16-byte access holds 8 bf16");
#else
typedef float element;
static_assert(VECTOR == 1 || VECTOR == 4, "a 16-byte access holds 4 f32");
#endif

#if VECTOR > 1
// Elements as one of the four words of a 16-byte access, and back.
#if IS_BF16
DEVICE u32 pack_word(const float* pair) { return pack_bf16(pair[0], pair[1]); }
DEVICE void unpack_word(u32 word, float* pair) { pair[0] = bf16_low(word), pair[1] = bf16_high(word); }
#else
DEVICE u32 pack_word(const float* one) { return __float_as_uint(*one); }
DEVICE void unpack_word(u32 word, float* one) { *one = __uint_as_float(word); }
#endif
constexpr int WORD_ELEMENTS = VECTOR / 4;

// Global addresses must be aligned to 16 bytes.
DEVICE void load_vector(const element* from, float (&to)[VECTOR]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  unpack_word(words.x, to), unpack_word(words.y, to + WORD_ELEMENTS);
  unpack_word(words.z, to + 2 * WORD_ELEMENTS), unpack_word(words.w, to + 3 * WORD_ELEMENTS);
}
DEVICE void store_vector(element* to, const float (&from)[VECTOR]) {
  // Written as assembly, because nvcc 13.0 splits the assignment of a uint4 into four stores here.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack_word(from)),
               "r"(pack_word(from + WORD_ELEMENTS)), "r"(pack_word(from + 2 * WORD_ELEMENTS)),
               "r"(pack_word(from + 3 * WORD_ELEMENTS))
               : "memory");
}
#elif IS_BF16
DEVICE void load_vector(const element* from, float (&to)[1]) { to[0] = bf16_to_f32(*from); }
DEVICE void store_vector(element* to, const float (&from)[1]) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(from[0]));
}
#else
DEVICE void load_vector(const element* from, float (&to)[1]) { to[0] = *from; }
DEVICE void store_vector(element* to, const float (&from)[1]) { *to = from[0]; }
#endif
