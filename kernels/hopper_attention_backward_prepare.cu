// hopper_attention_backward_prepare: attention_backward_prepare from o in f32, in place of it and of the row sums that
// a bias needs.
// Math       row_stats_i = {lse_i * log2(e), sum_c o32_ic do_ic}, o32 the f32 of the bits (o << 16) + o_low, o_low
//            signed (bf16_rest); a row that sees nothing (lse -inf) and the padding get {+inf, 0}, so that 2^(S - lse)
//            is 0
// Layout     o, do bf16, o_low i16 (of hopper_attention_forward with RESIDUAL) [batch, seq_len, num_heads, HEAD_DIM_V];
//            lse f32 [batch, num_heads, seq_len];
//            row_stats f32 pairs [batch, num_heads, padded_len, 2]; all contiguous
// Buffers    o, o_low, do, lse, row_stats
// Defines    HEAD_DIM_V, a multiple of 8, at most 256
// Tiling     grid (ceil(batch * padded_len * num_heads / ROWS)), ROWS = 256 / (HEAD_DIM_V / 8 rounded up to a power of
//            two); 256 threads, a lane takes 8 columns of a row; no shared memory
// Numerics   f32 sums of products; writes every element; memory-bound, o, o_low and do are read once
// Edges      padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/backward_prepare.cuh"

// A block prepares ROWS rows, each by HEAD_DIM_V / 8 lanes, rounded up to a power of two.
extern "C" __global__ void __launch_bounds__(256)
    hopper_attention_backward_prepare(const bf16* o, const short* o_low, const bf16* d_out, const float* lse,
                                      float2* row_stats,
                                      const __grid_constant__ AttentionBackwardPrepareParams params) {
  prepare_rows<true>(o, o_low, d_out, lse, row_stats, params);
}
