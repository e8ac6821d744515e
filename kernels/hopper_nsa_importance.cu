// hopper_nsa_importance: nsa_importance for sm_90a, for blocks of four strides and compressed blocks of two, and by
// each token's score; the same mathematics, layout, buffers, params words and results to rounding.
// Math       p[i, c] = sum over heads h of exp(softmax_scale q_ih . k_c - lse_ih), over the blocks c that i sees;
//            RULE 0: importance[i, b] = sum over slots c of the document of w(c, b) p[i, c],
//            w = 1, 2, 2, 2, 1 for the slots 4 b - 1 .. 4 b + 3; RULE 1: the largest p[i, c] of these slots;
//            RULE 3: the largest q_i . k_c of the slots c of block b that i sees;
//            RULE 4: lse_ih = log sum over the slots c that i sees of exp(softmax_scale q_ih . k_c), no importance
// Layout     as nsa_importance
// Buffers    q, keys, lse, doc_start, doc_end, importance
// Defines    HEAD_DIM 64|128; RULE 0|1|3|4; ONE_QUERY as nsa_importance: but of RULE 4, thread blocks then share a
//            row's slots
// Tiling     grid (ceil(num_queries / (128 / group)), choosers, batch); 256 threads: 128 rows (queries x heads, a
//            query's heads side by side) against 128 slots a step, counted from a document's first; two blocks a
//            multiprocessor; dynamic shared bytes = 3 * 128 * HEAD_DIM * 2 + 1024; ONE_QUERY: grid (ceil(num_slots /
//            max(select_size, 128)), choosers, batch) by RULE 3, (ceil(num_blocks / 32), choosers, batch) by RULE 0 and
//            1, (1, choosers, batch) by RULE 4
// Numerics   bf16 products, f32 sums in a fixed order; writes the blocks up to each query's own; a log-sum-exp goes
//            through the slots from the document's first on (log_sum.cuh), -inf of a query that sees none
// Edges      group 1, 2, 4, 8 or 16; slots that no query sees may hold NaN; RULE 3: group 1, slots of a token, blocks
//            of 16, 32, 64 or a multiple of 128 tokens; RULE 4: blocks and compressed blocks of any size
// A thread's columns of eight are two neighbours. A block is the columns of two lanes and one of the lane before, so
// that sums over a query's heads and a block's slots are shuffles, and nothing goes through shared memory.
#include "common/attention_params.cuh"
#include "common/hopper_copy.cuh"
#include "common/log_sum.cuh"
#include "common/mma.cuh"
#include "common/nsa_blocks.cuh"
#include "common/quad.cuh"
#include "common/row_sums.cuh"
#include "common/wgmma.cuh"

#ifndef ONE_QUERY
#define ONE_QUERY 0
#endif
constexpr int THREADS = 256, ROWS = 128, SLOTS = 128, TILES = SLOTS / 8;
constexpr int TILE_BYTES = ROWS * HEAD_DIM * 2;

// Where a thread's importances go: of rows g (0) and g + 8 (1) of its warp.
struct ImportanceRows {
  float* all;
  u32 to[2];   // a launch writes fewer than 2^31 importances
  int own[2];  // the last block that is written; -1: none
};

// Halvings of the column tiles by which RowSums adds up MERGED heads; with 16, a thread's two rows are added first.
template <int MERGED>
constexpr int SUM_STEPS = MERGED >= 8 ? 3 : MERGED == 4 ? 2 : MERGED == 2 ? 1 : 0;
template <int MERGED>
constexpr int SUM_ROWS = MERGED == 16 ? 1 : 2;

// With 16 heads a query has both rows of a thread: adds the probabilities of row g + 8 to those of row g.
template <int MERGED>
DEVICE void merge_rows(float (&p)[4 * TILES]) {
  if (MERGED == 16) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int x = 0; x < 2; ++x) p[4 * n + x] += p[4 * n + 2 + x];
  }
}

