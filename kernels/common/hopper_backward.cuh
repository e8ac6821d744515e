// hopper_backward: the gradients of a block of 128 keys on Hopper (sm_90a), from every query that sees one of them (arXiv:2407.08608, section 3 and
// its backward). Used by hopper_attention_backward.cu (dense, sliding window) and hopper_dma_attention_backward.cu (gathered lists), which document it.
// Defines    HEAD_DIM (64, 128); HAS_BIAS; COMPUTE_DQ 0|1; DQ_BULK 0|1: dq leaves through shared memory by bulk adds, or from registers;
//            Q_STAGES, DO_STAGES; TENSOR_MAPS 0|1: queries and output gradients by the copy engine instead of cp.async; CONSUMER_REGISTERS, PRODUCER_REGISTERS
// A producer warpgroup streams tiles of 64 queries and output gradients; two consumer warpgroups own 64 keys each. Scores are kept transposed,
// S^T = K Q^T, so that P^T in registers is the A operand of dV += P^T dO; dS^T goes through shared memory, for dK += dS^T Q (the sums of dK and dV stay
// in registers) and for dQ = dS K, of which each warpgroup makes half the columns, over all 128 keys. Order of a step's products, so that tensor cores work
// while exponentials and sums are made: dP | exp S | dV | dS | barrier | S of the next step, dQ, dK | add dQ.
#pragma once
#include "common/hopper_copy.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"
#include "common/reduce_add.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef COMPUTE_DQ
#define COMPUTE_DQ 1
#endif
#ifndef DQ_BULK
#define DQ_BULK 1
#endif
#ifndef TENSOR_MAPS
#define TENSOR_MAPS 0
#endif

constexpr int BLOCK_KV = 128, BLOCK_Q = 64, NUM_CONSUMERS = 2;
constexpr int THREADS = 128 + NUM_CONSUMERS * 128;
constexpr int SUM_REGISTERS = HEAD_DIM / 2;      // of dK or dV: 64 keys x HEAD_DIM over 128 threads
constexpr int DQ_COLUMNS = HEAD_DIM / NUM_CONSUMERS;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a thread keeps 64 or 128 registers of sums");

static_assert(NUM_CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168, "a block cannot hand out more registers than it is launched with");

// Shared memory, from a 1024-byte boundary on.
constexpr int KEY_TILE_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int QUERY_TILE_BYTES = BLOCK_Q * HEAD_DIM * 2;
constexpr int DS_BYTES = BLOCK_KV * BLOCK_Q * 2;      // x 2: a warpgroup may be one step ahead of the other's dQ
constexpr int STATS_BYTES = BLOCK_Q * 8;
constexpr int WARP_DQ_BYTES = 16 * DQ_COLUMNS * 4;    // a warp's part of a dQ tile
constexpr int V_AT = KEY_TILE_BYTES;
constexpr int Q_AT = 2 * KEY_TILE_BYTES;
constexpr int DO_AT = Q_AT + Q_STAGES * QUERY_TILE_BYTES;
constexpr int DS_AT = DO_AT + DO_STAGES * QUERY_TILE_BYTES;
constexpr int DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr int STATS_AT = DQ_AT + (COMPUTE_DQ && DQ_BULK ? NUM_CONSUMERS * 4 * WARP_DQ_BYTES : 0);
constexpr int BARRIERS_AT = STATS_AT + DO_STAGES * STATS_BYTES;
constexpr int FULL_KV = 0, FULL_Q = 1, EMPTY_Q = FULL_Q + Q_STAGES, FULL_DO = EMPTY_Q + Q_STAGES, EMPTY_DO = FULL_DO + DO_STAGES;
constexpr int NUM_BARRIERS = EMPTY_DO + DO_STAGES;
constexpr int SHARED_BYTES = BARRIERS_AT + NUM_BARRIERS * 8;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "a block's shared memory, with room to align it");
static_assert(Q_STAGES >= 2 && DO_STAGES >= 2, "the next step's scores are made before this step's sums");

