// hopper_forward: attention of a tile of query rows on Hopper (sm_90a): a producer warpgroup fills rings of keys and values in shared memory,
// consumer warpgroups of 64 rows each multiply (wgmma) with the softmax kept online (arXiv:2407.08608).
// Used by hopper_attention_forward.cu (dense, sliding window) and hopper_dma_attention_forward.cu (gathered lists), which document the interface.
// Defines    HEAD_DIM (64, 128); NUM_CONSUMERS warpgroups (2, 3); BLOCK_KV (128) keys a stage; K_STAGES, V_STAGES; HEADS_PER_TILE query heads of a
//            group share a tile; HAS_BIAS; GATHER; TENSOR_MAPS 0|1: keys and values by the copy engine instead of cp.async (dense only);
//            TAKE_TURNS 0|1: two consumers issue their products in turns; CONSUMER_REGISTERS, PRODUCER_REGISTERS
// A stage's life: a producer thread waits for the slot (empty barrier), copies, and arrives at the full barrier when its copies are there; each
// consumer warp releases K right after S = Q K^T and V after O += P V. While the softmax of stage k + 1 runs, the tensor cores do S of that
// stage for the other warpgroup and O of stage k.
#pragma once
#include "common/hopper_copy.cuh"
#include "common/hopper_schedule.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef HEADS_PER_TILE
#define HEADS_PER_TILE 1
#endif
#ifndef TENSOR_MAPS
#define TENSOR_MAPS 0
#endif
#ifndef TAKE_TURNS
#define TAKE_TURNS 1
#endif

constexpr int BLOCK_Q = NUM_CONSUMERS * 64;
constexpr int TILE_QUERIES = BLOCK_Q / HEADS_PER_TILE;
constexpr int THREADS = 128 + NUM_CONSUMERS * 128;
constexpr int O_REGISTERS = HEAD_DIM / 2;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "output rows are 32 or 64 registers of a thread");
static_assert(BLOCK_KV == 128, "scores are 64 registers of a thread; each of four producer warps brings 32 keys");
static_assert(BLOCK_Q % HEADS_PER_TILE == 0, "a tile holds whole heads");
static_assert(!TENSOR_MAPS || !GATHER, "the copy engine brings boxes");
static_assert(K_STAGES >= 2 && K_STAGES <= 3 && V_STAGES >= 2, "stage k + 1 is scored while stage k is weighed");

// Shared memory, from a 1024-byte boundary on.
constexpr int Q_BYTES = BLOCK_Q * HEAD_DIM * 2;
constexpr int STAGE_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int K_AT = Q_BYTES;
constexpr int V_AT = K_AT + K_STAGES * STAGE_BYTES;
// Per key of a stage: {position, expire} (GATHER) and delta (HAS_BIAS). They are needed longer than K's rows: until the softmax, which precedes the
// release of the next stage's K. So K_STAGES + 1 slots need no barriers of their own; four keep the index a mask.
constexpr int NUM_KEY_SLOTS = 4;
constexpr int ENTRY_BYTES = GATHER ? BLOCK_KV * 8 : 0;
constexpr int KEY_BYTES = ENTRY_BYTES + (HAS_BIAS ? BLOCK_KV * 4 : 0);
constexpr int KEYS_AT = V_AT + V_STAGES * STAGE_BYTES;
// Two of these: the producer describes the next tile while the consumers store the last.
constexpr int TILE_BYTES = 32 + (GATHER ? 0 : TILE_QUERIES * 4);
constexpr int TILE_AT = KEYS_AT + NUM_KEY_SLOTS * KEY_BYTES;
constexpr int BARRIERS_AT = TILE_AT + 2 * TILE_BYTES;
constexpr int FULL_K = 0, EMPTY_K = FULL_K + K_STAGES, FULL_V = EMPTY_K + K_STAGES, EMPTY_V = FULL_V + V_STAGES, FULL_Q = EMPTY_V + V_STAGES, EMPTY_Q = FULL_Q + 1;
constexpr int NUM_BARRIERS = EMPTY_Q + 1;
constexpr int SHARED_BYTES = BARRIERS_AT + NUM_BARRIERS * 8;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "a block's shared memory, with room to align it");
static_assert(BARRIERS_AT % 16 == 0, "barriers and vectors are aligned");

