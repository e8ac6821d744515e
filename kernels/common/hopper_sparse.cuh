// hopper_sparse: the producer of tiles of queries and of the keys that a selector's mask lists for them, key by key.
// Defines    as hopper_tiles.cuh, with GATHER and SPARSE 1, HAS_BIAS 0, HEADS_PER_TILE 1, NUM_CONSUMERS 2
#pragma once
#include "common/hopper_tiles.cuh"
#include "common/hopper_listed.cuh"

#if GATHER  // hopper_blocks.cuh has the other way to read keys

// WorkSchedule over the parts of BLOCK_Q rows of all query tiles, the tiles with most keys first. A short query tile
// has fewer than `parts` parts; `find` skips the missing ones.
struct SparseSchedule {
  SparseMask mask;
  int parts;
  WorkSchedule all;
  u32 num_rounds;

  // For the query tiles and heads of the launch that `mask` describes.
  DEVICE SparseSchedule(const SparseMask& mask)
      : mask(mask),
        parts(ceil_div(mask.query_tile, BLOCK_Q)),
        all((u32)(mask.num_query_tiles * parts), (u32)mask.launch_heads, (u32)mask.launch_kv_heads, 1,
            (u64)mask.num_keys * HEAD_DIM * 4, SECTION_BYTES),
        num_rounds(all.num_rounds) {}

  // The rows of the part at `place` of query tile `tile`; with fewer than one slot there are none.
  DEVICE SparseQueries queries(WorkPlace place, int tile) const {
    return mask.queries(place.head, tile, place.tile % parts, BLOCK_Q);
  }
  // The query tile at `place`, counted from the call's first. place.tile counts parts of tiles, in the order of rank.
  DEVICE int query_tile(WorkPlace place) const { return mask.tile_of_rank(place.head, place.tile / parts); }

  // Finds this thread block's tile in `round`, with the head counted over the whole call; false where it has none.
  DEVICE bool find(u32 round, WorkPlace& place) const {
    if (!all.find(round, place)) return false;
    place.head += mask.first_head;
    return queries(place, query_tile(place)).num_slots > 0;
  }
};

// What run_block calls to load a tile: listed keys, row by row.
struct SparseWork {
  SparseSchedule schedule;

  // Makes the schedule of the launch's mask.
  DEVICE SparseWork(const SparseMask& mask) : schedule(mask) {}

  // Loads tile number `done` of the thread block, at `place`. All 128 threads of the producer call it, and thread t has
  // key t of each stage.
  DEVICE void produce(const InputTensors& tensors, const TensorMap* const*, WorkPlace place, u32 done, u32 shared,
                      StagePlaces& places) const {
    const int thread = (int)threadIdx.x % 128, warp = thread / 32,
              kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads);
    const int query_tile = schedule.query_tile(place);
    const SparseQueries queries = schedule.queries(place, query_tile);
    const SparseKeys keys = schedule.mask.keys(place.head, query_tile, queries);
    const int position = queries.position(thread, queries.end);
    TileHead tile = {};
    tile.head = place.head;
    tile.first_query = queries.first;
    tile.end_query = queries.end;
    // The first stage may have fewer keys, later stages are whole. A tile without keys takes one stage of zeros.
    tile.num_stages = max(ceil_div(keys.count(), BLOCK_KV), 1);
    const int missing = tile.num_stages * BLOCK_KV - keys.count();
    tile.first_is_half = missing >= HALF_KV;

    const bf16* k = tensors.k + (u64)kv_head * HEAD_DIM;
    const bf16* v = tensors.v + (u64)kv_head * HEAD_DIM;
    // This thread's entry of a stage: the first stage lacks its last `missing` keys.
    const auto entry = [&](int stage) {
      const int at = stage * BLOCK_KV + thread - (stage > 0 ? missing : 0);
      return stage == 0 && thread >= BLOCK_KV - missing ? make_int2(0, 0) : keys.entry(at);
    };
    // Rows that no query sees arrive as zeros, since in memory they may hold NaN.
    const auto row_of = [](int2 entry) { return entry.y > 0 ? entry.x : -1; };
    int here = -1;                           // this thread's row of stage `it`
    int2 next = entry(0), after = entry(1);  // its entries of the next two stages, loaded ahead

    for (int it = -1; it < tile.num_stages; ++it) {
      if (it + 1 < tile.num_stages) {
        // Keys run one stage ahead of values.
        const u32 full = barrier_at(shared, FULL_K + places.k.slot);
        barrier_wait(barrier_at(shared, EMPTY_K + places.k.slot), places.k.phase ^ 1);
        if (it >= 0 || !tile.first_is_half || warp < HALF_KV / 32)
          copy_key_rows<DIM_BLOCKS, true>(shared + K_AT + places.k.slot * STAGE_BYTES, k,
                                          (u32)tensors.k_token_stride * 2, row_of(next), warp);
        store_shared_int2(key_slot(shared, places.stage) + thread * 8, next.x, next.y);
        barrier_arrive_copies(full);
        barrier_arrive(full);  // for the store of the entry
        places.next_keys();
      }
      if (it < 0) {
        bring_queries(tensors, tile, position, done, shared);
      } else {
        barrier_wait(barrier_at(shared, EMPTY_V + places.v.slot), places.v.phase ^ 1);
        if (it > 0 || !tile.first_is_half || warp < HALF_KV / 32)
          copy_key_rows<DIM_BLOCKS_V, true>(shared + V_AT + places.v.slot * V_STAGE_BYTES, v,
                                            (u32)tensors.v_token_stride * 2, here, warp);
        barrier_arrive_copies(barrier_at(shared, FULL_V + places.v.slot));
        places.v.advance();
      }
      here = row_of(next);
      next = after;
      after = entry(it + 3);
    }
  }
};
#endif
