// dma_select: exact `expire` for every key. Sequences of more than 2 * PREFIX_BLOCK tokens need the survivors of
// dma_select_prefix.
// Math       per document and KV head: every arrival enters a heap on (z_j, j); while it holds more than w =
//            keep_window_size keys the smallest is popped, t = position of the arrival, which may be its own:
//            expire[popped] = min(t + r, doc_end) with r = local_window_size. Never popped: doc_end. (Query i so sees
//            the last r keys and the best w of those before them.)
// Method     one block of threads per 1024 arrivals. T(s), T(e) = w-th largest key before and after them, by radix
//            select over survivors(S) and the keys from S on, S the last multiple of PREFIX_BLOCK (up to
//            2 * PREFIX_BLOCK tokens: 0, so all keys). They are read once, into shared memory. Only survivors in [T(s),
//            T(e)) and arrivals below
//            T(e) can leave here, as many as keys are popped, at most 1024: the pool, sorted. An arrival below T(s)
//            pops itself and changes nothing, so time t counts the others. Pops take the pool in ascending order of
//            what is present, hence the pool's key of rank r, born at time b_r, leaves at
//                the first t >= b_r with t - free >= c_r(t),   c_r(t) = number of pool keys of rank < r born by t,
//            free = places still empty at s. t - c_r(t) never falls, so each key searches for its own time: first over
//            blocks of 32 times, where c_r is a prefix count in a bit matrix (times x ranks), then through the block.
//            The block in which a document ends writes the keys that reach T(e), and short documents are written where
//            they lie: every element is written once, by one block.
// Layout     z f32 [batch, num_kv_heads, seq_len]; doc_start, doc_end i32 [batch, seq_len]; survivors
//            as dma_select_prefix writes them;
//            expire i32 [batch, num_kv_heads, seq_len]
// Defines    PREFIX_BLOCK (8192, as in dma_select_prefix)
// Tiling     grid (ceil(seq_len / 1024), num_kv_heads, batch); 1024 threads, one per arrival; 37 KiB static shared
//            memory; dynamic shared bytes = 8 * PREFIX_BLOCK - 4096 (both together fit a device's 99 KiB)
// Numerics   integer comparisons only: exact; writes every element of expire, each once
// Edges      seq_len below 2^22; any number of documents a block (documents of at most w keys so far cost nothing);
//            w = 0 with r > 0: every key is popped by its own arrival
#include "common/block_rank.cuh"
#include "common/block_stream.cuh"
#include "common/radix_select.cuh"

// Blocks to fit on a multiprocessor: as many as shared memory has room for.
#define MIN_BLOCKS (__CUDA_ARCH__ >= 900 && THREADS_PER_MULTIPROCESSOR >= 2048 ? 2 : 1)

typedef unsigned short u16;

constexpr int BLOCK = 1024;       // arriving keys of a block: one per thread
constexpr int TIME_BLOCK = 32;    // times between two rows of the bit matrix
constexpr int NUM_WORDS = BLOCK / 32;
constexpr int NUM_ROWS = BLOCK / TIME_BLOCK + 1;
// Dynamic shared memory: the keys before a block, and where survivors replace older keys room for the survivors.
constexpr i32 STAGED_KEYS = 2 * PREFIX_BLOCK - BLOCK, STAGED_SURVIVORS = (STAGED_KEYS - PREFIX_BLOCK) / 2;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u16 NOT_IN_POOL = 0xffff;
static_assert(BLOCK == SELECT_THREADS, "one thread per arrival, one block of threads per selection");
static_assert(PREFIX_BLOCK % BLOCK == 0, "a block must not straddle a boundary of dma_select_prefix");

struct DmaSelectParams {
  u64 seq_len, num_kv_heads;
  u64 num_ranked;  // keys that are kept for their rank: keep_window_size - local_window_size
  u64 local_window_size;
};

// Where the keys before the arriving ones lie: survivors of the last boundary, then all keys from `first` on. Shared
// memory holds the order keys of the first of them, up to `staged_end`; the others, which only a window of more than
// PREFIX_BLOCK keys has, are reloaded in each pass.
struct OldKeys {
  const u64* survivors;
  const u32 *staged, *z;
  i32 num_survivors, first, staged_end, end;
};

struct Shared {
  OldKeys old_keys;                    // here, since they would not fit into registers
  RadixSelect<2> select;               // 0: the keys before s, 1: the keys before s and the arriving ones
  u64 pool[BLOCK];                     // keys that leave in this block
  u32 present[NUM_ROWS][NUM_WORDS];    // bit r of row k: the pool's key of rank r is born before time 32 k
  u16 present_before[NUM_ROWS][NUM_WORDS];  // set bits of the earlier words
  alignas(16) u16 rank_at[BLOCK];      // time -> rank in the pool of the key born then
  u16 time_of[BLOCK];                  // arrival -> time
  u16 arrival_at[BLOCK];               // time -> arrival
  u16 segment[BLOCK];                  // first arrivals of the documents in which keys leave here
  u32 warp_sums[32];
  u32 num_segments, pool_size;
};

