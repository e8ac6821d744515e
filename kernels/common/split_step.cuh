// split_step: adds a number per row and a number per column to a wgmma GEMM by one extra K step: each f32 is split into
// three bf16 that are multiplied by ones, so that nothing is left to add after the GEMM. Operands lie in shared memory,
// 16 bytes a row or column, side by side (wgmma_unswizzled): eight columns, where a step sums K = 16. The step reads
// these eight twice, so the numbers, not the ones, are stored halved. As the first K step it adds its numbers to zero
// accumulators, so that where two large ones cancel, the difference is exact.
#pragma once
#include "common/async_copy.cuh"
#include "common/wgmma.cuh"

constexpr int SPLIT_BYTES = 16;  // bytes of the operand of a row or column
constexpr u32 BF16_ONE = 0x3f80u;

// The three bf16 parts of an f32, each in the lower half of a word. The first two are truncated, not rounded, so that
// the third holds the remaining bits exactly.
struct SplitParts {
  u32 first, second, third;
  DEVICE SplitParts(float x) {
    const u32 upper = __float_as_uint(x);
    const float rest = x - __uint_as_float(upper & 0xffff0000u);
    const u32 middle = __float_as_uint(rest);
    first = upper >> 16, second = middle >> 16;
    third = __float_as_uint(rest - __uint_as_float(middle & 0xffff0000u)) >> 16;
  }
};

// Stores an operand of eight bf16, two a word: a, b, c and two zeros, at shared address `shared`.
DEVICE void store_split(u32 shared, u32 a, u32 b, u32 c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(0u) : "memory");
}

// Stores the split number of one column as an operand. `one`: BF16_ONE, or 0 if no number per row is added. Call
// fence_async_proxy before wgmma reads it.
DEVICE void store_split_column(u32 shared, float x, u32 one) {
  const SplitParts parts(0.5f * x);
  store_split(shared, parts.first | parts.second << 16, parts.third | one << 16, one | one << 16);
}
// Stores the split number of one row as an operand.
DEVICE void store_split_row(u32 shared, float x) {
  const SplitParts parts(0.5f * x);
  store_split(shared, BF16_ONE | BF16_ONE << 16, BF16_ONE | parts.first << 16, parts.second | parts.third << 16);
}

// The operand of a row without a number: three ones, then zeros. Computed before the GEMMs, so that none waits for it.
struct SplitWeights {
  u32 words[4];
  DEVICE SplitWeights() {
    const u32 t = threadIdx.x % 4;
    words[0] = words[1] = words[2] = words[3] = opaque(t == 0 ? BF16_ONE | BF16_ONE << 16 : t == 1 ? BF16_ONE : 0u);
  }
};
