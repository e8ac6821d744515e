// dma_decode: one new token per row against a DMA cache of w slots per KV head; the slot of the evicted key is
// overwritten.
// Math       heap step of the selection, then attention. Slots hold the w = keep_window_size largest (z_j, j) so far.
//            The new key (z_new, length) takes a free slot; else the slot of the smallest (z_j, j) if that is smaller
//            (so it wins ties, being the more recent); else no query sees it. With r = local_window_size > 0 only slots
//            of j <= length - r are candidates, the new key is none, and it always takes a slot. o_h = sum_j
//            softmax_j(softmax_scale q_h . k_j + delta_j) v_j over the keys then kept, delta_j = exp(min(z_j, 60))
//            (BIAS_LINEAR: z_j; NO_BIAS: 0)
// Layout     q bf16 [batch, num_heads, HEAD_DIM], k_new bf16 [batch, num_kv_heads, HEAD_DIM], v_new bf16
//            [batch, num_kv_heads, HEAD_DIM_V], each with an element offset and a batch stride (slices of one packed
//            row, multiples of 8); z_new f32 [batch, num_kv_heads]; k_cache bf16 [batch, num_kv_heads, w, HEAD_DIM],
//            v_cache bf16 [.., HEAD_DIM_V], slot_z f32, slot_position i32 [batch, num_kv_heads, w], all updated in
//            place, slots 0 .. min(length, w) in use, in any order; length i32 [batch], tokens of the row before this
//            one; o bf16 [batch, num_heads, HEAD_DIM_V]; partials f32 [batch, num_heads, num_splits, HEAD_DIM_V + 2]
//            (any content, unused and of any size when num_splits = 1); counters u32 [batch, num_kv_heads], zero before
//            the first launch, zero again after each
// Buffers    q, k_new, v_new, z_new, k_cache, v_cache, slot_z, slot_position, length, o, partials, counters
// Defines    HEAD_DIM, HEAD_DIM_V, BIAS_LINEAR (0), NO_BIAS (0), NUM_STAGES (4 for HEAD_DIM <= 64, else 2),
//            NUM_WARPS (2 where a head_dim is above 128, else 4 or 8)
// Tiling     grid (num_splits, num_kv_heads * ceil(group_size / 16), batch); 32 NUM_WARPS threads;
//            dynamic shared bytes = 16 * (2 HEAD_DIM + 16)
//              + NUM_WARPS * NUM_STAGES * (32 HEAD_DIM + 32 HEAD_DIM_V + 576);
//            num_splits: eight warps or two blocks a multiprocessor, a tile of 16 slots a warp at least, at most 4096.
//            One launch: every block finds the smallest slot by itself while its first tiles arrive, split 0 attends
//            the new key as a tile of its own, the last block of a head stores it
// Numerics   order by integers, exact. The largest bias is taken from all (the softmax is the same). Logits, softmax
//            and sums in f32, P rounded to bf16 for P V, one rounding at the store; fixed order
// Edges      rows of different length in one batch; length 0; w not a multiple of a tile; w = 1. The slot that is
//            overwritten is loaded and masked: its v must be finite (it was attended before)
#include "common/attention_params.cuh"
#include "common/order_key.cuh"
#include "common/programmatic_launch.cuh"
#include "common/split_decode.cuh"

#ifndef BIAS_LINEAR
#define BIAS_LINEAR 0
#endif
#ifndef NO_BIAS
#define NO_BIAS 0
#endif
constexpr float MAX_EXPONENT = 60.f;  // exp overflows at 88.7, and one such key would own the softmax
constexpr i32 NO_SLOT = -1;
constexpr int EARLY = NUM_WARPS > 4 ? 2 : 4;  // vectors of scores that a thread loads at once: 2048 slots in all
constexpr int K_CHUNKS = HEAD_DIM / 8, V_CHUNKS = HEAD_DIM_V / 8;
static_assert(K_CHUNKS + V_CHUNKS <= NUM_THREADS, "a thread keeps one chunk of the new key or value");

struct DmaDecodeParams : TokenParams {
  u64 keep_window_size, num_splits, local_window_size;
};

DEVICE float bias_of_score(float z) { return NO_BIAS ? 0.f : BIAS_LINEAR ? z : expf(fminf(z, MAX_EXPONENT)); }

