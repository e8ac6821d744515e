// hopper_backward: the gradients of a block of 128 keys on Hopper (sm_90a), from every query that sees one of them
// (arXiv:2407.08608, section 3 and its backward). Used by hopper_attention_backward.cu (dense, sliding window) and
// hopper_dma_attention_backward.cu (gathered lists), which document it.
// Defines    HEAD_DIM (64, 128; 192 with HEAD_DIM_V 128, DQ_BULK and no bias: hopper_backward_wide.cuh has
//            the consumer); HAS_BIAS; DQ_BULK 0|1: dq leaves through shared memory by bulk adds, or
//            from registers; ORDERED 0|1: dq is summed in the order of the tiles of keys (DQ_BULK), with DQ_STAGES (1)
//            buffers and SENDERS (1) threads that send them; HEAD_BY_HEAD 0|1; Q_STAGES, DO_STAGES;
//            CONSUMER_REGISTERS, PRODUCER_REGISTERS; TILE_LISTS 0|1: a block's steps come from a list (tile_steps.cuh)
// A producer warpgroup streams tiles of 64 queries and output gradients; two consumer warpgroups own 64 keys each.
// Scores are kept transposed, S^T = K Q^T, so that P^T and dS^T in registers are the A operands of dV += P^T dO and dK
// += dS^T Q, whose sums stay in registers. dS^T also goes through shared memory, for dQ = dS K, of which each warpgroup
// computes half the columns, over all 128 keys. D of a query, and its lse or, with a bias, its base enter the GEMMs as
// extra K steps (split_step.cuh). Order of a step's GEMMs, so that tensor cores are busy during exponentials, sums and
// the warpgroups' barrier: dP | exp S | dV | send the last step's dQ | dS | dK | barrier | dQ and S of the next step |
// stage dQ. Steps visit the query tiles of one head after the other. ORDERED: from the last query tile down, all heads
// at each tile; threads of the producer send dQ. Blocks start with the first key tiles; in this order each block
// follows the block of the preceding key tile by a step and a half and never waits for its turn. Head by head it would
// wait at each head's end, since later keys are seen by fewer queries. In a window all keys are seen by equally many
// queries: there HEAD_BY_HEAD is faster, since the L2 cache then holds the queries of the head that all blocks work
// on. TILE_LISTS: steps are a list's, in its order, and ORDERED takes the turns that it names.
// kernels/notes/order-of-a-backward-step.md has what bounds a step, and an order of its GEMMs that was slower.
#pragma once
#include "common/far_keys.cuh"
#include "common/hopper_copy.cuh"
#include "common/key_range.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"
#include "common/reduce_add.cuh"
#include "common/split_step.cuh"
#include "common/tile_steps.cuh"
#include "common/tma.cuh"
#include "common/semaphores.cuh"
#include "common/wgmma.cuh"

#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef DQ_STAGES
#define DQ_STAGES 1
#endif
// Two at width 64: kernels/notes/two-senders-at-width-64.md
#ifndef SENDERS
#define SENDERS 1
#endif
// kernels/notes/order-of-ordered-steps.md
#ifndef HEAD_BY_HEAD
#define HEAD_BY_HEAD !ORDERED
#endif
// Whether lse (without a bias) and D enter the GEMMs as extra K steps; with a bias, delta - base always does. These
// steps cost power: long dense rows at head_dim 128 are faster without (2 x 8192 2.54 against 2.55 ms, 32768 19.1
// against 19.7), everything else is faster with them (gathered 32768 1.83 against 1.97, 64 columns 1.46 against 1.60).
// kernels/notes/statistics-as-k-steps.md
#ifndef SPLIT_STATS
#define SPLIT_STATS (HAS_BIAS || HEAD_DIM == 64)
#endif
// Whether a step's last GEMM is dQ, or the next step's scores. Without a bias either works; with one, dQ last spills.
// kernels/notes/ds-from-registers.md
#define DQ_LAST !HAS_BIAS

constexpr int BLOCK_KV = 128, BLOCK_Q = 64, NUM_CONSUMERS = 2;
constexpr int THREADS = 128 + NUM_CONSUMERS * 128;
#define IS_WIDE (HEAD_DIM == 192)
// Registers of a thread for the sums of dV, and for dK's first HEAD_DIM_V columns: 64 keys over 128 threads.
constexpr int SUM_REGISTERS = HEAD_DIM_V / 2;
constexpr int DQ_COLUMNS = HEAD_DIM / NUM_CONSUMERS;
static_assert(HEAD_DIM_V == 64 || HEAD_DIM_V == 128, "a thread keeps 64 or 128 registers of sums, or 160");
static_assert(HEAD_DIM == HEAD_DIM_V || (IS_WIDE && HEAD_DIM_V == 128 && !HAS_BIAS),
              "wider keys come in one form");

static_assert(NUM_CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168,
              "a block cannot hand out more registers than it is launched with");

