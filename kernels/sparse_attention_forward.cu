// sparse_attention_forward: attention over the keys that a selector's mask names, for prefill.
// Math       o_i = sum_j softmax_j(softmax_scale * q_i . k_j) v_j over the keys of i's query tile with
//            j <= i < expire_j; lse_i = log sum_j exp(softmax_scale * q_i . k_j);
//            a query that sees nothing gets o = 0, lse = -inf;
//            BLOCK_LSE: block_lse[h, j, p] = log2 sum_b 2^(softmax_scale * log2(e) * q_i . k_b) over the keys b <= i of
//            block j, for the query i = p * gamma; blocks that no query of p's tile sees are left as they are
// Layout     q, k, v as attention_forward, batch 1, keys of tokens 0 .. seq_len - 1; queries are the last num_queries
//            tokens of q's tensor;
//            o bf16 [num_queries, num_heads, HEAD_DIM], lse f32 [num_heads, num_queries] contiguous. mask i32: the
//            arrays of sieve-select's SparseMask in one buffer, each at a word of params (0: absent): row_ptr
//            [lists * num_query_tiles + 1] and tile_idx (absent: every key up to a tile's last query), col_ptr and
//            col_idx, key_order [num_heads / heads_per_order, seq_len], query_order [num_heads, num_queries] (or
//            [num_slots], for some rows of all heads), windows {init, local} [lists], tile_order
//            [lists, num_query_tiles]: query tiles by falling number of keys. lists = num_heads / heads_per_list.
//            block_lse f32 [heads of the launch, num_blocks, num_probes]
// Buffers    q, k, v, mask, o, lse(, BLOCK_LSE: block_lse)
// Defines    as attention_forward; HEADS_PER_TILE is always 1, HAS_BIAS is 0; BLOCK_LSE: 0, or keys of a block (1, 2,
//            4 .. 128), for masks that list the key tiles 0, 1, 2 .. alone
// Tiling     BLOCK_Q = NUM_WARPS * WARP_ROWS rows of one query tile; grid
//            (num_query_tiles * ceil(query_tile / BLOCK_Q), heads of the launch, 1), tiles with most keys first;
//            NUM_WARPS * 32 threads; dynamic shared bytes = BLOCK_Q * HEAD_DIM * 2
//              + NUM_STAGES * BLOCK_KV * HEAD_DIM * 4 + BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_forward; the order of a row's sums follows the list
// Edges      any sizes of tiles; rows of K and V that no query of the block sees are never read (with permuted queries:
//            rows of tiles that are not listed).
//            A launch may compute some rows alone: the range first_row, num_slots, or the num_slots rows of query_order
#define GATHER 1
#define SPARSE 1
#include "common/attention_params.cuh"
#include "common/sparse_keys.cuh"
#include "common/attention_forward.cuh"

// A block computes BLOCK_Q rows of one query tile of one head, a warp WARP_ROWS of them.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sparse_attention_forward(const bf16* q, const bf16* k, const bf16* v, const i32* mask, bf16* o, float* lse,
#if BLOCK_LSE
                             float* block_lse,
#endif
                             const __grid_constant__ SparseAttentionForwardParams params) {
#include "common/begin_sparse_tile.cuh"
  // Outputs are the call's rows; positions count from the first key.
  ForwardOutput out = {o - (u64)queries.context * sparse.num_heads * HEAD_DIM, lse - queries.context};
#if BLOCK_LSE
  out.block_lse = block_lse_of(block_lse, params);
#endif
  attention_forward_tile(shared_tile, out, stream, shared_memory);
}
