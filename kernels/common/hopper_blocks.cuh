// hopper_blocks: tiles of queries and the tiles of keys that a selector's mask lists, loaded by TMA in boxes of a whole
// stage (128 keys) or half of one. Each consumer has 64 rows. Query tiles of 64 rows are processed in pairs (PAIRS):
// the producer streams the halves that either list names, in order, and a consumer computes those of its own list.
// Else both consumers take every stage, as in dense attention: the loop does not test a stage before its GEMMs, since a
// value that differs by warpgroup there keeps addresses out of the uniform registers.
// Defines    as hopper_tiles.cuh, with SPARSE 1, GATHER and HAS_BIAS 0, HEADS_PER_TILE 1, NUM_CONSUMERS
//            2; PAIRS 0|1; KEY_BOX 64, or 128 without PAIRS
#pragma once
#include "common/hopper_forward.cuh"
#include "common/hopper_listed.cuh"

#if !GATHER  // hopper_sparse.cuh has the other way to read keys

constexpr int ABSENT_BOX = (1 << 30) / KEY_BOX;  // behind all keys
static_assert(KEY_BOX == HALF_KV || (KEY_BOX == BLOCK_KV && !PAIRS), "consumers of a pair see halves of a stage");

// A warp reads a list of key tiles as boxes of KEY_BOX keys: its lane l holds box l of the present 32, and has loaded
// box l of the next 32. All its lanes call the functions.
struct BoxList {
  const i32* tiles;  // null: all boxes
  int count;         // boxes
  int per_tile;      // boxes of a key tile
  int at;           // place in the list of the next box
  int here, ahead;  // this lane's boxes: of the present 32, of the next 32

  // The list of query tile `tile` for query head `head`: where the mask has no lists all boxes before position
  // `end_query`, and where the tile does not exist no box.
  DEVICE BoxList(const SparseMask& mask, int head, int tile, int end_query, bool is_there)
      : per_tile(mask.key_tile / KEY_BOX), at(0) {
    tiles = nullptr;
    count = is_there ? ceil_div(end_query, KEY_BOX) : 0;
    if (is_there && mask.row_ptr) {
      const i32* ptr = mask.data + mask.row_ptr + (u64)(head / mask.heads_per_list) * mask.num_query_tiles + tile;
      tiles = mask.data + mask.tile_idx + ptr[0];
      count = (ptr[1] - ptr[0]) * per_tile;
    }
    here = load(0);
    ahead = load(32);
  }

  // The box at place `from` + lane of the list, counted from key 0; past the list's end ABSENT_BOX.
  DEVICE int load(int from) const {
    const int box = from + (int)threadIdx.x % 32;
    if (box >= count) return ABSENT_BOX;
    return tiles ? tiles[box / per_tile] * per_tile + box % per_tile : box;
  }
  // The next box, the same for all lanes.
  DEVICE int first() const { return __shfl_sync(~0u, here, at % 32); }
  // Goes past the next box.
  DEVICE void advance() {
    if (++at % 32 == 0) {
      here = ahead;
      ahead = load(at + 32);
    }
  }
};

// The boxes of a stage: the key where each begins, and of a pair of query tiles which consumers see it.
struct StageBoxes {
  int key[BOXES], seen[BOXES];  // seen: bit w for consumer w
};

// WorkSchedule over the parts of 128 rows of all query tiles, the tiles with most keys first; with PAIRS over pairs of
// query tiles, the last ones first.
struct BlockSchedule {
  SparseMask mask;
  int parts;  // tiles of 128 rows that a query tile fills
  WorkSchedule all;
  u32 num_rounds;

  // For the query tiles and heads of the launch that `mask` describes.
  DEVICE BlockSchedule(const SparseMask& mask)
      : mask(mask),
        parts(ceil_div(mask.query_tile, BLOCK_Q)),
        all((u32)(PAIRS ? ceil_div(mask.num_query_tiles, 2) : mask.num_query_tiles * parts), (u32)mask.launch_heads,
            (u32)mask.launch_kv_heads, 1, (u64)mask.num_keys * HEAD_DIM * 4, SECTION_BYTES),
        num_rounds(all.num_rounds) {}