// Shared memory, from a 1024-byte boundary on.
constexpr int KEY_TILE_BYTES = BLOCK_KV * HEAD_DIM * 2, VALUE_TILE_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int QUERY_TILE_BYTES = BLOCK_Q * HEAD_DIM * 2, DO_TILE_BYTES = BLOCK_Q * HEAD_DIM_V * 2;
constexpr int DS_BYTES = BLOCK_KV * BLOCK_Q * 2;      // x 2: a warpgroup may be one step ahead of the other's dQ
// SPLIT_STATS, per query of a tile: -lse (with a bias -base, and lse unsplit beside the output gradients) beside the
// queries, -D beside the output gradients. Else {lse, D} beside the output gradients.
constexpr bool SPLIT_LSE = SPLIT_STATS && !HAS_BIAS;
constexpr int Q_STATS_BYTES = SPLIT_STATS ? BLOCK_Q * SPLIT_BYTES : 0;
constexpr int DO_STATS_BYTES = SPLIT_STATS ? BLOCK_Q * SPLIT_BYTES + (HAS_BIAS ? BLOCK_Q * 4 : 0) : BLOCK_Q * 8;
// Threads that load the stats, from warp 1 on; the producer's last SENDERS warps send dQ.
constexpr int STATS_THREADS = SENDERS > 1 ? 32 : BLOCK_Q;
constexpr int STATS_ARRIVALS = STATS_THREADS / 32 * WARP_ARRIVALS;
static_assert(32 + STATS_THREADS + 32 * SENDERS <= 128, "warps of the producer: tiles, stats, dQ");
constexpr float NEVER = -1.0e30f;  // stands for -lse where a query sees nothing: 2^ of it is 0
// of a warp's part of a dQ tile, what is staged at once
constexpr int WARP_DQ_BYTES = 16 * (IS_WIDE ? 64 : DQ_COLUMNS) * 4;
constexpr int V_AT = KEY_TILE_BYTES;
constexpr int Q_AT = V_AT + VALUE_TILE_BYTES;
constexpr int DO_AT = Q_AT + Q_STAGES * QUERY_TILE_BYTES;
constexpr int DS_AT = DO_AT + DO_STAGES * DO_TILE_BYTES;
constexpr int DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr int DQ_BYTES = NUM_CONSUMERS * 4 * WARP_DQ_BYTES;
constexpr int STATS_AT = DQ_AT + (DQ_BULK ? DQ_STAGES * DQ_BYTES : 0);
constexpr int DO_STATS_AT = STATS_AT + Q_STAGES * Q_STATS_BYTES;
// HAS_BIAS: each key's delta / softmax_scale, for the products' steps
constexpr int KEY_SPLIT_AT = DO_STATS_AT + DO_STAGES * DO_STATS_BYTES;
constexpr int BARRIERS_AT = KEY_SPLIT_AT + (HAS_BIAS ? BLOCK_KV * SPLIT_BYTES : 0);
constexpr int FULL_KV = 0, FULL_Q = 1, EMPTY_Q = FULL_Q + Q_STAGES, FULL_DO = EMPTY_Q + Q_STAGES,
              EMPTY_DO = FULL_DO + DO_STAGES, FULL_DQ = EMPTY_DO + DO_STAGES;
// ORDERED: parts in which a dQ tile is staged; barriers of dQ, each for one buffer and the tiles of one sender
constexpr int DQ_PARTS = IS_WIDE ? 2 : 1, DQ_BARRIERS = DQ_STAGES > SENDERS ? DQ_STAGES : SENDERS;
constexpr int EMPTY_DQ = FULL_DQ + DQ_BARRIERS, NUM_BARRIERS = FULL_DQ + (ORDERED ? 2 * DQ_BARRIERS : 0);
static_assert(DQ_BARRIERS % DQ_STAGES == 0 && DQ_BARRIERS % SENDERS == 0 && (DQ_STAGES == 1 || DQ_PARTS == 1),
              "a barrier belongs to one buffer and one sender");
constexpr int SHARED_BYTES = BARRIERS_AT + NUM_BARRIERS * 8;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "a block's shared memory, with room to align it");
static_assert(!ORDERED || DQ_BULK, "adds in order leave through shared memory");
static_assert(ORDERED || HEAD_BY_HEAD, "all heads at each tile is the order of ordered adds");
static_assert(!TILE_LISTS || !(IS_WIDE || HAS_BIAS), "lists of steps come in one form");
static_assert(!HAS_FAR || !(IS_WIDE || HAS_BIAS || TILE_LISTS || !HEAD_BY_HEAD),
              "keys beyond a window come in one form");
static_assert(Q_STAGES >= 2 && DO_STAGES >= 2, "the next step's scores are made before this step's sums");

#include "common/hopper_backward_steps.cuh"

// The shared address of mbarrier number `barrier`: one of FULL_KV, FULL_Q and so on, plus the slot in its ring.
DEVICE u32 barrier_at(u32 shared, int barrier) { return shared + BARRIERS_AT + barrier * 8; }

