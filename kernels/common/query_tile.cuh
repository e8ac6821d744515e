// query_tile: a tile of query rows, which keys its warps see, and the masking of scores; shared by the kernels that
// keep queries in place.
// Defines    as kv_stream; WARP_ROWS rows a warp (16 or 32), HEADS_PER_TILE query heads of a group that share a tile
#pragma once
#include "common/block_order.cuh"
#include "common/kv_stream.cuh"

#ifndef HEADS_PER_TILE
#define HEADS_PER_TILE 1
#endif
#ifndef WARP_ROWS
#define WARP_ROWS 16
#endif

constexpr int BLOCK_Q = NUM_WARPS * WARP_ROWS;  // rows of a tile: heads x queries
constexpr int TILE_QUERIES = BLOCK_Q / HEADS_PER_TILE;
[[maybe_unused]] constexpr int ROW_TILES = WARP_ROWS / 16;
static_assert(WARP_ROWS % 16 == 0 && BLOCK_Q % HEADS_PER_TILE == 0, "tensor core tiles have 16 rows");
static_assert(TILE_QUERIES % WARP_ROWS == 0 || WARP_ROWS % TILE_QUERIES == 0,
              "a warp holds parts of one head or whole heads");

struct QueryTile {
  const bf16* q;           // at the batch row and the tile's first head
  u32 q_stride;            // elements from token to token
  int batch, head;         // the tile's batch row and first head
  int num_heads, seq_len;
  int first_query, end_query;
#if SPARSE
  SparseQueries queries;
#endif
  const i32* doc_start;    // dense: the row's document starts
  int window;
#if HAS_FAR
  FarKeys far;             // in place of the window
#endif
  float scale_log2;        // softmax_scale * log2(e)
  const float* base;       // HAS_BIAS: [padded_len] of the KV head, the largest bias that each query sees
  float bias_unit;         // HAS_BIAS: 1 / softmax_scale
};

// Copies the tile to shared memory. The loop does not use it and lacks registers for it.
DEVICE const QueryTile& shared_copy(const QueryTile& tile) {
  __shared__ QueryTile shared_tile;
  if (threadIdx.x == 0) shared_tile = tile;
  __syncthreads();  // every thread reads the tile
  return shared_tile;
}

// A tile row is (head, query), head-major.
#if SPARSE
DEVICE int row_query(const QueryTile& tile, int row) { return tile.queries.position(row, tile.queries.end); }
#else
DEVICE int row_query(const QueryTile& tile, int row) { return tile.first_query + row % TILE_QUERIES; }
#endif
DEVICE int row_head(int row) { return row / TILE_QUERIES; }

#if HAS_BIAS
// A query's base in the units of q . k.
DEVICE float row_base(const QueryTile& tile, int query) {
  return query < tile.end_query ? in_scores(tile.base[query], tile.bias_unit) : 0.0f;
}

// Accumulators start at (delta - base) / softmax_scale: only differences of biases matter, and an f32 near a bias of
// 2^29 would have no digits left for q . k. `bias`: the deltas of this thread's columns of a tile, two every eight.
template <int ROWS>
DEVICE void start_scores(float (&score)[ROWS][BLOCK_KV / 8][4], const float (&base)[ROWS][2], const float* bias,
                         float bias_unit) {
#pragma unroll
  for (int n = 0; n < BLOCK_KV / 8; ++n) {
    const float2 delta = *(const float2*)(bias + n * 8);
    const float unit[2] = {in_scores(delta.x, bias_unit), in_scores(delta.y, bias_unit)};
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
      for (int x = 0; x < 4; ++x) score[m][n][x] = unit[x % 2] - base[m][x / 2];
  }
}
#endif

#if !GATHER
// The lowest key a query sees, with HAS_FAR its document's first; a position outside the row counts as its nearest end.
DEVICE int lowest_key(const QueryTile& tile, int query) {
  query = min(max(query, 0), tile.seq_len - 1);
  return HAS_FAR ? tile.doc_start[query] : max(tile.doc_start[query], query - tile.window + 1);
}
#endif

