// hopper_sparse_attention_backward: gradients of attention under a mask of tiles for sm_90a: attention_backward with
// TILE_LISTS, the same mathematics, buffers, params words and results to rounding.
// The kernels before and after it are those of hopper_attention_backward.
// Math       as hopper_attention_backward, over the pairs that tile_lists name (tile_steps.cuh)
// Layout     as attention_backward, one batch row
// Buffers    q_map, do_map by value, as hopper_attention_backward; then q, k, v, do, row_stats, tile_lists, dq_sum,
//            (ORDERED: dq_semaphores,) dk, dv; SHARES: dk_sum, dv_sum instead of dk, dv
// Defines    as hopper_attention_backward; HEAD_DIM 64 or 128, HAS_BIAS is 0, TILE_LISTS is 1
// Tiling     one block a multiprocessor, 384 threads, shared bytes as hopper_attention_backward. ORDERED: grid (the
//            lists' number of blocks or more, 1, 1), which run at the same time; each goes through the lists that
//            tile_lists names for it, one after the other. Else grid (ceil(seq_len / 128), num_kv_heads * head_shares *
//            query_shares, 1), a list or a part of one each, early keys (most queries) first (block_order.cuh)
// Numerics   as hopper_attention_backward. ORDERED: tiles of keys add to a tile of dq in the order that tile_lists
//            name, the first stores: the order in which blocks come to it where each step takes as long as every other.
//            A block waits for an earlier step of another block alone, and all blocks run.
//            A tile of dq_sum whose semaphore stays 0 is not written
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64; rows that see nothing give nothing
#define TILE_LISTS 1
#define HAS_BIAS 0
#include "common/attention_params.cuh"
#include "common/block_order.cuh"
#include "common/hopper_backward.cuh"
#include "common/key_gradients.cuh"
#include "common/query_share.cuh"

#if ORDERED
// Named barriers; number 1 is the consumers'.
constexpr int LIST_READ = 2, READY_TO_LOAD = 3, READY_TO_READ = 4;
#else
// Bytes of the queries and output gradients of the heads computed at a time; their sums of dq take as much of the L2
// cache again.
constexpr u64 SECTION_BYTES = 32ull << 20;
#endif

// Keys of a list: 128 successive ones.
struct ListKeys {
  TileSteps list;
  int first_key, seq_len;

  // {position, expire} of key `at` of the tile, 0 .. 127. No key expires: which queries see it is in the list.
  DEVICE int2 entry(int at) const {
    const int key = first_key + at;
    return make_int2(key, key < seq_len ? 0x7fffffff : 0);
  }
  // The position whose rows of k and v are loaded for key `at`; past the end the last one.
  DEVICE int row(int at) const { return min(first_key + at, seq_len - 1); }
  // Takes the steps of the list in place of a range of query tiles.
  DEVICE void find_tiles(BackwardBlock& block) const {
    block.steps = list.steps;
    block.first_tile = list.begin;
    block.num_tiles = list.end - list.begin;
  }
};

// A block computes the gradients of the keys of one list, or ORDERED of several lists in turn: warpgroup 0 loads,
// warpgroups 1 and 2 have 64 of a list's 128 keys each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_sparse_attention_backward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const bf16* /*q*/, const bf16* k, const bf16* v, const bf16* /*do*/, const float2* row_stats, const i32* tile_lists,
    float* dq_sum,
#if ORDERED
    i32* dq_semaphores,
#endif
    gradient* dk, gradient* dv, const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  __syncthreads();  // the barriers are set up
  const int seq_len = (int)params.seq_len, num_kv_heads = (int)params.num_kv_heads,
            group_size = (int)params.num_heads / num_kv_heads, tiles = ceil_div(seq_len, STEP_KEYS);
#if SHARES
  const int head_shares = (int)params.head_shares, query_shares = (int)params.query_shares;
#else
  constexpr int head_shares = 1, query_shares = 1;