// Sets up all mbarriers of the block; one thread calls it, before any other uses them.
DEVICE void start_barriers(u32 shared) {
  // FULL barriers count an arrival for the copies and one of each warp that stores statistics, EMPTY barriers one of
  // each consumer warp.
  barrier_init(barrier_at(shared, FULL_KV), HAS_BIAS ? 256 : 128);  // copies; biases stored
  constexpr int FILL = 1 + (SPLIT_STATS ? STATS_ARRIVALS : 0), READ = NUM_CONSUMERS * 4;
  ring_init(barrier_at(shared, FULL_Q), barrier_at(shared, EMPTY_Q), Q_STAGES, FILL, READ);
  ring_init(barrier_at(shared, FULL_DO), barrier_at(shared, EMPTY_DO), DO_STAGES, FILL, READ);
  if (ORDERED) ring_init(barrier_at(shared, FULL_DQ), barrier_at(shared, EMPTY_DQ), DQ_BARRIERS, READ, 1);
  barrier_ready();
}

// Returns the shared address of the block's memory, rounded up to 1024 bytes. Every thread calls it, thread 0 sets up
// the barriers, and a __syncthreads follows.
DEVICE u32 start_block(void* memory) {
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) start_barriers(shared);
  return shared;
}

// ---- Producer
// ---------------------------------------------------------------------------------------------------------------------

// Streams the tiles of queries and output gradients of all steps by the copy engine, each to the next free slot of its
// ring; without SPLIT_STATS the statistics of the tile's queries follow the output gradients. Thread 0 of the producer
// calls it.
DEVICE void produce_tiles(const BackwardBlock& block, u32 shared) {
  RingPlace<Q_STAGES> q_place;
  RingPlace<DO_STAGES> do_place;
  StepPlace place(block);
#pragma unroll 1
  for (int left = block.group_size * block.num_tiles; left > 0; --left) {
    const u32 full_q = barrier_at(shared, FULL_Q + q_place.slot),
              full_do = barrier_at(shared, FULL_DO + do_place.slot);
    barrier_wait(barrier_at(shared, EMPTY_Q + q_place.slot), q_place.phase ^ 1);
    barrier_expect(full_q, QUERY_TILE_BYTES);
    load_tile<DIM_BLOCKS, BLOCK_Q>(shared + Q_AT + q_place.slot * QUERY_TILE_BYTES, block.q_map, full_q,
                                   (block.head + place.head) * HEAD_DIM, place.tile * BLOCK_Q, block.batch);
    barrier_wait(barrier_at(shared, EMPTY_DO + do_place.slot), do_place.phase ^ 1);
    barrier_expect(full_do, DO_TILE_BYTES + (SPLIT_STATS ? 0 : DO_STATS_BYTES));
    load_tile<DIM_BLOCKS_V, BLOCK_Q>(shared + DO_AT + do_place.slot * DO_TILE_BYTES, block.do_map, full_do,
                                     (block.head + place.head) * HEAD_DIM_V, place.tile * BLOCK_Q, block.batch);
    if (!SPLIT_STATS)
      bulk_load(shared + DO_STATS_AT + do_place.slot * DO_STATS_BYTES,
                block.stats + (u64)place.head * block.padded_len + place.tile * BLOCK_Q, DO_STATS_BYTES, full_do);
    q_place.advance();
    do_place.advance();
    place.advance(block);
  }
}

#if ORDERED
// Where part `number` of the block's dQ, in the order of staging, is passed to send_tiles. A fresh barrier counts as
// complete in the phase of numbers before 0.
struct DqPlace {
  u32 barrier, phase;
  // Of part `number`: which of the DQ_BARRIERS barriers it has, and that barrier's phase.
  DEVICE explicit DqPlace(u32 number)
      : barrier(number / DQ_PARTS % DQ_BARRIERS),
        phase((number / DQ_PARTS / DQ_BARRIERS * DQ_PARTS + number % DQ_PARTS) & 1) {}
};

// Adds every SENDERS-th staged tile of dQ, from tile `sender` on, to the f32 sums: one thread's part. It waits for what
// would stall the consumers: the block of the preceding key tile, the copy engine, and the fence before this block lets
// the next one add. At head_dim 64 these take longer than a step, so two threads in different warps take turns. A block
// that reads OWN_TURN, its number in the order of adds, in a query tile's semaphore adds to what the block before it
// left there: that block's bulk adds are done, and its fence orders them before the semaphore for every multiprocessor.
// The wait for bulk adds alone does not: with no fence dq differs in about one of a thousand passes, with
// fence.proxy.async in its place in one of sixty.
DEVICE void send_tiles(const BackwardBlock& block, int sender, u32 shared) {
  const int num_tiles = block.group_size * block.num_tiles;
  if (sender >= num_tiles) return;
  StepPlace place(block);
  for (int i = 0; i < sender; ++i) place.advance(block);
  // row of a tile in the buffer of dq's sums
  auto row_of = [&block](const StepPlace& at) { return at.head * block.dq_len + at.tile * BLOCK_Q - block.dq_first; };
  i32* semaphore = block.semaphores + row_of(place) / BLOCK_Q;
  int seen = read_semaphore(semaphore);
#pragma unroll 1
  for (int tile = sender; tile < num_tiles; tile += SENDERS) {
    float* to = block.dq_sum + (i64)row_of(place) * HEAD_DIM;
    const u32 staging = shared + DQ_AT + tile % DQ_STAGES * DQ_BYTES;
#if HAS_FAR
    const int own_turn = place.own_turn(block);
    const bool is_first = own_turn == 0;
#define OWN_TURN own_turn
#else
    const bool is_first = place.is_first(block);  // no block has written there yet
#endif
#if HAS_FAR
#elif TILE_LISTS
    const int own_turn = place.own_turn;
#define OWN_TURN own_turn
#else
#define OWN_TURN block.own_turn  // no variable: with one the compiler places other code elsewhere
#endif
    auto add = [is_first](float* sums, u32 from, u32 bytes) {
      if (is_first) bulk_store(sums, from, bytes);
      else bulk_add_f32(sums, from, bytes);
    };
    auto staged = [tile, shared](int part) {
      const DqPlace at(tile * DQ_PARTS + part);
      barrier_wait(barrier_at(shared, FULL_DQ + at.barrier), at.phase);
    };
    auto sent = [tile, shared] {
      bulk_commit();
      bulk_wait_read();
      barrier_arrive(barrier_at(shared, EMPTY_DQ + DqPlace(tile * DQ_PARTS).barrier));
    };
    staged(0);
    while (!is_first && seen != OWN_TURN) seen = read_semaphore(semaphore);
#if IS_WIDE
    // In two parts, because the buffer holds 128 of the 192 columns: 0 to 63 and 128 to 191, then those between. An add
    // takes 64 columns of 16 rows.
    constexpr int ROWS = 16 * HEAD_DIM, PART = 16 * 64;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) add(to + i / 2 * ROWS + i % 2 * 2 * PART, staging + i * PART * 4, PART * 4);
    sent();
    staged(1);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) add(to + i * ROWS + PART, staging + i * PART * 4, PART * 4);
