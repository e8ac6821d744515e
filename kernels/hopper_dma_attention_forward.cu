// hopper_dma_attention_forward: dma_attention_forward for sm_90a; the same mathematics, layout, buffers, params words
// and results to rounding.
// Math       logit_ij = softmax_scale * q_i . k_j + (delta_j - base_i); o_i = sum_j softmax_j(logit_ij) v_j over the
//            keys with j <= i < expire_j (arXiv:2508.02124, eq. 3 to 6);
//            lse_i = log sum_j exp(logit_ij); a query that sees nothing gets o = 0, lse = -inf
// Layout     as dma_attention_forward
// Buffers    q_map by value, q, k, v, (HAS_BIAS: delta, base,) list,
//            tile_window, o, lse, (RESIDUAL: o_low)
// Defines    as hopper_attention_forward, HAS_BIAS (1); HEADS_PER_TILE: the query heads that share a gathered tile, a
//            divisor of the group
// Tiling     BLOCK_Q = NUM_CONSUMERS * 64 rows = HEADS_PER_TILE heads x TILE_QUERIES queries; a tile stays inside one
//            super-block. Persistent: grid (multiprocessors, 1, 1); 128 + NUM_CONSUMERS * 128 threads; dynamic shared
//            bytes = BLOCK_Q * HEAD_DIM * 2 + (K_STAGES + V_STAGES) * 256 * HEAD_DIM
//              + 4096 + HAS_BIAS * 12288 + 64 + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as dma_attention_forward; RESIDUAL as hopper_attention_forward; the order of a row's sums follows the list
// Edges      any seq_len >= 1; rows of K, V and delta that no query of the super-block sees are never read;
//            softmax_scale > 0
#define GATHER 1
#ifndef HAS_BIAS
#define HAS_BIAS 1
#endif
#include "common/attention_params.cuh"
#include "common/hopper_forward.cuh"
#include "common/hopper_gather.cuh"

// A block computes tiles of query rows until none is left: warpgroup 0 gathers keys, each of the others has 64 rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_forward(
    const __grid_constant__ TensorMap q_map,
    const bf16* q, const bf16* k, const bf16* v,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    const int2* list, const i32* tile_window, bf16* o, float* lse,
#if RESIDUAL
    short* o_low,
#endif
    const __grid_constant__ DmaAttentionForwardParams params) {
#include "common/begin_hopper_tile.cuh"
#if RESIDUAL
  const ForwardConsumer consumer = {{o, lse, o_low}};
#else
  const ForwardConsumer consumer = {{o, lse, nullptr}};
#endif
  run_block(tensors, work, consumer, maps, shared);
}
