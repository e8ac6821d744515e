// hopper_tiles: a tile of query rows on Hopper (sm_90a), and the stages of keys and values that stream past it: shared
// memory, barriers and masks of the kernels that keep queries in place, attention (hopper_forward.cuh) and the row sums
// of its backward pass (hopper_row_sums.cuh).
// Defines    HEAD_DIM, HEAD_DIM_V (64, 128; also 192 and 128 without GATHER); NUM_CONSUMERS warpgroups of 64 rows;
//            BLOCK_KV (128) keys a stage; K_STAGES, V_STAGES; HEADS_PER_TILE query heads of a group share a tile;
//            HAS_BIAS; GATHER: 1 keys and values are copied by cp.async, 0 by TMA (queries by TMA, with SPARSE by
//            cp.async); TAKE_TURNS: consumers issue their GEMMs alternately, a consumer after the other has issued its
//            GEMMs (1) or after the other's first GEMM is done (2); CONSUMER_REGISTERS, PRODUCER_REGISTERS; SPARSE: the
//            keys come from a selector's mask, with GATHER key by key, without GATHER in boxes of KEY_BOX (64,
//            or 128 without PAIRS) keys; PAIRS: each consumer has a query tile of its own;
//            ROW_SUMS: output gradients are loaded beside the queries; CACHED: keys lie in the slots of a cache, and a
//            row's one query sees all listed ones but holes (GATHER); HALF_STAGES: a tile's first stage may have 64
//            keys
// A producer thread waits until a stage's slot is empty (its empty barrier), copies, and arrives at the slot's full
// barrier when its copies are done; each consumer warp arrives at the empty barrier after the GEMMs that read the slot.
#pragma once
#include "common/far_keys.cuh"
#include "common/hopper_copy.cuh"
#include "common/hopper_schedule.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"
#include "common/split_step.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

#ifndef GATHER
#define GATHER 0
#endif
#ifndef SPARSE
#define SPARSE 0
#endif
#ifndef ROW_SUMS
#define ROW_SUMS 0
#endif
#ifndef CACHED
#define CACHED 0
#endif
#ifndef HALF_STAGES
#define HALF_STAGES 0
#endif

constexpr int BLOCK_Q = NUM_CONSUMERS * 64;
constexpr int TILE_QUERIES = BLOCK_Q / HEADS_PER_TILE;
constexpr int THREADS = 128 + NUM_CONSUMERS * 128;
static_assert(HEAD_DIM_V == 64 || HEAD_DIM_V == 128,
              "output rows are 32 or 64 registers of a thread, and a producer thread copies whole chunks");
static_assert(HEAD_DIM == HEAD_DIM_V || (HEAD_DIM == 192 && HEAD_DIM_V == 128 && !GATHER && !ROW_SUMS),
              "keys wider than values are only copied by TMA");
static_assert(BLOCK_KV == 128, "scores are 64 registers of a thread; each of four producer warps copies 32 keys");
constexpr int HALF_KV = BLOCK_KV / 2;
static_assert(BLOCK_Q % HEADS_PER_TILE == 0, "a tile holds whole heads");
static_assert(!HAS_FAR || !(GATHER || SPARSE || HAS_BIAS || ROW_SUMS), "keys beyond a window come in one form");
static_assert(K_STAGES >= 2 && K_STAGES <= 3 && V_STAGES >= 2, "S of stage k + 1 is computed beside P V of stage k");

static_assert(NUM_CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (NUM_CONSUMERS == 2 ? 3 * 168 : 4 * 128),
              "a block cannot hand out more registers than it is launched with");

