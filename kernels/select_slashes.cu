// select_slashes: the blocks of a vertical-slash pattern, which kept columns and diagonals cross (MInference,
// arXiv:2407.02490; FlexPrefill, arXiv:2502.20766).
// Math       by_token 1: block j of row i is kept where a kept distance o leads from one of the row's queries to one of
//            its keys; kept columns are not read.
//            by_token 0: where column j is kept, or block distance o from a block that meets the row's queries, or
//            entry (i, j) of a map
// Layout     columns, diagonals u32 [num_heads, ceil(length / 32)], a bit a token or a block; map u32
//            [num_heads, ceil(rows * blocks / 32)], read where has_map;
//            kept u32 [num_heads, rows, ceil(blocks / 32)]
// Buffers    columns, diagonals, map, kept
// Defines    none
// Tiling     grid (ceil(rows / 4), num_heads, 1); 128 threads, a warp a row; no dynamic shared memory
// Numerics   integers; every word written
// Edges      any sizes; blocks after a row's last query are not kept
#include "common/select_blocks.cuh"

struct SelectSlashesParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 by_token, has_map;
};

// Whether a bit from `low` to `high` is set.
DEVICE bool any_bit(const u32* bits, int low, int high) {
  u32 set = 0;
  for (int word = low / 32; word <= high / 32; ++word) {
    const u32 from = word == low / 32 ? ~0u << low % 32 : ~0u, to = word == high / 32 ? ~0u >> (31 - high % 32) : ~0u;
    set |= bits[word] & from & to;
  }
  return set;
}

// A warp has one row, a block of queries of one head, and a lane a word of 32 blocks of keys at a time.
extern "C" __global__ void __launch_bounds__(128)
    select_slashes(const u32* columns, const u32* diagonals, const u32* map, u32* kept,
                   const __grid_constant__ SelectSlashesParams params) {
  const SelectBlocks blocks = select_blocks(params);
  const int lane = (int)threadIdx.x % 32, row = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, head = (int)blockIdx.y;
  const int rows = blocks.num_rows(), num_columns = blocks.num_columns(), words = ceil_div(num_columns, 32),
            block = blocks.block;
  if (row >= rows) return;
  const bool by_token = params.by_token;
  const u64 line_words = ceil_div(by_token ? blocks.num_keys : num_columns, 32),
            map_words = ((u64)rows * num_columns + 31) / 32;
  columns += head * line_words;
  diagonals += head * line_words;
  map += params.has_map ? head * map_words : 0;
  kept += ((u64)head * rows + row) * words;
  const int first = blocks.first(row), last = blocks.last(row), admissible = blocks.admissible(row);
  for (int word = lane; word < words; word += 32) {
    u32 here = 0;
    for (int j = word * 32; j < min(word * 32 + 32, admissible); ++j) {
      bool keeps = false;
      if (by_token) keeps = any_bit(diagonals, max(first - j * block - (block - 1), 0), last - j * block);
      else {
        const u64 entry = (u64)row * num_columns + j;
        keeps = any_bit(columns, j, j) || any_bit(diagonals, max(first / block - j, 0), last / block - j) ||
                (params.has_map && map[entry / 32] >> entry % 32 & 1);
      }
      here |= (u32)keeps << j % 32;
    }
    kept[word] = here;
  }
}
