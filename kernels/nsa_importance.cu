// nsa_importance: how important each block of keys is to a query, by pooled keys: their probabilities, over the heads
// of the group (arXiv:2502.11089, eq. 9, 10; arXiv:2509.24663), or their products with one head (arXiv:2502.13189), of
// which a block has one or the largest of its tokens' (arXiv:2606.13392). No score matrix is stored.
// Math       p[i, c] = sum over heads h of exp(softmax_scale q_ih . k_c - lse_ih), over the blocks c that i sees;
//            w(c, b) the strides that compressed block c and block b share;
//            RULE 0: importance[i, b] = sum over slots c of the document of w(c, b) p[i, c];
//            RULE 1: max over c with w(c, b) > 0 of p[i, c], 0 without any;
//            RULE 2: q_i . k_b, 0 for a block that has not ended;
//            RULE 3: max over the slots c of block b that i sees of q_i . k_c;
//            RULE 4: lse_ih = log sum over the slots c that i sees of exp(softmax_scale q_ih . k_c), no importance
// Layout     q bf16 [batch, seq_len, heads, HEAD_DIM]: any token and batch stride and an element offset, all multiples
//            of 8; keys bf16 [batch, num_slots, choosers / key_group, HEAD_DIM]; lse f32 [batch, num_heads,
//            seq_len], of RULE 2 to 4 not read; doc_start i32 [batch, seq_len]; importance f32 [batch, choosers,
//            num_queries, num_blocks] of the queries from first_query on, of RULE 4 the log-sum-exps, f32 [batch,
//            num_heads, seq_len]; contiguous
// Buffers    q, keys, lse, doc_start, doc_end, importance
// Defines    HEAD_DIM 64|128; RULE 0|1|2|3|4; ONE_QUERY (0): 1: a row has one query, number 0; doc_start is minus its
//            position, its document begins in slot 0, and keys are a cache, bf16 [batch, choosers / key_group,
//            num_slots, HEAD_DIM]
// Tiling     grid (ceil(num_queries / (64 / group)), choosers, batch); 128 threads: 64 rows (queries x heads, a
//            query's heads side by side) against 64 slots a step; dynamic shared bytes = 192 * HEAD_DIM * 2 + 64 * (64
//            + CARRY + 1) * 4
// Numerics   bf16 products, f32 sums in a fixed order; writes the blocks up to each query's own; a log-sum-exp goes
//            through the slots from the document's first on (log_sum.cuh), -inf of a query that sees none
// Edges      group <= 64, of RULE 2 and 3 1, of RULE 2 with blocks of one stride; but of RULE 3 (select + compress) /
//            stride <= CARRY + 2, select / stride <= 64; slots that no query sees may hold NaN
#define NUM_WARPS 4
#include "common/attention_params.cuh"
#include "common/copy_rows.cuh"
#include "common/log_sum.cuh"
#include "common/nsa_blocks.cuh"
#include "common/quad.cuh"
#include "common/row_sums.cuh"

#ifndef ONE_QUERY
#define ONE_QUERY 0
#endif
constexpr int ROWS = 64, SLOTS = 64, CARRY = 32, PITCH = CARRY + SLOTS + 1;
using Tile = SwizzledTile<HEAD_DIM>;
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2, K_BYTES = SLOTS * HEAD_DIM * 2;

// The largest score of each block, over a warp's 16 x 64 scores and the scores of earlier steps. `low`,
// `high`: the columns that rows g (0) and g + 8 (1) see, counted from the step's first; `own`: the rows' last block.
DEVICE void store_largest(const float (&score)[2][16], const int (&low)[2], const int (&high)[2], const int (&own)[2],
                          int per_select, float* (&to)[2]) {
  const int t = (int)threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int begin = max(-low[h], 0) / per_select;
    for (int i = 0;; ++i) {
      const int block = begin + i, first = low[h] + block * per_select, end = min(first + per_select, high[h]);
      const bool inside = block <= own[h] && first < SLOTS;
      if (!__any_sync(~0u, inside)) break;
      float largest = -INFINITY_F32;
#pragma unroll
      for (int n = 0; n < SLOTS / 4; ++n) {
        const int column = n / 2 * 8 + 2 * t + n % 2;
        if (column >= first && column < end) largest = fmaxf(largest, score[h][n]);
      }
      largest = quad_max(largest);
      // The result of an earlier step was written by the same lane.
      if (t == 0 && inside) to[h][block] = first < 0 ? fmaxf(to[h][block], largest) : largest;
    }
  }
}