// Shared memory, from a 1024-byte boundary on.
constexpr int Q_BYTES = BLOCK_Q * HEAD_DIM * 2;
constexpr int STAGE_BYTES = BLOCK_KV * HEAD_DIM * 2, V_STAGE_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int DO_AT = Q_BYTES;
constexpr int K_AT = DO_AT + (ROW_SUMS ? Q_BYTES : 0);
constexpr int V_AT = K_AT + K_STAGES * STAGE_BYTES;
// Key slots hold {position, expire} (GATHER) and the bias (HAS_BIAS) of each key of a stage. The softmax reads them
// after the stage's K was released, but before the next stage's K is. So K_STAGES + 1 slots need no barriers of their
// own; there are four, a power of two.
constexpr int NUM_KEY_SLOTS = 4;
// SPARSE without GATHER: which keys of the stage each consumer sees, and whether it is the tile's last stage
// (hopper_blocks.cuh).
constexpr int ENTRY_BYTES = GATHER ? BLOCK_KV * 8 : SPARSE ? 32 : 0;
constexpr int KEY_BYTES = ENTRY_BYTES + (HAS_BIAS ? BLOCK_KV * SPLIT_BYTES : 0);
constexpr int KEYS_AT = V_AT + V_STAGES * V_STAGE_BYTES;
// Two tile descriptions of TILE_BYTES: the producer describes the next tile while the consumers store the last one.
constexpr int HEAD_BYTES = HAS_FAR ? 64 : 32;  // of a TileHead
constexpr int BASES_AT = HEAD_BYTES + (GATHER && !SPARSE ? 0 : TILE_QUERIES * 4);
constexpr int TILE_BYTES = BASES_AT + (HAS_BIAS ? BLOCK_Q * SPLIT_BYTES : 0);
static_assert(!HAS_BIAS || BLOCK_Q == 128, "each producer thread loads the base of one row");
constexpr int TILE_AT = KEYS_AT + NUM_KEY_SLOTS * KEY_BYTES;
constexpr int BARRIERS_AT = TILE_AT + 2 * TILE_BYTES;
constexpr int FULL_K = 0, EMPTY_K = FULL_K + K_STAGES, FULL_V = EMPTY_K + K_STAGES, EMPTY_V = FULL_V + V_STAGES,
              FULL_Q = EMPTY_V + V_STAGES, EMPTY_Q = FULL_Q + 1;
constexpr int NUM_BARRIERS = EMPTY_Q + 1;
constexpr int SHARED_BYTES = BARRIERS_AT + NUM_BARRIERS * 8;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "a block's shared memory, with room to align it");
static_assert(BARRIERS_AT % 16 == 0, "barriers and vectors are aligned");

// The description of a tile for the consumers, which read its members by their offsets in bytes: batch 0, head 4,
// first_query 8 and so on. In shared memory it is followed by the lowest key that each query sees (dense; HAS_FAR: the
// first token of its document) or the position of each query (SPARSE), and by each row's -base / softmax_scale
// (HAS_BIAS).
struct TileHead {
  int batch, head, first_query, end_query;
  // num_stages: 0 is the end mark, at which the consumers stop. last_stage (dense): stages are visited from this
  // one (key / BLOCK_KV) downwards.
  int num_stages, last_stage;
  int first_is_half;  // HALF_STAGES: the first stage holds HALF_KV keys
  // SPARSE without GATHER: `local` of the window (SparseKeys); its `init` is in last_stage, and num_stages is 1.
  int local;
#if HAS_FAR
  int near, gap, nearer, next_gap;  // of KeyTiles: stages that are left out
  FarKeys far;
#endif
  // Dense: the first key of the stage visited as number `it`.
  DEVICE int first_key(int it) const {
#if HAS_FAR
    return (last_stage - it - (it >= near ? gap : 0) - (it >= nearer ? next_gap : 0)) * BLOCK_KV;
#else
    return (last_stage - it) * BLOCK_KV;
#endif
  }
};
static_assert(sizeof(TileHead) == HEAD_BYTES, "what follows it lies behind it");

