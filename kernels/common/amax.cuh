// amax: partial maxima of |x| over what a kernel stores in bf16, for the scale of fp8_quantise.
// Defines    AMAX_PARTIALS: number of partial maxima, 0 for a kernel that computes none
// Partial maxima are the bits of f32s, zeroed before the launch: magnitudes compare like unsigned integers, and a NaN
// is larger than every number. Rounding to bf16 is monotonic, so only the maximum is rounded.
#pragma once
#include "common/types.cuh"

#ifndef AMAX_PARTIALS
#define AMAX_PARTIALS 0
#endif

#if AMAX_PARTIALS
#define AMAX_BUFFER u32 *amax,
#else
#define AMAX_BUFFER
#endif

// The largest absolute value that a thread has seen.
struct Amax {
#if AMAX_PARTIALS
  u32 bits = 0;
  DEVICE void keep(float x) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    bits = magnitude > bits ? magnitude : bits;
  }
  // All threads of a warp must call it.
  DEVICE void store(u32* amax) const {
    const u32 largest = __reduce_max_sync(~0u, bits);
    u32 rounded;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(__uint_as_float(largest)), "f"(0.f));
    if (threadIdx.x % 32 == 0) atomicMax(amax + blockIdx.x % AMAX_PARTIALS, rounded & 0x7fff0000u);
  }
#else
  DEVICE void keep(float) {}
#endif
};
