// nsa_gates_backward: gradients of nsa_gates. column_sums adds up the bias's from the logits'.
// Math       dx_c = g_c do; dlogit_c = g_c (1 - g_c) do . x_c
// Layout     as nsa_gates; do, dx_c bf16 as o; dlogits bf16 and dlogits_exact f32 [tokens, num_heads, 3]; contiguous
// Buffers    compressed, selected, window, logits, bias, do, dcompressed, dselected, dwindow, dlogits, dlogits_exact
// Defines    none
// Tiling     grid (ceil(rows / (256 / lanes))), lanes = width / 8 rounded up to a power of two, at most 32: the lanes
//            of a row, 8 columns each; 256 threads; no shared memory
// Numerics   f32 sums in a fixed order, one rounding; every element written; memory-bound
// Edges      width a multiple of 8, at most 256
#include "common/bf16x8.cuh"

struct NsaGatesBackwardParams {
  u64 rows, num_heads, width, lanes;
};

// A group of `lanes` lanes has one row, a query head of a token; a lane has eight of its columns, where the width has
// as many.
extern "C" __global__ void __launch_bounds__(256)
    nsa_gates_backward(const bf16* compressed, const bf16* selected, const bf16* window, const bf16* logits,
                       const float* bias, const bf16* d_out, bf16* d_compressed, bf16* d_selected, bf16* d_window,
                       bf16* d_logits, float* d_logits_exact, const __grid_constant__ NsaGatesBackwardParams params) {
  const u32 lanes = (u32)params.lanes, lane = threadIdx.x % lanes;
  const u64 row = (u64)blockIdx.x * (256 / lanes) + threadIdx.x / lanes, at = row * params.width + lane * 8;
  const bool inside = row < params.rows, has_columns = inside && lane * 8 < params.width;
  const bf16* branches[3] = {compressed, selected, window};
  bf16* gradients[3] = {d_compressed, d_selected, d_window};
  float d_o[8] = {};
  if (has_columns) unpack_bf16x8(load_16_bytes(d_out + at), d_o);
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    float x[8] = {}, dot = 0.0f, gate = 0.0f;
    if (inside) gate = 1.0f / (1.0f + expf(-(bf16_to_f32(logits[row * 3 + c]) + bias[row % params.num_heads * 3 + c])));
    if (has_columns) unpack_bf16x8(load_16_bytes(branches[c] + at), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dot += d_o[i] * x[i];
      x[i] = gate * d_o[i];
    }
    if (has_columns) store_16_bytes(gradients[c] + at, pack_bf16x8(x));
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0u, dot, (int)distance);
    if (inside && lane == 0) {
      const float d_logit = dot * gate * (1.0f - gate);
      d_logits_exact[row * 3 + c] = d_logit;
      d_logits[row * 3 + c].bits = (unsigned short)pack_bf16(d_logit, 0.0f);
    }
  }
}
