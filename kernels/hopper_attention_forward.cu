// hopper_attention_forward: attention_forward for sm_90a; the same mathematics, layout, buffers, params words and results to rounding.
// Math       logit_ij = softmax_scale * q_i . k_j + delta_j; o_i = sum_j softmax_j(logit_ij) v_j over the keys max(doc_start_i, i - window + 1) <= j <= i;
//            lse_i = log sum_j exp(logit_ij)
// Layout     as attention_forward; strides and offsets are multiples of 8
// Buffers    (TENSOR_MAPS: k_map, v_map by value,) q, k, v, doc_start, (HAS_BIAS: delta,) o, lse
// Defines    HEAD_DIM (64, 128), HAS_BIAS, HEADS_PER_TILE (a divisor of the group), NUM_CONSUMERS, BLOCK_KV 128, K_STAGES, V_STAGES, TAKE_TURNS,
//            TENSOR_MAPS 0|1: maps of bf16 [batch, seq_len, num_kv_heads * HEAD_DIM] (k's and v's strides, base at their offset), box 1 x 128 x 64, 128-byte swizzle;
//            CONSUMER_REGISTERS, PRODUCER_REGISTERS (multiples of 8; 128 * (NUM_CONSUMERS * consumer + producer) <= 65536)
// Tiling     BLOCK_Q = NUM_CONSUMERS * 64 rows = HEADS_PER_TILE heads x TILE_QUERIES queries. Persistent: grid (multiprocessors, 1, 1), any number works;
//            128 + NUM_CONSUMERS * 128 threads, one block a multiprocessor; dynamic shared bytes = BLOCK_Q * HEAD_DIM * 2 + (K_STAGES + V_STAGES) * 256 * HEAD_DIM
//              + (HAS_BIAS ? 2048 : 0) + 2 * (32 + TILE_QUERIES * 4) + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as attention_forward
// Edges      any seq_len >= 1; only stages of 128 keys with a visible pair are read, only those seen in part are masked; softmax_scale > 0, window >= 1
#include "common/hopper_forward.cuh"

constexpr u64 SECTION_BYTES = 32 << 20;  // keys and values of the heads in work at a time: about half of an L2 cache

struct HopperAttentionForwardParams {
  u64 batch, seq_len, num_heads, num_kv_heads;
  u64 q_offset, k_offset, v_offset;                    // elements into the buffers
  u64 q_token_stride, k_token_stride, v_token_stride;  // elements
  u64 q_batch_stride, k_batch_stride, v_batch_stride;
  u64 window;                                          // keys a query sees at most, itself included; seq_len or more: no window
  u64 softmax_scale;                                   // f32 bits
};

struct DenseWork {
  const i32* doc_start;
  u32 tiles, head_units, kv_heads, batch, num_items;
  int seq_len, window;

  DEVICE WorkPlace place(u32 item) const {
    WorkPlace place = work_place(item, tiles, head_units, kv_heads, batch, (u64)seq_len * HEAD_DIM * 4, SECTION_BYTES);
    place.tile = (int)tiles - 1 - place.tile;  // late tiles see most keys
    place.head *= HEADS_PER_TILE;
    return place;
  }
};

// The producer warpgroup's part of one tile.
DEVICE void produce_tile(const ForwardTensors& tensors, const DenseWork& work, const TensorMap* maps, u32 item, u32 round, u32 shared, RingPlace<K_STAGES>& k_place,
                         RingPlace<V_STAGES>& v_place, u32& stage) {
  const int thread = (int)threadIdx.x % 128;
  const WorkPlace place = work.place(item);
  const int kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads);
  TileHead tile = {};
  tile.batch = place.batch;
  tile.head = place.head;
  tile.first_query = place.tile * TILE_QUERIES;
  tile.end_query = min(tile.first_query + TILE_QUERIES, tensors.seq_len);
  const i32* starts = work.doc_start + (u64)place.batch * tensors.seq_len;
  const int first_low = max(starts[tile.first_query], tile.first_query - work.window + 1);
  tile.last_stage = (tile.end_query - 1) / BLOCK_KV;
  tile.num_stages = tile.last_stage - first_low / BLOCK_KV + 1;
#if !TENSOR_MAPS
  const bf16* k = tensors.k + place.batch * tensors.k_batch_stride + (u64)kv_head * HEAD_DIM;
  const bf16* v = tensors.v + place.batch * tensors.v_batch_stride + (u64)kv_head * HEAD_DIM;
#endif
#if HAS_BIAS
  const float* delta = tensors.delta + ((u64)place.batch * tensors.num_kv_heads + kv_head) * tensors.seq_len;
