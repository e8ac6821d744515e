// hopper_dma_attention_forward: dma_attention_forward for sm_90a; the same mathematics, layout, buffers, params words and results to rounding.
// Math       logit_ij = softmax_scale * q_i . k_j + delta_j; o_i = sum_j softmax_j(logit_ij) v_j over the keys with j <= i < expire_j (paper 004, eq. 3 to 6);
//            lse_i = log sum_j exp(logit_ij); a query that sees nothing gets o = 0, lse = -inf
// Layout     as dma_attention_forward
// Buffers    q, k, v, delta, list, tile_window, o, lse
// Defines    as hopper_attention_forward, HAS_BIAS is always 1, TENSOR_MAPS always 0; HEADS_PER_TILE: the query heads that share a gathered tile, a divisor
//            of the group; SUPER_BLOCK (1024)
// Tiling     BLOCK_Q = NUM_CONSUMERS * 64 rows = HEADS_PER_TILE heads x TILE_QUERIES queries; a tile stays inside one super-block. Persistent: grid
//            (multiprocessors, 1, 1); 128 + NUM_CONSUMERS * 128 threads; dynamic shared bytes = BLOCK_Q * HEAD_DIM * 2 + (K_STAGES + V_STAGES) * 256 * HEAD_DIM
//              + 6144 + 64 + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as dma_attention_forward; the order of a row's sums follows the list
// Edges      any seq_len >= 1; rows of K, V and delta that no query of the super-block sees are never read; softmax_scale > 0
#define GATHER 1
#define HAS_BIAS 1
#include "common/hopper_forward.cuh"

#ifndef SUPER_BLOCK
#define SUPER_BLOCK 1024
#endif

constexpr u64 SECTION_BYTES = 32 << 20;  // keys and values of the heads in work at a time: about half of an L2 cache
constexpr int BLOCK_TILES = ceil_div(SUPER_BLOCK, TILE_QUERIES);

struct HopperDmaAttentionForwardParams {
  u64 batch, seq_len, num_heads, num_kv_heads;
  u64 q_offset, k_offset, v_offset;                    // elements into the buffers
  u64 q_token_stride, k_token_stride, v_token_stride;  // elements
  u64 q_batch_stride, k_batch_stride, v_batch_stride;
  u64 softmax_scale;                                   // f32 bits
  u64 list_capacity;                                   // entries a list has room for
  u64 tile_queries;                                    // queries a row of tile_window stands for; divides SUPER_BLOCK
};

struct GatherWork {
  const int2* list;
  const i32* tile_window;
  u64 list_capacity;
  u32 tiles, head_units, num_items;
  int tile_queries;
};

// A tile's keys: `count` entries of a list.
struct KeyWindow {
  const int2* entries;
  int count;

  DEVICE int2 entry(int at) const { return at < count ? entries[at] : make_int2(0, 0); }
};