// What a block of keys streams. The pointers stand at the batch row and the KV head's first query head.
struct BackwardBlock {
  const bf16* k;         // at the batch row and KV head
  const bf16* v;
  u32 k_stride, v_stride, q_stride, do_stride;  // elements from token to token
  const bf16* q;
  const bf16* d_out;     // [seq_len, num_heads, HEAD_DIM]
  const float2* stats;   // [heads, padded_len] {lse * log2(e) or +inf, D}
  float* dq_sum;         // [heads, dq_len] x HEAD_DIM, in fragment order
  int group_size, seq_len, padded_len;
  int dq_first, dq_len;  // the queries dq_sum holds
  int first_tile, num_tiles;  // query tiles (of BLOCK_Q positions) seen by a key of the block
  float scale_log2;
  const TensorMap* q_map;     // TENSOR_MAPS: of bf16 [batch, seq_len, num_heads * HEAD_DIM]
  const TensorMap* do_map;
  int batch, head;            // head: the KV head's first query head
};

// The keys of a warp's choice at a glance.
struct KeyRange {
  int lowest, highest, first_expire, last_expire;
};

// Over the entries first .. first + count; `keys.entry(at)` is {position, expire}, `keys.row(at)` a row to load in its place that holds numbers,
// `keys.find_tiles(block)` sets first_tile and num_tiles; entries that are none have expire 0 and count for the smallest expire only.
template <class Keys>
DEVICE KeyRange key_range(const Keys& keys, int first, int count) {
  KeyRange range = {0x7fffffff, -1, 0x7fffffff, 0};
  for (int at = (int)threadIdx.x % 32; at < count; at += 32) {
    const int2 entry = keys.entry(first + at);
    if (entry.y > 0) range.lowest = min(range.lowest, entry.x);
    range.highest = max(range.highest, entry.x);
    range.first_expire = min(range.first_expire, entry.y);
    range.last_expire = max(range.last_expire, entry.y);
  }
  range.lowest = __reduce_min_sync(~0u, range.lowest);
  range.highest = __reduce_max_sync(~0u, range.highest);
  range.first_expire = __reduce_min_sync(~0u, range.first_expire);
  range.last_expire = __reduce_max_sync(~0u, range.last_expire);
  return range;
}

DEVICE u32 barrier_at(u32 shared, int barrier) { return shared + BARRIERS_AT + barrier * 8; }

// Sets up the barriers. Returns the aligned shared memory; followed by a __syncthreads.
DEVICE u32 start_block(void* memory) {
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    // Arrivals: every producer thread's copies (one expect_tx with tensor maps); one of each consumer warp.
    barrier_init(barrier_at(shared, FULL_KV), 128);
    for (int i = 0; i < Q_STAGES; ++i) {
      barrier_init(barrier_at(shared, FULL_Q + i), TENSOR_MAPS ? 1 : 128);
      barrier_init(barrier_at(shared, EMPTY_Q + i), NUM_CONSUMERS * 4);
    }
    for (int i = 0; i < DO_STAGES; ++i) {
      barrier_init(barrier_at(shared, FULL_DO + i), TENSOR_MAPS ? 1 : 128);
      barrier_init(barrier_at(shared, EMPTY_DO + i), NUM_CONSUMERS * 4);
    }
    barrier_ready();
  }
  return shared;
}

// ---- Producer ------------------------------------------------------------------------------------------------------------------------------

// Copies 64 rows from `first_row` on; rows at or past `end_row` arrive as zeros.
DEVICE void copy_query_rows(u32 to, const bf16* rows, u32 stride, int first_row, int end_row) {
  constexpr int CHUNKS = HEAD_DIM / 8, STEP = 128 / CHUNKS;
  const int thread = (int)opaque(threadIdx.x) % 128, chunk = thread % CHUNKS, row = thread / CHUNKS;
  to += chunk / 8 * BLOCK_Q * 128 + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  const bf16* from = rows + (u64)(u32)(first_row + row) * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < BLOCK_Q / STEP; ++i) {
    copy_async_16(to + i * STEP * 128, first_row + row + i * STEP < end_row ? from : rows, first_row + row + i * STEP < end_row ? 16 : 0);
    from += STEP * stride;
  }
}

