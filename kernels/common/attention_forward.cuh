// attention_forward: one tile of queries against the keys it sees, with the softmax kept online (arXiv:2205.14135,
// arXiv:2307.08691).
// Used by attention_forward.cu (dense, sliding window) and dma_attention_forward.cu (gathered lists), which document
// the interface.
// Defines    HEAD_DIM, HEAD_DIM_V; WARP_ROWS rows a warp (16 or 32), NUM_WARPS, BLOCK_KV keys a tile, NUM_STAGES,
//            MIN_BLOCKS per SM;
//            HEADS_PER_TILE query heads of a group share a tile; Q_IN_REGISTERS; HAS_BIAS; GATHER
#pragma once
#include "common/block_lse.cuh"
#include "common/quad.cuh"
#include "common/query_tile.cuh"

constexpr int KEY_TILES = BLOCK_KV / 8;
constexpr int VALUE_TILES = HEAD_DIM_V / 8;
constexpr int RING_AT = BLOCK_Q * HEAD_DIM * 2;  // after the queries
static_assert(RING_AT + KV_STREAM_BYTES <= 227 * 1024,
              "no device gives a block more shared memory; the caller checks its own limit");
static_assert(HEAD_DIM_V <= HEAD_DIM, "the output tile is staged where the queries were");

// The online softmax keeps its reference maximum until a row outgrows it by this many powers of two; exp2 then stays
// below 2^8.
constexpr float RESCALE_AT = 8.0f;
// The maximum of a row that has seen no key: finite, so that no infinity is subtracted from another. With a bias it
// exceeds the scores of masked keys (about -2^60), whose exponents would else be rounding errors of that magnitude; it
// stays below a row's largest logit, which is at least the q . k of the key with the largest bias.
constexpr float NO_MAXIMUM = HAS_BIAS ? -16777216.0f : -3.0e38f;

struct ForwardOutput {
  bf16* o;     // [batch, seq_len, num_heads, HEAD_DIM_V]
  float* lse;  // [batch, num_heads, seq_len]
#if BLOCK_LSE
  BlockLse block_lse;
#endif
};

// Computes and stores attention of the block's tile of queries, whose keys come from `stream`; a warp has WARP_ROWS
// rows. Every thread of the block calls it; `memory` is the block's shared memory.
DEVICE void attention_forward_tile(const QueryTile& tile, const ForwardOutput& out, KvStream& stream,
                                   unsigned char* q_memory) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int warp_row = warp * WARP_ROWS;
  const u32 q_shared = shared_address(q_memory);

  copy_query_rows<HEAD_DIM>(tile, q_shared, tile.q, tile.q_stride);
  stream.start();

  __shared__ WarpQueries all_queries[NUM_WARPS];
  if (lane == 0) all_queries[threadIdx.x / 32] = warp_queries(tile, warp_row);  // read after the first tile's barrier

  const u32 q_lane = q_shared + (u32)warp_row * KTile::ROW_BYTES;

  float output[ROW_TILES][VALUE_TILES][4] = {};
  float maximum[ROW_TILES][2], total[ROW_TILES][2];
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    maximum[r / 2][r % 2] = NO_MAXIMUM;
    total[r / 2][r % 2] = 0.0f;
  }
#if HAS_BIAS
  float base[ROW_TILES][2];
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) base[r / 2][r % 2] = row_base(tile, row_query(tile, warp_row + r * 8 + g));
#endif
#if Q_IN_REGISTERS
  u32 q_fragments[HEAD_DIM / 16][ROW_TILES][4];
#endif

  for (int it = 0; it < stream.num_tiles; ++it) {
    stream.advance(it);
#if Q_IN_REGISTERS
    if (it == 0) {
      const u32 q_rows = q_lane + KTile::offset(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) load_matrix_x4(q_fragments[step][m], KTile::step(q_rows, m * 16, step * 2));
    }
#endif
    const WarpQueries queries = all_queries[threadIdx.x / 32];
    const TileMask mask = queries.last < queries.first ? TILE_EMPTY : tile_mask(tile, stream, queries, it);
    if (mask == TILE_EMPTY) continue;

    // Score: S = Q K^T.
#if HAS_BIAS
    float score[ROW_TILES][KEY_TILES][4];
    start_scores(score, base, stream.bias_slot(stream.slot) + 2 * (lane % 4), tile.bias_unit);
#else
    float score[ROW_TILES][KEY_TILES][4] = {};
#endif
    // Fragment addresses: A and transposed B rows go by lane % 16, B rows by the 8-lane groups (0, 0, 1, 1). Per-lane
    // offsets are recomputed from an opaque thread index: held in registers they would spill.
    const int thread = (int)opaque(threadIdx.x), lane = thread % 32;
    const u32 k_at = stream.k_slot(stream.slot) + KTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#if !Q_IN_REGISTERS
    const u32 q_rows =
        q_shared + (u32)(thread / 32 * WARP_ROWS) * KTile::ROW_BYTES + KTile::offset(lane % 16, lane / 16);
#endif
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#if Q_IN_REGISTERS
#pragma unroll
        for (int x = 0; x < 4; ++x) a[m][x] = q_fragments[step][m][x];
#else
        load_matrix_x4(a[m], KTile::step(q_rows, m * 16, step * 2));
#endif
      }
