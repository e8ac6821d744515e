// hopper_nsa_selected_attention_backward: nsa_selected_attention_backward for sm_90a; the same mathematics, layout,
// buffers and results to rounding, in either order.
// attention_backward_prepare runs before it, nsa_selected_combine (dq) and dma_attention_backward_convert (dk, dv)
// after it.
// Math       as attention_backward over the pairs of a choice and the block's keys j <= i: each choice's part of dq =
//            sum_j dS_ij k_j (without softmax_scale), dk_sum_j += sum_i dS_ij q_i (without softmax_scale), dv_sum_j +=
//            sum_i P_ij do_i
// Layout     as nsa_selected_attention_backward; a seq_len of q takes less than 32 GiB
// Buffers    q, k, v, do, row_stats, doc_start, doc_end, entries, items, num_items, dq_parts, dk_sum, dv_sum,
//            (ORDERED: key_semaphores i32 [batch, num_kv_heads, seq_len, 4], 0 before each launch); the number behind
//            num_items' last counts items taken
// Defines    HEAD_DIM 64|128; BLOCK_KEYS (64): 128 with HEAD_DIM 128 for blocks of 128 keys; ORDERED 0|1: a fixed
//            order of dk and dv; ROW_STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS
// Tiling     grid (multiprocessors); 384 threads, one block a multiprocessor; dynamic shared bytes = (256 +
//            ROW_STAGES * 256) * HEAD_DIM * 2 + 16384 + ROW_STAGES * 1552 + 80 + 1024; BLOCK_KEYS 128: (512 +
//            ROW_STAGES * 128) * HEAD_DIM * 2 + 32768 + ROW_STAGES * 784 + 80 + 1024
// Numerics   P and dS rounded to bf16, f32 sums; dk_sum, dv_sum: two f32 adds per key and item, one with BLOCK_KEYS
//            128, in any order, or ORDERED piece after piece of a list, each piece's first half of rows first; parts
//            rounded to bf16
// Edges      select_size <= 64 or 128: two pieces of 64 keys, each with parts of dq of its own, with BLOCK_KEYS 128
//            one; any group; keys of a block that no query chose are neither read nor written
// Scores are kept transposed, S^T = K Q^T, as in hopper_backward.cuh; dQ = dS K reads dS^T from shared memory. A step's
// products:
// S, dP | exp S | dV | dS | dK, dQ.
#define GRADIENT 1
#include "common/attention_params.cuh"
#include "common/hopper_chosen_gradients.cuh"