#endif
  const int num_lists = num_kv_heads * head_shares * tiles, own_heads = group_size / head_shares;

  // A part of a list, and its place among the parts of a KV head's tile of keys.
  struct Part {
    ListKeys keys;
    BackwardBlock block;
    int kv_head, place;
  };
  // Fills in part `query_share`, of query_shares, of list number `list`.
  auto part_of = [&](int list, int query_share, Part& part) {
    const int share = list / tiles, first_key = list % tiles * STEP_KEYS;
    part.kv_head = share / head_shares;
    part.place = share % head_shares * query_shares + query_share;
    part.keys.list = TileSteps(tile_lists, num_lists, list, seq_len);
    part.keys.list.take_part(query_share, query_shares);
    part.keys.first_key = first_key;
    part.keys.seq_len = seq_len;
    const int head = share * own_heads;
    BackwardBlock& block = part.block;
    block.q_map = &q_map;
    block.do_map = &do_map;
    block.batch = 0;
    block.head = head;
    block.k = k + params.k_offset + (u64)part.kv_head * HEAD_DIM;
    block.v = v + params.v_offset + (u64)part.kv_head * HEAD_DIM_V;
    block.k_stride = (u32)params.k_token_stride;
    block.v_stride = (u32)params.v_token_stride;
    block.stats = row_stats + (u64)head * params.padded_len;
    block.dq_sum = dq_sum + (u64)head * params.padded_len * HEAD_DIM;
#if ORDERED
    block.semaphores = dq_semaphores + (u64)head * (params.padded_len / BLOCK_Q);
#endif
    block.group_size = 1;  // a list's steps name their heads
    block.padded_len = (int)params.padded_len;
    block.dq_first = 0;
    block.dq_len = (int)params.padded_len;
    block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
    block.bias_unit = 1.0f / f32_word(params.softmax_scale);
  };
  // Stores the gradients of the 64 keys that consumer `warpgroup` has of the part; all its threads call it.
  auto store = [&](const Part& part, const KeyGradients& sums, int warpgroup) {
    const int first_key = part.keys.first_key + warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16;
#if SHARES
    const int places = head_shares * query_shares;
    if (first_key < (int)params.padded_len) {
      store_sums(sums.dk, sum_tile<HEAD_DIM>(dk, part.kv_head, places, part.place, params.padded_len, first_key));
      store_sums(sums.dv, sum_tile<HEAD_DIM_V>(dv, part.kv_head, places, part.place, params.padded_len, first_key));
    }
#else
    store_gradient(sums.dk, f32_word(params.softmax_scale), dk + params.dk_offset + (u64)part.kv_head * HEAD_DIM,
                   params.dk_token_stride, first_key, seq_len);
    store_gradient(sums.dv, 1.0f, dv + params.dv_offset + (u64)part.kv_head * HEAD_DIM_V, params.dv_token_stride,
                   first_key, seq_len);
#endif
  };

  const int warpgroup = warpgroup_index();
#if ORDERED
  const ListOrder order(tile_lists, num_lists);
  if ((int)gridDim.x < order.num_blocks) __trap();  // the lists of absent blocks
  if ((int)blockIdx.x >= order.num_blocks) return;
  const int num_parts = order.num_places * query_shares;
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
#pragma unroll 1
    for (int at = (int)blockIdx.x; at < num_parts; at += order.num_blocks) {
      const int list = order.lists[at / query_shares];
      if (list < 0) continue;
      Part part;
      part_of(list, at % query_shares, part);
      if (part.keys.list.end > part.keys.list.begin) produce(part.block, part.keys, 0.0f, shared);
      __syncwarp();
      barrier_sync(LIST_READ, THREADS);  // no warp reads or waits for what the list's steps left in shared memory
      if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_BARRIERS; ++i) barrier_end(barrier_at(shared, i));
        start_barriers(shared);
      }
      __syncwarp();
      barrier_sync(READY_TO_LOAD, 128);
      barrier_pass(READY_TO_READ, THREADS);
    }
  } else {
    registers_grow<CONSUMER_REGISTERS>();
#pragma unroll 1
    for (int at = (int)blockIdx.x; at < num_parts; at += order.num_blocks) {
      const int list = order.lists[at / query_shares];
      if (list < 0) continue;
      Part part;
      part_of(list, at % query_shares, part);
      KeyGradients sums;
      consume(part.block, part.keys, shared, warpgroup - 1, sums);
      __syncwarp();
      barrier_sync(LIST_READ, THREADS);
      store(part, sums, warpgroup - 1);
      __syncwarp();
      barrier_sync(READY_TO_READ, THREADS);
    }
  }
#else
  const BlockPlace place =
      block_place(num_kv_heads * head_shares,
                  share_bytes(params.seq_len, group_size, head_shares, (HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES);
  Part part;
  part_of(place.head / query_shares * tiles + place.tile, place.head % query_shares, part);
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    produce(part.block, part.keys, 0.0f, shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    KeyGradients sums;
    consume(part.block, part.keys, shared, warpgroup - 1, sums);
    store(part, sums, warpgroup - 1);
  }
#endif
}