struct InputTensors {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  u64 q_token_stride, q_batch_stride;  // elements
  u64 k_token_stride, k_batch_stride, v_token_stride, v_batch_stride;
  const float* delta;                  // [batch, num_kv_heads, seq_len] (HAS_BIAS)
  const float* base;                   // [batch, num_kv_heads, padded_len] (HAS_BIAS)
  const bf16* d_out;                   // [batch, seq_len, num_heads, HEAD_DIM] (ROW_SUMS)
  int seq_len, num_heads, num_kv_heads;
#if CACHED
  int num_slots;  // keys, and biases, of a KV head
#endif
  float softmax_scale;
};

// Takes the members that all params structs of these kernels begin with.
template <class Params>
DEVICE InputTensors input_tensors(const bf16* q, const bf16* k, const bf16* v, const Params& params) {
  InputTensors tensors = {};
  tensors.q = q + params.q_offset;
  tensors.k = k + params.k_offset;
  tensors.v = v + params.v_offset;
  tensors.q_token_stride = params.q_token_stride;
  tensors.q_batch_stride = params.q_batch_stride;
  tensors.k_token_stride = params.k_token_stride;
  tensors.k_batch_stride = params.k_batch_stride;
  tensors.v_token_stride = params.v_token_stride;
  tensors.v_batch_stride = params.v_batch_stride;
  tensors.seq_len = (int)params.seq_len;
  tensors.num_heads = (int)params.num_heads;
  tensors.num_kv_heads = (int)params.num_kv_heads;
  tensors.softmax_scale = f32_word(params.softmax_scale);
  return tensors;
}

// The shared address of the description of the block's tile number `done`, counted over all its tiles; two are kept.
DEVICE u32 tile_base(u32 shared, u32 done) { return shared + TILE_AT + (done & 1) * TILE_BYTES; }
// The shared address of the key slot of stage number `stage`, counted over all tiles of the block.
DEVICE u32 key_slot(u32 shared, u32 stage) { return shared + KEYS_AT + (stage % NUM_KEY_SLOTS) * KEY_BYTES; }
// The shared address of mbarrier number `barrier`: FULL_K, EMPTY_K and so on, plus the slot in their ring.
DEVICE u32 barrier_at(u32 shared, int barrier) { return shared + BARRIERS_AT + barrier * 8; }

// ---- Producer
// ---------------------------------------------------------------------------------------------------------------------

#if !SPARSE
// Starts the copies of the tile's queries, and with ROW_SUMS of its output gradients, to the block's memory at
// `shared`; all threads of the producer call it, thread 0 does it. `maps` are those of q, k, v and do.
DEVICE void copy_queries(u32 shared, const TensorMap* const* maps, const TileHead& tile) {
  if (threadIdx.x % 128 != 0) return;
  const u32 full = barrier_at(shared, FULL_Q);
  barrier_expect(full, Q_BYTES * (ROW_SUMS ? 2 : 1));
#pragma unroll
  for (int x = 0; x < (ROW_SUMS ? 2 : 1) * DIM_BLOCKS * HEADS_PER_TILE; ++x) {
    const int head = x % HEADS_PER_TILE, block = x / HEADS_PER_TILE % DIM_BLOCKS,
              tensor = x / HEADS_PER_TILE / DIM_BLOCKS;
    tensor_load_3d(shared + tensor * DO_AT + block * BLOCK_Q * 128 + head * TILE_QUERIES * 128, maps[tensor ? 3 : 0],
                   full, (tile.head + head) * HEAD_DIM + block * 64, tile.first_query, tile.batch);
  }
}
#endif