// The producer warpgroup's part.
template <class Keys>
DEVICE void produce(BackwardBlock& block, const Keys& keys, u32 shared) {
  const int thread = (int)threadIdx.x % 128, warp = thread / 32;
  {
    const int key = keys.row(thread);
    copy_key_rows(shared, block.k, block.k_stride * 2, key, warp);
    copy_key_rows(shared + V_AT, block.v, block.v_stride * 2, key, warp);
    barrier_arrive_copies(barrier_at(shared, FULL_KV));
  }
  keys.find_tiles(block);
  RingPlace<Q_STAGES> q_place;
  RingPlace<DO_STAGES> do_place;
  for (int head = 0; head < block.group_size; ++head) {
    const float2* stats = block.stats + (u64)head * block.padded_len;
    for (int tile = block.first_tile; tile < block.first_tile + block.num_tiles; ++tile) {
#if TENSOR_MAPS
      if (thread != 0) continue;
      const u32 full_q = barrier_at(shared, FULL_Q + q_place.slot), full_do = barrier_at(shared, FULL_DO + do_place.slot);
      barrier_wait(barrier_at(shared, EMPTY_Q + q_place.slot), q_place.phase ^ 1);
      barrier_expect(full_q, QUERY_TILE_BYTES);
#pragma unroll
      for (int h = 0; h < DIM_BLOCKS; ++h)
        tensor_load_3d(shared + Q_AT + q_place.slot * QUERY_TILE_BYTES + h * BLOCK_Q * 128, block.q_map, full_q, (block.head + head) * HEAD_DIM + h * 64, tile * BLOCK_Q, block.batch);
      barrier_wait(barrier_at(shared, EMPTY_DO + do_place.slot), do_place.phase ^ 1);
      barrier_expect(full_do, QUERY_TILE_BYTES + STATS_BYTES);
#pragma unroll
      for (int h = 0; h < DIM_BLOCKS; ++h)
        tensor_load_3d(shared + DO_AT + do_place.slot * QUERY_TILE_BYTES + h * BLOCK_Q * 128, block.do_map, full_do, (block.head + head) * HEAD_DIM + h * 64, tile * BLOCK_Q, block.batch);
      bulk_load(shared + STATS_AT + do_place.slot * STATS_BYTES, stats + tile * BLOCK_Q, STATS_BYTES, full_do);
#else
      barrier_wait(barrier_at(shared, EMPTY_Q + q_place.slot), q_place.phase ^ 1);
      copy_query_rows(shared + Q_AT + q_place.slot * QUERY_TILE_BYTES, block.q + head * HEAD_DIM, block.q_stride, tile * BLOCK_Q, block.seq_len);
      barrier_arrive_copies(barrier_at(shared, FULL_Q + q_place.slot));
      barrier_wait(barrier_at(shared, EMPTY_DO + do_place.slot), do_place.phase ^ 1);
      copy_query_rows(shared + DO_AT + do_place.slot * QUERY_TILE_BYTES, block.d_out + head * HEAD_DIM, block.do_stride, tile * BLOCK_Q, block.seq_len);
      if (thread < BLOCK_Q / 2) copy_async_16(shared + STATS_AT + do_place.slot * STATS_BYTES + thread * 16, stats + tile * BLOCK_Q + thread * 2, 16);
      barrier_arrive_copies(barrier_at(shared, FULL_DO + do_place.slot));
#endif
      q_place.advance();
      do_place.advance();
    }
  }
  copy_async_wait<0>();
}

// ---- Consumer ------------------------------------------------------------------------------------------------------------------------------

// d = a b^T: 64 keys of the warpgroup (rows of a tile of 128) against a tile of 64 queries.
DEVICE void multiply_queries(float (&d)[32], u32 keys, u32 queries) {
  const u64 a = wgmma_along(keys), b = wgmma_along(queries);
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step)
    wgmma<0, 0>(d, wgmma_step(a, step / 4 * BLOCK_KV * 128 + step % 4 * 32), wgmma_step(b, step / 4 * BLOCK_Q * 128 + step % 4 * 32), step > 0);
  wgmma_commit();
}

// sums += weights queries, weights 64 keys x 64 queries in registers.
DEVICE void accumulate_queries(float (&sums)[SUM_REGISTERS], const u32 (&weights)[4][4], u32 queries) {
  const u64 b = wgmma_across(queries, BLOCK_Q * 128);
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma<1>(sums, weights[step], wgmma_step(b, step * 2048), 1);
  wgmma_commit();
}

// The same with the weights in shared memory, rows are keys.
DEVICE void accumulate_stored(float (&sums)[SUM_REGISTERS], u32 weights, u32 queries) {
  const u64 a = wgmma_along(weights), b = wgmma_across(queries, BLOCK_Q * 128);
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma<0, 1>(sums, wgmma_step(a, step * 32), wgmma_step(b, step * 2048), 1);
  wgmma_commit();
}

