// kv_stream: brings the keys and values that a tile of queries sees into shared memory, tile by tile, contiguous or gathered by a list.
// Defines    HEAD_DIM, HEAD_DIM_V, BLOCK_KV keys a tile, NUM_WARPS, NUM_STAGES (2 or more tiles in flight or in use), HAS_BIAS, GATHER
// A ring of NUM_STAGES slots holds K and V (swizzled rows) and, with HAS_BIAS, the keys' delta. With GATHER a second ring holds the
// list entries {key, expire}; they must be here before the rows they name can be asked for, so they run NUM_STAGES - 1 tiles further ahead.
#pragma once
#include "common/async_copy.cuh"
#include "common/mma.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
#ifndef NUM_STAGES
#define NUM_STAGES 2
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
static_assert(BLOCK_KV % 16 == 0, "P x V takes 16 keys a step");
static_assert(NUM_STAGES >= 2, "one tile is used while the next one arrives");

constexpr int THREADS = NUM_WARPS * 32;
constexpr int K_TILE_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int V_TILE_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int KV_STAGE_BYTES = K_TILE_BYTES + V_TILE_BYTES;
constexpr int ENTRY_LEAD = 2 * (NUM_STAGES - 1);                  // tiles between asking for entries and using their rows' scores
constexpr int ENTRY_SLOTS = NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16;  // a power of two above ENTRY_LEAD
constexpr int BIAS_BYTES = HAS_BIAS ? NUM_STAGES * BLOCK_KV * 4 : 0;
constexpr int ENTRY_BYTES = GATHER ? ENTRY_SLOTS * BLOCK_KV * 8 : 0;
constexpr int KV_STREAM_BYTES = NUM_STAGES * KV_STAGE_BYTES + BIAS_BYTES + ENTRY_BYTES;
using KTile = SwizzledTile<HEAD_DIM>;
using VTile = SwizzledTile<HEAD_DIM_V>;

// Where a thread copies: row after row of one chunk when that comes out even, else chunk after chunk of the whole tile.
template <int ROW, int ROWS>
struct CopyPlan {
  static constexpr int CHUNKS = ROW / 8, TOTAL = ROWS * CHUNKS;
  static constexpr bool EVEN = THREADS % CHUNKS == 0 && TOTAL % THREADS == 0 && THREADS / CHUNKS % 8 == 0;
  static constexpr int PASSES = ceil_div(TOTAL, THREADS), PASS_ROWS = THREADS / CHUNKS;
};

// Asks for ROWS rows of ROW elements; row r comes from base + (first + r) * stride, rows at or past `limit` arrive as zeros.
template <int ROW, int ROWS>
DEVICE void copy_rows(u32 shared, const bf16* base, u32 stride, int first, int limit) {
  using Plan = CopyPlan<ROW, ROWS>;
  if constexpr (Plan::EVEN) {
    const int row = (int)threadIdx.x / Plan::CHUNKS, chunk = (int)threadIdx.x % Plan::CHUNKS;
    const void* from = base + (u64)(u32)(first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < Plan::PASSES; ++i) {
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk) + i * Plan::PASS_ROWS * ROW * 2, from,
                    first + row + i * Plan::PASS_ROWS < limit ? 16 : 0);
      from = opaque((const bf16*)from + Plan::PASS_ROWS * stride);
    }
  } else {
#pragma unroll 4
    for (int at = (int)threadIdx.x; at < Plan::TOTAL; at += THREADS) {
      const int row = at / Plan::CHUNKS, chunk = at % Plan::CHUNKS;
      const bf16* from = base + (u64)(u32)(first + row) * stride + chunk * 8;
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk), from, first + row < limit ? 16 : 0);
    }
  }
}

// As copy_rows, with the row numbers taken from list entries in shared memory; an entry that expires at 0 is filler and gives zeros.
template <int ROW, int ROWS>
DEVICE void gather_rows(u32 shared, const bf16* base, u32 stride, const int2* entries) {
  using Plan = CopyPlan<ROW, ROWS>;
  if constexpr (Plan::EVEN) {
    const int row = (int)threadIdx.x / Plan::CHUNKS, chunk = (int)threadIdx.x % Plan::CHUNKS;
#pragma unroll
    for (int i = 0; i < Plan::PASSES; ++i) {
      const int2 entry = entries[row + i * Plan::PASS_ROWS];
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk) + i * Plan::PASS_ROWS * ROW * 2,
                    base + (u64)(u32)entry.x * stride + chunk * 8, entry.y > 0 ? 16 : 0);
    }
  } else {
#pragma unroll 4
    for (int at = (int)threadIdx.x; at < Plan::TOTAL; at += THREADS) {
      const int row = at / Plan::CHUNKS, chunk = at % Plan::CHUNKS;
      const int2 entry = entries[row];
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk), base + (u64)(u32)entry.x * stride + chunk * 8, entry.y > 0 ? 16 : 0);
    }
  }
}

