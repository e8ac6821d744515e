// hopper_attention_backward_query: attention_backward_query for sm_90a; the same mathematics, layout, buffers, params
// words and results to rounding: dq with queries in place, the deterministic partner of hopper_attention_backward with
// COMPUTE_DQ 0.
// Math       dq_i = softmax_scale * sum_j dS_ij k_j, dS_ij = P_ij (do_i . v_j - D_i), P_ij = exp(softmax_scale * q_i .
//            k_j + delta_j - base_i - lse_i)
// Layout     as attention_backward_query
// Buffers    q_map, k_map, v_map, do_map by value, q, k, v, do, row_stats,
//            doc_start, (HAS_BIAS: delta, base,) dq
// Defines    as hopper_attention_forward, without RESIDUAL; TAKE_TURNS 0
// Tiling     as hopper_attention_row_sums
// Numerics   dS rounded to bf16 for the product, f32 accumulator, fixed order, one rounding; writes every element of dq
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/hopper_query_gradient.cuh"
#include "common/hopper_dense.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_attention_backward_query(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float2* row_stats, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    bf16* dq, const __grid_constant__ AttentionBackwardQueryParams params) {
#include "common/begin_hopper_tile.cuh"
  const QueryGradientConsumer consumer = {row_stats, (int)params.padded_len, dq + params.dq_offset,
                                          params.dq_token_stride, params.dq_batch_stride};
  run_block(tensors, work, consumer, maps, shared);
}