// Key sources are structs with a templated call: NVRTC takes a generic lambda of a kernel for host code and refuses it.

// The keys before the arriving ones.
struct KeysBefore {
  const Shared& shared;
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    const OldKeys& keys = shared.old_keys;
    for_each_pair<BLOCK, 1>(keys.survivors, keys.num_survivors,
                            [&](u32 position, u32 order) { visit(order, position); });
    const i32 first = keys.first;
    for_each_word<BLOCK, 1>(keys.staged, 0, keys.staged_end - first,
                            [&](u32 order, i32 at) { visit(order, (u32)(first + at)); });
    for_each_word<BLOCK, 1>(keys.z, keys.staged_end, keys.end,
                            [&](u32 bits, i32 position) { visit(order_of_bits(bits), (u32)position); });
  }
};

// Puts survivors (keys that the last block kept) that leave in this block into the pool. If the document ends in this
// block, its end becomes the expire of the survivors that outlive it.
struct CollectPool {
  Shared& shared;
  u64 before, after;
  i32* expire;
  i32 document_end;  // 0: the document does not end in this block
  DEVICE void operator()(u32 order, u32 position) const {
    if (order < (u32)(before >> 32)) return;  // rejects nearly all keys after loading one word
    const u64 key = order_key(order, position);
    if (key < before) return;
    if (key < after) shared.pool[atomicAdd(&shared.pool_size, 1u) & (BLOCK - 1)] = key;
    else if (document_end > 0) expire[position] = document_end;
  }
};

// The key that arrives at this thread, if any.
struct OwnArrival {
  bool arrives;
  u32 order;
  i32 position;
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    if (arrives) visit(order, (u32)position);
  }
};