#if HAS_BIAS
// Returns the base of producer thread t's row t of the tile, for KV head `kv_head`: loaded well before store_base
// stores it. All 128 producer threads call both.
DEVICE float load_base(const InputTensors& tensors, const TileHead& tile, int kv_head) {
  const int query = min(tile.first_query + (int)threadIdx.x % 128 % TILE_QUERIES, tensors.seq_len - 1),
            padded_len = (tensors.seq_len + 63) & ~63;
  return tensors.base[((u64)tile.batch * tensors.num_kv_heads + kv_head) * padded_len + query];
}
// Stores `base`, in units of q . k and negated, as the operand of the thread's row; `tile` is the shared address of the
// tile's description. Call fence_async_proxy before wgmma reads it.
DEVICE void store_base(u32 tile, float base, float inverse_scale) {
  store_split_row(tile + BASES_AT + threadIdx.x % 128 * SPLIT_BYTES, -in_scores(base, inverse_scale));
}
#endif

// Tells the consumers that there is no further tile, by the description of a tile without stages or queries, in place
// of tile number `done`. All 128 producer threads call it.
DEVICE void describe_end(u32 done, u32 shared) {
  const u32 full = barrier_at(shared, FULL_Q);
  barrier_wait(barrier_at(shared, EMPTY_Q), (done & 1) ^ 1);
  if (threadIdx.x % 128 == 0) {
    const TileHead none = {};
    *(TileHead*)__cvta_shared_to_generic(tile_base(shared, done)) = none;
  }
  if (SPARSE || threadIdx.x % 128 == 0) barrier_arrive(full);  // in place of the copies
  barrier_arrive(full);
}

// Next slots of the producer, or of a consumer, in the rings of keys and values; `stage` counts the stages of all
// tiles.
struct StagePlaces {
  RingPlace<K_STAGES> k;
  RingPlace<V_STAGES> v;
  u32 stage = 0;
  // Moves on to the next stage's slot of keys. Values follow by v.advance(), at another moment.
  DEVICE void next_keys() {
    k.advance();
    stage += 1;
  }
};

// ---- Consumer
// ---------------------------------------------------------------------------------------------------------------------

// d = a b^T: the consumer's 64 rows of a tile of BLOCK_Q, at shared address `rows`, times the 2 N keys of a stage, or
// of its first half, at `stage`. With BIAS (delta - base) / softmax_scale is added as the first K step, from the rows'
// `bases` and the stage's key slot `keys`; base is the largest bias that the query sees. Only differences of biases
// matter, and an f32 near a bias of 2^29 would have no digits left for q . k. Starts the GEMM and closes its group; all
// 128 threads call it.
template <int BIAS, int N>
DEVICE void multiply_stage(float (&d)[N], u32 rows, u32 stage, [[maybe_unused]] u32 bases, [[maybe_unused]] u32 keys) {
  const u64 a = wgmma_along(rows), b = wgmma_along(stage);
  // kernels/notes/bias-as-the-first-k-step.md
  if (BIAS) wgmma<0, 0>(d, wgmma_unswizzled(bases), wgmma_unswizzled(keys + ENTRY_BYTES), 0);
  wgmma_rows<HEAD_DIM, BLOCK_Q, BLOCK_KV>(d, a, b, BIAS);
  wgmma_commit();
}

// Positions of the warpgroup's rows of a tile.
struct ConsumerRows {
  int first_query, last_query;  // first and last of the warpgroup; they decide whether a stage needs the mask
  int query[2];                 // positions of this thread's two rows
#if SPARSE && !GATHER
  int init, local;              // a key from `init` on is seen by the `local` queries from its own position on
#elif !GATHER
  int highest_low;              // the lowest key seen by the last query: keys from here on need no lower bound
  int lowest[2];
#if HAS_FAR
  u32 tile;                     // shared address of the tile's description
#endif
  int last_stage;
#endif
};

#if SPARSE
// The position of row `row` of the tile described at `tile`, 0 .. 127; past the tile's last slot a position past all
// queries.
DEVICE int row_position(u32 tile, int row) { return load_shared_int(tile + 32 + row * 4); }
#endif

