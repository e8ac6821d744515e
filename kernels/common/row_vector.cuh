// row_vector: VECTOR neighbouring elements of a row, loaded and stored as f32 in one access.
// Defines    IS_BF16 (1: bf16, 0: f32), VECTOR (1, or 16 bytes' worth: 8 bf16 or 4 f32)
// Pointers must be aligned to VECTOR elements; the wrappers choose VECTOR = 1 where they cannot promise it.
#pragma once
#include "common/types.cuh"

#if IS_BF16
typedef bf16 element;
static_assert(VECTOR == 1 || VECTOR == 8, "a 16-byte access holds 8 bf16");
#else
typedef float element;
static_assert(VECTOR == 1 || VECTOR == 4, "a 16-byte access holds 4 f32");
#endif

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return bf16_to_f32(x); }
DEVICE void from_float(float x, float& out) { out = x; }
// Round to nearest, ties to even; NaN stays NaN.
DEVICE void from_float(float x, bf16& out) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }

// VECTOR elements with the alignment that lets the compiler use one access.
struct __align__(sizeof(element) * VECTOR) ElementVector { element at[VECTOR]; };

DEVICE void load_vector(const element* from, float (&to)[VECTOR]) {
  const ElementVector loaded = *reinterpret_cast<const ElementVector*>(from);  // aligned by the wrapper's choice of VECTOR
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) to[i] = to_float(loaded.at[i]);
}

DEVICE void store_vector(element* to, const float (&from)[VECTOR]) {
  ElementVector stored;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) from_float(from[i], stored.at[i]);
  *reinterpret_cast<ElementVector*>(to) = stored;  // aligned by the wrapper's choice of VECTOR
}
