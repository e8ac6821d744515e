// hopper_chosen: attention over chosen blocks on Hopper (sm_90a) by blocks of 64 or 128 keys, each with the rows of the
// queries that chose it (nsa_rows.cuh): shared memory, barriers and the producer of its forward and backward kernels.
// Defines    HEAD_DIM (64, 128); BLOCK_KEYS (64): the keys of a tile, 64|128; without GRADIENT they hold a block, with
//            it a larger block is read in two pieces; GRADIENT 0|1: row statistics are loaded beside the queries, and
//            dS^T has a place; INDEXED (0): with GRADIENT, 0: output gradients are loaded
//            beside the queries; 1: for the indexer's gradient, where a row is a query, a tile of queries is loaded
//            once for each head of the group and then for the indexer's head, and the indexer's key head takes the
//            place of the values; ORDERED (0): with GRADIENT, 1: the items of a list add to its keys' gradients in a
//            fixed order; KEYS_ONLY (0): without GRADIENT, 1: all KV heads read the one key head, and no values are
//            loaded; ROW_STAGES tiles of rows; CONSUMER_REGISTERS, PRODUCER_REGISTERS
// An item is a part of the list of queries that chose the blocks of one cell; a run is the part of an item that is of
// one document, so that all its queries chose the same block, with one piece of that block. Thread blocks are
// persistent and take items from a shared counter. The producer warpgroup loads a run's keys and values, one run ahead,
// and gathers tiles of 128 rows. The two consumer warpgroups work on the same keys, each on 64 rows of a tile, without
// waiting for each other. Gradients of 128 keys would not fit a thread's registers, so there tiles have 64 rows, and
// each warpgroup has 64 of the keys (SPLIT_KEYS).
#pragma once
#include "common/hopper_copy.cuh"
#include "common/mma.cuh"
#include "common/nsa_rows.cuh"
#include "common/quad.cuh"
#include "common/wgmma.cuh"

#ifndef INDEXED
#define INDEXED 0
#endif
#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef KEYS_ONLY
#define KEYS_ONLY 0
#endif
#ifndef BLOCK_KEYS
#define BLOCK_KEYS 64
#endif
static_assert(!KEYS_ONLY || !GRADIENT, "gradients read values, or the indexer's key in their place");
static_assert(BLOCK_KEYS == 64 || (BLOCK_KEYS == 128 && !INDEXED), "the indexer's gradient reads 64 keys");
// 1: a consumer warpgroup has 64 of a tile's 128 keys and all of its rows; 0: 64 of its rows and all keys.
#define SPLIT_KEYS (GRADIENT && BLOCK_KEYS == 128)
static_assert(!SPLIT_KEYS || HEAD_DIM == 128, "each warpgroup has 64 columns of dq");
constexpr int NUM_CONSUMERS = 2, THREADS = 128 + NUM_CONSUMERS * 128;
constexpr int KEYS = BLOCK_KEYS, ROWS = SPLIT_KEYS ? 64 : NUM_CONSUMERS * 64, KEY_SLOTS = 2;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "sums of 64 rows are 32 or 64 registers of a thread");
static_assert(NUM_CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168,
              "a block cannot hand out more registers than it is launched with");