  // The query tile of the rows of `consumer`, 0 or 1, counted from the call's first query tile.
  DEVICE int query_tile(WorkPlace place, int consumer) const {
    if (PAIRS) return (ceil_div(mask.num_query_tiles, 2) - 1 - place.tile) * 2 + consumer;
    return mask.tile_of_rank(place.head, place.tile / parts);
  }
  // The 64 query rows of `consumer`, 0 or 1; with fewer than one slot there are none.
  DEVICE SparseQueries queries(WorkPlace place, int consumer) const {
    return mask.queries(place.head, query_tile(place, consumer), PAIRS ? 0 : place.tile % parts * 2 + consumer, 64);
  }

  // Finds this thread block's tile in `round`, with the head counted over the whole call; false where it has none.
  DEVICE bool find(u32 round, WorkPlace& place) const {
    if (!all.find(round, place)) return false;
    place.head += mask.first_head;
    return queries(place, 0).num_slots > 0;
  }
};

// What run_block calls to load a tile: keys and values in boxes.
struct BlockWork {
  BlockSchedule schedule;

  // Makes the schedule of the launch's mask.
  DEVICE BlockWork(const SparseMask& mask) : schedule(mask) {}

  // Loads tile number `done` of the thread block, at `place`: the producer's first warp loads keys and values, all four
  // warps load queries. All 128 threads of the producer call it.
  DEVICE void produce(const InputTensors& tensors, const TensorMap* const* maps, WorkPlace place, u32 done, u32 shared,
                      StagePlaces& places) const {
    const SparseMask& mask = schedule.mask;
    const int thread = (int)threadIdx.x % 128, kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads),
              list = place.head / mask.heads_per_list;
    const SparseQueries own = schedule.queries(place, thread / 64), queries = schedule.queries(place, 0),
                        more = schedule.queries(place, 1);
    TileHead tile = {};
    tile.head = place.head;
    tile.first_query = queries.first;
    tile.end_query = max(queries.end, more.num_slots > 0 ? more.end : 0);
    tile.last_stage = mask.windows ? mask.data[mask.windows + 2 * list] : NEVER;
    tile.local = mask.windows ? mask.data[mask.windows + 2 * list + 1] : NEVER;
    const int position = own.position(thread % 64, tile.end_query);
    if (thread >= 32) {
      bring_queries(tensors, tile, position, done, shared);
      return;
    }

    const auto list_of = [&](int consumer, bool is_there) {
      return BoxList(mask, place.head, schedule.query_tile(place, consumer), tile.end_query, is_there);
    };
    BoxList boxes = list_of(0, true);
    tile.num_stages = PAIRS ? 1 : max(ceil_div(boxes.count, BOXES), 1);
#if PAIRS
    BoxList others = list_of(1, more.num_slots > 0);
#endif
    const auto next_stage = [&] {
      StageBoxes stage;
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        const int first = boxes.first();
#if PAIRS
        const int other = others.first(), smallest = min(first, other);
        stage.seen[box] = smallest == ABSENT_BOX ? 0 : (first == smallest) + 2 * (other == smallest);
        if (first == smallest) boxes.advance();
        if (other == smallest) others.advance();
#else
        const int smallest = first;
        boxes.advance();
#endif
        stage.key[box] = smallest * KEY_BOX;
      }
      return stage;
    };
    const auto is_absent = [](const StageBoxes& stage) { return stage.key[0] == ABSENT_BOX * KEY_BOX; };
    // A stage of keys or values; a box behind all keys arrives as zeros.
    const auto load_stage = [&](u32 to, const TensorMap* map, u32 full, const StageBoxes& stage) {
#pragma unroll
      for (int box = 0; box < BOXES; ++box)
        load_tile<DIM_BLOCKS, BLOCK_KV>(to + box * KEY_BOX * 128, map, full, kv_head * HEAD_DIM,
                                        min(stage.key[box], mask.num_keys), 0);
    };
    const auto bring_keys = [&](const StageBoxes& stage, [[maybe_unused]] bool is_last) {
      if (thread == 0) {
        const u32 full = barrier_at(shared, FULL_K + places.k.slot), to = shared + K_AT + places.k.slot * STAGE_BYTES;
        barrier_wait(barrier_at(shared, EMPTY_K + places.k.slot), places.k.phase ^ 1);
        int* slot = (int*)__cvta_shared_to_generic(key_slot(shared, places.stage));
#if PAIRS
        for (int at = 0; at < 4; ++at)
          slot[at] = stage.seen[at % 2] >> at / 2 & 1 ? stage.key[at % 2] : ABSENT_BOX * KEY_BOX;
        slot[LAST_AT / 4] = is_last;
#else
        for (int box = 0; box < BOXES; ++box) slot[box] = stage.key[box];
#endif
        barrier_expect(full, STAGE_BYTES);
        load_stage(to, maps[0], full, stage);
      }
      places.next_keys();
    };

    // Keys run one stage ahead of values.
    StageBoxes stage = next_stage(), next = next_stage();
    bring_keys(stage, is_absent(next));
    bring_queries(tensors, tile, position, done, shared);
    for (bool is_last = false; !is_last;) {
      is_last = is_absent(next);
      StageBoxes after = stage;
      if (!is_last) {
        after = next_stage();
        bring_keys(next, is_absent(after));
      }
      if (thread == 0) {
        const u32 full = barrier_at(shared, FULL_V + places.v.slot), to = shared + V_AT + places.v.slot * V_STAGE_BYTES;
        barrier_wait(barrier_at(shared, EMPTY_V + places.v.slot), places.v.phase ^ 1);
        barrier_expect(full, V_STAGE_BYTES);
        load_stage(to, maps[1], full, stage);
      }
      places.v.advance();
      stage = next;
      next = after;
    }
  }
};

