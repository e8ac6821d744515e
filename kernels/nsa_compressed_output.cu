// nsa_compressed_output: the output of native sparse attention's compressed branch (arXiv:2502.11089, eq. 6, 7) in one
// order: a query behind a cache has the bits of its whole row. Its log-sum-exp comes from nsa_importance's RULE 4.
// Math       o_ih = sum over the blocks c that i sees of exp(softmax_scale q_ih . k_c - lse_ih) v_c
// Layout     q bf16 [batch, seq_len, num_heads, HEAD_DIM]: any token and batch stride and an element offset, all
//            multiples of 8; keys, values bf16 [batch, num_slots, choosers / key_group, HEAD_DIM]; lse f32 [batch,
//            num_heads, seq_len]; doc_start, doc_end i32 [batch, seq_len]; o bf16 [batch, seq_len, num_heads,
//            HEAD_DIM], written from query first_query on; contiguous
// Buffers    q, keys, values, lse, doc_start, doc_end, o
// Defines    HEAD_DIM 64|128; ONE_QUERY (0): 1: a row has one query, number 0; doc_start is minus its position, its
//            document begins in slot 0, and keys and values are caches, bf16 [batch, choosers / key_group, num_slots,
//            HEAD_DIM]
// Tiling     grid (ceil(num_queries / (64 / group)), choosers, batch); 128 threads: 64 rows (queries x heads, a query's
//            heads side by side) against 64 slots a step, counted from a document's first; dynamic shared bytes =
//            5 * 64 * HEAD_DIM * 2
// Numerics   bf16 products, probabilities rounded to bf16, f32 sums over 16 slots at a time, from the document's first
//            on: slots that a query does not see add exact zeros (kernels/notes/one-order-of-sums.md); one rounding
// Edges      group <= 64; a query that sees no block gets zeros; slots that no query sees may hold NaN
#define NUM_WARPS 4
#include "common/attention_params.cuh"
#include "common/copy_rows.cuh"
#include "common/nsa_blocks.cuh"
#include "common/quad.cuh"

#ifndef ONE_QUERY
#define ONE_QUERY 0
#endif
constexpr int ROWS = 64, SLOTS = 64;
using Tile = SwizzledTile<HEAD_DIM>;
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2, STEP_BYTES = SLOTS * HEAD_DIM * 2;

// A block of threads has 64 rows, a warp 16 of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    nsa_compressed_output(const bf16* q, const bf16* keys, const bf16* values, const float* lse, const i32* doc_start,
                          const i32* doc_end, bf16* o, const __grid_constant__ NsaImportanceParams params) {
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
  const u32 shared = shared_address(shared_memory), k_shared = shared + Q_BYTES, v_shared = k_shared + 2 * STEP_BYTES;
  // of each row: its document's first slot, slots it sees, its log-sum-exp to the base 2
  __shared__ int row_first[ROWS], row_seen[ROWS];
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
    row_first[row] = row_seen[row] = 0, row_lse[row] = 0.0f;
    if (row < num_rows) {
      const int document = blocks.doc_start[query];
      row_first[row] = ONE_QUERY ? 0 : blocks.first_slot(document);
      row_seen[row] = blocks.num_seen(query, document);
      const u64 head = (u64)batch * params.num_heads + kv_head * group + row % group;
      row_lse[row] = lse[head * seq_len + query] * LOG2_E;
    }
  }
  __syncthreads();  // the descriptions of the rows are stored
  const u64 key_head = (u64)kv_head / params.key_group;
#if ONE_QUERY
  constexpr u32 key_stride = HEAD_DIM;
  const u64 first_key = ((u64)batch * key_heads + key_head) * num_slots * HEAD_DIM;
#else
  const u32 key_stride = (u32)key_heads * HEAD_DIM;
  const u64 first_key = ((u64)batch * num_slots * key_heads + key_head) * HEAD_DIM;
#endif
  keys += first_key, values += first_key;

  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  float output[HEAD_DIM / 8][4] = {};
  u32 a[HEAD_DIM / 16][4];
  int slot = 0;
  // One document after the other: wherever it begins, its slots lie at the same places of the steps.
  for (int from_row = 0, to_row; from_row < num_rows; from_row = to_row) {
    const int begin = row_first[from_row];
    for (to_row = from_row + group; to_row < num_rows && row_first[to_row] == begin;) to_row += group;
    const int end = begin + row_seen[to_row - 1];
    // Slots that none of these rows sees arrive as zeros: a probability of zero times what they hold could be NaN.
    const auto load_step = [&](int first, int to) {
      copy_rows<HEAD_DIM, SLOTS>(k_shared + to * STEP_BYTES, keys, key_stride, first, end);
      copy_rows<HEAD_DIM, SLOTS>(v_shared + to * STEP_BYTES, values, key_stride, first, end);
    };
    if (begin < end) load_step(begin, slot);
    copy_async_commit();
    for (int first = begin; first < end; first += SLOTS, slot ^= 1) {
      copy_async_wait<0>();
      __syncthreads();  // every thread may read this step's slots, and no thread reads the last step's
      if (first + SLOTS < end) load_step(first + SLOTS, slot ^ 1);
      copy_async_commit();
      if (first == begin) {
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
          load_matrix_x4(a[step], Tile::step(shared + warp * 16 * Tile::ROW_BYTES + Tile::offset(lane % 16, lane / 16),
                                             0, step * 2));
      }

      // Score, and probabilities of the slots that a row sees.
      float p[SLOTS / 8][4] = {};
      const u32 k_at = k_shared + slot * STEP_BYTES + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
        for (int n = 0; n < SLOTS / 16; ++n) {
          u32 b[4];
          load_matrix_x4(b, Tile::step(k_at, n * 16, step * 2));
          mma_bf16(p[2 * n], a[step], b[0], b[1]);
          mma_bf16(p[2 * n + 1], a[step], b[2], b[3]);
        }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + g,
                  left = row >= from_row && row < to_row ? begin + row_seen[row] - first : 0;
        const float row_sum = row_lse[row];
#pragma unroll
        for (int n = 0; n < SLOTS / 8; ++n)
#pragma unroll
          for (int x = 2 * h; x < 2 * h + 2; ++x)
            p[n][x] = n * 8 + 2 * t + x % 2 < left ? exp2_fast(fmaf(p[n][x], scale_log2, -row_sum)) : 0.0f;
      }

      // Output: O += P V, 16 slots at a time.
      const u32 v_at = v_shared + slot * STEP_BYTES + Tile::offset(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < SLOTS / 16; ++step) {
        u32 weights[4];
        pack_fragment(weights, p[2 * step], p[2 * step + 1]);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
          u32 b[4];
          load_matrix_x4_transposed(b, Tile::step(v_at, step * 16, n * 2));
          mma_bf16(output[2 * n], weights, b[0], b[1]);
          mma_bf16(output[2 * n + 1], weights, b[2], b[3]);
        }
      }
    }
  }

  // Store: eight columns of a row a lane.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + h * 8 + g;
    const u64 query = (u64)batch * seq_len + first_query + row / group;
    bf16* to = o + (query * params.num_heads + kv_head * group + row % group) * HEAD_DIM + t * 8;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 4) {
      u32 words[4];
      quad_pack(words, (const float*)output + 4 * n, h, 1.0f);
      if (row < num_rows) *(uint4*)(to + n * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  copy_async_wait<0>();
}
