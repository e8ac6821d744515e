// lane_product: products of a row of weights with rows in shared memory by one warp, in one order for any number of
// rows and in any kernel: lane l adds words of eight numbers l, l + 32, ... and the lanes are added by lanes_sum.
#pragma once
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"

// The eight numbers of a row of `width` numbers from `first` on; zeros behind its end. WORDS: rows are whole words.
template <bool WORDS>
DEVICE void load_word(const bf16* row, int first, int width, float (&to)[8]) {
  if constexpr (WORDS) {
    unpack_bf16x8(load_16_bytes(row + first), to);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = first + i < width ? bf16_to_f32(row[first + i]) : 0.0f;
  }
}

// sums[r] = sum over j < width of weights[j] x[r][j]; row r of x has words from x + r * row_words on, with zeros behind
// `width`. All 32 lanes call it, and each receives the sums.
template <bool WORDS, int ROWS>
DEVICE void lane_products(float (&sums)[ROWS], const bf16* weights, const uint4* x, int row_words, int width) {
  const int num_words = (width + 7) / 8;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
#pragma unroll 4
  for (int at = (int)threadIdx.x & 31; at < num_words; at += 32) {
    float w[8];
    load_word<WORDS>(weights, at * 8, width, w);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float numbers[8];
      unpack_bf16x8(x[r * row_words + at], numbers);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] = fmaf(w[i], numbers[i], sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = lanes_sum<32>(sums[r]);
}
