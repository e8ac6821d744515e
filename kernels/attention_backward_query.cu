// attention_backward_query: dq of dense causal or sliding-window attention, queries in place: the deterministic partner
// of attention_backward with COMPUTE_DQ 0.
// Math       dq_i = softmax_scale * sum_j dS_ij k_j, dS_ij = P_ij (do_i . v_j - D_i), P_ij = exp(softmax_scale * q_i .
//            k_j + delta_j - base_i - lse_i)
// Layout     q, k, v, doc_start, delta as attention_forward; do bf16 [batch, seq_len, num_heads, HEAD_DIM_V]
//            contiguous; row_stats f32 pairs [batch, num_heads, padded_len, 2] from attention_backward_prepare; dq bf16
//            with strides and an offset like q
// Buffers    q, k, v, do, row_stats, doc_start, (HAS_BIAS: delta, base,) dq
// Defines    HEAD_DIM, HEAD_DIM_V, HAS_BIAS, HAS_FAR (as attention_forward), HEADS_PER_TILE (1); tiling
//            NUM_WARPS, BLOCK_KV, NUM_STAGES, MIN_BLOCKS
// Tiling     BLOCK_Q = 16 * NUM_WARPS rows = HEADS_PER_TILE heads x TILE_QUERIES queries: grid
//            (ceil(seq_len / TILE_QUERIES), num_heads / HEADS_PER_TILE, batch); NUM_WARPS * 32 threads; dynamic shared
//            bytes = (BLOCK_Q + NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2
//              + (HAS_BIAS ? NUM_STAGES * BLOCK_KV * 4 : 0)
// Numerics   dS rounded to bf16 for the product, f32 accumulator, fixed order, one rounding; writes every element of dq
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/attention_backward_query.cuh"

// A block computes dq of one tile of query rows, by a walk through the tiles of keys that they see; a warp has 16 rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward_query(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float2* row_stats, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    bf16* dq, const __grid_constant__ AttentionBackwardQueryParams params) {
#include "common/begin_tile.cuh"
  const BackwardQueries back = backward_queries(d_out, row_stats, dq, params, tile);
  attention_backward_query_tile(shared_copy(tile), back, stream, shared_memory);
}
