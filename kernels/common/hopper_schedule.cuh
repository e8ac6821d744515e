// hopper_schedule: which tiles a persistent block works on, longest first, so that all blocks end together and caches
// help.
#pragma once
#include "common/types.cuh"

constexpr u64 SECTION_BYTES = 32 << 20;  // keys and values of the heads in work at a time: about half of an L2 cache

// A tile's place. `head` counts units of query heads that one tile holds.
struct WorkPlace {
  int tile, head, batch;
};

// Heads are grouped into sections whose keys and values fit into the L2 cache; inside a section every head's first tile
// (the longest) precedes every second one. Blocks take a section's tiles in snake order (0 1 2 3, then 3 2 1 0, ...),
// so that the block with the longest tile of one round has the shortest of the next. A section begins a new round, at
// the block where the section before ran out of tiles.
struct WorkSchedule {
  u32 heads_per_unit, units, kv_heads, section_units, section_items, section_rounds, num_rounds;

  // `tiles` and `heads` count those of a batch row; `unit_bytes` is the size of one KV head's keys and values.
  DEVICE WorkSchedule(u32 tiles, u32 heads, u32 kv_heads, u32 batch, u64 unit_bytes, u64 cache_bytes)
      : heads_per_unit(heads / kv_heads), units(kv_heads * batch), kv_heads(kv_heads) {
    const u32 capacity = (u32)max(cache_bytes / unit_bytes, (u64)1), sections = (units + capacity - 1) / capacity;
    section_units = (units + sections - 1) / sections;
    section_items = section_units * heads_per_unit * tiles;
    // kernels/notes/sections-begin-a-round.md
    section_rounds = (section_items + gridDim.x - 1) / gridDim.x;
    num_rounds = (units + section_units - 1) / section_units * section_rounds;
  }

  // Finds the tile that this thread block works on in `round`, 0 .. num_rounds - 1; false where it does nothing. Any
  // thread may call it alone.
  DEVICE bool find(u32 round, WorkPlace& place) const {
    const u32 section = round / section_rounds, turn = round % section_rounds,
              at = (blockIdx.x + section * section_items) % gridDim.x;
    const u32 item = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - at : at),
              here = min(section_units, units - section * section_units);
    const u32 heads = here * heads_per_unit;
    if (item >= section_items / section_units * here) return false;
    const u32 unit = section * section_units + item % heads / heads_per_unit;
    place.tile = (int)(item / heads);
    place.head = (int)(unit % kv_heads * heads_per_unit + item % heads % heads_per_unit);
    place.batch = (int)(unit / kv_heads);
    return true;
  }
};
