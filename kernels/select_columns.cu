// select_columns: the single keys of each row of a mask: kept columns that no kept tile of the row holds.
// Math       key c of row i: c is kept, not after the row's last query, and its tile is not kept
// Layout     columns u32 [lists, ceil(num_keys / 32)], a bit a key; bits u32 [lists, rows, ceil(tiles / 32)]
//            as select_lists writes it; counts i32 [lists, rows];
//            pairs i32 [lists, rows], added to: pairs of a query and such a key; mask i32: col_ptr [lists * rows + 1]
//            and col_idx from the words col_ptr_at and col_idx_at on
// Buffers    columns, bits, counts, pairs, mask
// Defines    none
// Tiling     grid (ceil(rows / 4), lists, 1); 128 threads, a warp a row; no dynamic shared memory. Two launches: fills
//            0 writes counts and pairs, 1 col_idx
// Numerics   integers
// Edges      tiles of a multiple of 32 keys; rows without a key
#include "common/block_scan.cuh"
#include "common/fixed_sum.cuh"
#include "common/select_blocks.cuh"

struct SelectColumnsParams {
  u64 num_queries, num_keys, tile, offset, query_tile;
  u64 fills, col_ptr_at, col_idx_at;
};

// A warp has one row of a list, and a lane a word of 32 keys at a time.
extern "C" __global__ void __launch_bounds__(128)
    select_columns(const u32* columns, const u32* bits, i32* counts, i32* pairs, i32* mask,
                   const __grid_constant__ SelectColumnsParams params) {
  // Here the blocks that queries and keys are cut into are tiles.
  const SelectBlocks tiles = {(int)params.num_queries, (int)params.num_keys, (int)params.tile, (int)params.offset,
                              (int)params.query_tile};
  const int lane = (int)threadIdx.x % 32, row = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, rows = tiles.num_rows(),
            list = (int)blockIdx.y;
  if (row >= rows) return;
  const int first = tiles.first(row), last = tiles.last(row), words = last / 32 + 1;
  const u64 at_row = (u64)list * rows + row;
  columns += (u64)list * ceil_div(tiles.num_keys, 32);
  bits += at_row * ceil_div(tiles.num_columns(), 32);
  i32* to = mask + params.col_idx_at + (params.fills ? mask[params.col_ptr_at + at_row] : 0);
  int count = 0;
  i64 sum = 0;
  for (int from = 0; from < words; from += 32) {
    const int word = from + lane, tile = word * 32 / tiles.block;
    u32 left = 0;
    if (word < words && !(bits[tile / 32] >> tile % 32 & 1)) {
      left = columns[word];
      if (word == words - 1) left &= ~0u >> (31 - last % 32);
    }
    // Keys of the lane's word, and of the words up to it. One launch adds up the pairs of each key and the queries that
    // see it, the other (fills) writes the keys.
    const u32 here = (u32)__popc(left), inclusive = warp_inclusive_sum(here);
    if (params.fills) {
      i32* next = to + count + (inclusive - here);
      for (; left; left &= left - 1) *next++ = word * 32 + __ffs((int)left) - 1;
    } else
      for (; left; left &= left - 1) sum += last - max(word * 32 + __ffs((int)left) - 1, first) + 1;
    count += (int)__shfl_sync(~0u, inclusive, 31);
  }
  if (params.fills) return;
  sum = lanes_sum<32>(sum);
  if (lane == 0) {
    counts[at_row] = count;
    pairs[at_row] += (i32)sum;
  }
}
