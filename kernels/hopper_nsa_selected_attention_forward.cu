// hopper_nsa_selected_attention_forward: nsa_selected_attention_forward for sm_90a; the same mathematics, layout,
// buffers and results to rounding.
// Math       for each choice: part = sum_j softmax_j(softmax_scale * q . k_j) v_j over the block's keys j <= i,
//            part_lse = log2 sum_j exp(softmax_scale * q . k_j)
// Layout     as nsa_selected_attention_forward; a seq_len of q takes less than 32 GiB
// Buffers    q, k, (KEYS_ONLY 0: v,) doc_start, doc_end, entries, items, num_items, (KEYS_ONLY 0: parts,) part_lse; the
//            number behind num_items' last counts items taken
// Defines    HEAD_DIM 64|128; BLOCK_KEYS (64): 128 for blocks of 128 keys; KEYS_ONLY (0): 1: k has one head for all KV
//            heads, and part_lse alone is computed; ROW_STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS
// Tiling     grid (multiprocessors); 384 threads, one block a multiprocessor; dynamic shared bytes = (4 * BLOCK_KEYS +
//            ROW_STAGES * 128) * HEAD_DIM * 2 + ROW_STAGES * 528 + 80 + 1024
// Numerics   P rounded to bf16, f32 sums, parts rounded to bf16; parts of unused choices (-1) stay unwritten
// Edges      select_size <= BLOCK_KEYS; any group; a block that no query chose is never read
#define GRADIENT 0
#include "common/attention_params.cuh"
#include "common/hopper_chosen.cuh"

// Work of consumer `warpgroup`, 0 or 1, all 128 threads of which call it: scores, softmax and parts of o of 64 rows of
// each tile, run after run.
DEVICE void consume(const NsaSelectedAttentionForwardParams& params, [[maybe_unused]] bf16* parts, float* part_lse,
                    u32 shared, int warpgroup) {
  const int warp_row = (int)threadIdx.x % 128 / 32 * 16, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  RingPlace<ROW_STAGES> place;
  for (u32 runs = 0;; ++runs) {
    const RunInWork run(shared, runs);
    const int num_rows = run.num_rows();
    if (num_rows == 0) break;
    // The second half of the last tile is often empty: the warpgroups take it alternately.
    const int half = (warpgroup + runs) % 2;
    const int num_tiles = ceil_div(num_rows, ROWS),
              work = num_rows > half * 64 ? ceil_div(num_rows - half * 64, ROWS) : 0;
    float score[KEYS / 2];
    const auto multiply = [&](const RingPlace<ROW_STAGES>& rows) {
      barrier_wait(barrier_at(shared, FULL_ROWS + rows.slot), rows.phase);
      fence_async_proxy();  // keys and queries were copied by cp.async
      wgmma_fence();
      multiply_rows<ROWS, KEYS>(score, stage_at(shared, rows.slot) + half * 64 * 128, run.keys());
    };
    if (work > 0) multiply(place);
    for (int tile = 0; tile < work; ++tile) {
      RingPlace<ROW_STAGES> next = place;
      if (tile + 1 < work) next.advance();
      [[maybe_unused]] const u32 q = stage_at(shared, place.slot) + half * 64 * 128;
      const u32 places = places_at(shared, place.slot) + half * 64 * 4;
      int row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) row[r] = load_shared_int(places + (warp_row + g + 8 * r) * 4);
      // Partial: the block is short, or is the own block of one of the warp's queries, which ascend.
      const bool partial = place_seen(load_shared_int(places + warp_row * 4)) < KEYS;
      wgmma_wait<0>();

      if (partial) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int seen = place_seen(row[r]) - 2 * t;
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x)
              if (8 * n + x >= seen) score[4 * n + 2 * r + x] = -INFINITY_F32;
        }
      }
      // Softmax over this block only. The two rows are computed together, so that their shuffles overlap.
      float largest[2], sum[2][2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(score[2 * r], score[2 * r + 1]);
#pragma unroll
      for (int n = 1; n < KEYS / 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          largest[r] = fmaxf(largest[r], fmaxf(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], step));
#pragma unroll
      // scores of -inf alone
      for (int r = 0; r < 2; ++r) largest[r] = largest[r] > -INFINITY_F32 ? largest[r] * scale_log2 : 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          score[4 * n + x] = exp2_fast(score[4 * n + x] * scale_log2 - largest[x / 2]);
          sum[x / 2][x % 2] += score[4 * n + x];
        }
#if !KEYS_ONLY
      u32 weights[KEYS / 16][4];
      pack_operand(weights, score);
      float output[HEAD_DIM / 2];
      wgmma_fence();
      weigh_rows<KEYS>(output, weights, run.values(), false);
#endif
      // The next tile's scores are computed while this one's output is stored. After the last tile its own again: a
      // branch around the GEMMs would keep them from overlapping.
      multiply(next);
      float total[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) total[r] = sum[r][0] + sum[r][1];
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int r = 0; r < 2; ++r) total[r] += __shfl_xor_sync(~0u, total[r], step);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (t == 0 && row[r] != NO_PLACE) part_lse[place_part(row[r])] = largest[r] + log2f(total[r]);
#if !KEYS_ONLY
      const float inverse[2] = {1.0f / total[0], 1.0f / total[1]};
      wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) output[i] *= inverse[i % 4 / 2];
      // The output is stored through the tile of q.
      barrier_sync(ROWS_READ + warpgroup, 128);  // no warp of the warpgroup reads these rows of q any more
      u32 packed[4][4];
      pack_operand(packed, output);
      store_parts(parts, q, places, packed);
#if HEAD_DIM == 128
      pack_operand<32>(packed, output);
      store_parts(parts + 64, q + ROWS * 128, places, packed);
#endif
#endif
      release_slot(barrier_at(shared, EMPTY_ROWS + place.slot));
      place = next;
    }
    wgmma_wait<0>();
    if (work > 0) place.advance();
    if (work < num_tiles) {
      barrier_wait(barrier_at(shared, FULL_ROWS + place.slot), place.phase);
      release_slot(barrier_at(shared, EMPTY_ROWS + place.slot));
      place.advance();
    }
    release_slot(run.done());
  }
}

// A block takes items of the lists until none is left: warpgroup 0 loads, warpgroups 1 and 2 each have 64 of a tile's
// 128 rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_nsa_selected_attention_forward(const bf16* q, const bf16* k,
#if !KEYS_ONLY
                                          const bf16* v,
#endif
                                          const i32* doc_start, const i32* doc_end, const int2* entries,
                                          const int4* items, i32* num_items,
#if !KEYS_ONLY
                                          bf16* parts,
#endif
                                          float* part_lse,
                                          const __grid_constant__ NsaSelectedAttentionForwardParams params) {
#if KEYS_ONLY
  const bf16* v = nullptr;
  bf16* parts = nullptr;
#endif
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  __syncthreads();  // the barriers are set up
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    produce(chosen_inputs(q, k, v, doc_start, doc_end, entries, items, num_items, params), shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    consume(params, parts, part_lse, shared, warpgroup - 1);
  }
}