extern "C" __global__ void __launch_bounds__(NUM_THREADS, NUM_WARPS > 4 ? 1 : 3)
    dma_decode(const bf16* __restrict__ q, const bf16* __restrict__ k_new, const bf16* __restrict__ v_new,
               const float* __restrict__ z_new, bf16* k_cache, bf16* v_cache, float* slot_z, i32* slot_position,
               const i32* __restrict__ length, bf16* __restrict__ o, float* partials, u32* counters,
               const __grid_constant__ DmaDecodeParams params) {
#include "common/begin_decode.cuh"
  wait_for_previous();
  __shared__ u64 warp_smallest[NUM_WARPS];
  __shared__ float warp_largest[NUM_WARPS];
  __shared__ i32 warp_slot[NUM_WARPS];
  const i32 window = (i32)params.keep_window_size;
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + kv_head;
  const i64 query_head = batch * params.num_heads + (i64)kv_head * group_size;  // first query head of the group

  bf16* head_k = k_cache + head * window * HEAD_DIM;
  bf16* head_v = v_cache + head * window * HEAD_DIM_V;
  float* head_z = slot_z + head * window;
  i32* head_position = slot_position + head * window;
  const bf16* token_k = k_new + params.k_offset + batch * params.k_batch_stride + (i64)kv_head * HEAD_DIM;
  const bf16* token_v = v_new + params.v_offset + batch * params.v_batch_stride + (i64)kv_head * HEAD_DIM_V;

  // Issue all loads before waiting for any: with a short cache latency is the whole cost. Scores and positions of
  // unused slots are loaded and ignored.
  uint4 early_z[EARLY], early_position[EARLY];
  const bool by_four = window % 4 == 0;
#pragma unroll
  for (int i = 0; i < EARLY; i++) {
    const i32 slot = (threadIdx.x + i * NUM_THREADS) * 4;
    if (!by_four || slot >= window) continue;
    early_z[i] = *(const uint4*)(head_z + slot);
    early_position[i] = *(const uint4*)(head_position + slot);
  }
  uint4 token_chunk = make_uint4(0, 0, 0, 0);  // of the new key or value; stored by the last block
  if (threadIdx.x < K_CHUNKS) token_chunk = ((const uint4*)token_k)[threadIdx.x];
  else if (threadIdx.x < K_CHUNKS + V_CHUNKS) token_chunk = ((const uint4*)token_v)[threadIdx.x - K_CHUNKS];
  const float token_z = z_new[head];
  const i32 position = length[batch];

  // Slots of this split, in whole tiles of the block; warp 0 of split 0 takes the new key as one tile more.
  i32 num_slots = window, begin, end, warp_begin;
  int num_tiles;
  auto divide = [&] {
    const i32 per_split = ((num_slots + Decode::SPLIT_KEYS - 1) / Decode::SPLIT_KEYS + num_splits - 1) / num_splits *
                          Decode::SPLIT_KEYS;
    begin = (i32)min((i64)split * per_split, (i64)num_slots), end = min(begin + per_split, num_slots);
    warp_begin = begin + warp * DECODE_KEYS;
    num_tiles = end > warp_begin ? (end - warp_begin + Decode::SPLIT_KEYS - 1) / Decode::SPLIT_KEYS : 0;
  };
  const bool has_token = split == 0 && warp == 0;

  // Load: fill this warp's ring, then the queries.
  const u32 stages = shared_address(shared_bytes) + Decode::Q_BYTES + warp * NUM_STAGES * Decode::STAGE_BYTES;
  auto load = [&](int tile) {
    const i64 slot = warp_begin + (i64)tile * Decode::SPLIT_KEYS;
    const bool is_token = tile == num_tiles;
    if (tile < num_tiles + has_token)
      Decode::load_tile(stages + tile % NUM_STAGES * Decode::STAGE_BYTES, is_token ? token_k : head_k + slot * HEAD_DIM,
                        is_token ? token_v : head_v + slot * HEAD_DIM_V, is_token ? z_new + head : head_z + slot,
                        is_token ? 1 : (int)min((i64)DECODE_KEYS, end - slot));
    copy_async_commit();
  };
  // The length is not known yet: copies as if all slots were in use.
  divide();
#pragma unroll 1
  for (int tile = 0; tile < NUM_STAGES; tile++) load(tile);
  Decode::load_q(
      shared_bytes,
      q + params.q_offset + batch * params.q_batch_stride + ((i64)kv_head * group_size + first_row) * HEAD_DIM,
      num_rows, DECODE_ROWS);
  if (position < window) {
    copy_async_wait<0>();
    __syncwarp();  // no copy into the stages is in flight
    num_slots = position;
    divide();
#pragma unroll 1
    for (int tile = 0; tile < NUM_STAGES; tile++) load(tile);
  }

  // Select the slot that the new key takes, if any, and find the largest score.
  float largest = token_z;
  u64 smallest = ~0ull;
  i32 slot_of_smallest = NO_SLOT;
  const i32 last_candidate = position - (i32)params.local_window_size;
  auto consider = [&](i32 slot, u32 z_bits, u32 key_position) {
    if (slot >= num_slots) return;
    largest = fmaxf(largest, __uint_as_float(z_bits));
    if ((i32)key_position > last_candidate) return;
    const u64 key = order_key(order_of_score(__uint_as_float(z_bits)), key_position);
    if (key < smallest) {
      smallest = key;
      slot_of_smallest = slot;
    }
  };
  auto consider_four = [&](i32 slot, uint4 z4, uint4 position4) {
    consider(slot, z4.x, position4.x);
    consider(slot + 1, z4.y, position4.y);
    consider(slot + 2, z4.z, position4.z);
    consider(slot + 3, z4.w, position4.w);
  };
  if (by_four) {
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const i32 slot = (threadIdx.x + i * NUM_THREADS) * 4;
      if (slot < window) consider_four(slot, early_z[i], early_position[i]);
    }
    for (i32 slot = (threadIdx.x + EARLY * NUM_THREADS) * 4; slot < num_slots; slot += NUM_THREADS * 4)
      consider_four(slot, *(const uint4*)(head_z + slot), *(const uint4*)(head_position + slot));
  } else {
#pragma unroll 4
    for (i32 slot = threadIdx.x; slot < num_slots; slot += NUM_THREADS)
      consider(slot, __float_as_uint(head_z[slot]), (u32)head_position[slot]);
  }
  u64 of_warp = smallest;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    of_warp = min(of_warp, __shfl_xor_sync(0xffffffffu, of_warp, distance));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (lane == 0) warp_smallest[warp] = of_warp, warp_largest[warp] = largest;
  // One lane has it, since keys are distinct; without a candidate every lane has "none".
  if (smallest == of_warp) warp_slot[warp] = slot_of_smallest;
  __syncthreads();  // the queries, and every warp's smallest key and largest score, are in shared memory
  i32 taken = num_slots;  // a free slot
  if (num_slots == window) {
    const u64 token_key = order_key(order_of_score(token_z), (u32)position);
    u64 of_block = params.local_window_size == 0 ? token_key : ~0ull;
    taken = NO_SLOT;  // the new key itself is the smallest and is not kept
#pragma unroll
    for (int other = 0; other < NUM_WARPS; other++)
      if (warp_smallest[other] < of_block) of_block = warp_smallest[other], taken = warp_slot[other];
  }