// The rows of consumer `warpgroup`, 0 or more, in the tile described at shared address `tile`; every one of its threads
// calls it and gets its own two rows. With SPARSE rows are in any order, so first_query and last_query are those of
// this thread's warp.
DEVICE ConsumerRows consumer_rows(u32 tile, int warpgroup) {
  ConsumerRows rows;
#if SPARSE
  const int end_query = load_shared_int(tile + 12);
  const int lane = (int)threadIdx.x % 32, warp_row = warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16,
            here = row_position(tile, warp_row + lane % 16);
  rows.first_query = here;
  rows.last_query = here < end_query ? here : -1;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    rows.first_query = min(rows.first_query, __shfl_xor_sync(~0u, rows.first_query, step));
    rows.last_query = max(rows.last_query, __shfl_xor_sync(~0u, rows.last_query, step));
  }
  rows.query[0] = row_position(tile, warp_row + lane / 4);
  rows.query[1] = row_position(tile, warp_row + lane / 4 + 8);
#if !GATHER
  rows.init = load_shared_int(tile + 20);
  rows.local = load_shared_int(tile + 28);
#endif
  return rows;
#else
  const int first_query = load_shared_int(tile + 8), end_query = load_shared_int(tile + 12),
            first_row = warpgroup * 64 % TILE_QUERIES;
  constexpr bool WHOLE_TILE = TILE_QUERIES % 64 != 0;  // a warpgroup's 64 rows may then belong to several heads
  rows.first_query = first_query + (WHOLE_TILE ? 0 : first_row);
  rows.last_query = min(rows.first_query + (WHOLE_TILE ? TILE_QUERIES : 64), end_query) - 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at =
        (warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * r) % TILE_QUERIES;
    rows.query[r] = first_query + at;
#if !GATHER
    rows.lowest[r] = load_shared_int(tile + HEAD_BYTES + at * 4);
#endif
  }
#if HAS_FAR
  rows.tile = tile;
#endif
#if !GATHER
  rows.highest_low = load_shared_int(tile + HEAD_BYTES + max(rows.last_query - first_query, 0) * 4);
  rows.last_stage = load_shared_int(tile + 20);
#endif
  return rows;
#endif
}

#if SPARSE && !GATHER
constexpr int BOXES = BLOCK_KV / KEY_BOX;  // boxes of a stage
constexpr int LAST_AT = 16;                // with PAIRS: offset in a key slot of the flag of the tile's last stage
// Where the two halves (64 keys) of a stage begin, for this thread's consumer; `keys`: shared address of the stage's
// key slot, the first key of each of its boxes. One box of 128 keys: the halves are neighbours. Boxes of 64: one a
// half, and with PAIRS, where each consumer has a query tile of its own, two for each consumer. A half of which its
// rows see no key begins behind all keys.
DEVICE int2 first_keys(u32 keys) {
  int2 first;
  if (BOXES == 1) {
    first.x = load_shared_int(keys);
    first.y = first.x + HALF_KV;
    return first;
  }
  return load_shared_int2(keys + (PAIRS ? threadIdx.x / 128 - 1 : 0) * 8);
}
#endif

#if SPARSE && !GATHER
// Whether some row of the warp does not see some of KEYS keys: HALF_KV from each of `first` on, or only from first.x.
// Every lane computes it alone, with the same result.
template <int KEYS>
DEVICE bool keys_are_partial(const ConsumerRows& rows, int2 first) {
  bool partial = (KEYS > HALF_KV ? max(first.x, first.y) : first.x) + HALF_KV > rows.first_query + 1;
  if (rows.local != NEVER)
#pragma unroll
    for (int half = 0; half < KEYS / HALF_KV; ++half) {
      const int key = half ? first.y : first.x;
      partial |= key + HALF_KV > rows.init && max(key, rows.init) + rows.local <= rows.last_query;
    }
  return partial;
}