#else
    add(to, staging, BLOCK_Q * HEAD_DIM * 4);
#endif
    sent();
    i32* const done = semaphore;
    for (int i = 0; i < SENDERS; ++i) place.advance(block);
    if (tile + SENDERS < num_tiles) semaphore = block.semaphores + row_of(place) / BLOCK_Q;
    seen = read_semaphore(semaphore);  // on its way while the adds and the fence are waited for
    bulk_wait();
    // kernels/notes/fence-of-ordered-sums.md
    fence_sums();
    write_semaphore(done, OWN_TURN + 1);
  }
}
#endif

#if SPLIT_STATS
// Stores each query's statistics as operands of the GEMMs' extra K steps (split_step.cuh): a number becomes three bf16
// that add up to it, in a column of SPLIT_BYTES. Beside the queries stands -lse, in units of q . k, which the step adds
// to S; with a bias -base in its place. Beside the output gradients stands -D, which the step adds to dP; with a bias
// lse follows, as f32. STATS_THREADS threads of the producer call it, from its warp 1 on; thread `first` of these has
// the queries `first`, first + STATS_THREADS, .. of each tile of 64. It loads them before the tile's slot is free.
DEVICE void produce_stats(const BackwardBlock& block, u32 first, u32 shared) {
  constexpr int OWN = BLOCK_Q / STATS_THREADS;
  RingPlace<Q_STAGES> q_place;
  RingPlace<DO_STAGES> do_place;
  StepPlace place(block);
#pragma unroll 1
  for (int left = block.group_size * block.num_tiles; left > 0; --left) {
    const u32 query = place.tile * BLOCK_Q + first;
    const u32 q_stats = shared + STATS_AT + q_place.slot * Q_STATS_BYTES + first * SPLIT_BYTES,
              do_stats = shared + DO_STATS_AT + do_place.slot * DO_STATS_BYTES;
    float2 stats[OWN];
#if HAS_BIAS
    float base[OWN];
#else
    const float inverse_scale = 1.0f / block.scale_log2;
#endif
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      stats[i] = block.stats[(u64)place.head * block.padded_len + query + i * STATS_THREADS];
#if HAS_BIAS
      base[i] = block.base[query + i * STATS_THREADS];
#endif
    }
    barrier_wait(barrier_at(shared, EMPTY_Q + q_place.slot), q_place.phase ^ 1);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const u32 to = q_stats + i * STATS_THREADS * SPLIT_BYTES;
#if HAS_BIAS
      store_split_column(to, -in_scores(base[i], block.bias_unit), BF16_ONE);
#else
      store_split_column(to, stats[i].x != INFINITY_F32 ? -stats[i].x * inverse_scale : NEVER, 0);
#endif
    }
    fence_async_proxy();
    release_slot(barrier_at(shared, FULL_Q + q_place.slot));
    barrier_wait(barrier_at(shared, EMPTY_DO + do_place.slot), do_place.phase ^ 1);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const u32 at = first + i * STATS_THREADS;
      store_split_column(do_stats + at * SPLIT_BYTES, -stats[i].y, 0);
#if HAS_BIAS
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(do_stats + BLOCK_Q * SPLIT_BYTES + at * 4), "f"(stats[i].x)
                   : "memory");
#endif
    }
    fence_async_proxy();
    release_slot(barrier_at(shared, FULL_DO + do_place.slot));
    q_place.advance();
    do_place.advance();
    place.advance(block);
  }
}
#endif

