// hopper_backward_steps: what a block of keys of hopper_backward.cuh streams, and the order of its steps.
// Defines    as hopper_backward.cuh, whose constants and headers come before
#pragma once

// The tensors that a block of keys streams. Pointers are to the batch row and the KV head's first query head.
struct BackwardBlock {
  const bf16* k;         // at the batch row and KV head
  const bf16* v;
  u32 k_stride, v_stride;  // elements from token to token
  const float2* stats;   // [heads, padded_len] {lse * log2(e) or +inf, D}
  const float* base;     // HAS_BIAS: [padded_len] of the KV head
  float* dq_sum;         // [heads, dq_len] x HEAD_DIM, in fragment order
  int group_size, padded_len;
  int dq_first, dq_len;  // the queries dq_sum holds
  // query tiles (of BLOCK_Q positions) seen by a key of the block; TILE_LISTS: places of its steps in `steps`
  int first_tile, num_tiles;
#if TILE_LISTS
  const int2* steps;
#endif
#if HAS_FAR
  QueryTiles<BLOCK_Q> tiles;  // the runs that num_tiles counts
  FarKeys far;
  const i32* doc_start;       // [seq_len] of the batch row
  const i32* doc_end;
  int seq_len;
#endif
  float scale_log2, bias_unit;  // bias_unit: 1 / softmax_scale
  const TensorMap* q_map;     // of bf16 [batch, seq_len, num_heads * HEAD_DIM]
  const TensorMap* do_map;    // of bf16 [batch, seq_len, num_heads * HEAD_DIM_V]
  int batch, head;            // head: the KV head's first query head
#if ORDERED
  i32* semaphores;  // as dq_sum: [heads, dq_len / BLOCK_Q], the tile of keys that adds next
#if !TILE_LISTS
  int own_turn;   // number of the block's tile of keys in the order of sums
  int other_end;  // query tiles before this one are seen by a key of the tile before it, too
#endif
#endif
};

// A kernel's `Keys`: `entry(at)` is {position, expire} of the block's key `at`, 0 .. 127; HAS_FAR: `band(at)` the first
// query that has it in its band, and the first one that no longer does; `row(at)` the row to load (an
// initialised one also for padding); `find_tiles(block)` sets first_tile and num_tiles, and all lanes of a warp call
// it.

// The query head (counted from the block's first one) and the query tile (of BLOCK_Q positions) of a block's step.
// Every thread that walks through the steps keeps its own: that which loads tiles, those of the statistics, those that
// send dQ, and all consumers.
#if TILE_LISTS
struct StepPlace : TileStep {
  int at, last;  // places in the list
  // The first step of the block's list.
  DEVICE explicit StepPlace(const BackwardBlock& block)
      : TileStep(block.steps[block.first_tile]), at(block.first_tile), last(at + block.num_tiles - 1) {}
  // Moves on to the next step of the list; at the last one it stays.
  DEVICE void advance(const BackwardBlock& block) {
    at = min(at + 1, last);
    *(TileStep*)this = TileStep(block.steps[at]);
  }
  // Whether no other block adds to the dQ of this head and query tile before this one.
  DEVICE bool is_first(const BackwardBlock&) const { return own_turn == 0; }
};
#else
struct StepPlace {
  int head, tile;
  // The first step: of the first head the first query tile, or with ORDERED the last.
#if HAS_FAR
  DEVICE explicit StepPlace(const BackwardBlock& block)
      : head(0), tile(ORDERED ? block.tiles.end - 1 : block.tiles.first) {}
#else
  DEVICE explicit StepPlace(const BackwardBlock& block)
      : head(0), tile(block.first_tile + (ORDERED ? block.num_tiles - 1 : 0)) {}
#endif
  // Moves on to the next step: the next head at the same tile, or the next tile (ORDERED: the one before) of the same
  // head.
  DEVICE void advance(const BackwardBlock& block) {
#if HAS_FAR && ORDERED
    // The band's queries come first, because the blocks of earlier keys have had the window's queries by the time that
    // this block reaches them.
    if (tile == block.tiles.first) tile = block.tiles.end, ++head;
    if (--tile == block.tiles.band_first - 1) tile = block.tiles.near_end - 1;
#elif HAS_FAR
    if (++tile == block.tiles.near_end) tile = block.tiles.band_first;
    if (tile == block.tiles.end) tile = block.tiles.first, ++head;
#elif !HEAD_BY_HEAD
    if (++head == block.group_size) head = 0, --tile;
#elif ORDERED
    if (--tile < block.first_tile) tile += block.num_tiles, ++head;
#else
    if (++tile == block.first_tile + block.num_tiles) tile = block.first_tile, ++head;
#endif
  }
#if ORDERED && HAS_FAR
  // The block's number in the order of adds to the dQ of this query tile: how many earlier tiles of keys it sees.
  DEVICE int own_turn(const BackwardBlock& block) const {
    const int first = tile * BLOCK_Q, last = min(first + BLOCK_Q, block.seq_len) - 1;
    const KeyTiles<BLOCK_KV> keys(block.far, block.doc_start[first], first, min(last, block.doc_end[first] - 1), last);
    return keys.rank(block.own_turn);
  }
#elif ORDERED
  // Whether no other block adds to the dQ of this query tile before this one.
  DEVICE bool is_first(const BackwardBlock& block) const { return tile >= block.other_end; }
#endif
};
#endif
