// select_fill: writes the tiles of each row of a mask where its row_ptr says.
// Math       tile_idx[row_ptr[i] ..] = the set bits of row i, ascending
// Layout     bits u32 [rows, words]; mask i32: row_ptr [rows + 1] and tile_idx from the words row_ptr_at and
//            tile_idx_at on
// Buffers    bits, mask
// Defines    none
// Tiling     grid (ceil(rows / 4), 1, 1); 128 threads, a warp a row; no dynamic shared memory
// Numerics   integers
// Edges      rows without a tile
#include "common/block_scan.cuh"

struct SelectFillParams {
  u64 rows, words, row_ptr_at, tile_idx_at;
};

// A warp writes the tiles of one row, and a lane those of a word of 32 bits at a time.
extern "C" __global__ void __launch_bounds__(128)
    select_fill(const u32* bits, i32* mask, const __grid_constant__ SelectFillParams params) {
  const int lane = (int)threadIdx.x % 32, row = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, words = (int)params.words;
  if (row >= (int)params.rows) return;
  i32* tiles = mask + params.tile_idx_at + mask[params.row_ptr_at + row];
  bits += (u64)row * words;
  for (int from = 0; from < words; from += 32) {
    u32 left = from + lane < words ? bits[from + lane] : 0;
    const u32 count = (u32)__popc(left), inclusive = warp_inclusive_sum(count);
    i32* to = tiles + (inclusive - count);
    for (; left; left &= left - 1) *to++ = (from + lane) * 32 + __ffs((int)left) - 1;
    tiles += __shfl_sync(~0u, inclusive, 31);
  }
}