// Puts the probabilities of a warp's 16 rows, summed over MERGED consecutive heads, into the table.
template <int MERGED>
DEVICE void store_probabilities(float (&p)[2][16], float* table, int warp) {
  constexpr int STEPS = MERGED >= 8 ? 3 : MERGED == 4 ? 2 : MERGED == 2 ? 1 : 0;
  using Sums = RowSums<STEPS, 2>;
  const int lane = (int)threadIdx.x % 32, t = lane % 4, g = lane / 4;
  if (MERGED == 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) p[0][i] += p[1][i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (MERGED == 16 && h == 1) break;
    Sums::add(p[h]);
    float* row = table + (warp * 16 + h * 8 + g) / MERGED * PITCH + CARRY + Sums::first_tile() * 8 + 2 * t;
#pragma unroll
    for (int n = 0; n < Sums::TILES; ++n) {
      row[n * 8] = p[h][2 * n];
      row[n * 8 + 1] = p[h][2 * n + 1];
    }
  }
}

// RULE 0 and 1: the importance of a block, from the probabilities of the slots that overlap it. `from`: the block's
// first slot in the first of the query's group / merged rows of the table. Slots before the document hold zeros.
DEVICE float block_importance(const float* from, int group, int merged, int per_select, int per_compress) {
  float sum = 0.0f;
  for (int offset = 1 - per_compress; RULE == 1 && offset < per_select; ++offset) {
    float of_slot = 0.0f;
    for (int part = 0; part < group / merged; ++part) of_slot += from[part * PITCH + offset];
    sum = fmaxf(sum, of_slot);
  }
  for (int part = 0; RULE == 0 && part < group / merged; ++part, from += PITCH)
    for (int offset = 1 - per_compress; offset < per_select; ++offset) {
      // The strides that the compressed block at this offset shares with the block.
      const int weight = min(per_select - 1, offset + per_compress - 1) - max(offset, 0) + 1;
      sum += (float)weight * from[offset];
    }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    nsa_importance(const bf16* q, const bf16* keys, const float* lse, const i32* doc_start, const i32* doc_end,
                   float* importance, const __grid_constant__ NsaImportanceParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int seq_len = (int)params.seq_len, heads = (int)params.choosers, group = (int)params.num_heads / heads,
            tile_queries = ROWS / group, key_heads = heads / (int)params.key_group;
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, num_slots = (int)params.num_slots;
  const int range_end = min((int)(params.first_query + params.num_queries), seq_len);
  // late queries see the most slots, so they start first
  const int first_query = (int)params.first_query + (int)(gridDim.x - 1 - blockIdx.x) * tile_queries;
  const int end_query = min(first_query + tile_queries, range_end), num_rows = max(end_query - first_query, 0) * group;
  if (num_rows == 0) return;
  const CompressedBlocks blocks = {doc_start + (u64)batch * seq_len, doc_end + (u64)batch * seq_len,
                                   (int)params.compress_size, (int)params.stride};
  const int per_select = (int)params.select_size / blocks.stride, per_compress = blocks.size / blocks.stride;
  const u32 shared = shared_address(shared_memory);
  // [ROWS / merged, PITCH]: column x is slot first - CARRY + x of a step; `merged` heads of a query share a row.
  float* probabilities = (float*)(shared_memory + Q_BYTES + 2 * K_BYTES);
  const int merged = group % 16 == 0 ? 16 : group % 8 == 0 ? 8 : group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1;
  const int carry = per_select + per_compress - 2, num_table_rows = num_rows / merged;
  // of each query: its document's first slot, slots it sees, own block
  __shared__ int row_first[ROWS], row_seen[ROWS], row_own[ROWS];
  __shared__ float row_lse[ROWS];

  // Load: queries, and what each row sees.
  for (int at = (int)threadIdx.x; at < ROWS * Tile::CHUNKS; at += THREADS) {
    const int row = at / Tile::CHUNKS, chunk = at % Tile::CHUNKS, query = min(first_query + row / group, end_query - 1);
    const bf16* from = q + params.q_offset + batch * params.q_batch_stride + (u64)query * params.q_token_stride +
                       (u64)(kv_head * group + row % group) * HEAD_DIM;
    copy_async_16(shared + Tile::offset(row, chunk), from + chunk * 8, row < num_rows ? 16 : 0);
  }
  if (threadIdx.x < ROWS) {
    const int row = (int)threadIdx.x, query = first_query + row / group;
    row_first[row] = row_seen[row] = 0, row_own[row] = -1, row_lse[row] = 0.0f;
    if (row < num_rows) {
      const int document = blocks.doc_start[query];
      row_first[row] = ONE_QUERY ? 0 : blocks.first_slot(document);
      row_seen[row] = blocks.num_seen(query, document);
      row_own[row] = (query - document) / (int)params.select_size;
      const u64 head = (u64)batch * params.num_heads + kv_head * group + row % group;
      if (RULE < 2) row_lse[row] = lse[head * seq_len + query] * LOG2_E;
    }
  }
  for (int at = (int)threadIdx.x; at < ROWS * CARRY; at += THREADS)
    probabilities[at / CARRY * PITCH + at % CARRY] = 0.0f;
  __syncthreads();  // the descriptions of the rows are stored
#if RULE != 4
  const int begin = row_first[0], end = row_first[num_rows - 1] + (row_own[num_rows - 1] + 1) * per_select;
#endif
#if ONE_QUERY
  constexpr u32 key_stride = HEAD_DIM;
  const bf16* k = keys + ((u64)batch * key_heads + kv_head / (int)params.key_group) * num_slots * HEAD_DIM;
#else
  const u32 key_stride = (u32)key_heads * HEAD_DIM;
  const bf16* k = keys + ((u64)batch * num_slots * key_heads + kv_head / (int)params.key_group) * HEAD_DIM;
#endif
#if RULE != 4
  copy_rows<HEAD_DIM, SLOTS>(shared + Q_BYTES, k, key_stride, begin, num_slots);
  copy_async_commit();
#endif

  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  float* to =
      importance + (((u64)batch * heads + kv_head) * params.num_queries + (first_query - (int)params.first_query)) *
                       params.num_blocks;
  // The query's blocks are distributed over its threads.
  const int team = THREADS / tile_queries, query = (int)threadIdx.x / team, query_row = min(query * group, ROWS - 1);
  const int document_first = row_first[query_row], own = row_own[query_row];
  int block = (int)threadIdx.x % team;
  u32 a[HEAD_DIM / 16][4];
  int slot = 0;
#if RULE == 4
  LogSum sums[2];
  // One document after the other: wherever it begins, its slots lie at the same places of the steps.
  for (int from_row = 0, to_row; from_row < num_rows; from_row = to_row) {
  const int begin = row_first[from_row];
  for (to_row = from_row + group; to_row < num_rows && row_first[to_row] == begin;) to_row += group;
  const int end = begin + row_seen[to_row - 1];
  if (begin < end) copy_rows<HEAD_DIM, SLOTS>(shared + Q_BYTES + slot * K_BYTES, k, key_stride, begin, num_slots);
  copy_async_commit();
#endif
  for (int first = begin; first < end; first += SLOTS, slot ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // every thread may read these keys; the last step's probabilities have been read and moved
    if (first + SLOTS < end)
      copy_rows<HEAD_DIM, SLOTS>(shared + Q_BYTES + (slot ^ 1) * K_BYTES, k, key_stride, first + SLOTS, num_slots);
    copy_async_commit();
    if (first == begin) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step)
        load_matrix_x4(a[step], Tile::step(shared + warp * 16 * Tile::ROW_BYTES + Tile::offset(lane % 16, lane / 16), 0,
                                           step * 2));
    }

    // Score, and probabilities of the slots that a row sees.
    float score[SLOTS / 8][4] = {};
    const u32 k_at = shared + Q_BYTES + slot * K_BYTES + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
      for (int n = 0; n < SLOTS / 16; ++n) {
        u32 b[4];
        load_matrix_x4(b, Tile::step(k_at, n * 16, step * 2));
        mma_bf16(score[2 * n], a[step], b[0], b[1]);
        mma_bf16(score[2 * n + 1], a[step], b[2], b[3]);
      }
    float p[2][16];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp * 16 + h * 8 + g, low = row_first[row] - first, high = low + row_seen[row];
      const float row_sum = row_lse[row];
#pragma unroll
      for (int n = 0; n < SLOTS / 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int column = n * 8 + 2 * t + x;
          const float x_score = score[n][2 * h + x];
          p[h][2 * n + x] = column < low || column >= high ? 0.0f
                            : RULE >= 2                    ? x_score
                                                           : exp2_fast(x_score * scale_log2 - row_sum);
        }
    }
#if RULE == 4
    {
      float seen[SLOTS / 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + g, left = begin + row_seen[row] - first;
        const bool inside = row >= from_row && row < to_row;
#pragma unroll
        for (int n = 0; n < SLOTS / 8; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x)
            seen[4 * n + 2 * h + x] = inside && n * 8 + 2 * t + x < left ? score[n][2 * h + x] : -INFINITY_F32;
        sums[h].join_step(seen, h, scale_log2);
      }
      continue;
    }
#endif
    if (RULE == 3) {
      int low[2], high[2], last[2];
      float* of_row[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + g;
        low[h] = row_first[row] - first, high[h] = low[h] + row_seen[row], last[h] = row_own[row];
        of_row[h] = to + (u64)row * params.num_blocks;
      }
      store_largest(p, low, high, last, per_select, of_row);
      continue;
    }
    if (RULE == 2) {
      // A row is a query and a slot is a block, so there is nothing to add up.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + g, first_block = first - row_first[row];
#pragma unroll
        for (int i = 0; i < SLOTS / 4; ++i) {
          const int of_block = first_block + i / 2 * 8 + 2 * t + i % 2;
          if (of_block >= 0 && of_block <= row_own[row]) to[(u64)row * params.num_blocks + of_block] = p[h][i];
        }
      }
      continue;
    }
    switch (merged) {
      case 16: store_probabilities<16>(p, probabilities, warp); break;
      case 8: store_probabilities<8>(p, probabilities, warp); break;
      case 4: store_probabilities<4>(p, probabilities, warp); break;
      case 2: store_probabilities<2>(p, probabilities, warp); break;
      default: store_probabilities<1>(p, probabilities, warp);
    }
    __syncthreads();  // all probabilities of the step are stored

    // Writes the importance of the blocks whose last slot is one of this step's. The probabilities of the earlier slots
    // that overlap such a block are in the table's CARRY columns, to the left of the step's own.
    if (query < end_query - first_query) {
      for (; block <= own && document_first + (block + 1) * per_select <= first + SLOTS; block += team) {
        const float* from =
            probabilities + query * group / merged * PITCH + CARRY + document_first + block * per_select - first;
        to[(u64)query * params.num_blocks + block] = block_importance(from, group, merged, per_select, per_compress);
      }
    }
    __syncthreads();  // no thread reads the step's probabilities any more
    for (int row = warp; row < num_table_rows; row += NUM_WARPS) {
      if (lane < carry)
        probabilities[row * PITCH + CARRY - carry + lane] = probabilities[row * PITCH + CARRY - carry + SLOTS + lane];
    }
  }
#if RULE == 4
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + h * 8 + g;
    sums[h].join_quad(scale_log2);
    const u64 head = (u64)batch * params.num_heads + kv_head * group + row % group;
    if (t == 0 && row < num_rows) importance[head * seq_len + first_query + row / group] = sums[h].value(scale_log2);
  }
#endif
  copy_async_wait<0>();
}
