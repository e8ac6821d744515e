// hopper_dma_attention_row_sums: dma_attention_row_sums for sm_90a; the same mathematics, layout, buffers, params words
// and results to rounding; runs between attention_backward_prepare and the backward.
// Math       D_i = sum_j P_ij (do_i . v_j), P_ij = exp(softmax_scale * q_i . k_j + delta_j - base_i - lse_i) over the
//            pairs j <= i < expire_j
// Layout     as dma_attention_row_sums: tile_window i32 [batch, num_kv_heads, tiles, 2], the range of the key list that
//            a tile of queries reads; row_stats f32 pairs [batch, num_heads, padded_len, 2]: lse * log2(e) is read, D_i
//            replaces the second number
// Buffers    q_map, do_map by value, q, k, v, do, row_stats, delta, base,
//            list, tile_window
// Defines    as hopper_dma_attention_forward
// Tiling     as hopper_dma_attention_forward, with BLOCK_Q * HEAD_DIM * 2 more dynamic shared bytes for output
//            gradients
// Numerics   f32 probabilities and sums; the order of sums follows the list; writes D of every query, no padding
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/hopper_row_sums.cuh"
#include "common/hopper_gather.cuh"

// A block computes the sums of tiles of query rows until none is left: warpgroup 0 gathers keys, each of the others has
// 64 rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_row_sums(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, float2* row_stats, const float* delta,
    const float* base, const int2* list, const i32* tile_window,
    const __grid_constant__ DmaAttentionRowSumsParams params) {
// Declares shared, tensors, work and maps.
#include "common/begin_hopper_tile.cuh"
  const RowSumsConsumer consumer = {row_stats, (int)params.padded_len};
  run_block(tensors, work, consumer, maps, shared);
}
