// hopper_query_gradient: dq of a tile of query rows on Hopper (sm_90a), queries in place, so that every sum has a fixed
// order.
// Used by hopper_dma_attention_backward_query.cu, which documents the interface.
// Three products a stage, S = Q K^T, dP = dO V^T and dQ += dS K, the last beside the next stage's S and
// the other warpgroup's work.
// Defines    as hopper_tiles.cuh
#pragma once
#define ROW_SUMS 1
#include "common/hopper_tiles.cuh"

// The first of this thread's two rows of a tile, the other is 8 further.
DEVICE int row_of_thread(int warpgroup) {
  const int thread = (int)opaque(threadIdx.x) % 128;
  return warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
}

struct QueryGradientConsumer {
  const float2* stats;  // [batch, num_heads, padded_len] {lse * log2(e) or +inf, D}
  int padded_len;
  bf16* dq;             // at its offset; [batch, seq_len, num_heads, HEAD_DIM] with strides
  u64 token_stride, batch_stride;

  // The warpgroup's 64 rows of one tile; false when there was none.
  DEVICE bool consume(const InputTensors& tensors, u32 shared, u32 done, int warpgroup, ConsumerPlaces& places) const {
    const u32 tile = tile_base(shared, done), q = shared + warpgroup * 64 * 128, d_out = q + DO_AT;
    barrier_wait(barrier_at(shared, FULL_Q), done & 1);
    const int num_stages = load_shared_int(tile + 16);
    if (num_stages == 0) return false;
    const ConsumerRows rows = consumer_rows(tile, warpgroup);
    float lse[2], dot[2];
    {
      const int first_row = row_of_thread(warpgroup);
      const int batch = load_shared_int(tile), head = load_shared_int(tile + 4), end_query = load_shared_int(tile + 12);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2 stat = {INFINITY_F32, 0.0f};
        if (rows.query[r] < end_query)
          stat = stats[((u64)batch * tensors.num_heads + head + (first_row + 8 * r) / TILE_QUERIES) * padded_len +
                       rows.query[r]];
        lse[r] = stat.x;
        dot[r] = stat.y;
      }
    }
    const float scale_log2 = tensors.softmax_scale * LOG2_E;
    float sums[HEAD_DIM / 2];
    u32 weights[BLOCK_KV / 16][4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;
    u32 last_slot = 0;

    for (int it = 0; it < num_stages; ++it) {
      float score[64], dp[64];
      const u32 k = shared + K_AT + places.k.slot * STAGE_BYTES;
      barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
      if (GATHER) fence_async_proxy();
      wgmma_fence();
      multiply_stage<HAS_BIAS>(score, q, k, tile + BASES_AT + warpgroup * 64 * SPLIT_BYTES,
                               key_slot(shared, places.stage));
      wgmma_wait<1>();  // the last stage's dQ, whose weights' registers are needed
      if (it > 0) release(barrier_at(shared, EMPTY_K + last_slot));
      // Only now: the producer brings the next stage's keys before these values, and with two slots it may have been
      // waiting for the one just released.
      barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);
      if (GATHER) fence_async_proxy();
      wgmma_fence();
      multiply_stage<0>(dp, d_out, shared + V_AT + places.v.slot * STAGE_BYTES, 0, 0);
      const bool partial = stage_is_partial(rows, key_slot(shared, places.stage), it);
      wgmma_wait<1>();

      // P = 2^(S - lse), zero where masked.
#pragma unroll
      for (int i = 0; i < 64; ++i) score[i] = exp2_fast(score[i] * scale_log2 - lse[i % 4 / 2]);
      if (partial) mask_stage(score, rows, key_slot(shared, places.stage), it, 0.0f);
      keep_here(score);  // before the wait, where dP covers them
      wgmma_wait<0>();
      release(barrier_at(shared, EMPTY_V + places.v.slot));
      if (it == num_stages - 1) release(barrier_at(shared, EMPTY_Q));

      // dS = P (dP - D); dQ += dS K.
#pragma unroll
      for (int step = 0; step < BLOCK_KV / 16; ++step)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int i = 8 * step + 2 * x, r = x % 2;
          weights[step][x] = pack_bf16(score[i] * (dp[i] - dot[r]), score[i + 1] * (dp[i + 1] - dot[r]));
        }
      wgmma_fence();
      const u64 b = wgmma_across(k, BLOCK_KV * 128);
#pragma unroll
      for (int step = 0; step < BLOCK_KV / 16; ++step) wgmma<1>(sums, weights[step], wgmma_step(b, step * 2048), 1);
      wgmma_commit();
      last_slot = places.k.slot;
      places.k.advance();
      places.v.advance();
      places.stage += 1;
    }
    wgmma_wait<0>();
    release(barrier_at(shared, EMPTY_K + last_slot));

    // Store. Places are worked out anew: kept, they would not fit into registers.
    const int batch = load_shared_int(tile), head = load_shared_int(tile + 4), first_query = load_shared_int(tile + 8),
              end_query = load_shared_int(tile + 12);
    const int first_row = row_of_thread(warpgroup);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + (first_row + 8 * r) % TILE_QUERIES;
      bf16* to = dq + batch * batch_stride + query * token_stride +
                 (head + (first_row + 8 * r) / TILE_QUERIES) * HEAD_DIM + opaque(threadIdx.x) % 4 * 8;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 32; ++n) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = pack_bf16(sums[(4 * n + i) * 4 + 2 * r] * tensors.softmax_scale,
                           sums[(4 * n + i) * 4 + 2 * r + 1] * tensors.softmax_scale);
        quad_transpose(x);
        if (query < end_query) *(uint4*)(to + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
    return true;
  }
};
