// attention_forward: dense causal or sliding-window attention inside packed documents, with an optional bias per key.
// Math       logit_ij = softmax_scale * q_i . k_j + (delta_j - base_i); o_i = sum_j softmax_j(logit_ij) v_j over the
//            keys max(doc_start_i, i - window + 1) <= j <= i; HAS_FAR: of the document's keys also over its first
//            sink_tokens ones and those at the distances of the KV head's band (far_keys.cuh);
//            lse_i = log sum_j exp(logit_ij). delta (HAS_BIAS) is DMA's bias with every key kept (w >= the longest
//            document), base the largest bias that a row sees (bias_base.cu)
// Layout     q [batch, seq_len, num_heads, HEAD_DIM], k [.., num_kv_heads, HEAD_DIM], v [.., num_kv_heads, HEAD_DIM_V]
//            bf16: any token and batch stride and an element offset, all multiples of 8 (slices of one packed tensor:
//            pass it three times); doc_start i32 [batch, seq_len];
//            delta f32 [batch, num_kv_heads, seq_len], base f32 [batch, num_kv_heads, seq_len rounded up to 64]; o bf16
//            [batch, seq_len, num_heads, HEAD_DIM_V], lse f32 [batch, num_heads, seq_len] contiguous
// Buffers    q, k, v, doc_start, (HAS_BIAS: delta, base,) o, lse
// Defines    HEAD_DIM (16 .. 256, a multiple of 16), HEAD_DIM_V (default HEAD_DIM, at most it), HAS_BIAS 0|1;
//            HAS_FAR (0; 1 without a bias); the tiling WARP_ROWS 16|32, NUM_WARPS, BLOCK_KV, NUM_STAGES, MIN_BLOCKS,
//            Q_IN_REGISTERS; HEADS_PER_TILE (1;
//            else a divisor of the group)
// Tiling     BLOCK_Q = NUM_WARPS * WARP_ROWS rows = HEADS_PER_TILE heads x TILE_QUERIES queries.
//            grid (ceil(seq_len / TILE_QUERIES), num_heads / HEADS_PER_TILE, batch), the longest tiles first
//            (block_order.cuh); NUM_WARPS * 32 threads;
//            dynamic shared bytes = BLOCK_Q * HEAD_DIM * 2 + NUM_STAGES * BLOCK_KV * (HEAD_DIM + HEAD_DIM_V) * 2 +
//            (HAS_BIAS ? NUM_STAGES * BLOCK_KV * 4 : 0)
// Numerics   delta / softmax_scale and base / softmax_scale are rounded to f32 and subtracted before q . k is added: a
//            bias is as good as one rounding more;
//            products on bf16 tensor cores, f32 accumulators; softmax f32 in powers of two, P rounded to bf16 for P V;
//            one rounding at the store.
//            A row's arithmetic does not depend on later tokens or on other rows of the batch. Writes every element of
//            o and lse.
// Edges      any seq_len >= 1; only tiles with a visible pair are read and only tiles seen in part are masked;
//            softmax_scale > 0, window >= 1.
//            Masked weights are 0, and 0 times NaN is NaN: NaN or infinity in v of one document reaches queries of its
//            neighbours in the same tile of keys
#include "common/attention_params.cuh"
#include "common/attention_forward.cuh"

// A block computes one tile of query rows, by a walk through the tiles of keys that they see; a warp has WARP_ROWS
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(
    const bf16* q, const bf16* k, const bf16* v, const i32* doc_start,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    bf16* o, float* lse, const __grid_constant__ AttentionFarForwardParams params) {
#include "common/begin_tile.cuh"
  attention_forward_tile(shared_copy(tile), {o, lse}, stream, shared_memory);
}