// Sets the thread's scores to `masked` where one of its two rows does not see a key: HALF_KV keys from each of `first`
// on.
template <int N>
DEVICE void mask_keys(float (&score)[N], const ConsumerRows& rows, int2 first, float masked) {
  const int t = (int)threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = rows.query[x / 2],
                key = (n < HALF_KV / 8 ? first.x : first.y) + n % (HALF_KV / 8) * 8 + 2 * t + x % 2;
      if (key > i || (key >= rows.init && key <= i - rows.local)) score[4 * n + x] = masked;
    }
}
#endif

#if HAS_FAR
// The first key of the tile's stage visited as number `it`.
DEVICE int stage_key(const ConsumerRows& rows, int it) {
  const uint4 runs = load_shared_128(rows.tile + 32);
  TileHead tile;
  tile.last_stage = rows.last_stage;
  tile.near = (int)runs.x, tile.gap = (int)runs.y, tile.nearer = (int)runs.z, tile.next_gap = (int)runs.w;
  return tile.first_key(it);
}
// What the tile's queries see beyond their window.
DEVICE FarKeys far_keys(const ConsumerRows& rows) {
  const uint4 words = load_shared_128(rows.tile + 48);
  FarKeys far;
  far.window = (int)words.x, far.band = (int)words.y, far.band_end = (int)words.z, far.sinks = (int)words.w;
  return far;
}
#endif

// Whether some row of the warp does not see some of the stage's first KEYS keys, so that scores must be masked; all
// lanes get the same answer. `keys` is the shared address of the stage's key slot, `it` the number of the stage in its
// tile. It does not read the scores, so it runs beside their GEMM.
template <int KEYS = BLOCK_KV>
DEVICE bool stage_is_partial(const ConsumerRows& rows, u32 keys, int it) {
#if GATHER
  // A lane looks at every 32nd key. All rows see a key that is not after the first of them and expires after the last.
  bool sees_all = true;
#pragma unroll
  for (int i = 0; i < KEYS / 32; ++i) {
    const int2 entry = load_shared_int2(keys + (i * 32 + threadIdx.x % 32) * 8);  // {position, expire}
    sees_all &= CACHED ? entry.y > 0 : entry.x <= rows.first_query && entry.y > rows.last_query;
  }
  return !__all_sync(~0u, sees_all);
#elif SPARSE
  return keys_are_partial<KEYS>(rows, first_keys(keys));
#elif HAS_FAR
  const int first_key = stage_key(rows, it);
  return !far_keys(rows).all_see(rows.first_query, rows.last_query, rows.highest_low, first_key, first_key + BLOCK_KV);
#else
  // The stage's last key comes after the first row, or its first key before the lowest that the last row sees.
  const int first_key = (rows.last_stage - it) * BLOCK_KV;
  return first_key + BLOCK_KV - 1 > rows.first_query || first_key < rows.highest_low;
#endif
}

// Sets the thread's scores to `masked` where one of its two rows does not see a key of the stage; `keys` and `it` as in
// stage_is_partial.
template <int N>
DEVICE void mask_stage(float (&score)[N], const ConsumerRows& rows, u32 keys, int it, float masked) {
  [[maybe_unused]] const int t = (int)threadIdx.x % 4;
#if GATHER
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    const uint4 pair = load_shared_128(keys + (n * 8 + 2 * t) * 8);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = rows.query[x / 2], key = (int)(x % 2 ? pair.z : pair.x), expire = (int)(x % 2 ? pair.w : pair.y);
      if (CACHED ? expire <= 0 : !(key <= i && i < expire)) score[4 * n + x] = masked;
    }
  }
#elif SPARSE
  mask_keys(score, rows, first_keys(keys), masked);
