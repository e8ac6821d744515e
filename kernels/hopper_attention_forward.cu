// hopper_attention_forward: attention_forward for sm_90a; the same mathematics, layout, buffers, params words and
// results to rounding.
// Math       logit_ij = softmax_scale * q_i . k_j + (delta_j - base_i); o_i = sum_j softmax_j(logit_ij) v_j over the
//            keys max(doc_start_i, i - window + 1) <= j <= i, with HAS_FAR also those of attention_forward;
//            lse_i = log sum_j exp(logit_ij)
// Layout     as attention_forward; strides and offsets are multiples of 8
// Buffers    q_map, k_map, v_map by value, q, k, v, doc_start, (HAS_BIAS:
//            delta, base,) o, lse, (RESIDUAL: o_low)
// Defines    HEAD_DIM (64, 128; 192 with HEAD_DIM_V 128 and no bias), HEAD_DIM_V (HEAD_DIM), HAS_BIAS, HAS_FAR (0; 1
//            without a bias, up to 128 wide),
//            HEADS_PER_TILE (a divisor of the group), NUM_CONSUMERS, BLOCK_KV 128, K_STAGES, V_STAGES, TAKE_TURNS (0,
//            1, 2); maps of bf16 [batch, seq_len, heads * HEAD_DIM] (the tensor's strides, base at its
//            offset), box 1 x TILE_QUERIES (q, do) or 128 (k, v) x 64, 128-byte swizzle; RESIDUAL;
//            CONSUMER_REGISTERS, PRODUCER_REGISTERS (multiples of 8; NUM_CONSUMERS * consumer + producer <= 504, with
//            three consumers 512)
// Tiling     BLOCK_Q = NUM_CONSUMERS * 64 rows = HEADS_PER_TILE heads x TILE_QUERIES queries. Persistent: grid
//            (multiprocessors, 1, 1), any number works;
//            128 + NUM_CONSUMERS * 128 threads, one block a multiprocessor; dynamic shared bytes =
//            BLOCK_Q * HEAD_DIM * 2 + 256 * (K_STAGES * HEAD_DIM + V_STAGES * HEAD_DIM_V)
//              + (HAS_BIAS ? 12288 : 0) + 2 * ((HAS_FAR ? 64 : 32) + TILE_QUERIES * 4)
//              + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as attention_forward. RESIDUAL 1 (0): o_low i16, laid out as o, receives the lower 16 bits of o in f32
//            (bf16_rest.cuh); with it hopper_attention_backward_prepare's D is as good as attention_row_sums' (one more
//            tensor to keep, no pass over keys)
// Edges      any seq_len >= 1; only stages of 128 keys with a visible pair are read, only those seen in part are
//            masked; softmax_scale > 0, window >= 1.
//            Masked weights are 0, and 0 times NaN is NaN: NaN or infinity in v of one document reaches queries of its
//            neighbours in the same tile of keys
#include "common/attention_params.cuh"
#include "common/hopper_forward.cuh"
#include "common/hopper_dense.cuh"

// A block computes tiles of query rows until none is left: warpgroup 0 loads, each of the others has 64 rows of a tile.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const bf16* q, const bf16* k, const bf16* v, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    bf16* o, float* lse,
#if RESIDUAL
    short* o_low,
#endif
    const __grid_constant__ AttentionFarForwardParams params) {
#include "common/begin_hopper_tile.cuh"
#if RESIDUAL
  const ForwardConsumer consumer = {{o, lse, o_low}};
#else
  const ForwardConsumer consumer = {{o, lse, nullptr}};
#endif
  run_block(tensors, work, consumer, maps, shared);
}