// Shared memory, from a 1024-byte boundary on.
constexpr int KEY_TILE_BYTES = KEYS * HEAD_DIM * 2, ROW_TILE_BYTES = ROWS * HEAD_DIM * 2;
constexpr int STAGE_BYTES = ROW_TILE_BYTES * (GRADIENT && !INDEXED ? 2 : 1);  // queries, then output gradients
constexpr int STAGES_AT = KEY_SLOTS * 2 * KEY_TILE_BYTES;     // after the keys and values of all slots
constexpr int DS_BYTES = GRADIENT ? 64 * 64 * 2 : 0;          // dS^T of a warpgroup
constexpr int DS_SLOTS = SPLIT_KEYS ? 2 : 1;                  // tiles of dS^T of a warpgroup, used alternately
constexpr int DS_AT = STAGES_AT + ROW_STAGES * STAGE_BYTES;
constexpr int PLACES_AT = DS_AT + NUM_CONSUMERS * DS_SLOTS * DS_BYTES;  // of each row of a tile
constexpr int STATS_AT = PLACES_AT + ROW_STAGES * ROWS * 4;   // GRADIENT: lse * log2(e) of each row, then D
constexpr int RUNS_AT = STATS_AT + GRADIENT * ROW_STAGES * ROWS * 8;
// The item taken by the producer's first warp, for the other producer warps; two places, used alternately.
constexpr int ITEMS_AT = RUNS_AT + KEY_SLOTS * 16;
constexpr int BARRIERS_AT = ITEMS_AT + 2 * 8;
constexpr int FULL_KEYS = 0, EMPTY_KEYS = FULL_KEYS + KEY_SLOTS, FULL_ROWS = EMPTY_KEYS + KEY_SLOTS,
              EMPTY_ROWS = FULL_ROWS + ROW_STAGES;
constexpr int SHARED_BYTES = BARRIERS_AT + (EMPTY_ROWS + ROW_STAGES) * 8;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "a block's shared memory, with room to align it");
constexpr int CONSUMER_ARRIVALS = NUM_CONSUMERS * 4 * WARP_ARRIVALS;
// Numbers of named barriers: of the producer warps; then, plus the number of a consumer warpgroup, those of its warps.
constexpr int PRODUCERS_MEET = 1, DS_READY = 2, DS_FREE = 4, ROWS_READ = 6;
constexpr int CONSUMERS_MEET = 8;  // SPLIT_KEYS: both consumers' dS^T of a tile is there

struct ChosenInputs {
  const bf16 *q, *k, *v, *d_out;  // the whole tensors, offsets included
  const float2* stats;            // [batch, num_heads, padded_len] {lse * log2(e), D}
#if INDEXED
  const bf16* index_q;           // offset included
  const float *lse, *index_lse;  // [batch, num_heads, seq_len], [batch, num_kv_heads, seq_len]
  u64 index_token_stride, index_batch_stride;
#endif
  u64 q_token_stride, k_token_stride, v_token_stride, q_batch_stride, k_batch_stride, v_batch_stride, padded_len;
  const i32 *doc_start, *doc_end;
  const int2* entries;
  const int4* items;
  i32* num_items;  // [num_lists + 1]: items of each list, then the counter of items that were taken
  u64 choices, max_items;
  int num_lists, num_kv_heads, group, seq_len, select_size;
};

// Takes the members that the params structs of these kernels have in common.
template <class Params>
DEVICE ChosenInputs chosen_inputs(const bf16* q, const bf16* k, const bf16* v, const i32* doc_start, const i32* doc_end,
                                  const int2* entries, const int4* items, i32* num_items, const Params& params) {
  ChosenInputs inputs = {};
  inputs.q = q + params.q_offset;
  inputs.k = k + params.k_offset;
  if (!KEYS_ONLY) inputs.v = v + params.v_offset;
  inputs.q_token_stride = params.q_token_stride;
  inputs.k_token_stride = params.k_token_stride;
  inputs.v_token_stride = params.v_token_stride;
  inputs.q_batch_stride = params.q_batch_stride;
  inputs.k_batch_stride = params.k_batch_stride;
  inputs.v_batch_stride = params.v_batch_stride;
  inputs.doc_start = doc_start;
  inputs.doc_end = doc_end;
  inputs.entries = entries;
  inputs.items = items;
  inputs.num_items = num_items;
  inputs.choices = params.choices;
  inputs.max_items = params.max_items;
  inputs.num_kv_heads = (int)params.num_kv_heads;
  inputs.num_lists = (int)params.batch * inputs.num_kv_heads;
  inputs.group = (int)params.num_heads / inputs.num_kv_heads;
  inputs.seq_len = (int)params.seq_len;
  inputs.select_size = (int)params.select_size;
  return inputs;
}