// Number of keys of a rank below `rank` that were born before time 32 * row.
DEVICE int born_below(const Shared& shared, int row, int rank) {
  const u32 word = shared.present[row][rank >> 5];
  return shared.present_before[row][rank >> 5] + __popc(word & ((1u << (rank & 31)) - 1));
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
dma_select(const float* __restrict__ z, const i32* __restrict__ doc_start, const i32* __restrict__ doc_end,
      const u64* __restrict__ survivors, i32* __restrict__ expire, const __grid_constant__ DmaSelectParams params) {
  __shared__ Shared shared;
  extern __shared__ __align__(16) unsigned char staged_memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.num_ranked, local = (i32)params.local_window_size;
  const u32 head = blockIdx.z * (u32)params.num_kv_heads + blockIdx.y;
  const i64 tokens = (i64)blockIdx.z * seq_len;
  const u32* row_z = (const u32*)(z + (i64)head * seq_len);
  i32* row_expire = expire + (i64)head * seq_len;
  const i32 block_first = blockIdx.x * BLOCK, block_end = min(block_first + BLOCK, seq_len);
  const i32 position = block_first + thread;

  // Find the documents, or parts of them, in which keys leave in this block.
  if (thread == 0) shared.num_segments = 0;
  __syncthreads();  // the counter is zero
  u32 my_order = 0;
  if (position < block_end) {
    const i32 start = doc_start[tokens + position], document_end = doc_end[tokens + position],
              end = min(document_end, block_end);
    if (document_end - start <= window) row_expire[position] = document_end;  // no key leaves
    if (window == 0) row_expire[position] = min(position + local, document_end);
    if ((thread == 0 || start == position) && end - start > window && window > 0)
      shared.segment[atomicAdd(&shared.num_segments, 1u)] = (u16)thread;
    my_order = order_of_bits(row_z[position]);
  }
  __syncthreads();  // the list of segments is complete
  const int num_segments = shared.num_segments;

  // Survivors of the last boundary, if this block has a document that began so far before it.
  const bool is_long = seq_len > 2 * PREFIX_BLOCK;
  const i32 prefix_block = is_long ? block_first / PREFIX_BLOCK : 0, boundary = prefix_block * PREFIX_BLOCK;
  u32* const staged_keys = (u32*)staged_memory;
  u64* const staged_survivors = (u64*)(staged_memory + PREFIX_BLOCK * 4);

#pragma unroll 1
  for (int index = 0; index < num_segments; index++) {
    const i32 s = block_first + shared.segment[index];
    const i32 document = doc_start[tokens + s], document_end = doc_end[tokens + s], e = min(document_end, block_end);
    const bool from_survivors = boundary - document > window;
    const u64* old_keys = survivors + ((i64)head * ((seq_len - 1) / PREFIX_BLOCK) + prefix_block - 1) * window;
    const i32 num_old = from_survivors ? window : 0, first = from_survivors ? boundary : document;
    const bool full = s - document >= window;            // every arrival pops one key
    const int free = full ? 0 : window - (s - document);  // else the first `free` pop none

    // Find the thresholds: T(s) over the keys before s, T(e) also over the arrivals, of which a thread holds one.
    if (thread == 0) shared.pool_size = 0;
    shared.rank_at[thread] = NOT_IN_POOL;
    const bool arrives = s <= position && position < e;
    const i32 staged_end = min(s, first + STAGED_KEYS);  // with survivors at most PREFIX_BLOCK keys
    if (num_old > 0 && num_old <= STAGED_SURVIVORS) {
      for (i32 i = thread; i < num_old; i += BLOCK) staged_survivors[i] = old_keys[i];
      old_keys = staged_survivors;
    }
    for_each_word<BLOCK, 4>(row_z, first, staged_end,
                            [&](u32 bits, i32 at) { staged_keys[at - first] = order_of_bits(bits); });
    if (thread == 0) shared.old_keys = {old_keys, staged_keys, row_z, num_old, first, staged_end, s};
    radix_begin<2>(shared.select, full ? window : 0, window);  // its barrier also completes what was staged
    const OwnArrival own = {arrives, my_order, position};
    const KeysBefore for_each_before = {shared};
    radix_select<2>(shared.select, 0, for_each_before, own);
    const u64 before = shared.select.threshold[0], after = shared.select.threshold[1];

    // Times: number the arrivals that do not pop themselves.
    const bool effective = arrives && order_key(my_order, (u32)position) >= before;
    u32 num_times;
    const u32 my_time = block_exclusive_sum<BLOCK>(effective, shared.warp_sums, num_times);
    if (arrives && !effective) row_expire[position] = min(position + local, document_end);
    if (effective) {
      shared.time_of[thread] = (u16)my_time;
      shared.arrival_at[my_time] = (u16)thread;
    }

    // Pool: the keys below T(e) that are alive at s or arrive.
    const CollectPool collect = {shared, before, after, row_expire, e == document_end ? e : 0};
    if (effective) collect(my_order, (u32)position);
    for_each_before(collect);
    __syncthreads();  // pool, times and arrivals are complete
    const int pool_size = min((int)shared.pool_size, BLOCK);
    const u64 unsorted = thread < pool_size ? shared.pool[thread] : 0;
    // the pool and its size are read; the ranking writes there and into the histograms, which are free by now
    __syncthreads();
    if (pool_size == 0) continue;  // uniform over the block: every arrival popped itself
    const RankMemory memory = {shared.select.histogram[0], shared.select.histogram[1], shared.pool, shared.warp_sums,
                               &shared.present[0][0]};
    const u64 key = block_rank(unsorted, pool_size, memory);

    // The key with rank `thread`: the time at which it enters the pool.
    const int rank = thread;
    const bool in_pool = rank < pool_size;
    const i32 key_position = (i32)(u32)key;
    int born = BLOCK;
    if (in_pool) {
      born = key_position >= s ? shared.time_of[key_position - block_first] : -1;
      if (born >= 0) shared.rank_at[born] = (u16)rank;
    }
    const int num_rows = ((int)num_times + TIME_BLOCK - 1) / TIME_BLOCK;
    if (warp * 32 < pool_size) {
      for (int row = 0; row <= num_rows; row++) {
        const u32 word = __ballot_sync(ALL_LANES, born < row * TIME_BLOCK);
        if (lane == 0) shared.present[row][warp] = word;
      }
    } else {
      for (int row = lane; row <= num_rows; row += 32) shared.present[row][warp] = 0;
    }
    __syncthreads();  // bit matrix and rank_at are complete
    for (int row = warp; row <= num_rows; row += NUM_WORDS) {
      const u32 count = __popc(shared.present[row][lane]);
      shared.present_before[row][lane] = (u16)(warp_inclusive_sum(count) - count);
    }
    __syncthreads();  // prefix counts are complete

    // Search: the first block of times, then the first time, at which this key is the smallest present.
    if (in_pool) {
      int low = 1, high = num_rows;
      while (low < high) {
        const int row = (low + high) / 2, time = row * TIME_BLOCK - 1;
        if (time >= born && time - free >= born_below(shared, row, rank)) high = row;
        else low = row + 1;
      }
      int below = born_below(shared, low - 1, rank), time = (low - 1) * TIME_BLOCK;
      const uint4* ranks = (const uint4*)(shared.rank_at + time);  // eight a load
      bool found = false;
      for (int eight = 0; eight < TIME_BLOCK / 8 && !found; eight++) {
        const uint4 packed = ranks[eight];
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (found) continue;
          below += (int)(i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16) < rank;
          found = time >= born && time - free >= below;
          time += !found;
        }
      }
      if (found) row_expire[key_position] = min(block_first + shared.arrival_at[time] + local, document_end);
    }
    __syncthreads();  // the next segment reuses all of it
  }
}
