// nsa_gates: the gated sum of the three branches of native sparse attention (arXiv:2502.11089, eq. 5).
// Math       o = sum_c g_c x_c, g_c = 1 / (1 + exp(-(logit_c + bias_c))), c = compressed, selected, window
// Layout     x_c, o bf16 [tokens, num_heads, width]; logits bf16 [tokens, num_heads, 3]; bias f32 [num_heads, 3];
//            contiguous
// Buffers    compressed, selected, window, logits, bias, o
// Defines    none
// Tiling     grid (ceil(tokens * num_heads * width / 8 / 256)); 256 threads, 8 columns each; no shared memory
// Numerics   f32, one rounding; memory-bound
// Edges      width a multiple of 8
#include "common/bf16x8.cuh"

struct NsaGatesParams {
  u64 rows, num_heads, width;  // rows = tokens * num_heads
};

// A thread computes eight columns of one row: a query head of a token.
extern "C" __global__ void __launch_bounds__(256)
    nsa_gates(const bf16* compressed, const bf16* selected, const bf16* window, const bf16* logits, const float* bias,
              bf16* o, const __grid_constant__ NsaGatesParams params) {
  const u32 chunks = (u32)params.width / 8;
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x, row = at / chunks;
  if (row >= params.rows) return;
  const bf16* branches[3] = {compressed, selected, window};
  float sum[8] = {};
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float gate = 1.0f / (1.0f + expf(-(bf16_to_f32(logits[row * 3 + c]) + bias[row % params.num_heads * 3 + c])));
    float x[8];
    unpack_bf16x8(load_16_bytes(branches[c] + at * 8), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += gate * x[i];
  }
  store_16_bytes(o + at * 8, pack_bf16x8(sum));
}