// The shared address of mbarrier number `barrier`: FULL_KEYS, EMPTY_KEYS and so on, plus the slot in their ring.
DEVICE u32 barrier_at(u32 shared, int barrier) { return shared + BARRIERS_AT + barrier * 8; }
// The shared address of the tile of ROWS rows in slot `slot`, 0 .. ROW_STAGES - 1.
DEVICE u32 stage_at(u32 shared, u32 slot) { return shared + STAGES_AT + slot * STAGE_BYTES; }
// The shared address of the places of the rows in slot `slot`, a word a row: see place_word.
DEVICE u32 places_at(u32 shared, u32 slot) { return shared + PLACES_AT + slot * ROWS * 4; }
// The place of a row of query `token`: the row of the partial results to which its own are written, and how many of the
// run's keys it sees, from the first on.
DEVICE int place_word(int part, int token, int first_key, int num_keys) {
  return part << 8 | max(min(token + 1 - first_key, num_keys), 0);
}
// The place of a row past the end of a run. It counts as one that sees all keys.
constexpr int NO_PLACE = -1;
// The keys that the row of a place sees, and the row of its partial results.
DEVICE int place_seen(int place) { return place & 0xff; }
DEVICE u32 place_part(int place) { return (u32)place >> 8; }
// The shared address of the log-sum-exps of the rows in slot `slot`, 4 bytes a row; after them stand their D.
DEVICE u32 stats_at(u32 shared, u32 slot) { return shared + STATS_AT + slot * ROWS * 8; }

// Returns the shared address of the block's memory, rounded up to 1024 bytes. Every thread calls it, thread 0 sets up
// the barriers, and a __syncthreads must follow.
DEVICE u32 start_block(void* memory) {
  const u32 shared = (shared_address(memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    // A full barrier takes two arrivals of each producer thread, for its copies and for its stores.
    ring_init(barrier_at(shared, FULL_KEYS), barrier_at(shared, EMPTY_KEYS), KEY_SLOTS, 256, CONSUMER_ARRIVALS);
    ring_init(barrier_at(shared, FULL_ROWS), barrier_at(shared, EMPTY_ROWS), ROW_STAGES, 256, CONSUMER_ARRIVALS);
    barrier_ready();
  }
  return shared;
}

// ---- Producer
// ---------------------------------------------------------------------------------------------------------------------

// {list, item} of the item with index `index` among those of all lists; {-1, 0} past the last. Called by a whole warp.
#if ORDERED
// Consecutive indices go through the lists, so that items of one list, which wait for each other, start far apart. For
// a list that has no such item the result is {list, -1}.
DEVICE int2 find_item(const ChosenInputs& inputs, int index) {
  const int list = index % inputs.num_lists, item = index / inputs.num_lists;
  int most = 0;
  for (int at = (int)threadIdx.x % 32; at < inputs.num_lists; at += 32) most = max(most, inputs.num_items[at]);
  if (item >= __reduce_max_sync(~0u, most)) return make_int2(-1, 0);
  return make_int2(list, item < inputs.num_items[list] ? item : -1);
}
#else
// Consecutive indices are consecutive items of a list, then those of the next list. Lane l adds up the items of lists 0
// to l of 32, and the first lane whose sum exceeds the index has the item's list.
DEVICE int2 find_item(const ChosenInputs& inputs, int index) {
  const int lane = (int)threadIdx.x % 32;
  for (int base = 0; base < inputs.num_lists; base += 32) {
    const int count = base + lane < inputs.num_lists ? inputs.num_items[base + lane] : 0;
    int end = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += other;
    }
    const u32 behind = __ballot_sync(~0u, index < end);
    if (behind != 0) {
      const int at = __ffs((int)behind) - 1;
      return make_int2(base + at, index - __shfl_sync(~0u, end - count, at));
    }
    index -= __shfl_sync(~0u, end, 31);
  }
  return make_int2(-1, 0);
}
#endif

constexpr int UNIT = 8;  // elements of a 16-byte copy; offsets of rows count these, so that they fit 32 bits

