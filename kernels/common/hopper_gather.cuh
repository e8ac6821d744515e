// hopper_gather: the producer of tiles of queries and of the keys in their list, for exact dynamic mask attention and,
// with HAS_BIAS 0, for NSA's compressed blocks.
// Defines    as hopper_tiles.cuh, with GATHER 1
#pragma once
#include "common/hopper_tiles.cuh"

constexpr int BLOCK_TILES = ceil_div(SUPER_BLOCK, TILE_QUERIES);

// A tile's keys: a range of list entries. The first stage has `head_count` of them, later stages are whole. The rest of
// the first stage is filled with the first entry's position and expire 0, which no query sees.
struct KeyWindow {
  const int2* entries;
  int head_count, num_stages;

  // Bytes to copy of each 16-byte chunk. A tile that sees no key has one stage of zeros, since rows of K and V may hold
  // NaN.
  DEVICE u32 row_bytes() const { return head_count > 0 ? 16 : 0; }
  // {position, expire} of key `at`, 0 .. 127, of stage `stage` of the tile; what lies past the window has expire 0.
  DEVICE int2 entry(int stage, int at) const {
    if (stage == 0 ? at >= head_count : stage >= num_stages) return make_int2(entries[0].x, 0);
    return entries[stage == 0 ? at : head_count - BLOCK_KV + stage * BLOCK_KV + at];
  }
};

// What run_block calls to load a tile: listed keys, row by row.
struct GatherWork {
  const int2* list;        // [batch, num_kv_heads, num_super_blocks, list_capacity]
  const i32* tile_window;  // [batch, num_kv_heads, ceil(seq_len / tile_queries), 2]
  u64 list_capacity;
  int tile_queries, tiles;
  WorkSchedule schedule;

  // For all tiles of TILE_QUERIES queries and HEADS_PER_TILE heads of the launch; none crosses a super-block.
  template <class Params>
  DEVICE GatherWork(const int2* list, const i32* tile_window, const Params& params)
      : list(list),
        tile_window(tile_window),
        list_capacity(params.list_capacity),
        tile_queries((int)params.tile_queries),
        tiles((int)params.seq_len / SUPER_BLOCK * BLOCK_TILES +
              ceil_div((int)params.seq_len % SUPER_BLOCK, TILE_QUERIES)),
        schedule((u32)tiles, (u32)params.num_heads / HEADS_PER_TILE, (u32)params.num_kv_heads, (u32)params.batch,
                 params.seq_len * HEAD_DIM * 4, SECTION_BYTES) {}

  // Loads tile number `done` of the thread block, at `place`. All 128 threads of the producer call it, and thread t has
  // key t of each stage.
  DEVICE void produce(const InputTensors& tensors, const TensorMap* const* maps, WorkPlace place, u32 done, u32 shared,
                      StagePlaces& places) const {
    const int thread = (int)threadIdx.x % 128, warp = thread / 32;
    place.tile = tiles - 1 - place.tile;  // the last tiles first: early ones may see fewer keys
    place.head *= HEADS_PER_TILE;
    const int kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads), super_block = place.tile / BLOCK_TILES;
    TileHead tile = {};
    tile.batch = place.batch;
    tile.head = place.head;
    tile.first_query = super_block * SUPER_BLOCK + place.tile % BLOCK_TILES * TILE_QUERIES;
    tile.end_query = min(min(tile.first_query + TILE_QUERIES, (super_block + 1) * SUPER_BLOCK), tensors.seq_len);