// The reference maximum of the online softmax moves only when a row outgrows it by this many powers of two.
constexpr float RESCALE_AT = 8.0f;
// "Nothing seen yet": finite, so that no infinity is subtracted from another.
constexpr float NO_MAXIMUM = -3.0e38f;

// What consumers need to know of a tile; followed by the lowest key of each query (dense).
struct TileHead {
  int batch, head, first_query, end_query;
  int num_stages, last_stage;  // last_stage: dense, stages are visited from this one (key / BLOCK_KV) downwards
  int unused[2];
};

struct ForwardTensors {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  u64 q_token_stride, q_batch_stride;  // elements
  u64 k_token_stride, k_batch_stride, v_token_stride, v_batch_stride;
  const float* delta;                  // [batch, num_kv_heads, seq_len] (HAS_BIAS)
  bf16* o;
  float* lse;
  int seq_len, num_heads, num_kv_heads;
  float softmax_scale;
};

DEVICE u32 tile_base(u32 shared, u32 round) { return shared + TILE_AT + (round & 1) * TILE_BYTES; }
DEVICE u32 key_slot(u32 shared, u32 stage) { return shared + KEYS_AT + (stage % NUM_KEY_SLOTS) * KEY_BYTES; }
DEVICE u32 barrier_at(u32 shared, int barrier) { return shared + BARRIERS_AT + barrier * 8; }

// ---- Producer ------------------------------------------------------------------------------------------------------------------------------

// The tile's queries; rows past its end arrive as zeros.
DEVICE void copy_queries(u32 shared, const ForwardTensors& tensors, const TileHead& tile) {
  constexpr int CHUNKS = HEAD_DIM / 8, STEP = 128 / CHUNKS;  // rows that the warpgroup copies at once
  static_assert(STEP % 8 == 0 && BLOCK_Q % STEP == 0, "a thread's rows differ by multiples of 8, so its swizzled chunk is one");
  const int thread = (int)opaque(threadIdx.x) % 128, chunk = thread % CHUNKS;
  const bf16* base = tensors.q + tile.batch * tensors.q_batch_stride + (u64)tile.head * HEAD_DIM + chunk * 8;
  u32 to = shared + chunk / 8 * BLOCK_Q * 128 + thread / CHUNKS * 128 + (((chunk % 8) ^ (thread / CHUNKS % 8)) << 4);
#pragma unroll 2
  for (int row = thread / CHUNKS; row < BLOCK_Q; row += STEP, to += STEP * 128) {
    const int query = tile.first_query + row % TILE_QUERIES;
    const bool inside = query < tile.end_query;
    copy_async_16(to, base + (u64)(inside ? query : tile.first_query) * tensors.q_token_stride + row / TILE_QUERIES * HEAD_DIM, inside ? 16 : 0);
  }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------------------------------

// S = Q K^T of the warpgroup's 64 rows.
DEVICE void score_stage(float (&score)[64], u32 q, u32 k) {
  const u64 a = wgmma_along(q), b = wgmma_along(k);
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    wgmma<0, 0>(score, wgmma_step(a, step / 4 * BLOCK_Q * 128 + step % 4 * 32), wgmma_step(b, step / 4 * BLOCK_KV * 128 + step % 4 * 32), step > 0);
  wgmma_commit();
}

// O += P V.
DEVICE void weigh_stage(float (&output)[O_REGISTERS], const u32 (&weights)[BLOCK_KV / 16][4], u32 v) {
  const u64 b = wgmma_across(v, BLOCK_KV * 128);
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step) wgmma<1>(output, weights[step], wgmma_step(b, step * 2048), 1);
  wgmma_commit();
}

struct SoftmaxState {
  float maximum[2], total[2];
};

