// attention_backward_prepare: what the backward kernels need of each query row.
// Math       row_stats_i = {lse_i * log2(e), sum_c o_ic do_ic}; a row that sees nothing (lse -inf) and the padding get {+inf, 0}, so that 2^(S - lse) is 0
// Layout     o, do bf16 [batch, seq_len, num_heads, HEAD_DIM_V]; lse f32 [batch, num_heads, seq_len]; row_stats f32 pairs [batch, num_heads, padded_len, 2];
//            all contiguous
// Buffers    o, do, lse, row_stats
// Defines    HEAD_DIM_V, a multiple of 8
// Tiling     grid (ceil(batch * padded_len * num_heads / 8)); 256 threads, a warp a row; no shared memory
// Numerics   f32 sums of bf16 products; writes every element; memory-bound, o and do are read once
// Edges      padded_len = seq_len rounded up to 64
#include "common/types.cuh"

struct AttentionBackwardPrepareParams {
  u64 batch, seq_len, num_heads, padded_len;
};

extern "C" __global__ void __launch_bounds__(256) attention_backward_prepare(const bf16* o, const bf16* d_out, const float* lse, float2* row_stats,
                                                                            const __grid_constant__ AttentionBackwardPrepareParams params) {
  const u32 num_heads = (u32)params.num_heads, padded_len = (u32)params.padded_len, lane = threadIdx.x % 32;
  const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;  // (batch, query, head), the heads of a token side by side
  if (row >= params.batch * padded_len * num_heads) return;
  const u32 head = (u32)(row % num_heads), query = (u32)(row / num_heads % padded_len), batch = (u32)(row / num_heads / padded_len);
  float2 stats = {INFINITY_F32, 0.0f};
  if (query < params.seq_len) {
    const u64 at = (((u64)batch * params.seq_len + query) * num_heads + head) * HEAD_DIM_V;
    float sum = 0.0f;
#pragma unroll
    for (u32 c = lane * 4; c < HEAD_DIM_V; c += 128) {
      const uint2 a = *(const uint2*)(o + at + c), b = *(const uint2*)(d_out + at + c);
      sum += bf16_low(a.x) * bf16_low(b.x) + bf16_high(a.x) * bf16_high(b.x) + bf16_low(a.y) * bf16_low(b.y) + bf16_high(a.y) * bf16_high(b.y);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const float row_lse = lse[((u64)batch * num_heads + head) * params.seq_len + query];
    if (row_lse > -INFINITY_F32) stats = make_float2(row_lse * LOG2_E, sum);
  }
  if (lane == 0) row_stats[((u64)batch * num_heads + head) * padded_len + query] = stats;
}