#if INDEXED
// Loads the tiles of a run of KV head `kv_head`: 128 queries, once for each head of the group and once for the
// indexer's head, each time with their log-sum-exp. `first_part` is the row of dq_parts of this piece of the list's
// choice 0; a choice has `pieces` rows. All 128 threads of the producer call it, and thread t loads row t.
DEVICE void produce_indexed_rows(const ChosenInputs& inputs, u32 shared, RingPlace<ROW_STAGES>& place,
                                 const ChosenRun& run, int batch, int kv_head, int first_part, int pieces) {
  const int thread = (int)threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), group = inputs.group;
  const u64 first_head = ((u64)batch * inputs.num_kv_heads + kv_head) * group;
  const bf16* q = inputs.q + batch * inputs.q_batch_stride + (u64)kv_head * group * HEAD_DIM;
  const bf16* index_q = inputs.index_q + batch * inputs.index_batch_stride + (u64)kv_head * HEAD_DIM;
  for (int row = thread; row - thread < run.num_rows; row += ROWS) {
    const bool present = row < run.num_rows;
    const int2 entry = run.entries[min(row, run.num_rows - 1)];
    for (int head = 0; head <= group; ++head) {
      const bool is_index = head == group;
      const u32 full = barrier_at(shared, FULL_ROWS + place.slot);
      barrier_wait(barrier_at(shared, EMPTY_ROWS + place.slot), place.phase ^ 1);
      const u32 stride = (u32)((is_index ? inputs.index_token_stride : inputs.q_token_stride) / UNIT);
      copy_key_rows<DIM_BLOCKS, true>(stage_at(shared, place.slot), is_index ? index_q : q + (u64)head * HEAD_DIM,
                                      UNIT * 2, present ? (int)((u32)entry.x * stride) : -1, warp);
      const float* lse = is_index ? inputs.index_lse + ((u64)batch * inputs.num_kv_heads + kv_head) * inputs.seq_len
                                  : inputs.lse + (first_head + head) * inputs.seq_len;
      copy_async_4(stats_at(shared, place.slot) + thread * 4, lse + (present ? entry.x : 0), present ? 4 : 0);
      const int part = first_part + entry.y * pieces;
      store_shared_int(places_at(shared, place.slot) + thread * 4,
                       present ? place_word(part, entry.x, run.first_key, run.end_key - run.first_key) : NO_PLACE);
      barrier_arrive_copies(full);
      barrier_arrive(full);
      place.advance();
    }
  }
}
#endif

