// attention_backward: the gradients of a block of keys, from every query that sees one of them (arXiv:2307.08691, algorithm 2, keys outermost).
// Used by attention_backward.cu (dense, sliding window) and dma_attention_backward.cu (gathered lists), which document the interface.
// Defines    HEAD_DIM, HEAD_DIM_V; NUM_WARPS (a warp owns 16 keys), BLOCK_Q queries a step (32 or 64); HAS_BIAS; GATHER;
//            COMPUTE_DQ, COMPUTE_DK, COMPUTE_DV: which gradients this launch makes (large heads take two launches, for want of registers)
// Scores are kept transposed, S^T = K Q^T: a warp's P^T and dS^T then are A fragments of dV += P^T dO and dK += dS^T Q as they stand in
// registers. Only dQ = dS K sums over keys, hence over warps: dS^T goes through shared memory, and dQ of a step is made one step later, so
// that one barrier a step is enough.
#pragma once
#include "common/copy_rows.cuh"
#include "common/reduce_add.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef COMPUTE_DQ
#define COMPUTE_DQ 1
#endif
#ifndef COMPUTE_DK
#define COMPUTE_DK 1
#endif
#ifndef COMPUTE_DV
#define COMPUTE_DV 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
#define COMPUTE_DS (COMPUTE_DQ || COMPUTE_DK)

constexpr int BLOCK_KV = NUM_WARPS * 16;
constexpr int QUERY_TILES = BLOCK_Q / 8;
static_assert(BLOCK_Q == 32 || BLOCK_Q == 64, "a row of dS^T is one swizzled line of queries");

using KTile = SwizzledTile<HEAD_DIM>;
using VTile = SwizzledTile<HEAD_DIM_V>;
using DsTile = SwizzledTile<BLOCK_Q>;

// Shared memory, in order.
constexpr int K_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int V_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int Q_BYTES = BLOCK_Q * HEAD_DIM * 2;       // x 2 slots
constexpr int DO_BYTES = BLOCK_Q * HEAD_DIM_V * 2;    // x 2
constexpr int DS_BYTES = COMPUTE_DQ ? BLOCK_KV * BLOCK_Q * 2 : 0;  // x 2
constexpr int STATS_BYTES = BLOCK_Q * 8;              // x 2
constexpr int Q_AT = K_BYTES + V_BYTES;
constexpr int DO_AT = Q_AT + 2 * Q_BYTES;
constexpr int DS_AT = DO_AT + 2 * DO_BYTES;
constexpr int STATS_AT = DS_AT + 2 * DS_BYTES;
constexpr int ENTRIES_AT = STATS_AT + 2 * STATS_BYTES;
constexpr int BIAS_AT = ENTRIES_AT + BLOCK_KV * 8;
constexpr int BACKWARD_SHARED_BYTES = BIAS_AT + (HAS_BIAS ? BLOCK_KV * 4 : 0);

// How the warps share out a dQ tile of BLOCK_Q x HEAD_DIM: DQ_COLUMN_WARPS x DQ_ROW_WARPS of them, the others rest.
constexpr int DQ_COLUMN_WARPS = HEAD_DIM % 64 == 0 && NUM_WARPS >= 8 ? 4 : HEAD_DIM % 32 == 0 ? 2 : 1;
constexpr int DQ_ROW_WARPS = min_int(NUM_WARPS / DQ_COLUMN_WARPS, BLOCK_Q / 16);
constexpr int DQ_ROW_TILES = BLOCK_Q / DQ_ROW_WARPS / 16;
constexpr int DQ_COLUMN_TILES = HEAD_DIM / DQ_COLUMN_WARPS / 8;
static_assert(DQ_COLUMN_TILES % 2 == 0 && DQ_ROW_TILES >= 1, "fragments are loaded for 16 rows and 16 columns at a time");

struct BackwardBlock {
  const bf16* q;         // at the batch row and the KV head's first query head
  u32 q_stride;          // elements from token to token
  const bf16* d_out;     // as q; [seq_len, num_heads, HEAD_DIM_V]
  const float2* stats;   // as q: [heads, padded_len] {lse * log2(e) or +inf, rowsum(do * o)}
  float* dq_sum;         // as q: [heads, dq_len] x HEAD_DIM, in fragment order
  int num_heads, group_size, seq_len, padded_len;
  int dq_first, dq_len;  // the queries dq_sum holds
  int first_tile, num_tiles;  // query tiles (of BLOCK_Q positions) seen by a key of the block
  float scale_log2;
};

