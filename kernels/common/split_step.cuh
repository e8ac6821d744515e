// split_step: a number for each column of a wgmma product enters as one more step of it: as three bf16 whose sum it is, against ones. It then costs
// nothing behind the product, and is added to complete sums.
#pragma once
#include "common/async_copy.cuh"
#include "common/wgmma.cuh"

constexpr int SPLIT_BYTES = 16;  // of a column: eight bf16, three of them used; columns lie side by side (wgmma_unswizzled)

// Stores `x` for the column at `shared`. Products read it after fence_async_proxy.
DEVICE void store_split(u32 shared, float x) {
  const u32 first = __float_as_uint(x);
  const float rest = x - __uint_as_float(first & 0xffff0000u);
  const u32 second = __float_as_uint(rest), third = __float_as_uint(rest - __uint_as_float(second & 0xffff0000u));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(shared), "r"(first >> 16 | (second & 0xffff0000u)), "r"(third >> 16), "r"(0u) : "memory");
}

// The ones: the step's A operand, columns 0, 1 and 2 of every row. Made before the products, so that none waits for it.
struct SplitWeights {
  u32 ones[4];
  DEVICE SplitWeights() {
    const u32 t = threadIdx.x % 4;
    ones[0] = ones[1] = opaque(t == 0 ? 0x3f803f80u : t == 1 ? 0x3f80u : 0u);
    ones[2] = ones[3] = opaque(0u);
  }
};