// Work of consumer `warpgroup`, 0 or 1, all 128 threads of which call it, run after run: the gradients of 64 rows of
// each tile, or with SPLIT_KEYS of 64 of the run's keys. Values derived from the thread index are recomputed where they
// are used: held in registers they would spill.
DEVICE void consume(const NsaSelectedAttentionBackwardParams& params, bf16* parts, float* dk_sum, float* dv_sum,
                    [[maybe_unused]] i32* key_semaphores, u32 shared, int warpgroup) {
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  u32 tiles = 0;  // tiles of all runs so far
  for (u32 runs = 0;; ++runs) {
    const RunInWork run(shared, runs);
    const int num_rows = run.num_rows();
    if (num_rows == 0) break;
#if SPLIT_KEYS
    const int half = 0, first_key = warpgroup * 64;
#else
    // The second half of the last tile is often empty: the warpgroups take it alternately.
    const int half = (warpgroup + runs) % 2, first_key = 0;
#endif
    float dk[HEAD_DIM / 2] = {}, dv[HEAD_DIM / 2] = {};
    for (int first = half * 64; first - half * 64 < num_rows; first += ROWS, ++tiles) {
      const u32 slot = tiles % ROW_STAGES;
      barrier_wait(barrier_at(shared, FULL_ROWS + slot), tiles / ROW_STAGES % 2);
      if (first >= num_rows) {
        release_slot(barrier_at(shared, EMPTY_ROWS + slot));
        continue;
      }
      const u32 q = stage_at(shared, slot) + half * 64 * 128, d_out = q + ROW_TILE_BYTES,
                places = places_at(shared, slot) + half * 64 * 4;
      fence_async_proxy();  // keys and rows were copied by cp.async
      // A later row sees as many keys or more.
      const bool partial = place_seen(load_shared_int(places)) < first_key + 64;
      float scores[32], dp[32];
      wgmma_fence();
      multiply_rows<KEYS, ROWS>(scores, run.keys() + first_key * 128, q);
      multiply_rows<KEYS, ROWS>(dp, run.values() + first_key * 128, d_out);
      wgmma_wait<1>();

      // P^T = 2^(S^T - lse).
      const u32 stats = stats_at(shared, slot) + half * 64 * 4 + opaque(threadIdx.x) % 4 * 8;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 lse = load_shared_float2(stats + n * 32);
#pragma unroll
        for (int x = 0; x < 4; ++x)
          scores[4 * n + x] = exp2_fast(scores[4 * n + x] * scale_log2 - (x % 2 ? lse.y : lse.x));
      }
      if (partial) zero_hidden(scores, places, first_key);
      u32 weights[4][4];
      pack_operand(weights, scores);
      wgmma_fence();
      weigh_rows<ROWS>(dv, weights, d_out, true);  // dV += P^T dO
      wgmma_wait<1>();                             // dP
      // dS^T = P^T (dP^T - D), from the rounded P.
      u32 gradient[4][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 dot = load_shared_float2(stats + ROWS * 4 + n * 32);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const u32 pair = weights[n / 2][n % 2 * 2 + r];
          gradient[n / 2][n % 2 * 2 + r] = pack_bf16(bf16_low(pair) * (dp[4 * n + 2 * r] - dot.x),
                                                     bf16_high(pair) * (dp[4 * n + 2 * r + 1] - dot.y));
        }
      }
#if SPLIT_KEYS
      shared_query_gradient(dk, gradient, parts, q, places, run, shared, warpgroup, tiles);
#else
      query_gradient(dk, gradient, parts, q, places, run, shared, warpgroup);
#endif
      release_slot(barrier_at(shared, EMPTY_ROWS + slot));
    }
    const int num_keys = run.num_keys(), key = first_key + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
    const u64 first_row = (u64)run.list() * params.seq_len + run.first_key();
#if ORDERED
    // A semaphore for the thread's two keys and its columns, so that it waits for no other warp's adds.
    i32* semaphore = key_semaphores + (first_row + key) * 4 + threadIdx.x % 4;
    const int adds = SPLIT_KEYS ? 1 : 2, own_turn = adds * run.piece() + half;  // adds of an item to a key
    const bool waits = half * 64 < num_rows && key < num_keys && (half == 1 || !run.is_first());
#endif
    release_slot(run.done());
#if ORDERED
    wait_for_turn(waits, semaphore, own_turn);
#endif
    if (half * 64 < num_rows) {
      add_rows(dk_sum, first_row, key, num_keys, dk);
      add_rows(dv_sum, first_row, key, num_keys, dv);
#if ORDERED
      fence_sums();  // the next item adds to the same rows
      if (key < num_keys) write_semaphore(semaphore, num_rows > 64 ? own_turn + 1 : own_turn + adds);
#endif
    }
  }
}

// A block takes items of the lists until none is left: warpgroup 0 loads, warpgroups 1 and 2 each have 64 of a tile's
// 128 rows or keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_nsa_selected_attention_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out,
                                           const float2* row_stats, const i32* doc_start, const i32* doc_end,
                                           const int2* entries, const int4* items, i32* num_items, bf16* dq_parts,
                                           float* dk_sum, float* dv_sum,
#if ORDERED
                                           i32* key_semaphores,
#endif
                                           const __grid_constant__ NsaSelectedAttentionBackwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  __syncthreads();  // the barriers are set up
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    ChosenInputs inputs = chosen_inputs(q, k, v, doc_start, doc_end, entries, items, num_items, params);
    inputs.d_out = d_out;
    inputs.stats = row_stats;
    inputs.padded_len = params.padded_len;
    produce(inputs, shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
#if !ORDERED
    i32* key_semaphores = nullptr;
#endif
    consume(params, dq_parts, dk_sum, dv_sum, key_semaphores, shared, warpgroup - 1);
  }
}
