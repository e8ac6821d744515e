// hopper_schedule: which pieces of work a persistent block does, longest first, so that all blocks end together and caches help.
#pragma once
#include "common/types.cuh"

// Items are numbered longest first. Blocks take them back and forth (0 1 2 3, then 3 2 1 0, ...), so that a block with the longest item of one
// round has the shortest of the next. Returns num_items or more when the block has none in this round.
DEVICE u32 round_item(u32 round) { return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

// A head-tile's place. `head` counts units of query heads that one tile holds.
struct WorkPlace {
  int tile, head, batch;
};

// Heads are dealt out in sections whose keys and values fit into a cache together; inside a section every head's first tile precedes every
// second one. tiles, heads: per batch row; units: KV heads of the whole batch; unit_bytes: keys and values of one.
DEVICE WorkPlace work_place(u32 item, u32 tiles, u32 heads, u32 kv_heads, u32 batch, u64 unit_bytes, u64 cache_bytes) {
  const u32 units = kv_heads * batch, heads_per_unit = heads / kv_heads;
  const u32 capacity = (u32)max(cache_bytes / unit_bytes, (u64)1), sections = (units + capacity - 1) / capacity;
  const u32 section_units = (units + sections - 1) / sections, section_items = section_units * heads_per_unit * tiles;
  const u32 section = item / section_items, rest = item % section_items;
  const u32 here = min(section_units, units - section * section_units) * heads_per_unit;
  const u32 unit = section * section_units + rest % here / heads_per_unit;
  WorkPlace place;
  place.tile = (int)(rest / here);
  place.head = (int)(unit % kv_heads * heads_per_unit + rest % here % heads_per_unit);
  place.batch = (int)(unit / kv_heads);
  return place;
}
