// attention_row_sums: exact row sums for attention_backward; runs between attention_backward_prepare and it.
// Math       D_i = sum_j P_ij (do_i . v_j), P_ij = exp(softmax_scale * q_i . k_j + delta_j - base_i - lse_i). do_i .
//            o_i is the same number, but from an o rounded to bf16: where one key holds most of the softmax, as a large
//            delta makes it, do_i . v_j - D_i cancels and that rounding dominates ddelta, dq and dk (measured: up to 17
//            times the error of plain bf16 attention). Worth its time where there is a bias
// Layout     q, k, v, doc_start, delta as attention_forward; do bf16 [batch, seq_len, num_heads, HEAD_DIM_V]
//            contiguous; row_stats f32 pairs [batch, num_heads, padded_len, 2]: lse * log2(e) of each pair is read, D_i
//            replaces the second number
// Buffers    q, k, v, do, row_stats, doc_start, (HAS_BIAS: delta, base)
// Defines    HEAD_DIM, HEAD_DIM_V, HAS_BIAS, HEADS_PER_TILE (1); tiling WARP_ROWS 16|32, NUM_WARPS, BLOCK_KV,
//            NUM_STAGES, MIN_BLOCKS, Q_IN_REGISTERS
// Tiling     BLOCK_Q = NUM_WARPS * WARP_ROWS rows = HEADS_PER_TILE heads x TILE_QUERIES queries: grid
//            (ceil(seq_len / TILE_QUERIES), num_heads / HEADS_PER_TILE, batch); NUM_WARPS * 32 threads; dynamic shared
//            bytes = (BLOCK_Q + NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2
//              + (HAS_BIAS ? NUM_STAGES * BLOCK_KV * 4 : 0)
// Numerics   f32 probabilities and sums, fixed order; writes D of every query, no padding
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/attention_row_sums.cuh"

// A block computes D of one tile of query rows, by a walk through the tiles of keys that they see; a warp has WARP_ROWS
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_row_sums(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, float2* row_stats, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    const __grid_constant__ AttentionRowSumsParams params) {
#include "common/begin_tile.cuh"
  attention_row_sums_tile(shared_copy(tile), {d_out, row_stats, (int)params.padded_len}, stream, shared_memory);
}