#if PAIRS
// What run_block calls to compute a pair of query tiles: each consumer has a tile of its own and boxes of that tile's
// list.
struct PairConsumer {
  static constexpr int HALF = HALF_KV / 16;  // steps of 16 keys of a stage's half
  ForwardOutput out;

  // Computes attention of the 64 rows of consumer `warpgroup` of the block's tile number `done`; false when there was
  // none. All 128 threads of the consumer call it.
  DEVICE bool consume(const InputTensors& tensors, u32 shared, u32 done, int warpgroup, StagePlaces& places) const {
    const u32 tile = tile_base(shared, done);
    barrier_wait(barrier_at(shared, FULL_Q), done & 1);
    fence_async_proxy();  // the queries came by cp.async
    if (load_shared_int(tile + 16) == 0) return false;

    const ConsumerRows rows = consumer_rows(tile, warpgroup);
    float output[O_REGISTERS] = {};
    u32 weights[BLOCK_KV / 16][4];
    SoftmaxState state;
    RowsInWork work = {
        rows,   places, shared, shared + warpgroup * 64 * 128, 0, warpgroup, tensors.softmax_scale * LOG2_E,
        output, state};
    int pending = 0;  // steps of `weights`, 16 keys each, that wait for their values, from v_at on
    u32 v_at = 0;
    bool is_last = false;
    for (int it = 0; !is_last; ++it) {
      RingPlace<K_STAGES> k = places.k;
      if (it > 0) k.advance();
      barrier_wait(barrier_at(shared, FULL_K + k.slot), k.phase);
      const u32 slot = key_slot(shared, places.stage + (it > 0));
      int2 first = first_keys(slot);
      is_last = load_shared_int(slot + LAST_AT);
      const bool sees_x = first.x < ABSENT_BOX * KEY_BOX, sees_y = first.y < ABSENT_BOX * KEY_BOX;
      const u32 k_at = sees_x ? 0 : HALF_KV * 128;
      if (!sees_x) first.x = first.y;
      // from a lane, so that the compiler sees that it is the same for a whole warp
      const int steps = __shfl_sync(~0u, (sees_x + sees_y) * HALF, 0);
      if (steps && pending) {
        if (steps == 2 * HALF) {
          if (pending == 2 * HALF) work.next_part<2 * HALF, 2 * HALF>(weights, is_last, first, k_at, v_at);
          else work.next_part<HALF, 2 * HALF>(weights, is_last, first, k_at, v_at);
        } else {
          if (pending == 2 * HALF) work.next_part<2 * HALF, HALF>(weights, is_last, first, k_at, v_at);
          else work.next_part<HALF, HALF>(weights, is_last, first, k_at, v_at);
        }
      } else {
        if (it > 0) places.next_keys();
        if (steps == 2 * HALF) work.start_part<2 * HALF>(weights, it, is_last, first, k_at);
        else if (steps == HALF) work.start_part<HALF>(weights, it, is_last, first, k_at);
        else work.let_go_by(weights, pending, v_at, it, is_last);
      }
      pending = steps;
      v_at = k_at;
    }
    work.weigh_pending(weights, pending, v_at);
    places.next_keys();
    store_rows(output, state, work.logit_scale, tensors, out, tile, warpgroup);
    return true;
  }
};
#endif
#endif
