// block_order: which tile and head a block of a (tiles, heads, batch) grid works on, so that long tiles start first and
// K and V still hit the L2 cache.
#pragma once
#include "common/types.cuh"

struct BlockPlace {
  int tile, head, batch;  // tile in the order of starting, head in units of gridDim.y
};

// Blocks start in the order of their linear index. In plain grid order all tiles of one head precede the next head's,
// and the longest tiles of the last head end long after everything else. So heads are grouped into sections, whose
// streamed tensors (`head_bytes` for each of the `num_shared_heads` KV heads of a batch row) fit in `cache_bytes`
// together; inside a section every head's first tile precedes every second one.
// The first `others` blocks of the grid are left out: `of_head` of each head.
DEVICE BlockPlace block_place(int num_shared_heads, u64 head_bytes, u64 cache_bytes, u32 others = 0, u32 of_head = 0) {
  const u32 units = (u32)num_shared_heads * gridDim.z, heads_per_unit = gridDim.y / (u32)num_shared_heads;
  const u32 capacity = (u32)max(cache_bytes / head_bytes, (u64)1), sections = (units + capacity - 1) / capacity;
  const u32 section_units = (units + sections - 1) / sections;
  const u32 linear = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) - others,
            section_blocks = section_units * heads_per_unit * (gridDim.x - of_head);
  const u32 section = linear / section_blocks, rest = linear % section_blocks;
  const u32 heads = min(section_units, units - section * section_units) * heads_per_unit;
  const u32 unit = section * section_units + rest % heads / heads_per_unit;
  BlockPlace place;
  place.tile = (int)(rest / heads);
  place.head = (int)(unit % (u32)num_shared_heads * heads_per_unit + rest % heads % heads_per_unit);
  place.batch = (int)(unit / (u32)num_shared_heads);
  return place;
}
