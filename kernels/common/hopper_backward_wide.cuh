// hopper_backward_wide: the consumer of hopper_backward.cuh for keys of 192 and values of 128. dK and dV take 160
// registers of a thread, so at most two of the GEMMs S, dP and dQ are in flight. Order of a step's GEMMs: S | exp S |
// dP, dV | dS, dK | barrier | dQ (32 columns, 64 columns) and S of the next step beside the second | add dQ.
// kernels/notes/sums-of-160-registers.md has what else was tried.
#pragma once
#include "common/hopper_backward.cuh"

#if IS_WIDE
static_assert(Q_STAGES == 2 && DO_STAGES == 2, "a step's number is its place in both rings");

// Work of consumer `warpgroup`, 0 or 1, all 128 threads of which call it: it walks through the block's steps with 64 of
// its keys. Leaves the complete sums of dk and dv in `sums`.
template <class Keys>
DEVICE void consume(BackwardBlock& block, const Keys& keys, u32 shared, int warpgroup, KeyGradients& sums) {
  const KeyRange range = key_range(keys, warpgroup * 64, 64);
  keys.find_tiles(block);
  const int num_steps = block.group_size * block.num_tiles;
#pragma unroll
  for (int i = 0; i < SUM_REGISTERS; ++i) sums.dk[i] = sums.dv[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) sums.dk_rest[i] = 0.0f;
  if (num_steps <= 0) return;

  const u32 k = shared + warpgroup * 64 * 128, v = k + V_AT;
  const KeySplit key_split(shared, warpgroup);
  // The warpgroup's columns of dQ: a whole block of K's three, the first or the last, and half of the second.
  const u32 k_block = shared + warpgroup * 2 * BLOCK_KV * 128,
            k_half = shared + BLOCK_KV * 128 + warpgroup * 64;
  float scores[32];
  StepPlace place(block);
#if ORDERED
  float* const dq_to = nullptr;
#else
  // dq_sum holds fragments of 16 queries x 8 columns, 128 numbers each.
  const int warp = __shfl_sync(~0u, (int)threadIdx.x % 128 / 32, 0);
  float* dq_to = block.dq_sum + (u64)(place.tile * BLOCK_Q - block.dq_first + warp * 16) * HEAD_DIM;
#endif

  barrier_wait(barrier_at(shared, FULL_KV), 0);
  barrier_wait(barrier_at(shared, FULL_Q), 0);
  fence_async_proxy();  // keys and values came by cp.async
  wgmma_fence();
  multiply_queries<SPLIT_NONE>(scores, k, shared + Q_AT, key_split, 0);

  u32 slot = 0;  // step % 2
  for (int step = 0; step < num_steps; ++step) {
    const u32 phase = step / 2 % 2, q = shared + Q_AT + slot * QUERY_TILE_BYTES,
              d_out = shared + DO_AT + slot * DO_TILE_BYTES;
    const u32 stats = shared + DO_STATS_AT + slot * DO_STATS_BYTES;
    const int first_query = place.tile * BLOCK_Q;
    barrier_wait(barrier_at(shared, FULL_DO + slot), phase);
    wgmma_wait<0>();  // S

    // P^T = 2^(S^T - lse).
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float lse[2];
      load_stats<0>(lse, stats, n);
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[4 * n + x] = exp2_fast(scores[4 * n + x] * block.scale_log2 - lse[x % 2]);
    }
    if (first_query < range.highest || first_query + BLOCK_Q > range.first_expire) {
      // Bounds are reloaded: kept, they would cost registers in every step.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int2 entry =
            keys.entry(((int)opaque(threadIdx.x) - 128) / 32 * 16 + (int)opaque(threadIdx.x) % 32 / 4 + 8 * r);
        const int first = entry.x - first_query - (int)opaque(threadIdx.x) % 4 * 2, end = first + entry.y - entry.x;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x)
            if (!(first <= 8 * n + x && 8 * n + x < end)) scores[4 * n + 2 * r + x] = 0.0f;
      }
    }
    u32 weights[4][4];
    pack_operand(weights, scores);
    wgmma_fence();
    multiply_queries<SPLIT_NONE, HEAD_DIM_V>(scores, v, d_out, key_split, 0);  // dP^T = V dO^T
    accumulate_queries(sums.dv, weights, d_out);                               // dV += P^T dO
    wgmma_wait<0>();
    // dS^T = P^T (dP^T - D), from the rounded P and in its place.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float dot[2];
      load_stats<1>(dot, stats, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32& pair = weights[n / 2][n % 2 * 2 + r];
        pair = pack_bf16(bf16_low(pair) * (scores[4 * n + 2 * r] - dot[0]),
                         bf16_high(pair) * (scores[4 * n + 2 * r + 1] - dot[1]));
      }
    }
    release(barrier_at(shared, EMPTY_DO + slot));
    {
      // Address of this lane's row of each 8x8 matrix of dS^T. 16 queries further are two swizzled chunks further.
      const int thread = (int)opaque(threadIdx.x) - 128, in_warp = thread % 32;
      const u32 ds_row = shared + DS_AT + slot * DS_BYTES +
                         (thread / 32 * 16 + in_warp / 8 % 2 * 8 + in_warp % 8) * 128 +
                         (((in_warp / 16) ^ (in_warp % 8)) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) store_matrix_x4(ds_row ^ (i << 5), weights[i]);
    }
    wgmma_fence();
    // dK += dS^T Q, which needs nothing of the other warpgroup and covers the barrier.
    accumulate_queries(sums.dk, weights, q);
    accumulate_queries(sums.dk_rest, weights, q + HEAD_DIM_V / 64 * BLOCK_Q * 128);
    // The next step's queries; on the last step this step's again, because a branch around the GEMMs would keep them
    // from overlapping.
    const u32 next = step + 1 < num_steps ? step + 1 : step;
    // The slot comes from lane 0, so that the compiler sees one slot for the whole warp. Else it computes the address
    // of each GEMM's operand in every thread. kernels/notes/operand-addresses-in-uniform-registers.md
    const u32 next_slot = __shfl_sync(~0u, next % 2, 0), next_queries = shared + Q_AT + next_slot * QUERY_TILE_BYTES;
    barrier_wait(barrier_at(shared, FULL_Q + next_slot), next / 2 % 2);
    float dq_block[32], dq_half[16];
    const u32 ds = shared + DS_AT + slot * DS_BYTES;
    fence_async_proxy();                   // for dS^T
    barrier_sync(1, NUM_CONSUMERS * 128);  // all of dS^T is there; and the other half of the memory is free again
    wgmma_wait<0>();  // dK
    release(barrier_at(shared, EMPTY_Q + slot));
    wgmma_fence();
    multiply_keys(dq_block, ds, k_block);
    multiply_keys(dq_half, ds, k_half);
    wgmma_wait<1>();
    stage_dq(dq_block, shared, 2 * step);
    send_dq<32>(dq_to + warpgroup * 16 * 128, shared, 2 * step);
    wgmma_fence();
    // `opaque` has the addresses of the keys' columns computed here. The compiler would else keep them in registers
    // from before the loop on, and spill them.
    multiply_queries<SPLIT_NONE>(scores, opaque(k), next_queries, key_split, 0);
    wgmma_wait<1>();
    stage_dq(dq_half, shared, 2 * step + 1);
    send_dq<16>(dq_to + (8 + warpgroup * 4) * 128, shared, 2 * step + 1);
    place.advance(block);
    slot = next_slot;
#if !ORDERED
    // Moves `dq_to` to the same rows of the next tile, or of the next head's first tile.
    const i64 rows = place.tile == block.first_tile ? block.dq_len - (block.num_tiles - 1) * BLOCK_Q : BLOCK_Q;
    dq_to += rows * HEAD_DIM;
#endif
  }
  wgmma_wait<0>();
#if !ORDERED
  if (threadIdx.x % 32 == 0) bulk_wait_read();  // shared memory must last until the adds have read it
#endif
}
#endif