#pragma unroll
  for (int other = 0; other < NUM_WARPS; other++) largest = fmaxf(largest, warp_largest[other]);
  // The largest bias is subtracted from all (in base 2): next to a large one, q . k would lose its digits.
  const float base = bias_of_score(largest);
  auto bias_of = [base](float z) { return (bias_of_score(z) - base) * LOG2_E; };

  // Attend, tile by tile; the evicted key is masked.
  const float scale = f32_word(params.softmax_scale) * LOG2_E;
  Decode decode;
  decode.init();
  decode.take_q(shared_address(shared_bytes), num_rows);
  for (int tile = 0; tile < num_tiles + has_token; tile++) {
    copy_async_wait<NUM_STAGES - 1>();
    __syncwarp();  // the copies of all lanes are complete
    const i32 tile_begin = warp_begin + tile * Decode::SPLIT_KEYS;
    const bool is_token = tile == num_tiles;
    const int num_valid = is_token ? taken != NO_SLOT : end - tile_begin, left = is_token ? -1 : taken - tile_begin;
    const int stage_offset = Decode::Q_BYTES + (warp * NUM_STAGES + tile % NUM_STAGES) * Decode::STAGE_BYTES;
    const float* tile_z = (const float*)(shared_bytes + stage_offset + Decode::K_BYTES + Decode::V_BYTES);
    const int key = lane % DECODE_KEYS;
    decode.attend(shared_address(shared_bytes) + stage_offset, scale,
                  key < num_valid && key != left ? bias_of(tile_z[key]) : -INFINITY_F32);
    __syncwarp();  // all lanes have read the stage before it is filled again
    load(tile + NUM_STAGES);
  }

  // Join the results of the warps, then of the thread blocks that share the keys.
  copy_async_wait<0>();
  __syncthreads();  // no warp reads its stages any more
  float* shared_partials = (float*)(shared_bytes + Decode::Q_BYTES);
  decode.store_warp(shared_partials);
  __syncthreads();  // all partial rows are stored
  const bool is_last = decode_finish<HEAD_DIM_V, NUM_WARPS>(
      shared_partials, partials + query_head * num_splits * (HEAD_DIM_V + 2), o + query_head * HEAD_DIM_V,
      counters + head, &last_flag, split, num_splits, first_row, num_rows, group_size, num_splits * row_blocks);

  // Store the new key, now that every block of the head has read the slots.
  if (!is_last || taken == NO_SLOT) return;
  if (threadIdx.x < K_CHUNKS) ((uint4*)(head_k + (i64)taken * HEAD_DIM))[threadIdx.x] = token_chunk;
  else if (threadIdx.x < K_CHUNKS + V_CHUNKS)
    ((uint4*)(head_v + (i64)taken * HEAD_DIM_V))[threadIdx.x - K_CHUNKS] = token_chunk;
  if (threadIdx.x == 0) {
    head_z[taken] = token_z;
    head_position[taken] = position;
  }
}