// Adds up a step's probabilities, `p[4 n + 2 h + x]` of row g + 8 h and column 8 n + 2 t + x, over blocks and the
// MERGED consecutive heads, and writes them; all 32 lanes call it. `carry`: the last slot's of the step before, in
// lanes t = 3.
template <int MERGED>
DEVICE void write_step(float (&p)[4 * TILES], float (&carry)[2], const ImportanceRows& rows, int first_block) {
  using Sums = RowSums<SUM_STEPS<MERGED>, 1>;
  const int lane = (int)threadIdx.x % 32, t = lane % 4;
  const bool odd = t % 2;
  // half the weight of the thread's second column: the last slot of a block is shared with the next block
  const float share = odd ? 0.5f : 1.0f;
  merge_rows<MERGED>(p);
#pragma unroll
  for (int h = 0; h < SUM_ROWS<MERGED>; ++h) {
    float sums[TILES / 2], before = carry[h];
#pragma unroll
    for (int m = 0; m < TILES / 2; ++m) {
      // Of two tiles even lanes keep the first and odd lanes the second.
      const int first = 8 * m + 2 * h, second = first + 4;
      const float low = p[first] + share * p[first + 1], high = p[second] + share * p[second + 1];
      float sum = (odd ? high : low) + __shfl_xor_sync(~0u, odd ? low : high, 1);
      // Shuffle in the slot before the block: lane 1 reads lane 3 and lane 2 reads lane 1 (first tile), lane 3 reads
      // lane 1 (second tile), lane 0 reads lane 3 (the tile before).
      const int asked = (lane & ~3) | (t < 2 ? 3 : 1);
      const float inner = __shfl_sync(~0u, p[first + 1], asked),
                  outer = __shfl_sync(~0u, t == 1 ? p[second + 1] : before, asked);
      sums[m] = sum + 0.5f * (t == 1 || t == 2 ? inner : outer);
      before = p[second + 1];
    }
    carry[h] = before;
    Sums::add(sums);
    const int block = first_block + Sums::first_tile() * 4 + t % 2 * 2 + t / 2;
#pragma unroll
    for (int i = 0; i < Sums::TILES; ++i)
      if (block + 4 * i <= rows.own[h]) rows.all[rows.to[h] + block + 4 * i] = 2.0f * sums[i];
  }
}

// The lane that has the column tiles before those of the calling lane, which RowSums::first_tile gives, for the same
// query and the same t. Before a step's first tiles come its last ones.
template <int STEPS>
DEVICE int lane_before() {
  constexpr int TILES = 8 >> STEPS, BITS = (1 << STEPS) - 1;
  const int lane = (int)threadIdx.x % 32, tile = (RowSums<STEPS, 4>::first_tile() + 8 - TILES) % 8,
            row = (tile / 4 | tile / 2 % 2 * 2 | tile % 2 * 4) & BITS;
  return (lane & ~(BITS * 4)) | row * 4;
}

// As write_step for RULE 1: probabilities are added up over heads first, then the largest of a block's slots is taken.
// `carry`: each lane's last slot of the step before.
template <int MERGED>
DEVICE void write_largest(float (&p)[4 * TILES], float (&carry)[2], const ImportanceRows& rows, int first_block) {
  constexpr int STEPS = SUM_STEPS<MERGED>;
  using Sums = RowSums<STEPS, 4>;  // two tiles of two columns
  const int lane = (int)threadIdx.x % 32, t = lane % 4;
  const bool odd = t % 2, is_last = Sums::first_tile() + Sums::TILES == 8;
  merge_rows<MERGED>(p);
#pragma unroll
  for (int h = 0; h < SUM_ROWS<MERGED>; ++h) {
    float values[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) values[i] = p[i / 2 * 4 + 2 * h + i % 2];
    Sums::add(values);
    // The slot before the first of the lane's tiles; before a step's first tile it is the last step's.
    const float end = values[4 * Sums::TILES - 1];
    float before = STEPS == 0 ? carry[h] : __shfl_sync(~0u, is_last ? carry[h] : end, lane_before<STEPS>());
    carry[h] = end;
    const int block = first_block + Sums::first_tile() * 4 + t % 2 * 2 + t / 2;
#pragma unroll
    for (int i = 0; i < Sums::TILES; ++i) {
      const float* v = values + 4 * i;
      // Of two tiles even lanes keep the first and odd lanes the second; the shuffle for the slot before the block is
      // as in write_step.
      const float low = fmaxf(v[0], v[1]), high = fmaxf(v[2], v[3]);
      const float largest = fmaxf(odd ? high : low, __shfl_xor_sync(~0u, odd ? low : high, 1));
      const int asked = (lane & ~3) | (t < 2 ? 3 : 1);
      const float inner = __shfl_sync(~0u, v[1], asked), outer = __shfl_sync(~0u, t == 1 ? v[3] : before, asked);
      before = v[3];
      const float importance = fmaxf(largest, t == 1 || t == 2 ? inner : outer);
      if (block + 4 * i <= rows.own[h]) rows.all[rows.to[h] + block + 4 * i] = importance;
    }
  }
}