// The keys of a warp at a glance: their smallest and largest {position, expire}.
struct KeyRange {
  int lowest, highest, first_expire, last_expire;
};

// Over `count` (16 .. BLOCK_KV) entries; fillers (expire 0) count for the smallest expire only.
DEVICE KeyRange key_range(const int2* entries, int count) {
  KeyRange range = {0x7fffffff, -1, 0x7fffffff, 0};
  for (int at = (int)threadIdx.x % 32; at < count; at += 32) {
    int2 entry = entries[at];
    if (entry.y > 0) range.lowest = min(range.lowest, entry.x);
    range.highest = max(range.highest, entry.x);
    range.first_expire = min(range.first_expire, entry.y);
    range.last_expire = max(range.last_expire, entry.y);
  }
  range.lowest = __reduce_min_sync(~0u, range.lowest);
  range.highest = __reduce_max_sync(~0u, range.highest);
  range.first_expire = __reduce_min_sync(~0u, range.first_expire);
  range.last_expire = __reduce_max_sync(~0u, range.last_expire);
  return range;
}

// Asks for a step's queries, output gradients and row statistics.
DEVICE void load_queries(const BackwardBlock& block, u32 shared, int slot, int head, int query_tile) {
  copy_rows<HEAD_DIM, BLOCK_Q>(shared + Q_AT + slot * Q_BYTES, block.q + head * HEAD_DIM, block.q_stride, query_tile * BLOCK_Q, block.seq_len);
  copy_rows<HEAD_DIM_V, BLOCK_Q>(shared + DO_AT + slot * DO_BYTES, block.d_out + head * HEAD_DIM_V, (u32)block.num_heads * HEAD_DIM_V,
                                 query_tile * BLOCK_Q, block.seq_len);
  if (threadIdx.x < BLOCK_Q / 2)
    copy_async_16(shared + STATS_AT + slot * STATS_BYTES + threadIdx.x * 16,
                  block.stats + (u64)head * block.padded_len + query_tile * BLOCK_Q + threadIdx.x * 2, 16);
}

#if COMPUTE_DQ
// dQ += dS K of one step, from dS^T in shared memory; added to the f32 sums as 16 x 8 fragments of 512 contiguous bytes.
DEVICE void add_dq(const BackwardBlock& block, u32 shared, int slot, int head, int query_tile) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  if (warp >= DQ_COLUMN_WARPS * DQ_ROW_WARPS) return;
  const int row = warp / DQ_COLUMN_WARPS * DQ_ROW_TILES, column = warp % DQ_COLUMN_WARPS * DQ_COLUMN_TILES;  // in 16s, in 8s
  const u32 ds_at = opaque(shared + DS_AT + slot * DS_BYTES + DsTile::offset(lane % 8 + lane / 16 * 8, row * 2 + lane / 8 % 2));
  float dq[DQ_ROW_TILES][DQ_COLUMN_TILES][4] = {};
  u32 k_at[DQ_COLUMN_TILES / 2];  // the columns of a warp need not begin at a power of two, so each pair has its own address