// Work of the producer warpgroup, all 128 threads of which call it: takes items until none is left, and loads the keys,
// values and rows of each of their runs. Thread t loads row t of a tile; SPLIT_KEYS: two warps load the queries of 64
// rows, two their output gradients.
DEVICE void produce(const ChosenInputs& inputs, u32 shared) {
  const int thread = (int)threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), group = inputs.group;
  const int row_heads = INDEXED ? 1 : group;  // rows of a query in a tile
  RingPlace<KEY_SLOTS> keys_place;
  RingPlace<ROW_STAGES> place;
  int taken = 0;  // index of the next item, in thread 0
  if (thread == 0) taken = atomicAdd(inputs.num_items + inputs.num_lists, 1);
  for (u32 done = 0;; ++done) {
    const u32 announced = shared + ITEMS_AT + done % 2 * 8;  // where warp 0 tells the others {list, item}
    if (warp == 0) {
      const int2 list_and_item = find_item(inputs, __shfl_sync(~0u, taken, 0));
      if (thread == 0) store_shared_int2(announced, list_and_item.x, list_and_item.y);
    }
    // after it all four warps may read the item, and all have read the item before the last, whose place is reused next
    barrier_sync(PRODUCERS_MEET, 128);
    const int2 where = load_shared_int2(announced);
    if (where.x < 0) break;
    // take the next item early: the atomic's latency overlaps the work on this one
    if (thread == 0) taken = atomicAdd(inputs.num_items + inputs.num_lists, 1);
    if (ORDERED && where.y < 0) continue;
    // A run is named by its first entry in the item and the piece of its block, 2 * entry + piece; -1 follows the last.
    for (int run_at = 0, next_at; run_at >= 0; run_at = next_at) {
      // Recomputed for each run: kept, these would not fit into registers.
      const int list = load_shared_int(announced), batch = list / inputs.num_kv_heads,
                kv_head = list % inputs.num_kv_heads;
      const int4 item = inputs.items[list * inputs.max_items + load_shared_int(announced + 4)];
      int next;
      ChosenRun run = chosen_run(inputs.entries + list * inputs.choices + item.x, run_at / 2, item.y, item.z,
                                 inputs.select_size, row_heads, inputs.doc_start + (u64)batch * inputs.seq_len,
                                 inputs.doc_end + (u64)batch * inputs.seq_len, next);
      next_at = next < item.y ? 2 * next : -1;
      if (GRADIENT) {
        run.first_key += run_at % 2 * KEYS;
        if (run.first_key + KEYS < run.end_key) next_at = run_at + 1;  // another piece has keys
        run.end_key = min(run.end_key, run.first_key + KEYS);
      }
      const int last_row = run.num_rows - 1;
      int2 entry = run.entries[min(thread % ROWS, last_row) / row_heads];  // {query, choice} of this thread's next row

      // Two warps load 64 keys, two their values; or all load 128 keys, then their values.
      const int num_keys = run.end_key - run.first_key, key = thread % KEYS;
      barrier_wait(barrier_at(shared, EMPTY_KEYS + keys_place.slot), keys_place.phase ^ 1);
#pragma unroll
      for (int turn = 0; turn < KEYS / 64; ++turn) {
        const bool is_value = KEYS == 64 ? warp >= 2 : turn == 1;
        const bf16* from =
            is_value ? inputs.v + batch * inputs.v_batch_stride : inputs.k + batch * inputs.k_batch_stride;
        if (!KEYS_ONLY || !is_value)
          copy_key_rows<DIM_BLOCKS, true, KEYS>(shared + (keys_place.slot * 2 + is_value) * KEY_TILE_BYTES,
                                                from + (KEYS_ONLY || INDEXED && is_value ? 0 : (u64)kv_head * HEAD_DIM),
                                                (u32)(is_value ? inputs.v_token_stride : inputs.k_token_stride) * 2,
                                                key < num_keys ? run.first_key + key : -1, warp % (KEYS / 32));
      }
      if (thread == 0) {
        int keys_and_turn = num_keys;
#if ORDERED
        // The item's index in the order of adds, and whether this run is the first that adds to its keys: it is, unless
        // the preceding item ends with a query of the same document.
        const bool follows = run_at / 2 == 0 && item.w > 0 &&
                             run.entries[-1].x >= inputs.doc_start[(u64)batch * inputs.seq_len + run.entries[0].x];
        keys_and_turn |= item.w << 9 | (follows ? 0 : 1 << 8);
#endif
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared + RUNS_AT + keys_place.slot * 16),
                     "r"(run.first_key), "r"(keys_and_turn), "r"(run.num_rows), "r"(list)
                     : "memory");
      }
      barrier_arrive_copies(barrier_at(shared, FULL_KEYS + keys_place.slot));
      barrier_arrive(barrier_at(shared, FULL_KEYS + keys_place.slot));
      keys_place.advance();

      const int pieces = GRADIENT ? ceil_div(inputs.select_size, KEYS) : 1,  // rows of partial results of a choice
          first_row = (int)(list * inputs.choices) * pieces + run_at % 2;
#if INDEXED
      produce_indexed_rows(inputs, shared, place, run, batch, kv_head, first_row, pieces);
#else
      const bf16* q = inputs.q + batch * inputs.q_batch_stride + (u64)kv_head * group * HEAD_DIM;
      const u32 q_stride = (u32)(inputs.q_token_stride / UNIT);
      const int first_part = first_row * group;
#if GRADIENT
      const int num_heads = inputs.num_kv_heads * group;
      const bf16* d_out = inputs.d_out + ((u64)batch * inputs.seq_len * num_heads + (u64)kv_head * group) * HEAD_DIM;
      const float2* stats = inputs.stats + ((u64)batch * num_heads + (u64)kv_head * group) * inputs.padded_len;