// What a tile of queries streams. The pointers stand at the batch row and the KV head.
struct KvStream {
  const bf16* k;
  const bf16* v;
  u32 k_stride, v_stride;  // elements from token to token
  const float* delta;      // [seq_len] of the KV head (HAS_BIAS)
  const int2* list;        // the query tile's window of the list (GATHER)
  int num_keys;            // seq_len, or with GATHER the window's length
  int num_tiles;
  int last_tile;           // dense: tiles are visited from this one (by key / BLOCK_KV) downwards
  unsigned char* ring;     // shared memory, KV_STREAM_BYTES

  DEVICE u32 k_slot(int it) const { return shared_address(ring) + (u32)(it % NUM_STAGES) * KV_STAGE_BYTES; }
  DEVICE u32 v_slot(int it) const { return k_slot(it) + K_TILE_BYTES; }
  DEVICE float* bias_slot(int it) const { return (float*)(ring + NUM_STAGES * KV_STAGE_BYTES) + (it % NUM_STAGES) * BLOCK_KV; }
  DEVICE int2* entry_slot(int it) const {
    return (int2*)(ring + NUM_STAGES * KV_STAGE_BYTES + BIAS_BYTES) + (it & (ENTRY_SLOTS - 1)) * BLOCK_KV;
  }
  // Dense: the first key of the it-th tile visited.
  DEVICE int first_key(int it) const { return (last_tile - it) * BLOCK_KV; }

  // Asks for the entries of tile `it`; entries past the window arrive as {0, 0}, which no query sees.
  DEVICE void load_entries(int it) const {
#if GATHER
    if (it < num_tiles) {
#pragma unroll
      for (int row = (int)threadIdx.x; row < BLOCK_KV; row += THREADS) {
        int at = it * BLOCK_KV + row;
        copy_async_8(shared_address(entry_slot(it) + row), list + at, at < num_keys ? 8 : 0);
      }
    }
#endif
  }

  // Asks for the rows of tile `it`, whose entries must have arrived.
  DEVICE void load_rows(int it) const {
    if (it >= num_tiles) return;
#if GATHER
    const int2* entries = entry_slot(it);
    gather_rows<HEAD_DIM, BLOCK_KV>(k_slot(it), k, k_stride, entries);
    gather_rows<HEAD_DIM_V, BLOCK_KV>(v_slot(it), v, v_stride, entries);
#else
    copy_rows<HEAD_DIM, BLOCK_KV>(k_slot(it), k, k_stride, first_key(it), num_keys);
    copy_rows<HEAD_DIM_V, BLOCK_KV>(v_slot(it), v, v_stride, first_key(it), num_keys);
#endif
#if HAS_BIAS
#pragma unroll
    for (int row = (int)threadIdx.x; row < BLOCK_KV; row += THREADS) {
#if GATHER
      int2 entry = entries[row];
      copy_async_4(shared_address(bias_slot(it) + row), delta + entry.x, entry.y > 0 ? 4 : 0);
#else
      int key = first_key(it) + row;
      copy_async_4(shared_address(bias_slot(it) + row), delta + key, key < num_keys ? 4 : 0);
#endif
    }
#endif
  }

  // Fills the pipeline. The caller's own copies made before join the first group.
  DEVICE void start() const {
#if GATHER
    for (int it = 0; it < ENTRY_LEAD; ++it) load_entries(it);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // every thread needs entries that others have copied
#endif
#pragma unroll
    for (int it = 0; it < NUM_STAGES - 1; ++it) {
      load_rows(it);
      copy_async_commit();
    }
  }

  // Waits for tile `it` and asks for the tile that will take the slot freed by the barrier.
  DEVICE void advance(int it) const {
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();  // tile `it` is here for every thread, and nobody reads tile it - 1 any more
    load_rows(it + NUM_STAGES - 1);
    load_entries(it + ENTRY_LEAD);
    copy_async_commit();
  }
};

// Which queries see which keys. One object per warp and query tile; `first` and `last` are the warp's queries.
struct WarpQueries {
  int first, last;           // positions
  int lowest_first, lowest_last;  // dense: the lowest key seen by the first and by the last query
};

enum TileMask { TILE_EMPTY, TILE_FULL, TILE_PARTIAL };

// Whether the warp's queries see none, all or some of the keys of tile `it`.
DEVICE TileMask tile_mask(const KvStream& stream, const WarpQueries& queries, int it) {
#if GATHER
  const int2* entries = stream.entry_slot(it);
  bool some = false, all = true;
#pragma unroll
  for (int row = (int)threadIdx.x % 32; row < BLOCK_KV; row += 32) {
    int2 entry = entries[row];
    some |= entry.x <= queries.last && entry.y > queries.first && entry.y > entry.x;
    all &= entry.x <= queries.first && entry.y > queries.last;
  }
  if (!__any_sync(~0u, some)) return TILE_EMPTY;
  return __all_sync(~0u, all) ? TILE_FULL : TILE_PARTIAL;
#else
  int first = stream.first_key(it), last = first + BLOCK_KV - 1;
  if (first > queries.last || last < queries.lowest_first) return TILE_EMPTY;
  return last <= queries.first && first >= queries.lowest_last ? TILE_FULL : TILE_PARTIAL;
#endif
}