#pragma unroll
  for (int n = 0; n < DQ_COLUMN_TILES / 2; ++n) k_at[n] = opaque(shared + KTile::offset(lane % 16, column + n * 2 + lane / 16));
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step) {
    u32 a[DQ_ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < DQ_ROW_TILES; ++m) load_matrix_x4_transposed(a[m], DsTile::step(ds_at, step * 16, m * 2));
#pragma unroll
    for (int n = 0; n < DQ_COLUMN_TILES / 2; ++n) {
      u32 b[4];
      load_matrix_x4_transposed(b, k_at[n] + step * 16 * KTile::ROW_BYTES);
#pragma unroll
      for (int m = 0; m < DQ_ROW_TILES; ++m) {
        mma_bf16(dq[m][2 * n], a[m], b[0], b[1]);
        mma_bf16(dq[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
  const int first_row = (query_tile * BLOCK_Q - block.dq_first) / 16 + row;
  float* to = block.dq_sum + (((u64)head * (block.dq_len / 16) + first_row) * (HEAD_DIM / 8) + column) * 128 + lane * 4;
#pragma unroll
  for (int m = 0; m < DQ_ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < DQ_COLUMN_TILES; ++n)
      reduce_add_f32x4(to + (m * (HEAD_DIM / 8) + n) * 128, dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
}
#endif

// Gradients of the warp's 16 keys, summed over heads and queries; dk still lacks the softmax scale. Expects K, V (and the bias) on their
// way or there, and the entries {position, expire} in shared memory behind a barrier.
struct KeyGradients {
#if COMPUTE_DK
  float dk[HEAD_DIM / 8][4];
#endif
#if COMPUTE_DV
  float dv[HEAD_DIM_V / 8][4];
#endif
  float ddelta[2];  // rows g and g + 8; partial sums of a lane
};

DEVICE void attention_backward_block(const BackwardBlock& block, unsigned char* memory, KeyGradients& sums) {
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 shared = shared_address(memory);
  const int2* entries = (const int2*)(memory + ENTRIES_AT) + warp * 16;
  const KeyRange keys = key_range(entries, 16);

  // Lane parts of the fragment addresses: A, and B transposed, by rows; B by columns.
  const u32 k_rows = KTile::offset(lane % 16, lane / 16), v_rows = VTile::offset(lane % 16, lane / 16);
  const u32 q_columns = KTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  u32 k_at = shared + warp * 16 * KTile::ROW_BYTES + k_rows;
#if COMPUTE_DS
  const u32 do_columns = VTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  u32 v_at = shared + K_BYTES + warp * 16 * VTile::ROW_BYTES + v_rows;
#endif

#if COMPUTE_DK
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) sums.dk[n][x] = 0.0f;
#endif
#if COMPUTE_DV
#pragma unroll
  for (int n = 0; n < HEAD_DIM_V / 8; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) sums.dv[n][x] = 0.0f;
#endif
  sums.ddelta[0] = sums.ddelta[1] = 0.0f;

  // Steps go through the query tiles of one head after the other.
  const int num_steps = block.num_tiles * block.group_size;
  int head = 0, tile = 0;
#if COMPUTE_DQ
  int last_head = 0, last_tile = 0;
#endif
  if (num_steps > 0) load_queries(block, shared, 0, 0, block.first_tile);
  copy_async_commit();

  for (int step = 0; step < num_steps; ++step) {
    const int slot = step & 1, first_query = (block.first_tile + tile) * BLOCK_Q;
    int next_tile = tile + 1, next_head = head;
    if (next_tile == block.num_tiles) next_tile = 0, ++next_head;

    copy_async_wait<0>();
    __syncthreads();  // this step's rows and the last step's dS^T are here for every thread; the other slot is no longer read
    if (step + 1 < num_steps) load_queries(block, shared, slot ^ 1, next_head, block.first_tile + next_tile);
    copy_async_commit();
#if COMPUTE_DQ
    if (step > 0) add_dq(block, shared, slot ^ 1, last_head, block.first_tile + last_tile);
    last_head = head;
    last_tile = tile;
#endif
    head = next_head;
    tile = next_tile;

#if COMPUTE_DQ
    const u32 ds_lane = shared + DS_AT + slot * DS_BYTES + warp * 16 * DsTile::ROW_BYTES;
#endif
    if (first_query + BLOCK_Q <= keys.lowest || first_query >= keys.last_expire) {  // no query of the step sees a key of the warp
#if COMPUTE_DQ
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n) {
        store_shared_32(ds_lane + DsTile::offset(g, n) + t * 4, 0);
        store_shared_32(ds_lane + DsTile::offset(g + 8, n) + t * 4, 0);
      }
#endif
      continue;
    }
    const u32 q_tile = shared + Q_AT + slot * Q_BYTES, do_tile = shared + DO_AT + slot * DO_BYTES;
    const float4* stats = (const float4*)(memory + STATS_AT + slot * STATS_BYTES) + t;  // of queries 2t, 2t + 1

    // Score: S^T = K Q^T, then P^T = 2^(S^T - lse).
    float p[QUERY_TILES][4] = {};
    k_at = opaque(k_at);
    const u32 q_at = opaque(q_tile + q_columns);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      u32 a[4];
      load_matrix_x4(a, KTile::step(k_at, 0, k * 2));
#pragma unroll
      for (int n = 0; n < QUERY_TILES / 2; ++n) {
        u32 b[4];
        load_matrix_x4(b, KTile::step(q_at, n * 16, k * 2));
        mma_bf16(p[2 * n], a, b[0], b[1]);
        mma_bf16(p[2 * n + 1], a, b[2], b[3]);
      }
    }
    {
#if HAS_BIAS
      const float* bias = (const float*)(memory + BIAS_AT) + warp * 16 + g;
      const float row_bias[2] = {bias[0] * LOG2_E, bias[8] * LOG2_E};
#else
      const float row_bias[2] = {0.0f, 0.0f};
#endif
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n) {
        const float4 stat = stats[n * 4];
#pragma unroll
        for (int x = 0; x < 4; ++x) p[n][x] = exp2_fast(p[n][x] * block.scale_log2 + (row_bias[x / 2] - (x % 2 ? stat.z : stat.x)));
      }
    }
    // Mask: only where some query of the step sees a key of the warp in part.
    if (first_query < keys.highest || first_query + BLOCK_Q > keys.first_expire) {
      const int2 low = entries[g], high = entries[g + 8];
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int i = first_query + n * 8 + 2 * t + x % 2;
          const bool active = x < 2 ? low.x <= i && i < low.y : high.x <= i && i < high.y;
          if (!active) p[n][x] = 0.0f;
        }
    }

#if COMPUTE_DV
    // dV += P^T dO.
    const u32 do_transposed = opaque(do_tile + v_rows);
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k) {
      const u32 a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                        pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]), pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < HEAD_DIM_V / 16; ++n) {
        u32 b[4];
        load_matrix_x4_transposed(b, VTile::step(do_transposed, k * 16, n * 2));
        mma_bf16(sums.dv[2 * n], a, b[0], b[1]);
        mma_bf16(sums.dv[2 * n + 1], a, b[2], b[3]);
      }
    }