// Turns scores into weights 2^(S - maximum); `factor` is what earlier sums and outputs must be multiplied by. Returns whether any of it differs from 1.
DEVICE bool softmax_stage(float (&score)[64], SoftmaxState& state, float (&factor)[2], float logit_scale) {
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = fmaxf(score[2 * r], score[2 * r + 1]);
#pragma unroll
    for (int n = 1; n < 16; ++n) largest = fmaxf(largest, fmaxf(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
    largest = quad_max(largest) * logit_scale;
    const bool grows = largest > state.maximum[r] + RESCALE_AT;
    const float maximum = grows ? largest : state.maximum[r];
    factor[r] = grows ? exp2_fast(state.maximum[r] - maximum) : 1.0f;
    state.maximum[r] = maximum;
    outgrown |= grows;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float& s = score[4 * n + 2 * r + x];
        s = exp2_fast(s * logit_scale - maximum);
        sum[x] += s;
      }
    state.total[r] = state.total[r] * factor[r] + (sum[0] + sum[1]);
  }
  return __any_sync(~0u, outgrown);
}

DEVICE void pack_weights(u32 (&weights)[BLOCK_KV / 16][4], const float (&score)[64]) {
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step)
#pragma unroll
    for (int x = 0; x < 4; ++x) weights[step][x] = pack_bf16(score[8 * step + 2 * x], score[8 * step + 2 * x + 1]);
}

// The warpgroup's rows of a tile.
struct ConsumerRows {
  int first_query, last_query;  // of the warpgroup's rows: what decides whether a stage needs the mask
  int query[2];                 // of this thread's rows
#if !GATHER
  int highest_low;              // the lowest key seen by the last query: keys from here on need no lower bound
  int lowest[2];
  int last_stage;
#endif
};

// Puts -inf where a row does not see a key of the stage, if there is such a place.
DEVICE void mask_stage(float (&score)[64], const ConsumerRows& rows, u32 keys, int it) {
  const int t = (int)threadIdx.x % 4;
#if GATHER
  bool all = true;
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 32; ++i) {
    int2 entry;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(entry.x), "=r"(entry.y) : "r"(keys + (i * 32 + threadIdx.x % 32) * 8) : "memory");
    all &= entry.x <= rows.first_query && entry.y > rows.last_query;
  }
  if (__all_sync(~0u, all)) return;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const uint4 pair = load_shared_128(keys + (n * 8 + 2 * t) * 8);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = rows.query[x / 2], key = (int)(x % 2 ? pair.z : pair.x), expire = (int)(x % 2 ? pair.w : pair.y);
      if (!(key <= i && i < expire)) score[4 * n + x] = -INFINITY_F32;
    }
  }
#else
  const int first_key = (rows.last_stage - it) * BLOCK_KV;
  if (first_key + BLOCK_KV - 1 <= rows.first_query && first_key >= rows.highest_low) return;
  int last[2], lowest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    last[r] = rows.query[r] - first_key - 2 * t;
    lowest[r] = rows.lowest[r] - first_key - 2 * t;
  }
#pragma unroll
  for (int n = 0; n < 16; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (n * 8 + x % 2 > last[x / 2] || n * 8 + x % 2 < lowest[x / 2]) score[4 * n + x] = -INFINITY_F32;
#endif
}

#if HAS_BIAS
// Where the bias of a stage's key lies: a thread's keys of two 8-key tiles side by side.
DEVICE int bias_place(int key) { return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2; }

// Scores become logits: softmax_scale * q.k + delta.
DEVICE void bias_stage(float (&score)[64], u32 keys, float softmax_scale) {
  const u32 bias = keys + ENTRY_BYTES + (threadIdx.x % 4) * 16;
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const uint4 bits = load_shared_128(bias + pair * 64);
    const float delta[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
    for (int x = 0; x < 8; ++x) score[8 * pair + x] = score[8 * pair + x] * softmax_scale + delta[x / 4 * 2 + x % 2];
  }
}
#endif

