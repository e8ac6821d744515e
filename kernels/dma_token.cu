// dma_token: one new token per row joins DMA's slots, and the list of the slots that its query sees, in the order of
// epoch_order.cuh: that of the keys which dma_ordered_lists lists for the same query in a whole row.
// Math       the heap step of dma_decode: with all w = keep_window_size slots in use the new key (z_new, length) takes
//            the slot of the smallest (z_j, j), j <= length - local_window_size, or without a local window is itself
//            the smallest and not kept. list: {slot, 1}, or {a slot in use, 0} where no key lies, in whole stages of
//            128; base = the largest bias of a listed key, where a bias is z, or exp(min(z, 60)) (EXP_BIAS)
// Layout     k_new, v_new bf16 [batch, num_kv_heads, head_dim], each with an element offset and a batch stride
//            (multiples of 8); z_new f32 [batch, num_kv_heads]; k_cache, v_cache, slot_z, slot_position as in
//            dma_decode, updated in place; length i32 [batch]; delta f32 as slot_z, written at slots in use; list int2
//            [batch, num_kv_heads, capacity]; tile_window int2 {0, entries} [batch, num_kv_heads]; base f32
//            [batch, num_kv_heads, 64], of which the first is written
// Buffers    k_new, v_new, z_new, k_cache, v_cache, slot_z, slot_position, length, (EXP_BIAS: delta,) list,
//            tile_window, base
// Defines    MAX_OLD (1024, 2048): at least keep_window_size; EXP_BIAS 0|1
// Tiling     grid (num_kv_heads, 1, batch); 512 threads; 15 or 29 KiB static shared memory, no dynamic
// Numerics   order by integers, exact; the largest bias as bias_base finds it
// Edges      rows of different length in one batch; length 0; slots past min(length, w) are not read
#include "common/attention_params.cuh"
#include "common/epoch_order.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_THREADS = 512, NUM_WARPS = NUM_THREADS / 32;
constexpr i32 NO_SLOT = -1;
constexpr float MAX_EXPONENT = 60.f;  // as in dma_decode

struct DmaTokenParams {
  u64 num_kv_heads, head_dim, k_offset, v_offset, k_batch_stride, v_batch_stride;
  u64 keep_window_size, local_window_size, near_keys, capacity;
};

struct Shared {
  u64 old[MAX_OLD];                  // order keys of the older keys
  unsigned short old_slot[MAX_OLD];  // and their slots
  i32 near[MAX_OLD + EPOCH];         // slots of near keys by place; NO_SLOT: none
  u64 warp_smallest[NUM_WARPS];
  u32 warp_largest[NUM_WARPS];
  u32 num_old;
  i32 smallest_slot;
};

