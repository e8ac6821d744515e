// hopper_index_gradient: the gradient of an indexer's loss (MSA, arXiv:2606.13392) over the blocks that queries chose,
// on sm_90a: keys outermost, from the lists of nsa_lists.
// nsa_selected_combine (dq) and dma_attention_backward_convert (dk) run after it.
// Math       P[h, i, j] = exp(softmax_scale q_ih . k_j - lse_ih) of the attention's heads, I[r, i, j] =
//            exp(softmax_scale q^I_ir . k^I_j - index_lse_ir) of the indexer's head of KV head r, keys j <= i of the
//            blocks that i chose; dS = I - mean_h P over r's heads; each choice's part of dq^I_ir = sum_j dS_ij k^I_j,
//            dk_sum_j += sum_ir dS_ij q^I_ir
// Layout     q, k as nsa_selected_attention_forward; index_q, index_k (one head) bf16 with any token and batch stride
//            and an element offset, all multiples of 8; lse f32 [batch, num_heads, seq_len], index_lse f32 [batch,
//            num_kv_heads, seq_len], natural logarithms; entries, items, num_items as nsa_lists; dq_parts bf16 [batch,
//            num_kv_heads, choices, HEAD_DIM]; dk_sum f32 [batch, seq_len, HEAD_DIM] with columns in
//            dma_attention_backward's order, zero before the first launch; ORDERED [batch, num_kv_heads, seq_len,
//            HEAD_DIM]
// Buffers    q, k, index, lse, index_lse, doc_start, doc_end, entries, items, num_items, dq_parts, dk_sum, (ORDERED:
//            key_semaphores i32 [batch, num_kv_heads, seq_len, 4], zero before each launch); the element after
//            num_items' last one counts the items taken
// Defines    HEAD_DIM 64|128; ORDERED 0|1: a fixed order of dk; ROW_STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS
// Tiling     grid (multiprocessors); 384 threads, one block a multiprocessor; 128 queries of one head a tile, 64 a
//            consumer warpgroup; dynamic shared bytes = (256 + ROW_STAGES * 128) * HEAD_DIM * 2 + 16384 + ROW_STAGES *
//            1552 + 80 + 1024
// Numerics   bf16 products, f32 sums; dS rounded to bf16 once; dk_sum: two f32 adds per key and item, in any order, or
//            ORDERED piece after piece of a list, each piece's first half of rows first; parts rounded to bf16
// Edges      select_size <= 64 or 128: two pieces of 64 keys, each with parts of dq of its own; any group; keys of a
//            block that no query chose are neither read nor written
// The mean over the heads is formed in registers before any further product, so that a group of G heads costs G + 1
// products with keys and two with dS, and one part a piece of a choice.
#define GRADIENT 1
#define INDEXED 1
#include "common/attention_params.cuh"
#include "common/hopper_chosen_gradients.cuh"

