// nsa_copy_rows: asynchronous copies of the rows that chose a block (nsa_rows.cuh) into swizzled tiles, for the
// portable kernels.
// Defines    as copy_rows.cuh
#pragma once
#include "common/copy_rows.cuh"
#include "common/nsa_rows.cuh"

// Asks for a tile's rows of q or do, from the batch row on.
template <int ROW, int ROWS>
DEVICE void copy_chosen_rows(u32 shared, const bf16* base, u32 stride, const ChosenRow* rows) {
  using Tile = SwizzledTile<ROW>;
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS * Tile::CHUNKS, THREADS); ++i) {
    const int at = i * THREADS + (int)opaque(threadIdx.x), row = at / Tile::CHUNKS, chunk = at % Tile::CHUNKS;
    if (ROWS * Tile::CHUNKS % THREADS != 0 && at >= ROWS * Tile::CHUNKS) break;
    const ChosenRow chosen = rows[row];
    const bf16* from = base + (u64)(u32)max(chosen.token, 0) * stride + (u64)(u32)chosen.head * ROW + chunk * 8;
    copy_async_16(shared + Tile::offset(row, chunk), from, chosen.token >= 0 ? 16 : 0);
  }
}