// Divides, rounds and stores the warpgroup's rows.
DEVICE void store_rows(const float (&output)[O_REGISTERS], const SoftmaxState& state, const ForwardTensors& tensors, u32 tile, int warpgroup) {
  const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int batch = load_shared_int(tile), head = load_shared_int(tile + 4), first_query = load_shared_int(tile + 8), end_query = load_shared_int(tile + 12);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.total[r]);
    // A row that sees nothing has sum 0: its output is 0 and its log-sum-exp -inf.
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int row = warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16 + g + 8 * r, query = first_query + row % TILE_QUERIES, row_head = head + row / TILE_QUERIES;
    const bool inside = query < end_query;
    if (inside && t == 0)
      tensors.lse[((u64)batch * tensors.num_heads + row_head) * tensors.seq_len + query] = sum > 0.0f ? state.maximum[r] * LN_2 + logf(sum) : -INFINITY_F32;
    bf16* to = tensors.o + (((u64)batch * tensors.seq_len + query) * tensors.num_heads + row_head) * HEAD_DIM + t * 8;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 32; ++n) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = pack_bf16(output[(4 * n + i) * 4 + 2 * r] * inverse, output[(4 * n + i) * 4 + 2 * r + 1] * inverse);
      quad_transpose(x);
      if (inside) *(uint4*)(to + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

struct ConsumerPlaces {
  RingPlace<K_STAGES> k;
  RingPlace<V_STAGES> v;
  u32 stage = 0;  // stages so far, over all tiles
};

// Attention of the warpgroup's 64 rows of one tile.
DEVICE void consume_tile(const ForwardTensors& tensors, u32 shared, u32 round, int warpgroup, ConsumerPlaces& places) {
  const u32 tile = tile_base(shared, round);
  const u32 q = shared + warpgroup * 64 * 128;
  barrier_wait(barrier_at(shared, FULL_Q), round & 1);
  fence_async_proxy();  // the queries came by cp.async
  const int num_stages = load_shared_int(tile + 16);

  ConsumerRows rows;
  {
    const int first_query = load_shared_int(tile + 8), end_query = load_shared_int(tile + 12), first_row = warpgroup * 64 % TILE_QUERIES;
    constexpr bool WHOLE_TILE = TILE_QUERIES % 64 != 0;  // a warpgroup's rows then may be several heads
    rows.first_query = first_query + (WHOLE_TILE ? 0 : first_row);
    rows.last_query = min(rows.first_query + (WHOLE_TILE ? TILE_QUERIES : 64), end_query) - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = (warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * r) % TILE_QUERIES;
      rows.query[r] = first_query + at;
#if !GATHER
      rows.lowest[r] = load_shared_int(tile + 32 + at * 4);
#endif
    }
#if !GATHER
    rows.highest_low = load_shared_int(tile + 32 + max(rows.last_query - first_query, 0) * 4);
    rows.last_stage = load_shared_int(tile + 20);
#endif
  }
#if HAS_BIAS
  const float logit_scale = LOG2_E;
#else
  const float logit_scale = tensors.softmax_scale * LOG2_E;
#endif

  float output[O_REGISTERS], score[64], factor[2];
  u32 weights[BLOCK_KV / 16][4];
  SoftmaxState state;
#pragma unroll
  for (int i = 0; i < O_REGISTERS; ++i) output[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.maximum[r] = NO_MAXIMUM;
    state.total[r] = 0.0f;
  }

  // The first stage's scores.
  barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
  if (!TENSOR_MAPS) fence_async_proxy();
  wgmma_fence();
  score_stage(score, q, shared + K_AT + places.k.slot * STAGE_BYTES);
  wgmma_wait<0>();
  release(barrier_at(shared, EMPTY_K + places.k.slot));
  if (num_stages == 1) release(barrier_at(shared, EMPTY_Q));
#if HAS_BIAS
  bias_stage(score, key_slot(shared, places.stage), tensors.softmax_scale);
#endif
  mask_stage(score, rows, key_slot(shared, places.stage), 0);
  softmax_stage(score, state, factor, logit_scale);
  pack_weights(weights, score);
  barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);

  for (int it = 1; it < num_stages; ++it) {
    places.k.advance();
    places.stage += 1;
    barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
    if (!TENSOR_MAPS) fence_async_proxy();  // for the keys, and the values awaited before
#if TAKE_TURNS
    barrier_sync(1 + warpgroup, 256);
#endif
    wgmma_fence();
    score_stage(score, q, shared + K_AT + places.k.slot * STAGE_BYTES);
    wgmma_fence();
    weigh_stage(output, weights, shared + V_AT + places.v.slot * STAGE_BYTES);
#if TAKE_TURNS
    barrier_pass(1 + (warpgroup + 1) % NUM_CONSUMERS, 256);
#endif
    wgmma_wait<1>();
    release(barrier_at(shared, EMPTY_K + places.k.slot));
    if (it == num_stages - 1) release(barrier_at(shared, EMPTY_Q));
#if HAS_BIAS
    bias_stage(score, key_slot(shared, places.stage), tensors.softmax_scale);
#endif
    mask_stage(score, rows, key_slot(shared, places.stage), it);
    const bool outgrown = softmax_stage(score, state, factor, logit_scale);
    // The exponentials belong before the wait for O += P V, which covers them; the compiler moves them behind it where nothing holds them: this does,
    // together with the loop inside barrier_wait.
    keep_here(score);
    RingPlace<V_STAGES> next_v = places.v;
    next_v.advance();
    barrier_wait(barrier_at(shared, FULL_V + next_v.slot), next_v.phase);
    wgmma_wait<0>();
    release(barrier_at(shared, EMPTY_V + places.v.slot));
    places.v = next_v;
    if (outgrown) {
#pragma unroll
      for (int n = 0; n < O_REGISTERS / 4; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) output[4 * n + x] *= factor[x / 2];
    }
    pack_weights(weights, score);
  }

  // The last stage's weights.
  if (!TENSOR_MAPS) fence_async_proxy();
  wgmma_fence();
  weigh_stage(output, weights, shared + V_AT + places.v.slot * STAGE_BYTES);
  wgmma_wait<0>();
  release(barrier_at(shared, EMPTY_V + places.v.slot));
  places.k.advance();
  places.v.advance();
  places.stage += 1;
  store_rows(output, state, tensors, tile, warpgroup);
}