#pragma unroll
      for (int n = 0; n < KEY_TILES / 2; ++n) {
        u32 b[4];
        load_matrix_x4(b, KTile::step(k_at, n * 16, step * 2));
        mma_columns(score, a, 2 * n, b);
      }
    }

    const float logit_scale = tile.scale_log2;  // applied in the multiply-add of the exponent

    // Mask: needed only in tiles that some query of the warp sees partly.
    if (mask == TILE_PARTIAL) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) mask_scores(tile, stream, it, warp_row + m * 16, score[m], -INFINITY_F32);
    }

#if BLOCK_LSE
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const int row = warp_row + m * 16 + g;
      const BlockLseRows rows =
          block_lse_rows(out.block_lse, tile.head, row_query(tile, row), row_query(tile, row + 8), tile.end_query);
      rows.store((const float(&)[4 * KEY_TILES])score[m], it * BLOCK_KV, logit_scale);
    }
#endif

    // Reference maximum: moved only when some row of the warp outgrows it, so that the output is seldom rescaled.
    float tile_maximum[ROW_TILES][2];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < 2 * ROW_TILES; ++r) {
      const int m = r / 2, h = r % 2;
      float largest = fmaxf(score[m][0][2 * h], score[m][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < KEY_TILES; ++n) largest = fmaxf(largest, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
      tile_maximum[m][h] = quad_max(largest) * logit_scale;
      outgrown |= tile_maximum[m][h] > maximum[m][h] + RESCALE_AT;
    }
    if (__any_sync(~0u, outgrown)) {
#pragma unroll
      for (int r = 0; r < 2 * ROW_TILES; ++r) {
        const int m = r / 2, h = r % 2;
        float larger = fmaxf(maximum[m][h], tile_maximum[m][h]);
        float factor = exp2_fast(maximum[m][h] - larger);
        maximum[m][h] = larger;
        total[m][h] *= factor;
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
          output[m][n][2 * h] *= factor;
          output[m][n][2 * h + 1] *= factor;
        }
      }
    }

    // P = 2^(S - maximum), O += P V, 16 keys a step. A step's exponentials overlap the MMAs of the step before.
    const u32 v_at = stream.v_slot(stream.slot) + VTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < BLOCK_KV / 16; ++step) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            score[m][n][x] = exp2_fast(score[m][n][x] * logit_scale - maximum[m][x / 2]);
            total[m][x / 2] += score[m][n][x];
          }
        pack_fragment(a[m], score[m][2 * step], score[m][2 * step + 1]);
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES / 2; ++n) {
        u32 b[4];
        load_matrix_x4_transposed(b, VTile::step(v_at, step * 16, n * 2));
        mma_columns(output, a, 2 * n, b);
      }
    }
  }

  // Store, through this warp's part of the query tile, so that a quad stores whole lines in 16-byte accesses.
  copy_async_wait<0>();  // without any tile the copies of the queries may still be in flight
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    const int m = r / 2, h = r % 2;
    const float sum = quad_sum(total[m][h]);
    // A row that sees nothing has sum 0: its output is 0 and its log-sum-exp -inf. A NaN stays NaN.
    float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
    const int row = m * 16 + h * 8 + g;
    const int query = row_query(tile, warp_row + row);
    if (t == 0 && query < tile.end_query)
      out.lse[((u64)tile.batch * tile.num_heads + tile.head + row_head(warp_row + row)) * tile.seq_len + query] =
          sum != 0.0f ? maximum[m][h] * LN_2 + logf(sum) : -INFINITY_F32;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; ++n)
      store_shared_32(q_lane + VTile::offset(row, n) + t * 4,
                      pack_bf16(output[m][n][2 * h] * inverse, output[m][n][2 * h + 1] * inverse));
  }
  __syncwarp();
#pragma unroll
  for (int at = lane; at < WARP_ROWS * HEAD_DIM_V / 8; at += 32) {
    const int row = at / (HEAD_DIM_V / 8), chunk = at % (HEAD_DIM_V / 8);
    const int query = row_query(tile, warp_row + row);
    if (query < tile.end_query)
      *(uint4*)(out.o +
                (((u64)tile.batch * tile.seq_len + query) * tile.num_heads + tile.head + row_head(warp_row + row)) *
                    HEAD_DIM_V +
                chunk * 8) = load_shared_128(q_lane + VTile::offset(row, chunk));
  }
}
