// select_cells: the scores of 128 cells of queries with 128 cells of keys, by one thread block; a cell is `cell`
// consecutive tokens. select_cells.cu and hopper_select_cells.cu document the interface.
// Defines    HEAD_DIM, LSE, ORDERED; WGMMA 0|1: products by warpgroups (sm_90a; the includer includes wgmma.cuh)
#pragma once
#include "common/async_copy.cuh"
#include "common/mma.cuh"

struct SelectCellsParams {
  u64 num_queries, num_keys, num_heads, num_kv_heads, first_head;
  u64 q_offset, k_offset, q_token_stride, k_token_stride;  // elements
  u64 first_query, cell, query_step, per_block, reversed;
  u64 out_rows, out_columns;
  u64 scale;  // f32 bits
};

constexpr int SIDE = 128, STEP = 64, STAGES = 3, PITCH = SIDE + 1;
constexpr int SIDE_BYTES = SIDE * STEP * 2, STAGE_BYTES = 2 * SIDE_BYTES;
constexpr int ROWS_AT_ONCE = 32;  // rows of a side that 256 threads copy at once
using Tile = SwizzledTile<STEP>;
static_assert(SIDE * PITCH * 4 <= STAGES * STAGE_BYTES, "scores lie where the ring was");
static_assert(HEAD_DIM % STEP == 0, "a step stays inside a token");

// One side of a tile: 128 cells that begin `cell` tokens apart. A step loads 64 columns of one token of each cell.
// Places outside first .. end arrive as zeros. HAS_ORDER: place t holds token order[t], else token t.
template <bool HAS_ORDER>
struct CellSide {
  const bf16* from;  // this thread's chunk of its first cell's first token
  i64 token_stride;
  int token, cell, first, end;
  u32 to;  // this thread's offset in a step
  const i32* order;

  // `heads` is column 0 of the head at token 0, `token` the first place of the side's first cell. The thread copies 8
  // columns of every 32nd cell from cell threadIdx.x / 8 on.
  DEVICE CellSide(const bf16* heads, u64 token_stride, i64 token, int cell, i64 first, i64 end,
                  const i32* order)
      : token_stride((i64)token_stride), cell(cell), first((int)first), end((int)end), order(order) {
    const int row = (int)threadIdx.x / 8, chunk = (int)threadIdx.x % 8;
    this->token = (int)token + row * cell;
    from = heads + this->token * this->token_stride + chunk * 8;
    to = Tile::offset(row, chunk);
  }
  // The columns from `column` on of the token `u` of each cell.
  DEVICE void load(u32 step, int u, int column) const {
    const bf16* here = from + u * token_stride + column;
#pragma unroll
    for (int i = 0; i < SIDE / ROWS_AT_ONCE; ++i) {
      const int at = token + u + i * ROWS_AT_ONCE * cell;
      const bool is_there = at >= first && at < end;
      const bf16* there = here + (i64)(i * ROWS_AT_ONCE * cell) * token_stride;
      if (HAS_ORDER && is_there) there = from + (i64)(order[at] - token) * token_stride + column;
      copy_async_16(step + to + i * ROWS_AT_ONCE * Tile::ROW_BYTES, is_there ? there : from_first(), is_there ? 16 : 0);
    }
  }
  // A valid address for a copy of zero bytes.
  DEVICE const bf16* from_first() const { return from + (i64)(first - token) * token_stride; }
};