#endif

#if COMPUTE_DS
    // dP^T = V dO^T, then dS^T = P^T (dP^T - rowsum(do * o)).
    float ds[QUERY_TILES][4] = {};
    v_at = opaque(v_at);
    const u32 do_at = opaque(do_tile + do_columns);
#pragma unroll
    for (int k = 0; k < HEAD_DIM_V / 16; ++k) {
      u32 a[4];
      load_matrix_x4(a, VTile::step(v_at, 0, k * 2));
#pragma unroll
      for (int n = 0; n < QUERY_TILES / 2; ++n) {
        u32 b[4];
        load_matrix_x4(b, VTile::step(do_at, n * 16, k * 2));
        mma_bf16(ds[2 * n], a, b[0], b[1]);
        mma_bf16(ds[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
      const float4 stat = stats[n * 4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        ds[n][x] = p[n][x] * (ds[n][x] - (x % 2 ? stat.w : stat.y));
        sums.ddelta[x / 2] += ds[n][x];
      }
    }

    // dK += dS^T Q; dS^T to shared memory for dQ.
#if COMPUTE_DK
    const u32 q_transposed = opaque(q_tile + k_rows);
#endif
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k) {
      const u32 a[4] = {pack_bf16(ds[2 * k][0], ds[2 * k][1]), pack_bf16(ds[2 * k][2], ds[2 * k][3]),
                        pack_bf16(ds[2 * k + 1][0], ds[2 * k + 1][1]), pack_bf16(ds[2 * k + 1][2], ds[2 * k + 1][3])};
#if COMPUTE_DQ
#pragma unroll
      for (int x = 0; x < 4; ++x) store_shared_32(ds_lane + DsTile::offset(g + x % 2 * 8, 2 * k + x / 2) + t * 4, a[x]);
#endif
#if COMPUTE_DK
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        u32 b[4];
        load_matrix_x4_transposed(b, KTile::step(q_transposed, k * 16, n * 2));
        mma_bf16(sums.dk[2 * n], a, b[0], b[1]);
        mma_bf16(sums.dk[2 * n + 1], a, b[2], b[3]);
      }
#endif
    }
#endif
  }
  copy_async_wait<0>();
  __syncthreads();  // the last dS^T is complete
#if COMPUTE_DQ
  if (num_steps > 0) add_dq(block, shared, (num_steps - 1) & 1, last_head, block.first_tile + last_tile);
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sums.ddelta[h] += __shfl_xor_sync(~0u, sums.ddelta[h], 1);
    sums.ddelta[h] += __shfl_xor_sync(~0u, sums.ddelta[h], 2);
  }
}