// Work of the producer warpgroup, all 128 threads of which call it: its warps copy the rows of the block's keys and
// values, each thread naming one, then single threads stream queries, dO and statistics, and send dQ. `bias` is the
// bias of this thread's key, times bias_unit.
template <class Keys>
DEVICE void produce(BackwardBlock& block, const Keys& keys, [[maybe_unused]] float bias, u32 shared) {
  const int thread = (int)threadIdx.x % 128, warp = thread / 32;
  {
    const int key = keys.row(thread);
    copy_key_rows(shared, block.k, block.k_stride * 2, key, warp);
    copy_key_rows<DIM_BLOCKS_V>(shared + V_AT, block.v, block.v_stride * 2, key, warp);
    barrier_arrive_copies(barrier_at(shared, FULL_KV));
#if HAS_BIAS
    store_split_row(shared + KEY_SPLIT_AT + thread * SPLIT_BYTES, bias);
    fence_async_proxy();  // products read it
    barrier_arrive(barrier_at(shared, FULL_KV));
#endif
  }
  keys.find_tiles(block);
  if (block.num_tiles > 0) {
    if (thread == 0) produce_tiles(block, shared);
#if SPLIT_STATS
    if (thread >= 32 && thread < 32 + STATS_THREADS) produce_stats(block, thread - 32, shared);
#endif
#if ORDERED
    if (warp >= 4 - SENDERS && thread % 32 == 0) send_tiles(block, warp - (4 - SENDERS), shared);
#endif
  }
  copy_async_wait<0>();
}

// ---- Consumer
// ---------------------------------------------------------------------------------------------------------------------

// The keys' operand of split steps: with a bias in shared memory, where it costs no registers (two GEMMs in flight read
// it); a constant operand of ones takes one register.
#if HAS_BIAS
struct KeySplit {
  u32 rows;
  // The operand of the consumer's 64 keys; `warpgroup` is the consumer's number, 0 or 1.
  DEVICE KeySplit(u32 shared, int warpgroup) : rows(shared + KEY_SPLIT_AT + warpgroup * 64 * SPLIT_BYTES) {}
  // d = each key's number plus each query's, or with `accumulate` d += these. `stats` is the shared address of the
  // queries' columns; a column without a one leaves the keys' numbers out.
  DEVICE void multiply(float (&d)[32], u32 stats, int accumulate) const {
    wgmma<0, 0>(d, wgmma_unswizzled(rows), wgmma_unswizzled(stats), accumulate);
  }
};
#else
struct KeySplit : SplitWeights {
  // Takes the same arguments as with a bias; the operand of ones needs neither.
  DEVICE KeySplit(u32, int) {}
  // d = each query's number, or with `accumulate` d += it. `stats` is the shared address of the queries' columns.
  DEVICE void multiply(float (&d)[32], u32 stats, int accumulate) const {
    wgmma<0>(d, words, wgmma_unswizzled(stats), accumulate);
  }
};
#endif

// Where a GEMM has the split step of keys and queries among its K steps.
enum SplitPlace { SPLIT_NONE, SPLIT_FIRST, SPLIT_LAST };
// delta - base is the first K step: with zero accumulators the difference of two large numbers is exact.
// kernels/notes/bias-as-the-first-k-step.md
constexpr SplitPlace SCORE_SPLIT = HAS_BIAS ? SPLIT_FIRST : SPLIT_STATS ? SPLIT_LAST : SPLIT_NONE;
// d = a b^T: 64 keys of the consumer (rows of a tile of 128, at shared address `keys`) against a tile of 64 queries
// over COLUMNS columns, and their split step, with the queries' columns at `stats`. Starts the GEMM and closes its
// group; all 128 threads of a consumer call it. Also of values against output gradients.
template <SplitPlace SPLIT, int COLUMNS = HEAD_DIM>
DEVICE void multiply_queries(float (&d)[32], u32 keys, u32 queries, const KeySplit& key_split, u32 stats) {
  const u64 a = wgmma_along(keys), b = wgmma_along(queries);
  if (SPLIT == SPLIT_FIRST) key_split.multiply(d, stats, 0);
  wgmma_rows<COLUMNS, BLOCK_KV, BLOCK_Q>(d, a, b, SPLIT == SPLIT_FIRST);
  if (SPLIT == SPLIT_LAST) key_split.multiply(d, stats, 1);
  wgmma_commit();
}

// sums += weights queries: 64 keys x 64 queries of weights in registers times 2 N columns of the tile of queries (or of
// output gradients) at shared address `queries`. Starts the GEMM and closes its group; all threads of a consumer call
// it.
template <int N>
DEVICE void accumulate_queries(float (&sums)[N], const u32 (&weights)[4][4], u32 queries) {
  wgmma_weigh<BLOCK_Q>(sums, weights, queries, true);
  wgmma_commit();
}

// dq = dS K for the consumer's 2 N columns of the 64 queries, which lie in one block of 64 columns, over all 128 keys;
// dS^T lies in shared memory at `ds`, rows are keys. Starts the GEMM and closes its group.
template <int N>
DEVICE void multiply_keys(float (&dq)[N], u32 ds, u32 keys) {
  wgmma_columns<BLOCK_KV>(dq, ds, keys);
  wgmma_commit();
}

