// quad: the four lanes that share the rows of an accumulator fragment.
#pragma once
#include "common/types.cuh"

// Turns x[i] of lane t into x[t] of lane i, in each group of four lanes: 2 columns of four 8-column tiles become 8
// columns of one.
DEVICE void quad_transpose(u32 (&x)[4]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    if (odd) x[i] = other; else x[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    if (upper) x[i] = other; else x[i + 2] = other;
  }
}

// Of the 32 columns at `c` of an accumulator's row (r = 0: g, 1: g + 8) the eight that lane t of the quad stores, times
// `scale` and rounded to bf16.
DEVICE void quad_pack(u32 (&x)[4], const float* c, int r, float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = pack_bf16(c[4 * i + 2 * r] * scale, c[4 * i + 2 * r + 1] * scale);
  quad_transpose(x);
}

// The largest x of the quad's four lanes, in each of them.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
// The sum of x over the quad's four lanes, in each of them.
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