// The first consumer's turn comes once the last one has passed it on.
DEVICE void start_turns(int warpgroup) {
  if (TAKE_TURNS && warpgroup == NUM_CONSUMERS - 1) barrier_pass(1, 256);
}
DEVICE void end_turns(int warpgroup) {
  if (TAKE_TURNS && warpgroup == 0) barrier_sync(1, 256);  // the last turn passed on, so that no arrival is left over
}

// Sets up the barriers. Returns the aligned shared memory; followed by a __syncthreads.
DEVICE u32 start_block(void* memory) {
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    // Arrivals: every producer thread's copies (one expect_tx with tensor maps); one of each consumer warp.
    constexpr int FILL = TENSOR_MAPS ? 1 : 128;
    for (int i = 0; i < K_STAGES; ++i) {
      barrier_init(barrier_at(shared, FULL_K + i), FILL + (TENSOR_MAPS && HAS_BIAS ? 128 : 0));
      barrier_init(barrier_at(shared, EMPTY_K + i), NUM_CONSUMERS * 4);
    }
    for (int i = 0; i < V_STAGES; ++i) {
      barrier_init(barrier_at(shared, FULL_V + i), FILL);
      barrier_init(barrier_at(shared, EMPTY_V + i), NUM_CONSUMERS * 4);
    }
    barrier_init(barrier_at(shared, FULL_Q), 256);  // copies of the queries; stores of the tile's description
    barrier_init(barrier_at(shared, EMPTY_Q), NUM_CONSUMERS * 4);
    barrier_ready();
  }
  return shared;
}
