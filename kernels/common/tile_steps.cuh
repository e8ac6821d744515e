// tile_steps: the steps of a backward pass under a mask of tiles: for each share of a KV head's query heads and tile of
// 128 keys the tiles of 64 queries of which a head sees one of them. The lists are made with the mask (block_mask of
// the Python package).
// Defines    TILE_LISTS (0): 1 where a block's steps come from a list
// One buffer of i32: a number of thread blocks; starts [num_lists + 1], num_lists = num_shares * ceil(seq_len / 128),
// `num_shares` counts the shares of all KV heads; the order of the lists [num_lists rounded up to a multiple of the
// blocks]: block b goes through those at b, b + blocks and so on, -1 is none; a word to an even number; then the steps,
// two words each: query tile << 2 | halves; head << 16 | turn. `halves` says which 64 of the 128 keys are seen, bit 0
// the first; `head` counts query heads of the share; `turn` is the place of this key tile among those that the query
// tile's head sees, in the order in which they add to its dq: one in which the steps of a block follow each other, too.
// A list goes from the last query tile down. Tiles behind the row's end come first and are left out.
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

// Which lists each thread block goes through.
struct ListOrder {
  const i32* lists;
  int num_blocks, num_places;

  DEVICE ListOrder(const i32* words, int num_lists)
      : lists(words + num_lists + 2), num_blocks(words[0]), num_places(ceil_div(num_lists, num_blocks) * num_blocks) {}
};

// The list of one share of a KV head's query heads and tile of keys.
struct TileSteps {
  const int2* steps;
  int begin, end;

  TileSteps() = default;
  DEVICE TileSteps(const i32* words, int num_lists, int list, int seq_len) {
    const ListOrder order(words, num_lists);
    steps = (const int2*)(words + (num_lists + order.num_places + 3) / 2 * 2);
    begin = words[1 + list];
    end = words[2 + list];
    while (begin < end && TileStep(steps[begin]).tile * STEP_QUERIES >= seq_len) ++begin;
  }
  // Cuts the list down to one of its parts.
  DEVICE void take_part(int part, int num_parts) {
    const int first = begin, num_steps = end - begin;
    begin = first + num_steps * part / num_parts;
    end = first + num_steps * (part + 1) / num_parts;
  }
};
