// tile_steps: the steps of a backward pass under a mask of tiles: for each KV head and tile of 128 keys the tiles of 64
// queries of which a head sees one of them. The lists are made with the mask (block_mask of the Python package).
// Defines    TILE_LISTS (0): 1 where a block's steps come from a list
// One buffer of i32: starts [num_kv_heads * ceil(seq_len / 128) + 1], padded to an even number, then the steps, two
// words each: query tile << 2 | halves; head << 16 | turn. `halves` says which 64 of the 128 keys are seen, bit 0 the
// first; `head` counts query heads of the KV head; `turn` counts the key tiles before this one that the query tile's
// head sees. A list goes from the last query tile down. Tiles behind the row's end come first and are left out.
#pragma once
#include "common/types.cuh"

#ifndef TILE_LISTS
#define TILE_LISTS 0
#endif

constexpr int STEP_QUERIES = 64, STEP_KEYS = 128;

struct TileStep {
  int tile, head, own_turn;
  u32 halves;
  DEVICE explicit TileStep(int2 words)
      : tile(words.x >> 2), head(words.y >> 16), own_turn(words.y & 0xffff), halves(words.x & 3) {}
};

// The list of one KV head and tile of keys.
struct TileSteps {
  const int2* steps;
  int begin, end;

  DEVICE TileSteps(const i32* lists, int num_kv_heads, int seq_len, int kv_head, int first_key) {
    const int tiles = ceil_div(seq_len, STEP_KEYS), at = kv_head * tiles + first_key / STEP_KEYS;
    steps = (const int2*)(lists + (num_kv_heads * tiles + 2) / 2 * 2);
    begin = lists[at];
    end = lists[at + 1];
    while (begin < end && TileStep(steps[begin]).tile * STEP_QUERIES >= seq_len) ++begin;
  }
};
