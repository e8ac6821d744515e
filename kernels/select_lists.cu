// select_lists: the tiles that each list of a mask keeps, from the blocks that heads kept.
// Math       tile j of row i: some head of the list kept its block, or it meets the row's queries or the `local` tokens
//            before them, or it is one of the first `first_tiles`; all tiles where a head met a NaN. A row of blocks is
//            block / tile rows of tiles, and the blocks that meet its queries are kept whole.
//            With segments, tokens move inside them, if at all: a row keeps the tiles of its own segments that hold a
//            key not after one of its queries, and with keeps_first the tile of key 0
//            stride, limit: BFLA's rescue keeps a dropped tile (by_block: block) of position row and column after all
//            if 131 row + 17 column + seed is a multiple of stride, or a hash of both and the list is below limit
// Layout     kept u32 [num_heads, rows of blocks, ceil(columns / 32)], nan i32 [num_heads] as select_choose writes
//            them; bits u32 [lists, rows, ceil(tiles / 32)];
//            counts, pairs i32 [lists, rows]: kept tiles, and pairs of a query and a kept key not after it; with
//            moves_keys key_order i32 [num_kv_heads, num_keys], with moves_queries query_order i32
//            [num_heads, num_queries]
// Buffers    kept, nan, key_order, query_order, bits, counts, pairs
// Defines    none
// Tiling     grid (ceil(rows / 4), lists, 1); 128 threads, a warp a row; no dynamic shared memory
// Numerics   integers; every word written
// Edges      tile divides block; with tile < block the offset of the first block is 0, and there are no segments; the
//            segments of a row's queries hold at most 64 tiles
#include "common/fixed_sum.cuh"
#include "common/select_blocks.cuh"

struct SelectListsParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 tile, heads_per_list, num_lists_per_order;
  u64 local, first_tiles;
  u64 segment, keeps_first, moves_keys, moves_queries;
  u64 stride, limit, seed, is_linear, by_block;
};

// One step of splitmix64.
DEVICE u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Whether a row of a list keeps a tile or block that it dropped.
DEVICE bool is_rescued(u64 list, u64 row, u64 column, const SelectListsParams& params) {
  if (params.stride > 0 && (131 * row + 17 * column + params.seed) % params.stride == 0) return true;
  if (params.limit == 0) return false;
  const u64 sum = (row + 1) * 1103515245 + (column + 1) * 12345 + (list + 1) * 2654435761 + params.seed;
  const u64 hash = params.is_linear ? (sum & 0x7fffffff) % 1000000
                                    : mix(mix(mix(mix(list) + row) + column) + params.seed) >> 40;
  return hash < params.limit;
}

// Sums of min(max(n, 0), keys) for all n up to `n`.
DEVICE i64 seen_up_to(i64 n, i64 keys) {
  if (n <= 0) return 0;
  return n <= keys ? n * (n + 1) / 2 : keys * (keys + 1) / 2 + (n - keys) * keys;
}

// A warp decides which tiles of keys one row (a tile of queries) of a list keeps; a lane has a word of 32 tiles at a
// time.
extern "C" __global__ void __launch_bounds__(128)
    select_lists(const u32* kept, const i32* nan, const i32* key_order, const i32* query_order, u32* bits, i32* counts,
                 i32* pairs, const __grid_constant__ SelectListsParams params) {
  const SelectBlocks blocks = select_blocks(params);
  const int per_block = blocks.block / (int)params.tile, segment = (int)params.segment;
  const SelectBlocks tiles = {blocks.num_queries, blocks.num_keys, (int)params.tile, blocks.offset,
                              blocks.query_block / per_block};
  const int lane = (int)threadIdx.x % 32, row = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, list = (int)blockIdx.y;
  const int rows = tiles.num_rows(), words = ceil_div(tiles.num_columns(), 32), heads = (int)params.heads_per_list;
  if (row >= rows) return;
  const int block_row = row / per_block, block_rows = blocks.num_rows(),
            block_words = ceil_div(blocks.num_columns(), 32);
  // Blocks that the row keeps in any case, and the end of the tiles that it may keep.
  const int own = blocks.own(block_row, segment), own_end = blocks.own_end(block_row, segment),
            admissible = segment ? own_end : tiles.admissible(row);
  // Tiles from `band` on hold the row's queries or the `local` tokens before them.
  const int band = segment ? own : max(tiles.first(row) - (int)params.local, 0) / tiles.block,
            sinks = (int)params.first_tiles;
  bool dense = false;
  for (int head = 0; head < heads; ++head) dense |= nan[list * heads + head] != 0;
  const u64 at_row = (u64)list * rows + row;
  const i64 first = tiles.first(row), last = tiles.last(row);
  key_order += (u64)(list / (int)params.num_lists_per_order) * tiles.num_keys;
  const auto key_in = [&](int slot) { return params.moves_keys ? key_order[slot] : slot; };
  int first_key = -1;  // the tile of key 0
  if (segment && params.keeps_first) {
    for (int slot = lane; slot < min(segment, tiles.num_keys); slot += 32)
      if (key_in(slot) == 0) first_key = slot / tiles.block;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) first_key = max(first_key, __shfl_xor_sync(~0u, first_key, step));
  }
  int count = 0;  // kept tiles
  i64 sum = 0;    // pairs of a query and a kept key
  // The tiles of the row's own segments that hold a key not after one of its queries.
  u64 own_bits = 0;
  for (int tile = own; segment && tile < own_end; ++tile) {
    i64 here = 0;
    for (int slot = tile * tiles.block + lane; slot < min((tile + 1) * tiles.block, tiles.num_keys); slot += 32) {
      const i64 key = key_in(slot);
      if (!params.moves_queries) here += max(last + 1 - max(key, first), (i64)0);
      else
        for (i64 query = first; query <= last; ++query)
          here +=
              tiles.context() + query_order[(u64)list * heads * tiles.num_queries + (query - tiles.context())] >= key;
    }
    here = lanes_sum<32>(here);
    if (here > 0) own_bits |= 1ull << (tile - own);
    if (lane == 0) sum += here;
  }
  // The bits of the row's tiles of keys j.
  for (int word = lane; word < words; word += 32) {
    u32 here = 0;
    for (int j = word * 32; j < min(word * 32 + 32, admissible); ++j) {
      const int block = j / per_block;
      bool keeps = dense || (block >= own && block < own_end) || j >= band || j < sinks || j == first_key;
      for (int head = list * heads; head < (list + 1) * heads && !keeps; ++head)
        keeps = kept[((u64)head * block_rows + block_row) * block_words + block / 32] >> block % 32 & 1;
      // Rows are counted from position 0, so that a chunk of a prompt rescues what the whole prompt does.
      if (!keeps && params.stride + params.limit > 0)
        keeps = params.by_block ? is_rescued(list, blocks.first(block_row) / blocks.block, block, params)
                                : is_rescued(list, tiles.first(row) / tiles.block, j, params);
      if (!keeps) continue;
      if (segment && j >= own) {
        here |= (u32)(own_bits >> (j - own) & 1) << j % 32;
        continue;
      }
      here |= 1u << j % 32;
      const i64 key = (i64)j * tiles.block, keys = min(tiles.block, tiles.num_keys - (int)key);
      sum += seen_up_to(last + 1 - key, keys) - seen_up_to(first - key, keys);
    }
    bits[at_row * words + word] = here;
    count += __popc(here);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    count += __shfl_xor_sync(~0u, count, step);
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  if (lane == 0) {
    counts[at_row] = count;
    pairs[at_row] = (i32)sum;
  }
}
