// hopper_dma_attention_backward_query: dma_attention_backward_query for sm_90a; the same mathematics, layout, buffers,
// params words and results to rounding: dq with queries in place, the deterministic partner of
// hopper_dma_attention_backward with COMPUTE_DQ 0.
// Math       dq_i = softmax_scale * sum_j dS_ij k_j, dS_ij = P_ij (do_i . v_j - D_i), P_ij = exp(softmax_scale * q_i .
//            k_j + delta_j - base_i - lse_i) over the pairs j <= i < expire_j
// Layout     as dma_attention_backward_query
// Buffers    q_map, do_map by value, q, k, v, do, row_stats, delta, base,
//            list, tile_window, dq
// Defines    as hopper_dma_attention_forward, without RESIDUAL; TAKE_TURNS 0
// Tiling     as hopper_dma_attention_row_sums
// Numerics   dS rounded to bf16 for the product, f32 accumulator, fixed order, one rounding; writes every element of dq
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/hopper_query_gradient.cuh"
#include "common/hopper_gather.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_backward_query(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float2* row_stats, const float* delta,
    const float* base, const int2* list, const i32* tile_window, bf16* dq,
    const __grid_constant__ DmaAttentionBackwardQueryParams params) {
#include "common/begin_hopper_tile.cuh"
  const QueryGradientConsumer consumer = {row_stats, (int)params.padded_len, dq + params.dq_offset,
                                          params.dq_token_stride, params.dq_batch_stride};
  run_block(tensors, work, consumer, maps, shared);
}