// RULE 3: the largest of a step's scores in each of its BLOCKS blocks. With BLOCKS 1 a block is as long as the step or
// longer: `carry` is the largest so far, `inside` whether the block began in an earlier step.
template <int BLOCKS>
DEVICE void write_scores(const float (&s)[4 * TILES], float (&carry)[2], const ImportanceRows& rows, int first_block,
                         bool inside) {
  constexpr int BLOCK_TILES = TILES / BLOCKS;
  const int t = (int)threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      float largest = BLOCKS == 1 && inside ? carry[h] : -INFINITY_F32;
#pragma unroll
      for (int n = i * BLOCK_TILES; n < (i + 1) * BLOCK_TILES; ++n)
        largest = fmaxf(largest, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      if (BLOCKS == 1) carry[h] = largest;
      largest = quad_max(largest);
      // consecutive lanes write consecutive blocks
      if (t == i % 4 && first_block + i <= rows.own[h]) rows.all[rows.to[h] + first_block + i] = largest;
    }
  }
}

// Writes a step's importances by the rule RULE, 0 or 1; `first_block` is the first of the step's 32 blocks, counted
// from the document's start. All 32 lanes of a warp call it.
template <int MERGED>
DEVICE void write_importances(float (&p)[4 * TILES], float (&carry)[2], const ImportanceRows& rows, int first_block) {
  if constexpr (RULE == 1) write_largest<MERGED>(p, carry, rows, first_block);
  else write_step<MERGED>(p, carry, rows, first_block);
}

