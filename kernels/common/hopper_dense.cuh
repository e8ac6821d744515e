// hopper_dense: tiles of queries and the contiguous stages of keys they see: causal, a window, packed documents.
// Defines    as hopper_tiles.cuh, which the includer includes first
#pragma once
#include "common/hopper_tiles.cuh"

// What run_block calls to load a tile: consecutive keys by TMA.
struct DenseWork {
  const i32* doc_start;  // [batch, seq_len]
  int seq_len, window, tiles;
  WorkSchedule schedule;
#if HAS_FAR
  const AttentionFarForwardParams& params;
#endif

  // For all tiles of TILE_QUERIES queries and HEADS_PER_TILE heads of the launch.
  template <class Params>
  DEVICE DenseWork(const i32* doc_start, const Params& params)
      : doc_start(doc_start),
        seq_len((int)params.seq_len),
        window((int)(params.window < params.seq_len ? params.window : params.seq_len)),
        tiles(ceil_div(seq_len, TILE_QUERIES)),
        schedule((u32)tiles, (u32)params.num_heads / HEADS_PER_TILE, (u32)params.num_kv_heads, (u32)params.batch,
                 params.seq_len * ((HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES)
#if HAS_FAR
        ,
        params(params)
#endif
  {}

  // Loads tile number `done` of the thread block, at `place`. All 128 threads of the producer call it: thread 0 starts
  // the copies, all of them describe the tile and store biases.
  DEVICE void produce(const InputTensors& tensors, const TensorMap* const* maps, WorkPlace place, u32 done, u32 shared,
                      StagePlaces& places) const {
    const int thread = (int)threadIdx.x % 128;
    place.tile = tiles - 1 - place.tile;  // the last tiles first: they see the most keys
    place.head *= HEADS_PER_TILE;
    const int kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads);
    TileHead tile = {};
    tile.batch = place.batch;
    tile.head = place.head;
    tile.first_query = place.tile * TILE_QUERIES;
    tile.end_query = min(tile.first_query + TILE_QUERIES, seq_len);
    const i32* starts = doc_start + (u64)place.batch * seq_len;
#if HAS_BIAS
    // Loads that the tile's description needs are issued here and below.
    const int own_start = starts[min(tile.first_query + thread, seq_len - 1)];
#endif
#if HAS_FAR
    {
      const int start = starts[tile.first_query],
                same = count_of_document(starts, start, tile.first_query, tile.end_query - tile.first_query);
      tile.far = FarKeys(params, kv_head);
      const KeyTiles<BLOCK_KV> stages(tile.far, start, tile.first_query, tile.first_query + same - 1,
                                      tile.end_query - 1);
      tile.last_stage = stages.last;
      tile.num_stages = stages.count;
      tile.near = stages.near, tile.gap = stages.gap, tile.nearer = stages.nearer, tile.next_gap = stages.next_gap;
    }
#else
    const int first_low = max(starts[tile.first_query], tile.first_query - window + 1);
    tile.last_stage = (tile.end_query - 1) / BLOCK_KV;
    tile.num_stages = tile.last_stage - first_low / BLOCK_KV + 1;
#endif
#if HAS_BIAS
    const float* delta = tensors.delta + ((u64)place.batch * tensors.num_kv_heads + kv_head) * seq_len;
    const float inverse_scale = 1.0f / tensors.softmax_scale, base = load_base(tensors, tile, kv_head);
    float next_bias = delta[min(tile.last_stage * BLOCK_KV + thread, seq_len - 1)];  // loads run a stage ahead
#endif

    for (int it = -1; it < tile.num_stages; ++it) {
      if (it + 1 < tile.num_stages) {
        // Keys run one stage ahead of values. Past the end the last key is loaded instead, and masked.
        const int first_key = tile.first_key(it + 1);
        const u32 full = barrier_at(shared, FULL_K + places.k.slot), to = shared + K_AT + places.k.slot * STAGE_BYTES;
        if (HAS_BIAS || thread == 0) barrier_wait(barrier_at(shared, EMPTY_K + places.k.slot), places.k.phase ^ 1);
        if (thread == 0) {
          barrier_expect(full, STAGE_BYTES);
#pragma unroll
          for (int h = 0; h < DIM_BLOCKS; ++h)
            tensor_load_3d(to + h * BLOCK_KV * 128, maps[1], full, kv_head * HEAD_DIM + h * 64, first_key, place.batch);
        }
#if HAS_BIAS
        store_split_column(key_slot(shared, places.stage) + ENTRY_BYTES + thread * SPLIT_BYTES,
                           in_scores(next_bias, inverse_scale), BF16_ONE);
        fence_async_proxy();  // products read it
        barrier_arrive(full);
        next_bias = delta[min(max(first_key - BLOCK_KV, 0) + thread, seq_len - 1)];
#endif
        places.next_keys();
      }
      if (it < 0) {
        // Load Q and the tile's head once the consumers have released the last tile's Q.
        const u32 full = barrier_at(shared, FULL_Q);
        barrier_wait(barrier_at(shared, EMPTY_Q), (done & 1) ^ 1);
        copy_queries(shared, maps, tile);
        unsigned char* described = (unsigned char*)__cvta_shared_to_generic(tile_base(shared, done));
        if (thread == 0) *(TileHead*)described = tile;
        for (int at = thread; at < TILE_QUERIES; at += 128) {
          const int query = min(tile.first_query + at, seq_len - 1);
#if HAS_BIAS
          const int start = own_start;  // TILE_QUERIES <= 128
#else
          const int start = starts[query];
#endif
          ((int*)(described + HEAD_BYTES))[at] = HAS_FAR ? start : max(start, query - window + 1);
        }
#if HAS_BIAS
        store_base(tile_base(shared, done), base, inverse_scale);
        fence_async_proxy();  // products read it
#endif
        barrier_arrive(full);
        continue;
      }
      const u32 full = barrier_at(shared, FULL_V + places.v.slot), to = shared + V_AT + places.v.slot * V_STAGE_BYTES;
      const int first_key = tile.first_key(it);
      if (thread == 0) {
        barrier_wait(barrier_at(shared, EMPTY_V + places.v.slot), places.v.phase ^ 1);
        barrier_expect(full, V_STAGE_BYTES);
#pragma unroll
        for (int h = 0; h < DIM_BLOCKS_V; ++h)
          tensor_load_3d(to + h * BLOCK_KV * 128, maps[2], full, kv_head * HEAD_DIM_V + h * 64, first_key, place.batch);
      }
      places.v.advance();
    }
  }
};
