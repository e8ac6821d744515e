// hopper_row_sums: for each query of a tile, sum_j P_ij (do_i . v_j) over the keys it sees, on Hopper (sm_90a). Used by
// hopper_attention_row_sums.cu and hopper_dma_attention_row_sums.cu, which document the interface. Two GEMMs a stage, S
// = Q K^T and dP = dO V^T; exponentials and sums overlap the other warpgroup's GEMMs.
// Defines    as hopper_tiles.cuh
#pragma once
#define ROW_SUMS 1
#include "common/hopper_tiles.cuh"

// Loads the warp's 16 rows of a tile of BLOCK_Q, whose consumer's first row is at shared address `rows`, as A operands
// in registers, which leaves shared memory's bandwidth to keys and values. Registers hold one of q and do, not both.
DEVICE void keep_rows(u32 (&kept)[HEAD_DIM / 16][4], u32 rows) {
  const int thread = (int)threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    load_matrix_x4(kept[step],
                   rows + step / 4 * BLOCK_Q * 128 + row * 128 + (((step % 4 * 2 + lane / 16) ^ (row % 8)) << 4));
}

// d = rows stage^T, the consumer's 64 rows from registers against the 128 keys or values of the stage at shared address
// `stage`. Starts the GEMM and closes its group; all 128 threads of a consumer call it.
DEVICE void multiply_kept(float (&d)[64], const u32 (&rows)[HEAD_DIM / 16][4], u32 stage) {
  const u64 b = wgmma_along(stage);
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    wgmma<0>(d, rows[step], wgmma_step(b, step / 4 * BLOCK_KV * 128 + step % 4 * 32), step > 0);
  wgmma_commit();
}

struct RowSumsConsumer {
  // [batch, num_heads, padded_len] {lse * log2(e) or +inf, the row sum}: the first is read, the second written
  float2* stats;
  int padded_len;

  // Computes the sums of the 64 rows of consumer `warpgroup` of the block's tile number `done`; false when there was
  // none. All 128 threads of the consumer call it.
  DEVICE bool consume(const InputTensors& tensors, u32 shared, u32 done, int warpgroup, StagePlaces& places) const {
    const u32 tile = tile_base(shared, done), q = shared + warpgroup * 64 * 128, d_out = q + DO_AT;
    barrier_wait(barrier_at(shared, FULL_Q), done & 1);
    const int num_stages = load_shared_int(tile + 16);
    if (num_stages == 0) return false;
    const ConsumerRows rows = consumer_rows(tile, warpgroup);
    float2* row_stats[2];
    float lse[2], sums[2] = {0.0f, 0.0f};
    const int batch = load_shared_int(tile), head = load_shared_int(tile + 4), end_query = load_shared_int(tile + 12);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * r;
      row_stats[r] = stats + ((u64)batch * tensors.num_heads + head + row / TILE_QUERIES) * padded_len + rows.query[r];
      lse[r] = rows.query[r] < end_query ? row_stats[r]->x : INFINITY_F32;
    }

    const float scale_log2 = tensors.softmax_scale * LOG2_E;
    u32 do_kept[HEAD_DIM / 16][4];
    keep_rows(do_kept, d_out);

    for (int it = 0; it < num_stages; ++it) {
      float score[64], dp[64];
      barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
      barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);
      if (GATHER) fence_async_proxy();
      take_turn(warpgroup);
      wgmma_fence();
      multiply_stage<HAS_BIAS>(score, q, shared + K_AT + places.k.slot * STAGE_BYTES,
                               tile + BASES_AT + warpgroup * 64 * SPLIT_BYTES, key_slot(shared, places.stage));
      multiply_kept(dp, do_kept, shared + V_AT + places.v.slot * STAGE_BYTES);
      if (TAKE_TURNS == 1) pass_turn(warpgroup);
      const bool partial = stage_is_partial(rows, key_slot(shared, places.stage), it);
      wgmma_wait<1>();
      if (TAKE_TURNS == 2) pass_turn(warpgroup);
      release(barrier_at(shared, EMPTY_K + places.k.slot));
      if (it == num_stages - 1) release(barrier_at(shared, EMPTY_Q));

      // P = 2^(S - lse), zero where masked.
#pragma unroll
      for (int i = 0; i < 64; ++i) score[i] = exp2_fast(score[i] * scale_log2 - lse[i % 4 / 2]);
      if (partial) mask_stage(score, rows, key_slot(shared, places.stage), it, 0.0f);
      keep_here(score);  // before the wait, where dP covers them
      wgmma_wait<0>();
      release(barrier_at(shared, EMPTY_V + places.v.slot));
      places.next_keys();
      places.v.advance();

#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x) sum[x] += score[4 * n + 2 * r + x] * dp[4 * n + 2 * r + x];
        sums[r] += sum[0] + sum[1];
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sums[r]);
      if (threadIdx.x % 4 == 0 && rows.query[r] < end_query) row_stats[r]->y = sum;
    }
    return true;
  }
};
