// dma_attention_forward: exact dynamic mask attention over gathered key lists.
// Math       logit_ij = softmax_scale * q_i . k_j + (delta_j - base_i); o_i = sum_j softmax_j(logit_ij) v_j over the
//            keys with j <= i < expire_j (arXiv:2508.02124, eq. 3 to 6);
//            lse_i = log sum_j exp(logit_ij), base the largest bias of the row (bias_base.cu); a query that sees
//            nothing gets o = 0, lse = -inf
// Layout     q [batch, seq_len, num_heads, HEAD_DIM], k [.., num_kv_heads, HEAD_DIM], v [.., num_kv_heads, HEAD_DIM_V]
//            bf16: any token and batch stride and an element offset, all multiples of 8; delta f32
//            [batch, num_kv_heads, seq_len], base f32 [batch, num_kv_heads, seq_len rounded up to 64]; list int2 {j,
//            expire_j} [batch, num_kv_heads, num_super_blocks, list_capacity], tile_window i32
//            [batch, num_kv_heads, ceil(seq_len / tile_queries), 2], as dma_lists writes them; o bf16
//            [batch, seq_len, num_heads, HEAD_DIM_V], lse f32 [batch, num_heads, seq_len] contiguous
// Buffers    q, k, v, delta, base, list, tile_window, o, lse
// Defines    as attention_forward, HAS_BIAS is always 1; HEADS_PER_TILE: the query heads that share a gathered tile, a
//            divisor of the group (largest of 8, 4, 2, 1 that divides it and leaves TILE_QUERIES >= 16)
// Tiling     BLOCK_Q = NUM_WARPS * WARP_ROWS rows = HEADS_PER_TILE heads x TILE_QUERIES queries; a tile stays inside
//            one super-block:
//            grid (num_super_blocks * ceil(SUPER_BLOCK / TILE_QUERIES), num_heads / HEADS_PER_TILE, batch);
//            NUM_WARPS * 32 threads;
//            dynamic shared bytes = BLOCK_Q * HEAD_DIM * 2 + NUM_STAGES * BLOCK_KV * ((HEAD_DIM + HEAD_DIM_V) * 2 + 4)
//              + BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_forward; the order of a row's sums follows the list
// Edges      any seq_len >= 1; rows of K, V and delta that no query of the super-block sees are never read;
//            softmax_scale > 0
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/attention_forward.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dma_attention_forward(const bf16* q, const bf16* k, const bf16* v, const float* delta, const float* base,
                          const int2* list, const i32* tile_window, bf16* o, float* lse,
                          const __grid_constant__ DmaAttentionForwardParams params) {
#include "common/begin_tile.cuh"
  attention_forward_tile(shared_copy(tile), {o, lse}, stream, shared_memory);
}