// Like multiply_keys, where the step sees one half of the keys alone: bit 0 of `halves` for the first 64, bit 1 for the
// others. The keys of that half are then multiplied with the other half's dS too, which is 0: what lies in the unseen
// half need not be finite.
template <int N>
DEVICE void multiply_seen_keys(float (&dq)[N], u32 ds, u32 keys, u32 halves) {
  constexpr u32 HALF = BLOCK_KV / 2 * 128;
  const u64 a = wgmma_across(ds, 0), first = wgmma_across(keys + (halves & 1 ? 0 : HALF), 0),
            second = wgmma_across(keys + (halves & 2 ? HALF : 0), 0);
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step) {
    const u64 b = step < BLOCK_KV / 32 ? wgmma_step(first, step * 2048) : wgmma_step(second, step * 2048 - HALF);
    wgmma<1, 1>(dq, wgmma_step(a, step * 2048), b, step > 0);
  }
  wgmma_commit();
}

// Stores four f32 of the calling thread at shared address `shared`, a multiple of 16.
DEVICE void store_shared_float4(u32 shared, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// The warp's 16 rows x 2 N columns of dQ, on their way to the f32 sums, which are consecutive 16 x 8 fragments of 512
// bytes. DQ_BULK: through shared memory, in two steps, because a fence right after the stores stalls for about a
// tenth of a step; a later one does not.
// kernels/notes/fence-a-step-late.md
#if DQ_BULK
// The warp's part of the staging memory. ORDERED: rows in the order of the sums, and nothing between them; else a part
// that no other warp writes to, whatever N is.
template <int N>
DEVICE u32 staging_of_warp(u32 shared, u32 number) {
  const int thread = (int)threadIdx.x - 128, warp = thread / 32 % 4, warpgroup = thread / 128;
  return shared + DQ_AT + number % DQ_STAGES * DQ_BYTES +
         (warp * NUM_CONSUMERS + warpgroup) * (ORDERED ? N * 128 : WARP_DQ_BYTES);
}
// Writes the warp's part `number` of dQ, in the order of staging, to its staging memory, once the copy engine has read
// what lay there. All 32 lanes call it.
template <int N>
DEVICE void stage_dq(const float (&dq)[N], u32 shared, u32 number) {
  const int lane = (int)threadIdx.x % 32;
  const u32 to = staging_of_warp<N>(shared, number) + lane * 16;
  // What the buffer held before has been read. One lane waits: where all do, no branch is left, and the wide kernel
  // spills 66 registers.
#if ORDERED
  const DqPlace before(number - DQ_STAGES);
  if (lane == 0) barrier_wait(barrier_at(shared, EMPTY_DQ + before.barrier), before.phase);
#else
  if (lane == 0) bulk_wait_read();
#endif
  __syncwarp();
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
    store_shared_float4(to + n * 512, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
}
// Adds the warp's part `number`, which stage_dq wrote, to the sums at `to`; ORDERED: passes it to send_tiles. All 32
// lanes call it. Adds by one thread of the producer take 3 to 14 % longer in a free order.
template <int N>
DEVICE void send_dq([[maybe_unused]] float* to, u32 shared, u32 number) {
  fence_async_proxy();  // the copy engine reads what every lane stored
#if ORDERED
  release(barrier_at(shared, FULL_DQ + DqPlace(number).barrier));
#else
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    bulk_add_f32(to, staging_of_warp<N>(shared, number), N * 128);
    bulk_commit();
  }
#endif
}
#else
// Adds the warp's 16 rows x 2 N columns of dQ from registers to the f32 sums; `to` is the warp's first fragment there.
template <int N>
DEVICE void add_dq(const float (&dq)[N], float* to) {
  const int lane = (int)threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
    reduce_add_f32x4(to + n * 128 + lane * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
}
#endif

// Sums of the warpgroup's 64 keys; a thread's rows are keys g and g + 8 of its warp's 16.
struct KeyGradients {
  float dk[SUM_REGISTERS], dv[SUM_REGISTERS];  // dk without softmax_scale
#if IS_WIDE
  float dk_rest[(HEAD_DIM - HEAD_DIM_V) / 2];    // of dK's last columns
#endif
  float ddelta[2];
};

// Loads lse (WHICH 0) or D (1) of the two queries that this thread has of the n-th eight of a tile's 64, `stats` being
// the shared address of the tile's statistics. With SPLIT_STATS only lse is loaded, which lies alone.
template <int WHICH>
DEVICE void load_stats(float (&values)[2], u32 stats, int n) {
  const int t = (int)threadIdx.x % 4;
  if (SPLIT_STATS) {
    const float2 lse = load_shared_float2(stats + BLOCK_Q * SPLIT_BYTES + t * 8 + n * 32);
    values[0] = lse.x, values[1] = lse.y;
  } else {
    const uint4 both = load_shared_128(stats + t * 16 + n * 64);
    values[0] = __uint_as_float(WHICH ? both.y : both.x), values[1] = __uint_as_float(WHICH ? both.w : both.z);
  }
}

#if !IS_WIDE
// Work of consumer `warpgroup`, 0 or 1, all 128 threads of which call it: it walks through the block's steps with 64 of
// its keys. Leaves complete sums in `sums`, ddelta over the quad too.
template <class Keys>
DEVICE void consume(BackwardBlock& block, const Keys& keys, u32 shared, int warpgroup, KeyGradients& sums) {
  const int lane = (int)threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x % 128 / 32, 0), g = lane / 4,
            t = lane % 4;
  const KeyRange range = key_range(keys, warpgroup * 64, 64);
#if HAS_FAR
  const KeyRange bands = key_range(keys.bands(), warpgroup * 64, 64);
  int band_end[2];
#endif
  keys.find_tiles(block);
  const int num_steps = block.group_size * block.num_tiles;
  int key[2], expire[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int2 entry = keys.entry(warpgroup * 64 + warp * 16 + g + 8 * r);
    key[r] = entry.x - 2 * t;  // compared with columns 8n + x of a tile
    expire[r] = entry.y - 2 * t;
#if HAS_FAR
    band_end[r] = keys.band(warpgroup * 64 + warp * 16 + g + 8 * r).y - 2 * t;
#endif
    sums.ddelta[r] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < SUM_REGISTERS; ++i) sums.dk[i] = sums.dv[i] = 0.0f;
  if (num_steps == 0) return;

  const u32 k = shared + warpgroup * 64 * 128, v = k + V_AT;
  const KeySplit key_split(shared, warpgroup);
  const u32 k_columns = shared + (HEAD_DIM == 128 ? warpgroup * BLOCK_KV * 128 : warpgroup * 64);
  // Address of this lane's row of each 8x8 matrix of dS^T. 16 queries further are two swizzled chunks further: xor 32.
  const u32 ds_row = shared + DS_AT + (warpgroup * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8) * 128 +
                     (((lane / 16) ^ (lane % 8)) << 4);

  float scores[32], dp[32];
  u32 weights[4][4];
  RingPlace<Q_STAGES> q_place;
  RingPlace<DO_STAGES> do_place;
  StepPlace place(block);
#if !ORDERED && TILE_LISTS
  float* dq_to;
  auto next_tile = [&] {
    const u64 row = place.head * block.dq_len + place.tile * BLOCK_Q + warp * 16;
    dq_to = block.dq_sum + (row * (HEAD_DIM / 8) + warpgroup * (DQ_COLUMNS / 8) * 16) * 8;
  };
  next_tile();
#elif !ORDERED && HAS_FAR
  const u64 first_row = place.tile * BLOCK_Q - block.dq_first + warp * 16;
  float* dq_to = block.dq_sum + (first_row * (HEAD_DIM / 8) + warpgroup * (DQ_COLUMNS / 8) * 16) * 8;
  // As below, over the tiles between the runs.
  auto next_tile = [&] {
    const QueryTiles<BLOCK_Q>& tiles = block.tiles;
    const i64 rows = place.tile == tiles.first        ? block.dq_len - (tiles.end - tiles.first - 1) * BLOCK_Q
                     : place.tile == tiles.band_first ? (tiles.band_first - tiles.near_end + 1) * BLOCK_Q
                                                      : BLOCK_Q;
    dq_to += rows * HEAD_DIM;
  };
#elif !ORDERED
  const u64 first_row = place.tile * BLOCK_Q - block.dq_first + warp * 16;
  float* dq_to = block.dq_sum + (first_row * (HEAD_DIM / 8) + warpgroup * (DQ_COLUMNS / 8) * 16) * 8;
  // Moves `dq_to` from the last step's tile to the same rows of this step's tile, which may be the next head's first.
  auto next_tile = [&] {
    const i64 rows = place.tile == block.first_tile ? block.dq_len - (block.num_tiles - 1) * BLOCK_Q : BLOCK_Q;
    dq_to += rows * HEAD_DIM;
  };
#else
  float* const dq_to = nullptr;
#endif

  barrier_wait(barrier_at(shared, FULL_KV), 0);
  barrier_wait(barrier_at(shared, FULL_Q), 0);
  fence_async_proxy();  // keys and values came by cp.async
  wgmma_fence();
  multiply_queries<SCORE_SPLIT>(scores, k, shared + Q_AT, key_split, shared + STATS_AT);
  wgmma_wait<0>();

  for (int step = 0; step < num_steps; ++step) {
    const u32 q = shared + Q_AT + q_place.slot * QUERY_TILE_BYTES,
              d_out = shared + DO_AT + do_place.slot * DO_TILE_BYTES;
    const u32 stats = shared + DO_STATS_AT + do_place.slot * DO_STATS_BYTES;
    const int first_query = place.tile * BLOCK_Q;
    barrier_wait(barrier_at(shared, FULL_DO + do_place.slot), do_place.phase);
    wgmma_fence();
    // dP^T = V dO^T (SPLIT_STATS: dP^T - D)
    multiply_queries<SPLIT_STATS ? SPLIT_LAST : SPLIT_NONE>(dp, v, d_out, key_split, stats);

    // P^T = 2^(S^T - lse).
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float lse[2] = {0.0f, 0.0f};
      if (!SPLIT_LSE) load_stats<0>(lse, stats, n);
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[4 * n + x] = exp2_fast(scores[4 * n + x] * block.scale_log2 - lse[x % 2]);
    }
#if HAS_FAR
    const bool whole_band = first_query >= bands.highest && first_query + BLOCK_Q <= bands.first_expire;
    if ((first_query < range.highest || first_query + BLOCK_Q > range.first_expire) && !whole_band) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = key[r] - first_query;
        const u32 band = columns_from(own + block.far.band),
                  seen = (columns_from(own) & ~columns_from(expire[r] - first_query)) |
                         (band & ~columns_from(band_end[r] - first_query));
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x)
            if (!(seen >> (2 * n + x) & 1)) scores[4 * n + 2 * r + x] = 0.0f;
      }
    }
