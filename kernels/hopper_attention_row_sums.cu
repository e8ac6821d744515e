// hopper_attention_row_sums: attention_row_sums for sm_90a; the same mathematics, layout, buffers, params words and
// results to rounding; runs between attention_backward_prepare and the backward.
// Math       D_i = sum_j P_ij (do_i . v_j), P_ij = exp(softmax_scale * q_i . k_j + delta_j - base_i - lse_i)
// Layout     as attention_row_sums: row_stats f32 pairs [batch, num_heads, padded_len, 2]: lse * log2(e), or +inf where
//            a query sees no key, is read, and D replaces the second number
// Buffers    q_map, k_map, v_map, do_map by value, q, k, v, do, row_stats,
//            doc_start, (HAS_BIAS: delta, base)
// Defines    as hopper_attention_forward
// Tiling     as hopper_attention_forward, with BLOCK_Q * HEAD_DIM * 2 more dynamic shared bytes for output gradients
// Numerics   f32 probabilities and sums, fixed order; writes D of every query, no padding
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/hopper_row_sums.cuh"
#include "common/hopper_dense.cuh"

// A block computes the sums of tiles of query rows until none is left: warpgroup 0 loads, each of the others has 64
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_attention_row_sums(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, float2* row_stats, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    const __grid_constant__ AttentionRowSumsParams params) {
#include "common/begin_hopper_tile.cuh"  // declares shared, tensors, work and maps
  const RowSumsConsumer consumer = {row_stats, (int)params.padded_len};
  run_block(tensors, work, consumer, maps, shared);
}
