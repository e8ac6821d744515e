// hopper_listed: the queries of a tile under a selector's mask, in any order, and their description. Shared by
// hopper_sparse.cuh and hopper_blocks.cuh.
// Defines    as hopper_tiles.cuh, with SPARSE 1, HEADS_PER_TILE 1, NUM_CONSUMERS 2
#pragma once
#include "common/hopper_tiles.cuh"
#include "common/sparse_keys.cuh"

static_assert(BLOCK_Q == 128 && HEADS_PER_TILE == 1, "a producer thread loads one query, as a row of a tile of 128");

// Loads Q and the tile's head once the consumers have released the last tile's Q. All 128 threads of the producer call
// it; `position` is that of this thread's row, `tile.end_query` or more where the row is empty.
DEVICE void bring_queries(const InputTensors& tensors, const TileHead& tile, int position, u32 done, u32 shared) {
  const int thread = (int)threadIdx.x % 128;
  const u32 full = barrier_at(shared, FULL_Q);
  barrier_wait(barrier_at(shared, EMPTY_Q), (done & 1) ^ 1);
  copy_key_rows<DIM_BLOCKS, true>(shared, tensors.q + (u64)tile.head * HEAD_DIM, (u32)tensors.q_token_stride * 2,
                                  position < tile.end_query ? position : -1, thread / 32);
  unsigned char* described = (unsigned char*)__cvta_shared_to_generic(tile_base(shared, done));
  if (thread == 0) *(TileHead*)described = tile;
  ((int*)(described + 32))[thread] = position;
  barrier_arrive_copies(full);
  barrier_arrive(full);
}
