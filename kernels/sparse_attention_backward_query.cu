// sparse_attention_backward_query: dq of attention over the keys that a mask names, queries in place: the deterministic
// partner of attention_backward with TILE_LISTS and COMPUTE_DQ 0.
// Math       as attention_backward_query over the pairs that sparse_attention_forward sees
// Layout     q, k, v, mask as sparse_attention_forward; do, row_stats, dq as attention_backward_query, batch 1
// Buffers    q, k, v, do, row_stats, mask, dq
// Defines    as attention_backward_query; HEADS_PER_TILE is always 1, HAS_BIAS is 0
// Tiling     BLOCK_Q = 16 * NUM_WARPS rows of one query tile; grid
//            (num_query_tiles * ceil(query_tile / BLOCK_Q), num_heads, 1), tiles with most keys first; NUM_WARPS * 32
//            threads; dynamic shared bytes = (BLOCK_Q + NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2
//              + BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_backward_query; the order of sums follows the list
// Edges      any sizes of tiles; rows of K and V that no query of the block sees are never read; queries that see
//            nothing get 0
#define GATHER 1
#define SPARSE 1
#include "common/attention_params.cuh"
#include "common/sparse_keys.cuh"
#include "common/attention_backward_query.cuh"

// A block computes dq of BLOCK_Q rows of a query tile, by a walk through the keys that the mask lists for the tile; a
// warp has 16 rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sparse_attention_backward_query(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out,
                                    const float2* row_stats, const i32* mask, bf16* dq,
                                    const __grid_constant__ SparseAttentionBackwardQueryParams params) {
#include "common/begin_sparse_tile.cuh"
  const BackwardQueries back = backward_queries(d_out, row_stats, dq, params, tile);
  attention_backward_query_tile(shared_tile, back, stream, shared_memory);
}