#endif

  for (int it = -1; it < tile.num_stages; ++it) {
    if (it + 1 < tile.num_stages) {
      // Keys run one stage ahead of values.
      const int first_key = (tile.last_stage - it - 1) * BLOCK_KV;
      [[maybe_unused]] const int key = first_key + thread;
      const u32 full = barrier_at(shared, FULL_K + k_place.slot), to = shared + K_AT + k_place.slot * STAGE_BYTES;
#if TENSOR_MAPS
      if (HAS_BIAS || thread == 0) barrier_wait(barrier_at(shared, EMPTY_K + k_place.slot), k_place.phase ^ 1);
      if (thread == 0) {
        barrier_expect(full, STAGE_BYTES);
#pragma unroll
        for (int h = 0; h < DIM_BLOCKS; ++h) tensor_load_3d(to + h * BLOCK_KV * 128, &maps[0], full, kv_head * HEAD_DIM + h * 64, first_key, place.batch);
      }
#else
      barrier_wait(barrier_at(shared, EMPTY_K + k_place.slot), k_place.phase ^ 1);
      copy_key_rows(to, k, (u32)tensors.k_token_stride * 2, key < tensors.seq_len ? key : -1, thread / 32);
#endif
#if HAS_BIAS
      copy_async_4(key_slot(shared, stage) + bias_place(thread) * 4, delta + min(key, tensors.seq_len - 1), key < tensors.seq_len ? 4 : 0);
#endif
      if (!TENSOR_MAPS || HAS_BIAS) barrier_arrive_copies(full);
      k_place.advance();
      stage += 1;
    }
    if (it < 0) {
      // The queries and the tile's description, once the last tile's scores are done.
      const u32 full = barrier_at(shared, FULL_Q), head = tile_base(shared, round);
      barrier_wait(barrier_at(shared, EMPTY_Q), (round & 1) ^ 1);
      copy_queries(shared, tensors, tile);
      barrier_arrive_copies(full);
      unsigned char* described = (unsigned char*)__cvta_shared_to_generic(head);
      if (thread == 0) *(TileHead*)described = tile;
      for (int at = thread; at < TILE_QUERIES; at += 128) {
        const int query = min(tile.first_query + at, tensors.seq_len - 1);
        ((int*)(described + 32))[at] = max(starts[query], query - work.window + 1);
      }
      barrier_arrive(full);
      continue;
    }
    const u32 full = barrier_at(shared, FULL_V + v_place.slot), to = shared + V_AT + v_place.slot * STAGE_BYTES;
    const int first_key = (tile.last_stage - it) * BLOCK_KV;
#if TENSOR_MAPS
    if (thread == 0) {
      barrier_wait(barrier_at(shared, EMPTY_V + v_place.slot), v_place.phase ^ 1);
      barrier_expect(full, STAGE_BYTES);
#pragma unroll
      for (int h = 0; h < DIM_BLOCKS; ++h) tensor_load_3d(to + h * BLOCK_KV * 128, &maps[1], full, kv_head * HEAD_DIM + h * 64, first_key, place.batch);
    }
#else
    barrier_wait(barrier_at(shared, EMPTY_V + v_place.slot), v_place.phase ^ 1);
    const int key = first_key + thread;
    copy_key_rows(to, v, (u32)tensors.v_token_stride * 2, key < tensors.seq_len ? key : -1, thread / 32);
    barrier_arrive_copies(full);
#endif
    v_place.advance();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_attention_forward(
#if TENSOR_MAPS
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
#endif
    const bf16* q, const bf16* k, const bf16* v, const i32* doc_start,
#if HAS_BIAS
    const float* delta,
#endif
    bf16* o, float* lse, const __grid_constant__ HopperAttentionForwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  ForwardTensors tensors;
  tensors.q = q + params.q_offset;
  tensors.k = k + params.k_offset;
  tensors.v = v + params.v_offset;
  tensors.q_token_stride = params.q_token_stride;
  tensors.q_batch_stride = params.q_batch_stride;
  tensors.k_token_stride = params.k_token_stride;
  tensors.k_batch_stride = params.k_batch_stride;
  tensors.v_token_stride = params.v_token_stride;
  tensors.v_batch_stride = params.v_batch_stride;
#if HAS_BIAS
  tensors.delta = delta;
#endif
  tensors.o = o;
  tensors.lse = lse;
  tensors.seq_len = (int)params.seq_len;
  tensors.num_heads = (int)params.num_heads;
  tensors.num_kv_heads = (int)params.num_kv_heads;
  tensors.softmax_scale = f32_word(params.softmax_scale);
  DenseWork work;
  work.doc_start = doc_start;
  work.seq_len = tensors.seq_len;
  work.window = (int)(params.window < params.seq_len ? params.window : params.seq_len);
  work.tiles = (u32)ceil_div(tensors.seq_len, TILE_QUERIES);
  work.head_units = (u32)params.num_heads / HEADS_PER_TILE;
  work.kv_heads = (u32)params.num_kv_heads;
  work.batch = (u32)params.batch;
  work.num_items = work.tiles * work.head_units * work.batch;
  __syncthreads();  // the barriers are set up

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    RingPlace<K_STAGES> k_place;
    RingPlace<V_STAGES> v_place;
    u32 stage = 0;
    for (u32 round = 0;; ++round) {
      const u32 item = round_item(round);
      if (item >= work.num_items) break;
#if TENSOR_MAPS
      produce_tile(tensors, work, &k_map, item, round, shared, k_place, v_place, stage);
#else
      produce_tile(tensors, work, nullptr, item, round, shared, k_place, v_place, stage);
#endif
    }
    copy_async_wait<0>();
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    ConsumerPlaces places;
    start_turns(warpgroup - 1);
    for (u32 round = 0; round_item(round) < work.num_items; ++round) consume_tile(tensors, shared, round, warpgroup - 1, places);
    end_turns(warpgroup - 1);
  }
}
