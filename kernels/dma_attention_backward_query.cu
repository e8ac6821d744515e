// dma_attention_backward_query: dq of exact dynamic mask attention, queries in place: the deterministic partner of
// dma_attention_backward with COMPUTE_DQ 0.
// Math       as attention_backward_query over the pairs j <= i < expire_j
// Layout     q, k, v, delta, base, list, tile_window as dma_attention_forward; do, row_stats, dq
//            as attention_backward_query
// Buffers    q, k, v, do, row_stats, delta, base, list, tile_window, dq
// Defines    as attention_backward_query, HAS_BIAS is always 1; HEADS_PER_TILE as dma_attention_forward
// Tiling     grid as dma_attention_forward with BLOCK_Q = 16 * NUM_WARPS; NUM_WARPS * 32 threads; dynamic shared
//            bytes = (BLOCK_Q + NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2 + NUM_STAGES * BLOCK_KV * 4 +
//            BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_backward_query; the order of sums follows the list
// Edges      any seq_len >= 1; queries that see nothing get 0
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/attention_backward_query.cuh"

// A block computes dq of one tile of query rows, by a walk through its part of the super-block's list; a warp has 16
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dma_attention_backward_query(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out,
                                 const float2* row_stats, const float* delta, const float* base, const int2* list,
                                 const i32* tile_window, bf16* dq,
                                 const __grid_constant__ DmaAttentionBackwardQueryParams params) {
#include "common/begin_tile.cuh"
  const BackwardQueries back = backward_queries(d_out, row_stats, dq, params, tile);
  attention_backward_query_tile(shared_copy(tile), back, stream, shared_memory);
}