// Work of consumer `warpgroup`, 0 or 1, all 128 threads of which call it: the gradients of 64 queries of each tile, run
// after run. Scores are kept transposed, S^T = K Q^T: a thread has keys g and g + 8 of its warp's 16.
DEVICE void consume(const IndexGradientParams& params, bf16* parts, float* dk_sum, [[maybe_unused]] i32* key_semaphores,
                    u32 shared, int warpgroup) {
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  const int group = (int)(params.num_heads / params.num_kv_heads);
  const float share = 1.0f / (float)group;
  u32 tiles = 0;  // tiles of all runs so far
  for (u32 runs = 0;; ++runs) {
    const RunInWork run(shared, runs);
    const int num_rows = run.num_rows();
    if (num_rows == 0) break;
    // The second half of the last tile is often empty: the warpgroups take it alternately.
    const int half = (warpgroup + runs) % 2;
    float dk[HEAD_DIM / 2] = {};
    for (int first = half * 64; first - half * 64 < num_rows; first += ROWS) {
      // Score: dS^T = I^T - mean_h P^T, the heads one after the other, the indexer's last.
      float ds[32] = {};
      for (int head = 0; head <= group; ++head, ++tiles) {
        const u32 slot = tiles % ROW_STAGES;
        barrier_wait(barrier_at(shared, FULL_ROWS + slot), tiles / ROW_STAGES % 2);
        if (first < num_rows) {
          fence_async_proxy();  // keys and rows were copied by cp.async
          float scores[32];
          wgmma_fence();
          multiply_rows<KEYS, ROWS>(scores, head < group ? run.keys() : run.values(),
                                    stage_at(shared, slot) + half * 64 * 128);
          const u32 stats = stats_at(shared, slot) + half * 64 * 4 + opaque(threadIdx.x) % 4 * 8;
          const float weight = head < group ? -share : 1.0f;
          wgmma_wait<0>();
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float2 lse = load_shared_float2(stats + n * 32);
#pragma unroll
            for (int x = 0; x < 4; ++x)
              ds[4 * n + x] += weight * exp2_fast(scores[4 * n + x] * scale_log2 - (x % 2 ? lse.y : lse.x) * LOG2_E);
          }
        }
        // The indexer's rows are kept: the code below reads them.
        if (first >= num_rows || head < group) release_slot(barrier_at(shared, EMPTY_ROWS + slot));
      }
      if (first >= num_rows) continue;
      const u32 slot = (tiles - 1) % ROW_STAGES, q = stage_at(shared, slot) + half * 64 * 128,
                places = places_at(shared, slot) + half * 64 * 4;
      // A later row sees as many keys or more.
      if (place_seen(load_shared_int(places)) < KEYS) zero_hidden(ds, places);
      // Accumulate: dK += dS^T Q, dQ = dS K.
      u32 gradient[4][4];
      pack_operand(gradient, ds);
      query_gradient(dk, gradient, parts, q, places, run, shared, warpgroup);
      release_slot(barrier_at(shared, EMPTY_ROWS + slot));
    }
    const int num_keys = run.num_keys(), key = (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
#if ORDERED
    // Each KV head has its own sums; a later kernel adds them in the order of the heads.
    const u64 first_row = (u64)run.list() * params.seq_len + run.first_key();
    // A semaphore for the thread's two keys and its columns, so that it waits for no other warp's adds.
    i32* turn = key_semaphores + (first_row + key) * 4 + threadIdx.x % 4;
    const int own_turn = 2 * run.piece() + half;
    const bool waits = half * 64 < num_rows && key < num_keys && (half == 1 || !run.is_first());
#else
    // All KV heads add to the indexer's one key head.
    const u64 first_row = (u64)run.list() / params.num_kv_heads * params.seq_len + run.first_key();
#endif
    release_slot(run.done());
#if ORDERED
    wait_for_turn(waits, turn, own_turn);
#endif
    if (half * 64 < num_rows) {
      add_rows(dk_sum, first_row, key, num_keys, dk);
#if ORDERED
      fence_sums();  // the next item adds to the same rows
      if (key < num_keys) write_semaphore(turn, num_rows > 64 ? own_turn + 1 : own_turn + 2);
#endif
    }
  }
}

// A block takes items of the lists until none is left: warpgroup 0 loads, warpgroups 1 and 2 each have 64 of a tile's
// 128 queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_index_gradient(const bf16* q, const bf16* k, const bf16* index, const float* lse, const float* index_lse,
                          const i32* doc_start, const i32* doc_end, const int2* entries, const int4* items,
                          i32* num_items, bf16* dq_parts, float* dk_sum,
#if ORDERED
                          i32* key_semaphores,
#endif
                          const __grid_constant__ IndexGradientParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  __syncthreads();  // the barriers are set up
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    ChosenInputs inputs = chosen_inputs(q, k, index, doc_start, doc_end, entries, items, num_items, params);
    inputs.index_q = index + params.index_q_offset;
    inputs.index_token_stride = params.v_token_stride;
    inputs.index_batch_stride = params.v_batch_stride;
    inputs.lse = lse;
    inputs.index_lse = index_lse;
    produce(inputs, shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
#if !ORDERED
    i32* key_semaphores = nullptr;
#endif
    consume(params, dq_parts, dk_sum, key_semaphores, shared, warpgroup - 1);
  }
}
