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

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float& out) { out = x; }
__device__ __forceinline__ void from_float(float x, bf16& out) { out = __float2bfloat16_rn(x); }

// VECTOR elements with the alignment that lets the compiler use one access.
struct __align__(sizeof(element) * VECTOR) ElementVector { element at[VECTOR]; };

__device__ __forceinline__ void load_vector(const element* from, float (&to)[VECTOR]) {
  const ElementVector loaded = *reinterpret_cast<const ElementVector*>(from);  // aligned by the wrapper's choice of VECTOR
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) to[i] = to_float(loaded.at[i]);
}

__device__ __forceinline__ void store_vector(element* to, const float (&from)[VECTOR]) {
  ElementVector stored;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) from_float(from[i], stored.at[i]);
  *reinterpret_cast<ElementVector*>(to) = stored;  // aligned by the wrapper's choice of VECTOR
}