// dq = dS K for the warpgroup's columns; dS^T lies in shared memory, rows are keys.
DEVICE void multiply_keys(float (&dq)[DQ_COLUMNS / 2], u32 ds, u32 keys) {
  const u64 a = wgmma_across(ds, 0), b = wgmma_across(keys, 0);
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step) wgmma<1, 1>(dq, wgmma_step(a, step * 2048), wgmma_step(b, step * 2048), step > 0);
  wgmma_commit();
}

DEVICE void pack_rows(u32 (&packed)[4][4], const float (&x)[32]) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[step][i] = pack_bf16(x[8 * step + 2 * i], x[8 * step + 2 * i + 1]);
}

// Four 8x8 matrices to shared memory: lanes 8m .. 8m + 7 give the rows of matrix m.
DEVICE void store_matrix_x4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
DEVICE void store_shared_float4(u32 shared, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE float4 load_shared_float4(u32 shared) {
  const uint4 x = load_shared_128(shared);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

#if COMPUTE_DQ
// Adds the warp's 16 rows x DQ_COLUMNS of dQ to the f32 sums, where they lie side by side as 16 x 8 fragments of 512 bytes.
DEVICE void add_dq(const float (&dq)[DQ_COLUMNS / 2], float* to, u32 staging) {
  const int lane = (int)threadIdx.x % 32;
#if DQ_BULK
  if (lane == 0) bulk_wait_read();  // the last step's add has read the staging memory
  __syncwarp();
#pragma unroll
  for (int n = 0; n < DQ_COLUMNS / 8; ++n) store_shared_float4(staging + n * 512 + lane * 16, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  fence_async_proxy();  // the copy engine reads what every lane stored
  __syncwarp();
  if (lane == 0) {
    bulk_add_f32(to, staging, WARP_DQ_BYTES);
    bulk_commit();
  }
#else
#pragma unroll
  for (int n = 0; n < DQ_COLUMNS / 8; ++n) reduce_add_f32x4(to + n * 128 + lane * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
#endif
}
#endif

// Sums of the warpgroup's 64 keys; a thread's rows are keys g and g + 8 of its warp's 16.
struct KeyGradients {
  float dk[SUM_REGISTERS], dv[SUM_REGISTERS];  // dk without softmax_scale
  float ddelta[2];
};

// The consumer warpgroup's part. `bias`: of this thread's two keys, times log2(e). Leaves complete sums, ddelta over the quad too.
template <class Keys>
DEVICE void consume(BackwardBlock& block, const Keys& keys, const float (&bias)[2], u32 shared, int warpgroup, KeyGradients& sums) {
  const int lane = (int)threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x % 128 / 32, 0), g = lane / 4, t = lane % 4;
  const KeyRange range = key_range(keys, warpgroup * 64, 64);
  keys.find_tiles(block);
  const int num_steps = block.group_size * block.num_tiles;
  int key[2], expire[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int2 entry = keys.entry(warpgroup * 64 + warp * 16 + g + 8 * r);
    key[r] = entry.x - 2 * t;  // compared with columns 8n + x of a tile
    expire[r] = entry.y - 2 * t;
    sums.ddelta[r] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SUM_REGISTERS; ++i) sums.dk[i] = sums.dv[i] = 0.0f;
  if (num_steps == 0) return;

  const u32 k = shared + warpgroup * 64 * 128, v = k + V_AT;
  [[maybe_unused]] const u32 k_columns = shared + (HEAD_DIM == 128 ? warpgroup * BLOCK_KV * 128 : warpgroup * 64);
  // Where this lane's row of each 8x8 matrix of dS^T begins; 16 queries further: two chunks, a xor.
  const u32 ds_row = shared + DS_AT + (warpgroup * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8) * 128 + (((lane / 16) ^ (lane % 8)) << 4);
  [[maybe_unused]] const u32 staging = shared + DQ_AT + (warpgroup * 4 + warp) * WARP_DQ_BYTES;

  float scores[32], dp[32];
  u32 weights[4][4];
  RingPlace<Q_STAGES> q_place;
  RingPlace<DO_STAGES> do_place;
  int head = 0, tile = block.first_tile;

  barrier_wait(barrier_at(shared, FULL_KV), 0);
  barrier_wait(barrier_at(shared, FULL_Q), 0);
  fence_async_proxy();  // keys and values (and queries) came by cp.async
  wgmma_fence();
  multiply_queries(scores, k, shared + Q_AT);
  wgmma_wait<0>();

  for (int step = 0; step < num_steps; ++step) {
    const u32 q = shared + Q_AT + q_place.slot * QUERY_TILE_BYTES, d_out = shared + DO_AT + do_place.slot * QUERY_TILE_BYTES;
    const u32 stats = shared + STATS_AT + do_place.slot * STATS_BYTES + t * 16;
    barrier_wait(barrier_at(shared, FULL_DO + do_place.slot), do_place.phase);
    if (!TENSOR_MAPS) fence_async_proxy();
    wgmma_fence();
    multiply_queries(dp, v, d_out);  // dP^T = V dO^T

    // P^T = 2^(S^T - lse).
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 stat = load_shared_float4(stats + n * 64);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float lse = x % 2 ? stat.z : stat.x;
        scores[4 * n + x] = exp2_fast(scores[4 * n + x] * block.scale_log2 + (HAS_BIAS ? bias[x / 2] - lse : -lse));
      }
    }
    const int first_query = tile * BLOCK_Q;
    if (first_query < range.highest || first_query + BLOCK_Q > range.first_expire) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int i = first_query + 8 * n + x % 2;
          if (!(key[x / 2] <= i && i < expire[x / 2])) scores[4 * n + x] = 0.0f;
        }
    }
    pack_rows(weights, scores);
    wgmma_fence();
    accumulate_queries(sums.dv, weights, d_out);  // dV += P^T dO

    wgmma_wait<1>();  // dP, and dK of the last step
    if (step > 0) release(barrier_at(shared, EMPTY_Q + (q_place.slot == 0 ? Q_STAGES - 1 : q_place.slot - 1)));
    // dS^T = P^T (dP^T - D), from the rounded P: its f32 would cost 32 registers here.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 stat = load_shared_float4(stats + n * 64);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const u32 pair = weights[n / 2][n % 2 * 2 + x / 2];
        dp[4 * n + x] = (x % 2 ? bf16_high(pair) : bf16_low(pair)) * (dp[4 * n + x] - (x % 2 ? stat.w : stat.y));
        if (HAS_BIAS) sums.ddelta[x / 2] += dp[4 * n + x];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 packed[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) packed[x] = pack_bf16(dp[8 * i + 2 * x], dp[8 * i + 2 * x + 1]);
      store_matrix_x4((ds_row ^ (i << 5)) + step % 2 * DS_BYTES, packed);
    }
    wgmma_wait<0>();  // dV: its operand's registers are needed for dQ
    release(barrier_at(shared, EMPTY_DO + do_place.slot));
    // The next step's queries. On the last step this step's once more: a branch around products would keep them from overlapping.
    RingPlace<Q_STAGES> next_q = q_place;
    if (step + 1 < num_steps) next_q.advance();
    barrier_wait(barrier_at(shared, FULL_Q + next_q.slot), next_q.phase);
    fence_async_proxy();                   // for dS^T, and the next step's queries
    barrier_sync(1, NUM_CONSUMERS * 128);  // all of dS^T is there; and the other half of the memory is free again
    wgmma_fence();
    multiply_queries(scores, k, shared + Q_AT + next_q.slot * QUERY_TILE_BYTES);
#if COMPUTE_DQ
    float dq[DQ_COLUMNS / 2];
    multiply_keys(dq, shared + DS_AT + step % 2 * DS_BYTES, k_columns);
#endif
    accumulate_stored(sums.dk, shared + DS_AT + step % 2 * DS_BYTES + warpgroup * 64 * 128, q);  // dK += dS^T Q
    wgmma_wait<1>();                                                                             // all but dK
#if COMPUTE_DQ
    const u64 row_tile = (u64)head * (block.dq_len / 16) + (first_query - block.dq_first) / 16 + warp;
    add_dq(dq, block.dq_sum + (row_tile * (HEAD_DIM / 8) + warpgroup * (DQ_COLUMNS / 8)) * 128, staging);
#endif
    q_place = next_q;
    do_place.advance();
    if (++tile == block.first_tile + block.num_tiles) {
      tile = block.first_tile;
      head += 1;
    }
  }
  wgmma_wait<0>();
#if COMPUTE_DQ && DQ_BULK
  if (lane == 0) bulk_wait();  // shared memory must last until the adds have read it
#endif
#if HAS_BIAS
#pragma unroll
  for (int r = 0; r < 2; ++r) sums.ddelta[r] = quad_sum(sums.ddelta[r]);
#endif
}
