// attention_backward_query: dq of one tile of queries, summed over the keys it sees in the order of its stream: no
// atomics.
// Used by attention_backward_query.cu and dma_attention_backward_query.cu, which document the interface.
// Defines    HEAD_DIM, HEAD_DIM_V; NUM_WARPS (a warp owns 16 rows), BLOCK_KV, NUM_STAGES, MIN_BLOCKS; HEADS_PER_TILE;
//            HAS_BIAS; GATHER
#pragma once
#include "common/query_tile.cuh"

struct BackwardQueries {
  const bf16* d_out;    // [batch, seq_len, num_heads, HEAD_DIM_V]
  const float2* stats;  // [batch, num_heads, padded_len] {lse * log2(e) or +inf, D}
  bf16* dq;             // at the batch row and the tile's first head
  u64 dq_stride;        // elements from token to token
  int padded_len;
  float softmax_scale;
};

constexpr int RING_AT = BLOCK_Q * (HEAD_DIM + HEAD_DIM_V) * 2;  // behind queries and output gradients
static_assert(RING_AT + KV_STREAM_BYTES <= 227 * 1024,
              "no device gives a block more shared memory");
static_assert(WARP_ROWS == 16, "one row tile a warp: scores and their gradients are in registers at the same time");

// Takes the tensors and params of the launch, with dq at the tile's batch row and first head.
template <class Params>
DEVICE BackwardQueries backward_queries(const bf16* d_out, const float2* row_stats, bf16* dq, const Params& params,
                                        const QueryTile& tile) {
  BackwardQueries back;
  back.d_out = d_out;
  back.stats = row_stats;
  back.dq = dq + params.dq_offset + tile.batch * params.dq_batch_stride + (u64)tile.head * HEAD_DIM;
  back.dq_stride = params.dq_token_stride;
  back.padded_len = (int)params.padded_len;
  back.softmax_scale = f32_word(params.softmax_scale);
  return back;
}

// Computes and stores dq of the block's tile of queries, whose keys come from `stream`; a warp has 16 rows. Every
// thread of the block calls it; `memory` is the block's shared memory.
DEVICE void attention_backward_query_tile(const QueryTile& tile, const BackwardQueries& back, KvStream& stream,
                                          unsigned char* memory) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int warp_row = warp * 16;
  const u32 q_lane = shared_address(memory) + warp_row * KTile::ROW_BYTES;
  const u32 do_lane = shared_address(memory) + BLOCK_Q * HEAD_DIM * 2 + warp_row * VTile::ROW_BYTES;

  copy_query_rows<HEAD_DIM>(tile, shared_address(memory), tile.q, tile.q_stride);
  copy_gradient_rows(tile, shared_address(memory) + BLOCK_Q * HEAD_DIM * 2, back.d_out);
  stream.start();

  const WarpQueries queries = warp_queries(tile, warp_row);
  float lse[2], dot[2];
#if HAS_BIAS
  float base[1][2];
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + h * 8 + g, query = row_query(tile, row);
    float2 stat = {INFINITY_F32, 0.0f};
    if (query < tile.end_query)
      stat = back.stats[((u64)tile.batch * tile.num_heads + tile.head + row_head(row)) * back.padded_len + query];
    lse[h] = stat.x;
    dot[h] = stat.y;
#if HAS_BIAS
    base[0][h] = row_base(tile, query);
#endif
  }
  const u32 k_rows = KTile::offset(lane % 16, lane / 16);
  const u32 k_columns = KTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2),
            v_columns = VTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  u32 q_at = q_lane + k_rows, do_at = do_lane + VTile::offset(lane % 16, lane / 16);
  float dq[1][HEAD_DIM / 8][4] = {};

  for (int it = 0; it < stream.num_tiles; ++it) {
    stream.advance(it);
    const TileMask mask = queries.last < queries.first ? TILE_EMPTY : tile_mask(tile, stream, queries, it);
    if (mask == TILE_EMPTY) continue;
    const u32 k_at = stream.k_slot(stream.slot) + k_columns, v_at = stream.v_slot(stream.slot) + v_columns;
    q_at = opaque(q_at);
    do_at = opaque(do_at);

    // Score: S = Q K^T, and dP = dO V^T.
    float p[1][BLOCK_KV / 8][4] = {}, ds[1][BLOCK_KV / 8][4] = {};
#if HAS_BIAS
    start_scores(p, base, stream.bias_slot(stream.slot) + 2 * t, tile.bias_unit);
#endif
    multiply_rows<KTile>(p, q_at, k_at);
    multiply_rows<VTile>(ds, do_at, v_at);

    // P, zero where masked; dS = P (dP - rowsum(do * o)).
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) p[0][n][x] = exp2_fast(p[0][n][x] * tile.scale_log2 - lse[x / 2]);
    if (mask == TILE_PARTIAL) mask_scores(tile, stream, it, warp_row, p[0], 0.0f);
#pragma unroll
    for (int n = 0; n < BLOCK_KV / 8; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) ds[0][n][x] = p[0][n][x] * (ds[0][n][x] - dot[x / 2]);

    // dQ += dS K.
    const u32 k_transposed = stream.k_slot(stream.slot) + k_rows;
#pragma unroll
    for (int k = 0; k < BLOCK_KV / 16; ++k) {
      u32 a[1][4];
      pack_fragment(a[0], ds[0][2 * k], ds[0][2 * k + 1]);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        u32 b[4];
        load_matrix_x4_transposed(b, KTile::step(k_transposed, k * 16, n));
        mma_columns(dq, a, n, b);
      }
    }
  }

  copy_async_wait<0>();
  // Store through the warp's own query rows.
  __syncthreads();  // with no tile at all the queries may still be on their way there
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store_shared_32(q_lane + KTile::offset(h * 8 + g, n) + t * 4,
                      pack_bf16(dq[0][n][2 * h] * back.softmax_scale, dq[0][n][2 * h + 1] * back.softmax_scale));
  __syncwarp();
#pragma unroll
  for (int at = lane; at < HEAD_DIM * 2; at += 32) {
    const int row = at / (HEAD_DIM / 8), chunk = at % (HEAD_DIM / 8), query = row_query(tile, warp_row + row);
    if (query < tile.end_query)
      *(uint4*)(back.dq + (u64)query * back.dq_stride + row_head(warp_row + row) * HEAD_DIM + chunk * 8) =
          load_shared_128(q_lane + KTile::offset(row, chunk));
  }
}