#else
    if (first_query < range.highest || first_query + BLOCK_Q > range.first_expire) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int i = first_query + 8 * n + x % 2;
          if (!(key[x / 2] <= i && i < expire[x / 2])) scores[4 * n + x] = 0.0f;
        }
    }
#endif
#if TILE_LISTS
    const bool is_seen = place.halves >> warpgroup & 1;
    if (!is_seen) {
#pragma unroll
      for (int i = 0; i < 32; ++i) scores[i] = 0.0f;
    }
#endif
    pack_operand(weights, scores);
    wgmma_fence();
    accumulate_queries(sums.dv, weights, d_out);  // dV += P^T dO
#if DQ_BULK
    if (step > 0) {
      send_dq<DQ_COLUMNS / 2>(dq_to, shared, step - 1);
#if !ORDERED
      next_tile();
#endif
    }
#endif

    wgmma_wait<1>();  // dP, and dK of the last step
    // dS^T = P^T (dP^T - D), from the rounded P: its f32 would cost 32 registers here.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float dot[2] = {0.0f, 0.0f};
      if (!SPLIT_STATS) load_stats<1>(dot, stats, n);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const u32 pair = weights[n / 2][n % 2 * 2 + x / 2];
        dp[4 * n + x] =
            (x % 2 ? bf16_high(pair) : bf16_low(pair)) * (SPLIT_STATS ? dp[4 * n + x] : dp[4 * n + x] - dot[x % 2]);
        if (HAS_BIAS) sums.ddelta[x / 2] += dp[4 * n + x];
      }
    }