// A block computes the importances of 128 rows, queries x heads, for all blocks that they see; a warp has 16 of the
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    hopper_nsa_importance(const bf16* q, const bf16* keys, const float* lse, const i32* doc_start, const i32* doc_end,
                          float* importance, const __grid_constant__ NsaImportanceParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = (shared_address(shared_memory) + 1023) & ~1023u, k_shared = shared + TILE_BYTES;
  const int seq_len = (int)params.seq_len, heads = (int)params.choosers, group = (int)params.num_heads / heads,
            tile_queries = ROWS / group, key_heads = heads / (int)params.key_group;
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, num_slots = (int)params.num_slots,
            warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
  const int range_end = min((int)(params.first_query + params.num_queries), seq_len);
  // late queries see the most slots, so they start first
  const int first_query =
      (int)params.first_query + (ONE_QUERY ? 0 : (int)(gridDim.x - 1 - blockIdx.x) * tile_queries);
  const int end_query = min(first_query + tile_queries, range_end);
  if (first_query >= end_query) return;
  const CompressedBlocks blocks = {doc_start + (u64)batch * seq_len, doc_end + (u64)batch * seq_len,
                                   (int)params.compress_size, (int)params.stride};
  // With one query: the steps of a block of keys, or a step with several blocks.
  const int span = RULE == 3 ? ceil_div((int)params.select_size, SLOTS) : 1,
            step_tokens = RULE == 3 ? SLOTS : SLOTS * blocks.stride,
            first_step = ONE_QUERY ? (int)blockIdx.x * span : 0;
  if (ONE_QUERY && first_step * step_tokens > -blocks.doc_start[0]) return;  // keys behind the query's own
#if ONE_QUERY
  constexpr u32 key_stride = HEAD_DIM * 2;
  const bf16* k = keys + ((u64)batch * key_heads + kv_head / (int)params.key_group) * num_slots * HEAD_DIM;
#else
  const u32 key_stride = (u32)key_heads * HEAD_DIM * 2;
  const bf16* k = keys + ((u64)batch * num_slots * key_heads + kv_head / (int)params.key_group) * HEAD_DIM;
#endif
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;

  // Queries: eight warps copy 32 rows of 64 columns each.
  {
    const int row = warp % 4 * 32 + lane, query = first_query + row / group;
    const bf16* from =
        q + params.q_offset + batch * params.q_batch_stride + (u64)kv_head * group * HEAD_DIM + warp / 4 * 64;
    const int place =
        query < end_query ? (int)(((u32)query * (u32)(params.q_token_stride / 8)) + row % group * (HEAD_DIM / 8)) : -1;
    if (HEAD_DIM == 128 || warp < 4) copy_key_rows<1, true>(shared + warp / 4 * ROWS * 128, from, 16, place, warp % 4);
  }
  int query[2];
  float row_lse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + h * 8 + lane / 4;
    query[h] = first_query + row / group;
    row_lse[h] =
        RULE < 2 && query[h] < end_query
            ? lse[((u64)batch * params.num_heads + kv_head * group + row % group) * seq_len + query[h]] * LOG2_E
            : 0.0f;
  }

  // One document after the other; most tiles lie in one.
  for (int begin = first_query, end; begin < end_query; begin = end) {
    const int document = blocks.doc_start[begin], first_slot = ONE_QUERY ? 0 : blocks.first_slot(document);
    end = ONE_QUERY ? end_query : min(blocks.doc_end[begin], end_query);
    const int all_steps = (end - 1 - document) / (blocks.stride * SLOTS) + 1;
    const int num_steps = ONE_QUERY && RULE != 4 ? min(first_step + span, all_steps) : all_steps;
    // The first slot of a thread block's first block belongs to the step before, too, whose blocks another one writes.
    const int loaded_step = ONE_QUERY && RULE < 2 ? max(first_step - 1, 0) : first_step;
    ImportanceRows rows;
    rows.all = importance;
    int seen[2];
    float carry[2] = {0.0f, 0.0f};
    [[maybe_unused]] LogSum sums[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = query[h] >= begin && query[h] < end;
      seen[h] = inside ? blocks.num_seen(query[h], document) : 0;
      rows.own[h] = inside ? (query[h] - document) / (int)params.select_size : -1;
      rows.to[h] =
          ((u32)(batch * heads + kv_head) * (u32)params.num_queries + (u32)(query[h] - (int)params.first_query)) *
          (u32)params.num_blocks;
    }
    const auto load_slots = [&](int step) {
      const int slot = min(first_slot + step * SLOTS + warp % 4 * 32 + lane, num_slots - 1);
      if (HEAD_DIM == 128 || warp < 4)
        copy_key_rows<1>(k_shared + step % 2 * TILE_BYTES + warp / 4 * SLOTS * 128, k + warp / 4 * 64,
                         key_stride, slot, warp % 4);
      copy_async_commit();
    };
    __syncthreads();  // no thread reads the last document's slots any more
    load_slots(loaded_step);
    for (int step = loaded_step; step < num_steps; ++step) {
      copy_async_wait<0>();
      fence_async_proxy();
      __syncthreads();  // every warp may read this step's slots, and no warp reads the last step's
      if (step + 1 < num_steps) load_slots(step + 1);
      float p[4 * TILES];
      const u64 a = wgmma_along(shared + warp / 4 * 64 * 128), b = wgmma_along(k_shared + step % 2 * TILE_BYTES);
      wgmma_fence();
      wgmma_rows<HEAD_DIM, ROWS, SLOTS>(p, a, b, false);
      wgmma_commit();
      const int left[2] = {seen[0] - step * SLOTS, seen[1] - step * SLOTS};
      const bool partial = !__all_sync(~0u, min(left[0], left[1]) >= SLOTS);
      wgmma_wait<0>();
      if (RULE < 2) {
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) p[i] = exp2_fast(p[i] * scale_log2 - row_lse[i % 4 / 2]);
      }
      if (partial) {
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i)
          if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= left[i % 4 / 2]) p[i] = RULE < 2 ? 0.0f : -INFINITY_F32;
      }
      if constexpr (RULE == 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) sums[h].join_step(p, h, scale_log2);
        continue;
      }
      if constexpr (RULE == 3) {
        const int size = (int)params.select_size, slot = step * SLOTS, block = slot / size;
        switch (size) {
          case 16: write_scores<8>(p, carry, rows, block, false); break;
          case 32: write_scores<4>(p, carry, rows, block, false); break;
          case 64: write_scores<2>(p, carry, rows, block, false); break;
          default: write_scores<1>(p, carry, rows, block, slot % size != 0);
        }
        continue;
      }
      const int first_block = step * (SLOTS / 4);
#if ONE_QUERY && RULE < 2
      ImportanceRows written = rows;
      if (step < first_step) written.own[0] = written.own[1] = -1;
#else
      const ImportanceRows& written = rows;
#endif
      switch (group) {
        case 16: write_importances<16>(p, carry, written, first_block); break;
        case 8: write_importances<8>(p, carry, written, first_block); break;
        case 4: write_importances<4>(p, carry, written, first_block); break;
        case 2: write_importances<2>(p, carry, written, first_block); break;
        default: write_importances<1>(p, carry, written, first_block);
      }
    }
    if constexpr (RULE == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + lane / 4;
        sums[h].join_quad(scale_log2);
        const u64 head = (u64)batch * params.num_heads + kv_head * group + row % group;
        if (lane % 4 == 0 && query[h] >= begin && query[h] < end)
          importance[head * seq_len + query[h]] = sums[h].value(scale_log2);
      }
    }
  }
}