template <class Params>
DEVICE void select_cells_tile(const bf16* q, const bf16* k, const i32* order, float* out, const Params& params,
                              unsigned char* shared_memory) {
  const u32 shared = shared_address(shared_memory);
  const int cell = (int)params.cell, query_step = (int)params.query_step, per_block = (int)params.per_block,
            head = (int)params.first_head + (int)blockIdx.z,
            kv_head = head / (int)(params.num_heads / params.num_kv_heads);
  const int first_a = (int)blockIdx.y * SIDE, first_b = (int)blockIdx.x * SIDE;
  const i64 num_keys = (i64)params.num_keys, context = num_keys - (i64)params.num_queries,
            first_token = (i64)params.first_query + (i64)first_a * query_step;
  // Skip key blocks that begin after the tile's last query; only whole blocks, so that a row's own block is computed.
  const i64 last_token = min(first_token + (i64)SIDE * query_step, num_keys) - 1, block_tokens = (i64)per_block * cell;
  if ((i64)first_b * cell > last_token / block_tokens * block_tokens) return;
  q += params.q_offset + (u64)head * HEAD_DIM;
  k += params.k_offset + (u64)kv_head * HEAD_DIM;

  const int steps = cell * (HEAD_DIM / STEP);
  const CellSide<false> queries(q, params.q_token_stride, first_token, query_step, context, num_keys, nullptr);
  const CellSide<ORDERED> keys(k, params.k_token_stride, (i64)first_b * cell, cell, 0, num_keys,
                               order + (u64)kv_head * params.num_keys);
  const bool reversed = params.reversed;
  const auto load_step = [&](int step) {
    if (step < steps) {
      const int u = step / (HEAD_DIM / STEP), column = step % (HEAD_DIM / STEP) * STEP;
      const u32 to = shared + step % STAGES * STAGE_BYTES;
      queries.load(to, reversed ? cell - 1 - u : u, column);
      keys.load(to + SIDE_BYTES, u, column);
    }
    copy_async_commit();
  };
  const int lane = (int)threadIdx.x % 32;
#if WGMMA
  float sum[64];
#else
  const int warp = (int)threadIdx.x / 32, warp_a = warp / 4 * 64, warp_b = warp % 4 * 32;
  float sum[4][4][4] = {};
#endif
  for (int step = 0; step < STAGES - 1; ++step) load_step(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<STAGES - 2>();
#if WGMMA
    fence_async_proxy();  // the GEMMs read what cp.async copied
    wgmma_wait<0>();
#endif
    __syncthreads();  // every thread may read this step, and no thread reads the last one
    load_step(step + STAGES - 1);
    const u32 at = shared + step % STAGES * STAGE_BYTES;
#if WGMMA
    const u64 a = wgmma_along(at + threadIdx.x / 128 * 64 * Tile::ROW_BYTES), b = wgmma_along(at + SIDE_BYTES);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < STEP / 16; ++x)
      wgmma<0, 0>(sum, wgmma_step(a, x * 32), wgmma_step(b, x * 32), step > 0 || x > 0);
    wgmma_commit();
#else
    const u32 a_rows = at + Tile::offset(lane % 16, lane / 16),
              b_rows = at + SIDE_BYTES + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int x = 0; x < STEP / 16; ++x) {
      u32 a[4][4], b[2][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) load_matrix_x4(a[m], Tile::step(a_rows + warp_a * Tile::ROW_BYTES, m * 16, x * 2));
#pragma unroll
      for (int n = 0; n < 2; ++n) load_matrix_x4(b[n], Tile::step(b_rows + warp_b * Tile::ROW_BYTES, n * 16, x * 2));
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) mma_bf16(sum[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
#endif
  }
  copy_async_wait<0>();
#if WGMMA
  wgmma_wait<0>();
#endif
  __syncthreads();  // no thread reads the ring any more

  // Scores go to shared memory, where whole blocks of them are read. LSE: in base 2, and key cells after the query's
  // own are masked.
  float* score = (float*)shared_memory;
  const float scale = f32_word(params.scale) * (LSE ? LOG2_E : 1.0f);
  // LSE: first_query and query_step are multiples of the cell, but where only earlier segments are read.
  const auto put = [&](int a, int b, float x) {
    score[a * PITCH + b] = LSE && (first_b + b) * cell > (int)first_token + a * query_step ? -INFINITY_F32 : x * scale;
  };
#if WGMMA
#pragma unroll
  for (int i = 0; i < 64; ++i)
    put((int)threadIdx.x / 32 * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2, sum[i]);
#else
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        put(warp_a + m * 16 + lane / 4 + i / 2 * 8, warp_b + n * 8 + lane % 4 * 2 + i % 2, sum[m][n][i]);
#endif
  __syncthreads();  // all scores are stored
  const int rows = LSE ? SIDE : SIDE / per_block, columns = SIDE / per_block, deep = LSE ? 1 : per_block;
  for (int at = (int)threadIdx.x; at < rows * columns; at += 256) {
    const int row = at / columns, column = at % columns;
    const i64 out_row = (LSE ? first_a : first_a / per_block) + row, out_column = first_b / per_block + column;
    if (out_row >= (i64)params.out_rows || out_column >= (i64)params.out_columns) continue;
    const float* from = score + row * deep * PITCH + column * per_block;
    float largest = -INFINITY_F32, total = 0.0f;
    for (int a = 0; a < deep; ++a)
      for (int b = 0; b < per_block; ++b) {
        const float x = from[a * PITCH + b];
        if (x > largest || x != x) largest = x;
      }
    if (LSE) {
      for (int b = 0; b < per_block; ++b)
        if (largest > -INFINITY_F32 || largest != largest) total += exp2f(from[b] - largest);
      largest = total > 0.0f || total != total ? largest + log2f(total) : -INFINITY_F32;
    }
    out[((u64)blockIdx.z * params.out_rows + (u64)out_row) * params.out_columns + (u64)out_column] = largest;
  }
}
