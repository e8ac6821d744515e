// rms_norm_forward: RMSNorm of rows.
// Math       r = 1 / sqrt(mean(x^2) + epsilon); y = x r weight (arXiv:1910.07467, eq. 4)
// Layout     x bf16 [rows, width], rows x_stride apart; y bf16 [rows, width] contiguous; weight bf16 [width]; width and
//            stride multiples of 8
// Buffers    x, weight, y
// Defines    WARPS_PER_ROW (1: width up to 2048, 4: up to 8192)
// Tiling     grid (ceil(rows / (8 / WARPS_PER_ROW))); 256 threads; a row stays in registers between its two uses
// Numerics   f32 sums in a fixed order; writes every element of y; memory-bound, each input is read once
// Edges      the last block may have fewer rows; lanes past the width hold nothing
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/norm_row.cuh"

constexpr int NUM_WARPS = 8, ROWS = NUM_WARPS / WARPS_PER_ROW;
static_assert(NUM_WARPS % WARPS_PER_ROW == 0, "a row's warps are in one block");

struct RmsNormForwardParams { u64 rows, width, x_stride, epsilon; };

// WARPS_PER_ROW warps have one row; a thread has every CHUNK_STEP-th chunk of eight of its columns.
extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
    rms_norm_forward(const bf16* x, const bf16* weight, bf16* y, const __grid_constant__ RmsNormForwardParams params) {
  __shared__ float shared[NUM_WARPS];
  const u64 row = (u64)blockIdx.x * ROWS + threadIdx.x / CHUNK_STEP;
  const bool exists = row < params.rows;
  const int num_chunks = exists ? (int)(params.width / 8) : 0;
  const int first = first_chunk();

  // Load, all of the row at once.
  uint4 words[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    words[c] = make_uint4(0, 0, 0, 0);
    const int chunk = first + c * CHUNK_STEP;
    if (chunk < num_chunks) words[c] = load_16_bytes(x + row * params.x_stride + chunk * 8);
  }

  float squares = 0.f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float values[8];
    unpack_bf16x8(words[c], values);
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(values[i], values[i], squares);
  }
  squares = warps_sum<WARPS_PER_ROW>(squares, shared);
  const float inverse = 1.f / sqrtf(squares / (float)params.width + f32_word(params.epsilon));

  // Store the normed row, times the weight.
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int chunk = first + c * CHUNK_STEP;
    if (chunk < num_chunks) {
      float values[8], factors[8];
      unpack_bf16x8(words[c], values);
      unpack_bf16x8(load_16_bytes(weight + chunk * 8), factors);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] = values[i] * inverse * factors[i];
      store_16_bytes(y + row * params.width + chunk * 8, pack_bf16x8(values));
    }
  }
}