#endif
      for (int row = thread % ROWS; row - thread % ROWS < run.num_rows; row += ROWS) {
        const int head = row % group;
        const bool present = row <= last_row;
        const int2 here = entry;
        entry = run.entries[min(row + ROWS, last_row) / group];
        const u32 full = barrier_at(shared, FULL_ROWS + place.slot), stage = stage_at(shared, place.slot);
        barrier_wait(barrier_at(shared, EMPTY_ROWS + place.slot), place.phase ^ 1);
        const int at_q = present ? (int)((u32)here.x * q_stride + head * (HEAD_DIM / UNIT)) : -1;
#if SPLIT_KEYS
        const bool is_gradient = warp >= 2;
        const int at = is_gradient && present ? (here.x * num_heads + head) * (HEAD_DIM / UNIT) : at_q;
        copy_key_rows<DIM_BLOCKS, true, ROWS>(stage + (is_gradient ? ROW_TILE_BYTES : 0), is_gradient ? d_out : q,
                                              UNIT * 2, at, warp % 2);
        const float2* stat = stats + (u64)head * inputs.padded_len + (present ? here.x : 0);
        // Threads of the first two warps copy log-sum-exps, the others D.
        copy_async_4(stats_at(shared, place.slot) + thread * 4, is_gradient ? &stat->y : &stat->x, present ? 4 : 0);
#else
        copy_key_rows<DIM_BLOCKS, true>(stage, q, UNIT * 2, at_q, warp);
#if GRADIENT
        copy_key_rows<DIM_BLOCKS, true>(stage + ROW_TILE_BYTES, d_out, UNIT * 2,
                                        present ? (here.x * num_heads + head) * (HEAD_DIM / UNIT) : -1, warp);
        const float2* stat = stats + (u64)head * inputs.padded_len + (present ? here.x : 0);
        copy_async_4(stats_at(shared, place.slot) + thread * 4, &stat->x, present ? 4 : 0);
        copy_async_4(stats_at(shared, place.slot) + ROWS * 4 + thread * 4, &stat->y, present ? 4 : 0);
#endif
#endif
        const int part = first_part + here.y * pieces * group + head;
        if (thread < ROWS)
          store_shared_int(places_at(shared, place.slot) + thread * 4,
                           present ? place_word(part, here.x, run.first_key, num_keys) : NO_PLACE);
        barrier_arrive_copies(full);
        barrier_arrive(full);
        place.advance();
      }
#endif
    }
  }
  // A run without rows is the end mark: the consumers stop there.
  barrier_wait(barrier_at(shared, EMPTY_KEYS + keys_place.slot), keys_place.phase ^ 1);
  if (thread == 0)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared + RUNS_AT + keys_place.slot * 16), "r"(0)
                 : "memory");
  barrier_arrive_copies(barrier_at(shared, FULL_KEYS + keys_place.slot));
  barrier_arrive(barrier_at(shared, FULL_KEYS + keys_place.slot));
  copy_async_wait<0>();
}

// ---- Consumer
// ---------------------------------------------------------------------------------------------------------------------

// Run number `runs` of the thread block for a consumer, all threads of which read it. Its description, four words,
// stays in shared memory, where it costs no registers.
struct RunInWork {
  u32 shared, slot;
  // Waits until the run's keys and its description are there.
  DEVICE RunInWork(u32 shared, u32 runs) : shared(shared), slot(runs % KEY_SLOTS) {
    barrier_wait(barrier_at(shared, FULL_KEYS + slot), runs / KEY_SLOTS % 2);
  }
  // The shared address of the tile of keys.
  DEVICE u32 keys() const { return shared + slot * 2 * KEY_TILE_BYTES; }
  // The shared address of the tile of values; INDEXED: of the indexer's keys.
  DEVICE u32 values() const { return keys() + KEY_TILE_BYTES; }
  // The shared address of K of dQ = dS K.
  DEVICE u32 dq_keys() const { return INDEXED ? values() : keys(); }
  // The position of the run's first key in its row of the batch.
  DEVICE int first_key() const { return load_shared_int(shared + RUNS_AT + slot * 16); }
#if ORDERED
  // Keys of the run, 1 .. KEYS.
  DEVICE int num_keys() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 4) & 0xff; }
  // The item's index among those that add to the block's gradients, in the order of adds.
  DEVICE int piece() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 4) >> 9; }
  // Whether no run before it adds to its keys' gradients.
  DEVICE bool is_first() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 4) >> 8 & 1; }