// The producer warpgroup's part of one tile.
DEVICE void produce_tile(const ForwardTensors& tensors, const GatherWork& work, const WorkPlace& place, u32 round, u32 shared, RingPlace<K_STAGES>& k_place,
                         RingPlace<V_STAGES>& v_place, u32& stage) {
  const int thread = (int)threadIdx.x % 128, warp = thread / 32;
  const int kv_head = place.head / (tensors.num_heads / tensors.num_kv_heads), super_block = place.tile / BLOCK_TILES;
  TileHead tile = {};
  tile.batch = place.batch;
  tile.head = place.head;
  tile.first_query = super_block * SUPER_BLOCK + place.tile % BLOCK_TILES * TILE_QUERIES;
  tile.end_query = min(min(tile.first_query + TILE_QUERIES, (super_block + 1) * SUPER_BLOCK), tensors.seq_len);

  // The window's begin falls and its end falls from tile to tile: the last query decides the one, the first query the other.
  const u64 list_row = (u64)place.batch * tensors.num_kv_heads + kv_head;
  const int num_windows = ceil_div(tensors.seq_len, work.tile_queries), num_super_blocks = ceil_div(tensors.seq_len, SUPER_BLOCK);
  const i32* windows = work.tile_window + list_row * num_windows * 2;
  const int begin = windows[(tile.end_query - 1) / work.tile_queries * 2], end = windows[tile.first_query / work.tile_queries * 2 + 1];
  KeyWindow window;
  window.entries = work.list + (list_row * num_super_blocks + super_block) * work.list_capacity + begin;
  window.count = end - begin;
  tile.num_stages = max(ceil_div(window.count, BLOCK_KV), 1);

  const bf16* k = tensors.k + place.batch * tensors.k_batch_stride + (u64)kv_head * HEAD_DIM;
  const bf16* v = tensors.v + place.batch * tensors.v_batch_stride + (u64)kv_head * HEAD_DIM;
  const float* delta = tensors.delta + list_row * tensors.seq_len;
  int2 here = {0, 0}, next = window.entry(thread);  // this thread's entry of stages it and it + 1; the loads run one stage further ahead

  for (int it = -1; it < tile.num_stages; ++it) {
    const int2 after = window.entry((it + 2) * BLOCK_KV + thread);
    if (it + 1 < tile.num_stages) {
      // Keys run one stage ahead of values. Entries that are none get zeros and an expire that nobody precedes.
      const u32 full = barrier_at(shared, FULL_K + k_place.slot), keys = key_slot(shared, stage);
      const bool live = next.y > 0;
      barrier_wait(barrier_at(shared, EMPTY_K + k_place.slot), k_place.phase ^ 1);
      copy_key_rows(shared + K_AT + k_place.slot * STAGE_BYTES, k, (u32)tensors.k_token_stride * 2, live ? next.x : -1, warp);
      const int at = (it + 1) * BLOCK_KV + thread;
      copy_async_8(keys + thread * 8, window.entries + (at < window.count ? at : 0), at < window.count ? 8 : 0);
      copy_async_4(keys + ENTRY_BYTES + bias_place(thread) * 4, delta + (live ? next.x : 0), live ? 4 : 0);
      barrier_arrive_copies(full);
      k_place.advance();
      stage += 1;
    }
    if (it < 0) {
      // The queries and the tile's description, once the last tile's scores are done.
      const u32 full = barrier_at(shared, FULL_Q);
      barrier_wait(barrier_at(shared, EMPTY_Q), (round & 1) ^ 1);
      copy_queries(shared, tensors, tile);
      barrier_arrive_copies(full);
      if (thread == 0) *(TileHead*)__cvta_shared_to_generic(tile_base(shared, round)) = tile;
      barrier_arrive(full);
    } else {
      barrier_wait(barrier_at(shared, EMPTY_V + v_place.slot), v_place.phase ^ 1);
      copy_key_rows(shared + V_AT + v_place.slot * STAGE_BYTES, v, (u32)tensors.v_token_stride * 2, here.y > 0 ? here.x : -1, warp);
      barrier_arrive_copies(barrier_at(shared, FULL_V + v_place.slot));
      v_place.advance();
    }
    here = next;
    next = after;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_forward(
    const bf16* q, const bf16* k, const bf16* v, const float* delta, const int2* list, const i32* tile_window, bf16* o, float* lse,
    const __grid_constant__ HopperDmaAttentionForwardParams params) {
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
  tensors.delta = delta;
  tensors.o = o;
  tensors.lse = lse;
  tensors.seq_len = (int)params.seq_len;
  tensors.num_heads = (int)params.num_heads;
  tensors.num_kv_heads = (int)params.num_kv_heads;
  tensors.softmax_scale = f32_word(params.softmax_scale);
  GatherWork work;
  work.list = list;
  work.tile_window = tile_window;
  work.list_capacity = params.list_capacity;
  work.tile_queries = (int)params.tile_queries;
  work.tiles = (u32)(tensors.seq_len / SUPER_BLOCK * BLOCK_TILES + ceil_div(tensors.seq_len % SUPER_BLOCK, TILE_QUERIES));
  work.head_units = (u32)params.num_heads / HEADS_PER_TILE;
  work.num_items = work.tiles * work.head_units * (u32)params.batch;
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
      WorkPlace place = work_place(item, work.tiles, work.head_units, (u32)params.num_kv_heads, (u32)params.batch, params.seq_len * HEAD_DIM * 4, SECTION_BYTES);
      place.tile = (int)work.tiles - 1 - place.tile;  // early tiles may see fewer keys
      place.head *= HEADS_PER_TILE;
      produce_tile(tensors, work, place, round, shared, k_place, v_place, stage);
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