    // The last query of the tile determines where its window of keys begins, the first query where it ends.
    const u64 list_row = (u64)place.batch * tensors.num_kv_heads + kv_head;
    const int num_windows = ceil_div(tensors.seq_len, tile_queries),
              num_super_blocks = ceil_div(tensors.seq_len, SUPER_BLOCK);
    const i32* windows = tile_window + list_row * num_windows * 2;
    const int begin = windows[(tile.end_query - 1) / tile_queries * 2],
              end = windows[tile.first_query / tile_queries * 2 + 1];
    const int count = max(end - begin, 0);
    tile.num_stages = max(ceil_div(count, BLOCK_KV), 1);
    KeyWindow window;
    window.entries = list + (list_row * num_super_blocks + super_block) * list_capacity + (count > 0 ? begin : 0);
    window.head_count = count - (tile.num_stages - 1) * BLOCK_KV;
    window.num_stages = tile.num_stages;
    tile.first_is_half = HALF_STAGES && window.head_count <= HALF_KV;

#if CACHED
    const u64 head_stride = (u64)tensors.num_slots * HEAD_DIM;
    const int num_keys = tensors.num_slots;
#else
    const u64 head_stride = HEAD_DIM;
    [[maybe_unused]] const int num_keys = tensors.seq_len;
#endif
    const bf16* k = tensors.k + place.batch * tensors.k_batch_stride + kv_head * head_stride;
    const bf16* v = tensors.v + place.batch * tensors.v_batch_stride + kv_head * head_stride;
#if HAS_BIAS
    const float* delta = tensors.delta + list_row * num_keys;
    const float inverse_scale = 1.0f / tensors.softmax_scale, base = load_base(tensors, tile, kv_head);
#endif
    int here = 0;                         // this thread's key of stage `it`
    int2 next = window.entry(0, thread);  // its entries of stages it + 1 and it + 2, loaded ahead
    int2 after = window.entry(1, thread);
#if HAS_BIAS
    float next_bias = delta[next.x];
#endif

    for (int it = -1; it < tile.num_stages; ++it) {
      const int2 later = window.entry(it + 3, thread);
#if HAS_BIAS
      const float after_bias = delta[after.x];
#endif
      if (it + 1 < tile.num_stages) {
        // Keys run one stage ahead of values.
        const u32 full = barrier_at(shared, FULL_K + places.k.slot), keys = key_slot(shared, places.stage);
        barrier_wait(barrier_at(shared, EMPTY_K + places.k.slot), places.k.phase ^ 1);
        if (it >= 0 || !tile.first_is_half || warp < HALF_KV / 32)
          copy_key_rows(shared + K_AT + places.k.slot * STAGE_BYTES, k, (u32)tensors.k_token_stride * 2, next.x, warp,
                        window.row_bytes());
        store_shared_int2(keys + thread * 8, next.x, next.y);
#if HAS_BIAS
        store_split_column(keys + ENTRY_BYTES + thread * SPLIT_BYTES, in_scores(next_bias, inverse_scale), BF16_ONE);
#endif
        barrier_arrive_copies(full);
        barrier_arrive(full);  // for the stores of the entry and the bias
        places.next_keys();
      }
      if (it < 0) {
        // Load Q and the tile's head once the consumers have released the last tile's Q.
        barrier_wait(barrier_at(shared, EMPTY_Q), (done & 1) ^ 1);
        copy_queries(shared, maps, tile);
        if (thread == 0) *(TileHead*)__cvta_shared_to_generic(tile_base(shared, done)) = tile;
#if HAS_BIAS
        store_base(tile_base(shared, done), base, inverse_scale);
#endif
        barrier_arrive(barrier_at(shared, FULL_Q));
      } else {
        barrier_wait(barrier_at(shared, EMPTY_V + places.v.slot), places.v.phase ^ 1);
        if (it > 0 || !tile.first_is_half || warp < HALF_KV / 32)
          copy_key_rows(shared + V_AT + places.v.slot * STAGE_BYTES, v, (u32)tensors.v_token_stride * 2, here, warp,
                        window.row_bytes());
        barrier_arrive_copies(barrier_at(shared, FULL_V + places.v.slot));
        places.v.advance();
      }
      here = next.x;
      next = after;
      after = later;
#if HAS_BIAS
      next_bias = after_bias;
#endif
    }
  }
};
