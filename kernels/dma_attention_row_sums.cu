// dma_attention_row_sums: exact row sums for dma_attention_backward; runs between attention_backward_prepare and it.
// Math       as attention_row_sums over the pairs j <= i < expire_j
// Layout     q, k, v, delta, base, list, tile_window as dma_attention_forward; do, row_stats as attention_row_sums
// Buffers    q, k, v, do, row_stats, delta, base, list, tile_window
// Defines    as attention_row_sums, HAS_BIAS is always 1; HEADS_PER_TILE as dma_attention_forward
// Tiling     grid as dma_attention_forward; NUM_WARPS * 32 threads; dynamic shared bytes = (BLOCK_Q +
//            NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2
//              + NUM_STAGES * BLOCK_KV * 4 + BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_row_sums; the order of sums follows the list
// Edges      any seq_len >= 1; queries that see nothing get 0
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/attention_row_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dma_attention_row_sums(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, float2* row_stats,
                           const float* delta, const float* base, const int2* list, const i32* tile_window,
                           const __grid_constant__ DmaAttentionRowSumsParams params) {
#include "common/begin_tile.cuh"
  attention_row_sums_tile(shared_copy(tile), {d_out, row_stats, (int)params.padded_len}, stream, shared_memory);
}