#if TILE_LISTS
    if (!is_seen) {  // 0 times a value that is no number is none
#pragma unroll
      for (int i = 0; i < 32; ++i) dp[i] = 0.0f;
    }
#endif
    u32 ds[4][4];
    pack_operand(ds, dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_matrix_x4((ds_row ^ (i << 5)) + step % 2 * DS_BYTES, ds[i]);
    wgmma_fence();
    // dK += dS^T Q, which needs nothing of the other warpgroup and covers the barrier
    // kernels/notes/ds-from-registers.md
    accumulate_queries(sums.dk, ds, q);
    wgmma_wait<1>();                     // dV
    release(barrier_at(shared, EMPTY_DO + do_place.slot));
    // The next step's queries; on the last step this step's again, because a branch around the GEMMs would keep them
    // from overlapping.
    RingPlace<Q_STAGES> next_q = q_place;
    if (step + 1 < num_steps) next_q.advance();
    barrier_wait(barrier_at(shared, FULL_Q + next_q.slot), next_q.phase);
    fence_async_proxy();                   // for dS^T, and the next step's queries
    const u32 next_queries = shared + Q_AT + next_q.slot * QUERY_TILE_BYTES,
              next_stats = shared + STATS_AT + next_q.slot * Q_STATS_BYTES;
    float dq[DQ_COLUMNS / 2];
#if DQ_LAST
    wgmma_fence();
    multiply_queries<SCORE_SPLIT>(scores, k, next_queries, key_split, next_stats);
    barrier_sync(1, NUM_CONSUMERS * 128);  // all of dS^T is there; and the other half of the memory is free again
    wgmma_wait<1>();  // dK
    wgmma_fence();
#if TILE_LISTS
    multiply_seen_keys(dq, shared + DS_AT + step % 2 * DS_BYTES, k_columns, place.halves);
#else
    multiply_keys(dq, shared + DS_AT + step % 2 * DS_BYTES, k_columns);
#endif
    release(barrier_at(shared, EMPTY_Q + q_place.slot));
    wgmma_wait<0>();
#else
    barrier_sync(1, NUM_CONSUMERS * 128);
    wgmma_wait<0>();  // dK
    wgmma_fence();
    multiply_keys(dq, shared + DS_AT + step % 2 * DS_BYTES, k_columns);
    wgmma_fence();
    multiply_queries<SCORE_SPLIT>(scores, k, next_queries, key_split, next_stats);
    wgmma_wait<1>();  // all but the next step's scores
    release(barrier_at(shared, EMPTY_Q + q_place.slot));
#endif
#if DQ_BULK
    stage_dq(dq, shared, step);
#else
    add_dq(dq, dq_to);
#endif
    wgmma_wait<0>();
    q_place = next_q;
    do_place.advance();
    place.advance(block);
#if !DQ_BULK
    next_tile();
#endif
  }
  wgmma_wait<0>();
#if DQ_BULK
  send_dq<DQ_COLUMNS / 2>(dq_to, shared, num_steps - 1);
#if !ORDERED
  if (lane == 0) bulk_wait_read();  // shared memory must last until the adds have read it
#endif
#endif
#if HAS_BIAS
#pragma unroll
  for (int r = 0; r < 2; ++r) sums.ddelta[r] = quad_sum(sums.ddelta[r]);
#endif
}
#endif
