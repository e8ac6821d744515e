// nsa_selected_attention_forward: attention of the queries that chose a block of keys over that block, keys outermost:
// a block of threads holds a block's K and V and streams the rows of its list, 128 at a time. nsa_selected_combine
// combines a query's parts.
// Math       for each choice: part = sum_j softmax_j(softmax_scale * q . k_j) v_j over the block's keys j <= i,
//            part_lse = log2 sum_j exp(softmax_scale * q . k_j)
// Layout     q bf16 [batch, seq_len, num_heads, HEAD_DIM], k, v [.., num_kv_heads, HEAD_DIM]: any token and batch
//            stride and an element offset, all multiples of 8; doc_start, doc_end i32 [batch, seq_len]; entries, items,
//            num_items as nsa_lists; parts bf16 [batch, num_kv_heads, choices, group, HEAD_DIM], part_lse f32
//            [batch, num_kv_heads, choices, group], choices = queries of the lists * num_selected
// Buffers    q, k, v, doc_start, doc_end, entries, items, num_items, parts, part_lse
// Defines    HEAD_DIM 64|128
// Tiling     grid (max_items, num_kv_heads, batch), blocks past num_items leave at once; 128 threads, 32 rows a warp;
//            dynamic shared bytes = (2 * 64 + 2 * 128) * HEAD_DIM * 2
// Numerics   P rounded to bf16, f32 sums, parts rounded to bf16; parts of unused choices (-1) stay unwritten
// Edges      select_size <= 64; any group; a block that no query chose is never read
#define NUM_WARPS 4
#include "common/attention_params.cuh"
#include "common/nsa_copy_rows.cuh"
#include "common/quad.cuh"