#else
  // Keys of the run, 1 .. KEYS.
  DEVICE int num_keys() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 4); }
#endif
  // Rows of the run, in tiles of ROWS; 0 after the last run.
  DEVICE int num_rows() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 8); }
  // The run's list, batch * num_kv_heads + KV head.
  DEVICE int list() const { return load_shared_int(shared + RUNS_AT + slot * 16 + 12); }
  // The empty barrier of the run's keys, at which each consumer arrives when it has read them.
  DEVICE u32 done() const { return barrier_at(shared, EMPTY_KEYS + slot); }
};

// d = a b^T over HEAD_DIM columns: 64 rows of a tile of A_ROWS at shared address `a_tile` against 2 N of a tile of
// B_ROWS at `b_tile`. Starts the GEMM and closes its group; all 128 threads of a consumer call it.
template <int A_ROWS, int B_ROWS, int N>
DEVICE void multiply_rows(float (&d)[N], u32 a_tile, u32 b_tile) {
  wgmma_rows<HEAD_DIM, A_ROWS, B_ROWS>(d, wgmma_along(a_tile), wgmma_along(b_tile), false);
  wgmma_commit();
}

// sums = weights rows, or with `accumulate` sums += weights rows: 64 x 16 STEPS weights in registers, 16 STEPS rows of
// a tile of TILE_ROWS at shared address `rows`. Starts the GEMM and closes its group; all 128 threads of a consumer
// call it.
template <int TILE_ROWS, int STEPS>
DEVICE void weigh_rows(float (&sums)[HEAD_DIM / 2], const u32 (&weights)[STEPS][4], u32 rows, bool accumulate) {
  wgmma_weigh<TILE_ROWS>(sums, weights, rows, accumulate);
  wgmma_commit();
}

// Stores the warp's 16 rows of 64 columns in a swizzled tile of 64 rows at shared address `tile`; `packed` are the
// lane's columns in the order of pack_operand. All 32 lanes call it.
DEVICE void store_warp_rows(u32 tile, const u32 (&packed)[4][4]) {
  const int thread = (int)opaque(threadIdx.x) % 128, lane = thread % 32;
  // Address of this lane's row of the first 8x8 matrices; 16 columns further is an xor with two chunks (32 bytes).
  const u32 row = tile + (thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8) * 128 + (((lane / 16) ^ (lane % 8)) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) store_matrix_x4(row ^ (i << 5), packed[i]);
}

// Stores 64 columns of the warp's 16 rows as partial results, from `columns` on, each in the row that its place, a word
// at `places`, names. `tile` is 64 rows of 128 bytes of shared memory that no other warp uses any more; through it
// whole cache lines are stored, with an evict-first hint so that rows of q stay in the cache. All 32 lanes call it.
DEVICE void store_parts(bf16* columns, u32 tile, u32 places, const u32 (&packed)[4][4]) {
  store_warp_rows(tile, packed);
  __syncwarp();  // a lane reads what others stored
  const int thread = (int)opaque(threadIdx.x) % 128, chunk = thread % 8, first = thread / 32 * 16 + thread % 32 / 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + 4 * i;
    const int place = load_shared_int(places + row * 4);
    const uint4 x = load_shared_128(tile + row * 128 + ((chunk ^ (row % 8)) << 4));
    if (place != NO_PLACE)
      asm volatile(
          "st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(columns + (u64)place_part(place) * HEAD_DIM + chunk * 8),
          "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
          : "memory");
  }
}