// The float of an order key: the inverse of order_of_score, as in bias_base.
DEVICE float score_of_order(u32 order) { return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

DEVICE float bias_of_score(float z) { return EXP_BIAS ? expf(fminf(z, MAX_EXPONENT)) : z; }

// A block has the slots of one row and KV head, spread over its threads.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    dma_token(const bf16* __restrict__ k_new, const bf16* __restrict__ v_new, const float* __restrict__ z_new,
              bf16* k_cache, bf16* v_cache, float* slot_z, i32* slot_position, const i32* __restrict__ length,
#if EXP_BIAS
              float* delta,
#endif
              int2* list, int2* tile_window, float* base, const __grid_constant__ DmaTokenParams params) {
  __shared__ Shared shared;
  wait_for_previous();
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const i32 window = (i32)params.keep_window_size, head_dim = (i32)params.head_dim;
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + blockIdx.x;
  float* head_z = slot_z + head * window;
  i32* head_position = slot_position + head * window;
  const float token_z = z_new[head];
  const i32 position = length[batch], num_slots = max(min(position, window), 0);
  // Not num_slots == window: kernels/notes/bound-and-zero.md.
  const bool is_full = position >= window;

  // Find the slot that the new key takes: a free one, or the slot of the smallest candidate.
  if (thread == 0) shared.num_old = 0, shared.smallest_slot = NO_SLOT;
  const i32 last_candidate = position - (i32)params.local_window_size;
  u64 smallest = ~0ull;
  i32 smallest_slot = NO_SLOT;
  for (i32 slot = thread; is_full && slot < num_slots; slot += NUM_THREADS) {
    const i32 at = head_position[slot];
    const u64 key = order_key(order_of_score(head_z[slot]), (u32)at);
    if (at <= last_candidate && key < smallest) smallest = key, smallest_slot = slot;
  }
  u64 of_block = smallest;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    of_block = min(of_block, __shfl_xor_sync(0xffffffffu, of_block, distance));
  if (lane == 0) shared.warp_smallest[warp] = of_block;
  const EpochOrder order(position / EPOCH * EPOCH, 0, window, (i32)params.near_keys);
  for (i32 place = thread; place < order.near_total && place < MAX_OLD + EPOCH; place += NUM_THREADS)
    shared.near[place] = NO_SLOT;
  __syncthreads();  // the warps' smallest keys are there, and no key has a place
  of_block = params.local_window_size == 0 ? order_key(order_of_score(token_z), (u32)position) : ~0ull;
#pragma unroll
  for (int other = 0; other < NUM_WARPS; other++) of_block = min(of_block, shared.warp_smallest[other]);
  // One thread has it, since keys are distinct; none if it is the new key's.
  if (is_full && smallest_slot != NO_SLOT && smallest == of_block) shared.smallest_slot = smallest_slot;
  __syncthreads();  // the slot is known
  const i32 taken = is_full ? shared.smallest_slot : num_slots, in_use = is_full ? window : num_slots + 1;
  const i32 filler = taken == NO_SLOT ? 0 : taken;

  // Give every key in use its place, find the largest bias, and store the new key in its slot.
  u32 largest = 0;
  for (i32 slot = thread; slot < in_use; slot += NUM_THREADS) {
    const float z = slot == taken ? token_z : head_z[slot];
    const i32 at = slot == taken ? position : head_position[slot];
    if (slot == taken) head_z[slot] = z, head_position[slot] = at;
    const float bias = bias_of_score(z);
#if EXP_BIAS
    delta[head * window + slot] = bias;
#endif
    largest = max(largest, bias == bias ? order_of_score(bias) : ~0u);
    if (order.is_near(at)) {
      const i32 place = order.place(at);
      if (0 <= place && place < order.near_total && place < MAX_OLD + EPOCH) shared.near[place] = slot;
    } else {
      const u32 free = atomicAdd(&shared.num_old, 1u);
      if (free >= MAX_OLD) continue;
      shared.old[free] = order_key(order_of_score(z), (u32)at);
      shared.old_slot[free] = (unsigned short)slot;
    }
  }
  if (taken != NO_SLOT) {
    const uint4* from_k = (const uint4*)(k_new + params.k_offset + batch * params.k_batch_stride +
                                         (i64)blockIdx.x * head_dim);
    const uint4* from_v = (const uint4*)(v_new + params.v_offset + batch * params.v_batch_stride +
                                         (i64)blockIdx.x * head_dim);
    const i64 row = (head * window + taken) * head_dim;
    if (thread < head_dim / 8) ((uint4*)(k_cache + row))[thread] = from_k[thread];
    else if (thread < head_dim / 4) ((uint4*)(v_cache + row))[thread - head_dim / 8] = from_v[thread - head_dim / 8];
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) shared.warp_largest[warp] = largest;
  __syncthreads();  // every key has its place, or waits to be sorted
  const i32 num_old = min((i32)shared.num_old, MAX_OLD), size = sorted_size(num_old);
  for (i32 at = num_old + thread; at < size; at += NUM_THREADS) shared.old[at] = 0;  // below every key
  __syncthreads();  // the rest is filled
  if (num_old > 1) sort_falling<NUM_THREADS>(shared.old, shared.old_slot, size);

  const i32 entries = min(order.near_total + (num_old + EPOCH - 1) / EPOCH * EPOCH, (i32)params.capacity);
  int2* out = list + head * (i64)params.capacity;
  for (i32 place = thread; place < entries; place += NUM_THREADS) {
    const i32 at = place - order.near_total;
    const i32 slot = at < 0 ? shared.near[place] : at < num_old ? (i32)shared.old_slot[at] : NO_SLOT;
    out[place] = slot == NO_SLOT ? make_int2(filler, 0) : make_int2(slot, 1);
  }
  if (thread > 0) return;
  tile_window[head] = make_int2(0, entries);
#pragma unroll
  for (int other = 0; other < NUM_WARPS; other++) largest = max(largest, shared.warp_largest[other]);
  base[head * 64] = score_of_order(largest);
}
