// hopper_dma_attention_token: one new token per row over DMA's slots with the bits that hopper_dma_attention_forward
// gives it in a whole row: its code, for a row of one query, over the stages of keys that dma_token lists
// (kernels/notes/one-order-of-sums.md).
// Math       as hopper_dma_attention_forward, over the listed slots with expire > 0
// Layout     q bf16 [batch, 1, num_heads, HEAD_DIM] as there; k, v bf16 [batch, num_kv_heads, num_slots, HEAD_DIM],
//            delta f32 [batch, num_kv_heads, num_slots]; base, list, tile_window as dma_token writes them; o bf16
//            [batch, 1, num_heads, HEAD_DIM], lse f32 [batch, num_heads, 1]. All but q contiguous
// Buffers    q_map by value, q, k, v, delta, base, list, tile_window, o, lse
// Defines    as hopper_dma_attention_forward without RESIDUAL and HAS_BIAS
// Tiling     as hopper_dma_attention_forward: a block has HEADS_PER_TILE heads of one row, and most rows of its tile
//            are empty
// Numerics   as hopper_dma_attention_forward
// Edges      seq_len is 1; slots that are not listed are never read
#define GATHER 1
#define HAS_BIAS 1
#define CACHED 1
#include "common/attention_params.cuh"
#include "common/hopper_forward.cuh"
#include "common/hopper_gather.cuh"

struct DmaAttentionTokenParams : DmaAttentionForwardParams {
  u64 num_slots;
};

// As hopper_dma_attention_forward.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_token(
    const __grid_constant__ TensorMap q_map, const bf16* q, const bf16* k, const bf16* v, const float* delta,
    const float* base, const int2* list, const i32* tile_window, bf16* o, float* lse,
    const __grid_constant__ DmaAttentionTokenParams params) {
#include "common/begin_hopper_tile.cuh"
  tensors.num_slots = (int)params.num_slots;
  const ForwardConsumer consumer = {{o, lse, nullptr}};
  run_block(tensors, work, consumer, maps, shared);
}
