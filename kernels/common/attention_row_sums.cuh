// attention_row_sums: for each query of a tile, sum_j P_ij (do_i . v_j) over the keys it sees.
// Used by attention_row_sums.cu and dma_attention_row_sums.cu, which document the interface.
// Defines    HEAD_DIM, HEAD_DIM_V; WARP_ROWS rows a warp (16 or 32), NUM_WARPS, BLOCK_KV, NUM_STAGES, MIN_BLOCKS;
//            Q_IN_REGISTERS (queries and output gradients); HEADS_PER_TILE; HAS_BIAS; GATHER
#pragma once
#include "common/quad.cuh"
#include "common/query_tile.cuh"

constexpr int RING_AT = BLOCK_Q * (HEAD_DIM + HEAD_DIM_V) * 2;  // behind queries and output gradients
static_assert(RING_AT + KV_STREAM_BYTES <= 227 * 1024,
              "no device gives a block more shared memory; the caller checks its own limit");

struct RowSums {
  const bf16* d_out;  // [batch, seq_len, num_heads, HEAD_DIM_V]
  // [batch, num_heads, padded_len] {lse * log2(e) or +inf, the row sum}: the first is read, the second written
  float2* stats;
  int padded_len;
};

// score += A B^T over the head dimension, 16 elements a step: A from registers (`kept`) or shared memory at `row_at`, B
// from `column_at`.
template <class Tile, int STEPS>
DEVICE void multiply_rows(float (&score)[ROW_TILES][BLOCK_KV / 8][4],
                          const u32 (&kept)[Q_IN_REGISTERS ? STEPS : 1][ROW_TILES][4], u32 row_at, u32 column_at) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    u32 a[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      if (Q_IN_REGISTERS) {
#pragma unroll
        for (int x = 0; x < 4; ++x) a[m][x] = kept[Q_IN_REGISTERS ? k : 0][m][x];
      } else {
        load_matrix_x4(a[m], Tile::step(row_at, m * 16, k * 2));
      }
    }
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 16; ++n) {
      u32 b[4];
      load_matrix_x4(b, Tile::step(column_at, n * 16, k * 2));
      mma_columns(score, a, 2 * n, b);
    }
  }
}

// Computes and stores the sums of the block's tile of queries, whose keys come from `stream`; a warp has WARP_ROWS
// rows. Every thread of the block calls it; `memory` is the block's shared memory.
DEVICE void attention_row_sums_tile(const QueryTile& tile, const RowSums& out, KvStream& stream,
                                    unsigned char* memory) {
  const int lane = (int)threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * WARP_ROWS, g = lane / 4, t = lane % 4;
  const u32 q_shared = shared_address(memory), do_shared = q_shared + BLOCK_Q * HEAD_DIM * 2;
  copy_query_rows<HEAD_DIM>(tile, q_shared, tile.q, tile.q_stride);
  copy_gradient_rows(tile, do_shared, out.d_out);
  stream.start();

  __shared__ WarpQueries all_queries[NUM_WARPS];
  if (lane == 0) all_queries[threadIdx.x / 32] = warp_queries(tile, warp_row);  // read behind the first tile's barrier
  float2* stats = out.stats + ((u64)tile.batch * tile.num_heads + tile.head) * out.padded_len;
  float lse[ROW_TILES][2], dot[ROW_TILES][2];
#if HAS_BIAS
  float base[ROW_TILES][2];
#endif
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    const int row = warp_row + r * 8 + g, query = row_query(tile, row);
    lse[r / 2][r % 2] = query < tile.end_query ? stats[(u64)row_head(row) * out.padded_len + query].x : INFINITY_F32;
    dot[r / 2][r % 2] = 0.0f;
#if HAS_BIAS
    base[r / 2][r % 2] = row_base(tile, query);
#endif
  }
  const u32 q_at = q_shared + warp_row * KTile::ROW_BYTES + KTile::offset(lane % 16, lane / 16);
  const u32 do_at = do_shared + warp_row * VTile::ROW_BYTES + VTile::offset(lane % 16, lane / 16);
  u32 q_kept[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][ROW_TILES][4],
      do_kept[Q_IN_REGISTERS ? HEAD_DIM_V / 16 : 1][ROW_TILES][4];

  for (int it = 0; it < stream.num_tiles; ++it) {
    stream.advance(it);
    if (Q_IN_REGISTERS && it == 0) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int k = 0; k < (Q_IN_REGISTERS ? HEAD_DIM / 16 : 1); ++k)
          load_matrix_x4(q_kept[k][m], KTile::step(q_at, m * 16, k * 2));
#pragma unroll
        for (int k = 0; k < (Q_IN_REGISTERS ? HEAD_DIM_V / 16 : 1); ++k)
          load_matrix_x4(do_kept[k][m], VTile::step(do_at, m * 16, k * 2));
      }
    }
    const WarpQueries queries = all_queries[threadIdx.x / 32];
    const TileMask mask = queries.last < queries.first ? TILE_EMPTY : tile_mask(tile, stream, queries, it);
    if (mask == TILE_EMPTY) continue;

    // Score: S = Q K^T, and dP = dO V^T.
    const u32 k_at = stream.k_slot(stream.slot) + KTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const u32 v_at = stream.v_slot(stream.slot) + VTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#if HAS_BIAS
    float p[ROW_TILES][BLOCK_KV / 8][4], dp[ROW_TILES][BLOCK_KV / 8][4] = {};
    start_scores(p, base, stream.bias_slot(stream.slot) + 2 * t, tile.bias_unit);
#else
    float p[ROW_TILES][BLOCK_KV / 8][4] = {}, dp[ROW_TILES][BLOCK_KV / 8][4] = {};
#endif
    multiply_rows<KTile, HEAD_DIM / 16>(p, q_kept, opaque(q_at), k_at);
    multiply_rows<VTile, HEAD_DIM_V / 16>(dp, do_kept, opaque(do_at), v_at);

    // P = 2^(S - lse), zero where masked.
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n)
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int x = 0; x < 4; ++x) p[m][n][x] = exp2_fast(p[m][n][x] * tile.scale_log2 - lse[m][x / 2]);
    if (mask == TILE_PARTIAL) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) mask_scores(tile, stream, it, warp_row + m * 16, p[m], 0.0f);
    }

    // Accumulate p * dp into the two rows of each lane.
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < BLOCK_KV / 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) dot[m][x / 2] += p[m][n][x] * dp[m][n][x];
  }

  // Store: four lanes hold a row's columns; their sums are added and written as D.
  copy_async_wait<0>();
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    const float sum = quad_sum(dot[r / 2][r % 2]);
    const int row = warp_row + r * 8 + g, query = row_query(tile, row);
    if (t == 0 && query < tile.end_query) stats[(u64)row_head(row) * out.padded_len + query].y = sum;
  }
}