constexpr int ROWS = 128, KEYS = 64, ROW_TILES = 2;
using Tile = SwizzledTile<HEAD_DIM>;
constexpr int KEY_BYTES = KEYS * HEAD_DIM * 2, Q_BYTES = ROWS * HEAD_DIM * 2;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    nsa_selected_attention_forward(const bf16* q, const bf16* k, const bf16* v, const i32* doc_start,
                                   const i32* doc_end, const int2* entries, const int4* items, const i32* num_items,
                                   bf16* parts, float* part_lse,
                                   const __grid_constant__ NsaSelectedAttentionForwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ ChosenRow rows[3][ROWS];
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, group = (int)(params.num_heads / params.num_kv_heads);
  const u64 list = (u64)batch * params.num_kv_heads + kv_head;
  if ((int)blockIdx.x >= num_items[list]) return;
  const int4 item = items[list * params.max_items + blockIdx.x];
  entries += list * params.choices + item.x;
  doc_start += (u64)batch * params.seq_len, doc_end += (u64)batch * params.seq_len;
  q += params.q_offset + batch * params.q_batch_stride;
  k += params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  v += params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM;
  parts += list * params.choices * group * HEAD_DIM;
  part_lse += list * params.choices * group;
  const u32 shared = shared_address(shared_memory), v_shared = shared + KEY_BYTES, q_shared = shared + 2 * KEY_BYTES;
  const float scale_log2 = f32_word(params.softmax_scale) * LOG2_E;

  for (int first = 0, next; first < item.y; first = next) {
    const ChosenRun run =
        chosen_run(entries, first, item.y, item.z, (int)params.select_size, group, doc_start, doc_end, next);
    const int num_tiles = ceil_div(run.num_rows, ROWS);
    __syncthreads();  // no thread reads the last run's keys and rows any more
    rows[0][threadIdx.x] = chosen_row(run, (int)threadIdx.x, group, kv_head * group);
    rows[1][threadIdx.x] = chosen_row(run, ROWS + (int)threadIdx.x, group, kv_head * group);
    copy_rows<HEAD_DIM, KEYS>(shared, k, (u32)params.k_token_stride, run.first_key, run.end_key);
    copy_rows<HEAD_DIM, KEYS>(v_shared, v, (u32)params.v_token_stride, run.first_key, run.end_key);
    __syncthreads();  // every thread copies rows that others described
    copy_chosen_rows<HEAD_DIM, ROWS>(q_shared, q, (u32)params.q_token_stride, rows[0]);
    copy_async_commit();

    for (int it = 0; it < num_tiles; ++it) {
      copy_async_wait<0>();
      // This tile's queries and the next tile's description have arrived for every thread, and no thread reads the last
      // tile any more.
      __syncthreads();
      if (it + 1 < num_tiles)
        copy_chosen_rows<HEAD_DIM, ROWS>(q_shared + (it + 1) % 2 * Q_BYTES, q, (u32)params.q_token_stride,
                                         rows[(it + 1) % 3]);
      copy_async_commit();
      rows[(it + 2) % 3][threadIdx.x] = chosen_row(run, (it + 2) * ROWS + (int)threadIdx.x, group, kv_head * group);

      const int thread = (int)opaque(threadIdx.x), lane = thread % 32, warp_row = thread / 32 * 32, g = lane / 4,
                t = lane % 4;
      const ChosenRow* tile_rows = rows[it % 3] + warp_row;
      if (tile_rows[0].token < 0) continue;  // this warp has no rows

      // Score: S = Q K^T.
      float score[ROW_TILES][KEYS / 8][4] = {};
      const u32 q_at = q_shared + it % 2 * Q_BYTES + warp_row * Tile::ROW_BYTES + Tile::offset(lane % 16, lane / 16);
      const u32 k_at = shared + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      multiply_rows<Tile>(score, q_at, k_at);
      // Mask: where the block is short, or is the own block of one of the warp's queries, which ascend.
      if (run.end_key - run.first_key < KEYS || tile_rows[0].token < run.end_key - 1) {
#pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; ++r) {
          const int token = tile_rows[r * 8 + g].token, seen = min(token + 1, run.end_key) - run.first_key;
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x)
              if (n * 8 + 2 * t + x >= seen) score[r / 2][n][r % 2 * 2 + x] = -INFINITY_F32;
        }
      }

      // Softmax over this block only.
      u32 p[KEYS / 16][ROW_TILES][4];
      float inverse[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < 2 * ROW_TILES; ++r) {
        const int m = r / 2, h = r % 2;
        float largest = score[m][0][2 * h], sum = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) largest = fmaxf(largest, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
        largest = quad_max(largest) * scale_log2;
        if (!(largest > -INFINITY_F32)) largest = 0.0f;  // a row past the end
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int x = 2 * h; x < 2 * h + 2; ++x) {
            score[m][n][x] = exp2_fast(score[m][n][x] * scale_log2 - largest);
            sum += score[m][n][x];
          }
        sum = quad_sum(sum);
        inverse[m][h] = 1.0f / sum;
        const ChosenRow row = tile_rows[r * 8 + g];
        if (t == 0 && row.token >= 0) part_lse[row.part] = largest + log2f(sum);
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step)
          pack_fragment(p[step][m], score[m][2 * step], score[m][2 * step + 1]);

      // Multiply by the values, 64 columns at a time, and store.
      const u32 v_at = v_shared + Tile::offset(lane % 16, lane / 16);
#pragma unroll
      for (int column = 0; column < HEAD_DIM / 16; column += 4) {
        float output[ROW_TILES][8][4] = {};
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            u32 b[4];
            load_matrix_x4_transposed(b, Tile::step(v_at, step * 16, (column + n) * 2));
            mma_columns(output, p[step], 2 * n, b);
          }
#pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; ++r) {
          const int m = r / 2, h = r % 2;
          const ChosenRow row = tile_rows[r * 8 + g];
          bf16* to = parts + (u64)(u32)row.part * HEAD_DIM + column * 16 + t * 8;
#pragma unroll
          for (int four = 0; four < 2; ++four) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              words[i] = pack_bf16(output[m][four * 4 + i][2 * h] * inverse[m][h],
                                   output[m][four * 4 + i][2 * h + 1] * inverse[m][h]);
            quad_transpose(words);
            if (row.token >= 0) *(uint4*)(to + four * 32) = make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      }
    }
  }
  copy_async_wait<0>();
}