// Starts the copies of the tile's rows of q or do, from the batch row and the tile's first head; rows past the end
// arrive as zeros.
template <int ROW>
DEVICE void copy_query_rows(const QueryTile& tile, u32 shared, const bf16* base, u32 stride) {
  constexpr int CHUNKS = ROW / 8, TOTAL = BLOCK_Q * CHUNKS;
#pragma unroll
  for (int i = 0; i < ceil_div(TOTAL, THREADS); ++i) {
    int at = i * THREADS + (int)threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
    if (TOTAL % THREADS == 0 || at < TOTAL) {
      int query = row_query(tile, row);
      const bf16* from = base + (u64)(u32)query * stride + row_head(row) * ROW + chunk * 8;
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk), from, query < tile.end_query ? 16 : 0);
    }
  }
}

// The same of the output gradients, [batch, seq_len, num_heads, HEAD_DIM_V].
DEVICE void copy_gradient_rows(const QueryTile& tile, u32 shared, const bf16* d_out) {
  copy_query_rows<HEAD_DIM_V>(tile, shared,
                              d_out + ((u64)tile.batch * tile.seq_len * tile.num_heads + tile.head) * HEAD_DIM_V,
                              (u32)tile.num_heads * HEAD_DIM_V);
}

// Which queries see which keys. One object per warp and query tile; `first` and `last` are the warp's queries.
struct alignas(16) WarpQueries {
  int first, last;           // positions
  int lowest_first, lowest_last;  // dense: the lowest key seen by the first and by the last query
};

enum TileMask { TILE_EMPTY, TILE_FULL, TILE_PARTIAL };

// Whether the warp's queries, which are of `tile`, see none, all or some of the keys of the stream's tile `it`.
DEVICE TileMask tile_mask([[maybe_unused]] const QueryTile& tile, const KvStream& stream, const WarpQueries& queries,
                          int it) {
#if HAS_FAR
  const int key = stream.first_key(it), end = key + BLOCK_KV;
  if (!tile.far.may_see(queries.first, queries.last, queries.lowest_first, queries.lowest_last, key, end))
    return TILE_EMPTY;
  return tile.far.all_see(queries.first, queries.last, queries.lowest_last, key, end) ? TILE_FULL : TILE_PARTIAL;
#elif GATHER
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

// The queries of the warp whose rows begin at `warp_row`.
DEVICE WarpQueries warp_queries(const QueryTile& tile, int warp_row) {
  WarpQueries queries;
#if SPARSE
  // Permuted rows are in any order; those past the tile's last slot have the position end_query.
  queries.first = tile.end_query;
  queries.last = -1;
  for (int row = warp_row; row < warp_row + WARP_ROWS; ++row) {
    const int query = row_query(tile, row);
    queries.first = min(queries.first, query);
    if (query < tile.end_query) queries.last = max(queries.last, query);
  }
#else
  queries.first = TILE_QUERIES >= WARP_ROWS ? row_query(tile, warp_row) : tile.first_query;
  queries.last = min(queries.first + min_int(TILE_QUERIES, WARP_ROWS), tile.end_query) - 1;
#if !GATHER
  queries.lowest_first = lowest_key(tile, queries.first);
  queries.lowest_last = lowest_key(tile, queries.last);
#endif
#endif
  return queries;
}

// Sets the score to `masked` where a row of the 16 from tile row `first_row` on does not see the key of tile `it`.
DEVICE void mask_scores(const QueryTile& tile, const KvStream& stream, int it, int first_row,
                        float (&score)[BLOCK_KV / 8][4], float masked) {
  const int lane = (int)opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  int position[2];
#if !GATHER
  int lowest[2];
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    position[h] = row_query(tile, first_row + h * 8 + g);
#if !GATHER
    lowest[h] = lowest_key(tile, position[h]);
#endif
  }
#pragma unroll
  for (int n = 0; n < BLOCK_KV / 8; ++n) {
#if GATHER
    const int4 pair = *(const int4*)(stream.entry_slot(it) + n * 8 + 2 * t);
#else
    const int key = stream.first_key(it) + n * 8 + 2 * t;
#endif
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = position[x / 2];
#if GATHER
      const bool active = x % 2 ? pair.z <= i && i < pair.w : pair.x <= i && i < pair.y;
#else
#if HAS_FAR
      const bool active = tile.far.sees(i, lowest[x / 2], key + x % 2);
#else
      const bool active = key + x % 2 <= i && key + x % 2 >= lowest[x / 2];
#endif
#endif
      if (!active) score[n][x] = masked;
    }
  }
}