#elif HAS_FAR
  const int first_column = stage_key(rows, it) + 2 * t;
  const FarKeys far = far_keys(rows);
  u32 seen[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = rows.query[r] - first_column, start = rows.lowest[r] - first_column;
    const u32 near = columns_from(query - far.window + 1),
              band = columns_from(query - far.band_end + 1) & ~columns_from(query - far.band + 1);
    seen[r] = columns_from(start) & ~columns_from(query + 1) & (near | band | ~columns_from(start + far.sinks));
  }
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (!(seen[x / 2] >> (2 * n + x % 2) & 1)) score[4 * n + x] = masked;
#else
  const int first_key = (rows.last_stage - it) * BLOCK_KV;
  int last[2], lowest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    last[r] = rows.query[r] - first_key - 2 * t;
    lowest[r] = rows.lowest[r] - first_key - 2 * t;
  }
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (n * 8 + x % 2 > last[x / 2] || n * 8 + x % 2 < lowest[x / 2]) score[4 * n + x] = masked;
#endif
}

// With TAKE_TURNS a consumer waits at named barrier 1 + its number, at which the other consumer arrives. All 128
// threads of consumer `warpgroup` call this and the three functions below.
DEVICE void take_turn(int warpgroup) {
  if (TAKE_TURNS) barrier_sync(1 + warpgroup, 256);
}
// Lets the next consumer go on: arrives at its named barrier, which counts the threads of two consumers.
DEVICE void pass_turn(int warpgroup) { barrier_pass(1 + (warpgroup + 1) % NUM_CONSUMERS, 256); }
// Before the first tile the last consumer arrives for the first one's first turn.
DEVICE void start_turns(int warpgroup) {
  if (TAKE_TURNS && warpgroup == NUM_CONSUMERS - 1) barrier_pass(1, 256);
}
// After the last tile the first consumer waits for the last arrival, so that none is left over.
DEVICE void end_turns(int warpgroup) {
  if (TAKE_TURNS && warpgroup == 0) barrier_sync(1, 256);
}

// Returns the shared address of the block's memory, rounded up to 1024 bytes. Every thread calls it, thread 0 sets up
// the barriers, and a __syncthreads must follow.
DEVICE u32 start_block(void* memory) {
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    // A full barrier takes an arrival of each producer thread's copies (with TMA one expect_tx), and one of each
    // producer thread that stores entries or biases; an empty barrier takes one of each consumer warp.
    constexpr int FILL = GATHER ? 128 : 1;
    constexpr int KEY_ARRIVALS = FILL + (GATHER || HAS_BIAS ? 128 : 0);
    ring_init(barrier_at(shared, FULL_K), barrier_at(shared, EMPTY_K), K_STAGES, KEY_ARRIVALS, NUM_CONSUMERS * 4);
    ring_init(barrier_at(shared, FULL_V), barrier_at(shared, EMPTY_V), V_STAGES, FILL, NUM_CONSUMERS * 4);
    // the copies of the queries, and every producer thread's stores to the tile's description
    barrier_init(barrier_at(shared, FULL_Q), (SPARSE ? 128 : 1) + 128);
    barrier_init(barrier_at(shared, EMPTY_Q), NUM_CONSUMERS * 4);
    barrier_ready();
  }
  return shared;
}

// The main loop of a thread block, which all its threads enter after `start_block` and a __syncthreads. Warpgroup 0
// produces: `work` finds the tiles and loads them. The others consume: `consumer` computes a tile. `done` is the number
// of tiles that this block has finished.
template <class Work, class Consumer>
DEVICE void run_block(const InputTensors& tensors, const Work& work, const Consumer& consumer,
                      const TensorMap* const* maps, u32 shared) {
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    StagePlaces places;
    WorkPlace place;
    u32 done = 0;
    for (u32 round = 0; round < work.schedule.num_rounds; ++round)
      if (work.schedule.find(round, place)) work.produce(tensors, maps, place, done++, shared, places);
    describe_end(done, shared);
    copy_async_wait<0>();
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    StagePlaces places;
    start_turns(warpgroup - 1);
    for (u32 done = 0; consumer.consume(tensors, shared, done, warpgroup - 1, places); ++done) {
    }
    end_turns(warpgroup - 1);
  }
}
