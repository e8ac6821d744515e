// dma_lists: the keys each super-block of 1024 queries may see, as one ordered list per KV head, from `expire`.
// Math       block s holds queries [1024 s, q1). Entries {j, expire[j]}: first the keys that enter, j >= 1024 s with
//            expire[j] > j, latest first; then the old keys, j < 1024 s < expire[j], by falling (expire[j], j). The
//            entries a query tile [i0, i1] needs lie in [a, e): a = entering keys with j > i1; e = num_entering + old
//            keys with expire > i0.
// Method     no sort: at most one key leaves at a position, so an old key's place is the number of old keys that leave
//            later. Leaving times are bits (bit expire - q0 - 1; never popped: bit (doc_end - q0 - 1) + (j -
//            doc_start)), places are counts of higher bits, in windows of 65536 bits from the top. Old keys are found
//            among the survivors at the last PREFIX_BLOCK boundary and the keys since, in sequences of up to
//            2 * PREFIX_BLOCK tokens among all keys, and kept in shared memory if they are at most MAX_OLD (else found
//            again each time).
// Layout     expire i32 [batch, num_kv_heads, seq_len]; doc_start, doc_end i32 [batch, seq_len]; survivors u64
//            as dma_select_prefix (or dma_lists_prefix) writes them; list int2
//            [batch, num_kv_heads, num_super_blocks, capacity], capacity a multiple of 128 and at least min(w + 1024,
//            seq_len); list_len i32 [batch, num_kv_heads, num_super_blocks]; tile_window int2 {a, e}
//            [batch, num_kv_heads, ceil(seq_len / tile_queries)]. All contiguous.
// Defines    PREFIX_BLOCK (8192, as in dma_select_prefix)
// Tiling     grid (num_super_blocks, num_kv_heads, batch); 1024 threads; 37 KiB static shared memory, no dynamic
// Numerics   integers only; deterministic. Entries list_len .. round_up(list_len, 128) are written as {j of entry 0,
//            0}: safe to gather, never active. Entries past those are not written.
// Edges      tile_queries divides 1024. An `expire` that lets two keys of a document go at one place, or more keys live
//            than w, breaks the order; entries past `capacity` are dropped, nothing is written out of bounds.
#include "common/block_scan.cuh"
#include "common/block_stream.cuh"

#define MIN_BLOCKS (THREADS_PER_MULTIPROCESSOR >= 2048 ? 2 : 1)  // blocks to fit on a multiprocessor

constexpr int SUPER_BLOCK = 1024;    // queries that share a list: one thread per query
constexpr int WINDOW_WORDS = 2048;   // leaving times handled at once, in words of 32 bits
constexpr int MAX_OLD = 2560;        // old keys kept in shared memory
constexpr int WORDS_EACH = WINDOW_WORDS / SUPER_BLOCK;
constexpr int LIST_ALIGNMENT = 128;
static_assert(PREFIX_BLOCK % SUPER_BLOCK == 0, "a super-block must not straddle a boundary of dma_select_prefix");

struct DmaListsParams {
  u64 seq_len, num_kv_heads, keep_window_size, capacity, tile_queries;
};

struct Shared {
  u32 leaves[WINDOW_WORDS];       // bit t: an old key leaves at time t of the window
  u32 later[WINDOW_WORDS];        // old keys of the window that leave at the times of a later word
  u32 entering[SUPER_BLOCK / 32]; // bit per key of the block: some query sees it
  u32 entering_before[SUPER_BLOCK / 32];  // set bits of the earlier words
  int2 old[MAX_OLD];              // {key, expire}, any order
  u32 warp_sums[32];
  u32 num_old;
};

// Key sources are structs with a templated call: NVRTC takes a generic lambda of a kernel for host code and refuses it.

// The old keys: survivors at the last boundary, and keys from `first` on, that expire after q0.
struct FindOldKeys {
  const u64* survivors;
  i32 num_survivors;
  const i32* expire;
  i32 first, q0;
  // Calls visit(key, expire) once for each old key, in any order and from any thread; all threads of the block call it.
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    for_each_pair<SUPER_BLOCK, 2>(survivors, num_survivors, [&](u32 key, u32) {
      if (key >= (u32)q0) return;  // places that dma_lists_prefix did not fill hold ~0
      const i32 leaves = expire[key];
      if (leaves > q0) visit((i32)key, leaves);
    });
    for_each_word<SUPER_BLOCK, 2>((const u32*)expire, first, q0, [&](u32 leaves, i32 key) {
      if ((i32)leaves > q0) visit(key, (i32)leaves);
    });
  }
};

// Calls visit(key, expire, leaving time) for each old key: from shared memory where they all fit.
struct OldKeys {
  const Shared& shared;
  FindOldKeys find;
  i32 num_old, document, document_end;
  // Calls it once for each old key, in any order and from any thread; all threads of the block take part.
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    const i32 q0 = find.q0;
    auto with_time = [&](i32 key, i32 leaves) {
      visit(key, leaves, leaves < document_end ? leaves - q0 - 1 : document_end - q0 - 1 + key - document);
    };
    if (num_old <= MAX_OLD) {
      for (i32 i = threadIdx.x; i < num_old; i += SUPER_BLOCK) with_time(shared.old[i].x, shared.old[i].y);
    } else {
      find(with_time);
    }
  }
};

// A block makes the list of one super-block and KV head. Thread t has the query and the key at position t of the
// super-block; old keys are spread over the threads.
extern "C" __global__ void __launch_bounds__(SUPER_BLOCK, MIN_BLOCKS)
    dma_lists(const i32* __restrict__ expire, const i32* __restrict__ doc_start, const i32* __restrict__ doc_end,
              const u64* __restrict__ survivors, int2* __restrict__ list, i32* __restrict__ list_len,
              int2* __restrict__ tile_window, const __grid_constant__ DmaListsParams params) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.keep_window_size;
  const u32 capacity = (u32)params.capacity;
  const i64 head = (i64)blockIdx.z * params.num_kv_heads + blockIdx.y;
  const i64 tokens = (i64)blockIdx.z * seq_len;
  const i32* row_expire = expire + head * seq_len;
  const i32 q0 = blockIdx.x * SUPER_BLOCK, q1 = min(q0 + SUPER_BLOCK, seq_len);
  const i64 list_idx = head * gridDim.x + blockIdx.x;
  int2* out = list + list_idx * capacity;

  // Append the entering keys, the latest first.
  if (thread == 0) shared.num_old = 0;
  const i32 document = doc_start[tokens + q0], document_end = doc_end[tokens + q0];  // of the old keys
  const i32 position = q0 + thread;
  const i32 position_expire = position < q1 ? row_expire[position] : 0;
  const bool enters = position < q1 && position_expire > position;
  const u32 enter_word = __ballot_sync(0xffffffffu, enters);
  if (lane == 0) shared.entering[warp] = enter_word;
  u32 num_entering;
  const u32 enters_before = block_exclusive_sum<SUPER_BLOCK>(enters, shared.warp_sums, num_entering);
  if (lane == 0) shared.entering_before[warp] = enters_before;
  if (enters && num_entering - 1 - enters_before < capacity)
    out[num_entering - 1 - enters_before] = make_int2(position, position_expire);

  // Old keys: all of the document of query q0. Its length bounds the leaving times.
  const i32 prefix_block = seq_len > 2 * PREFIX_BLOCK ? q0 / PREFIX_BLOCK : 0, boundary = prefix_block * PREFIX_BLOCK;
  const i64 num_boundaries = (seq_len + PREFIX_BLOCK - 1) / PREFIX_BLOCK - 1;
  const bool from_survivors = boundary - document > window;
  const u64* old_keys = survivors + (head * num_boundaries + prefix_block - 1) * window;
  const FindOldKeys find_old_keys = {old_keys, from_survivors ? window : 0, row_expire,
                                     from_survivors ? boundary : document, q0};
  find_old_keys([&](i32 key, i32 leaves) {
    const u32 slot = atomicAdd(&shared.num_old, 1u);
    if (slot < MAX_OLD) shared.old[slot] = make_int2(key, leaves);
  });
  __syncthreads();  // the old keys are known
  const i32 num_old = (i32)shared.num_old;
  const OldKeys for_each_old_key = {shared, find_old_keys, num_old, document, document_end};

  u32 num_later = 0, num_above = 0;  // old keys in the windows that are done, and in those after the last one
  const i32 num_times = document < q0 ? document_end - document - 1 : 0;
  const i32 num_windows = (num_times + WINDOW_WORDS * 32 - 1) / (WINDOW_WORDS * 32);
#pragma unroll 1
  for (i32 window_idx = num_windows - 1; window_idx >= 0; window_idx--) {
    const i32 window_first = window_idx * (WINDOW_WORDS * 32);
    num_above = num_later;
    __syncthreads();  // the last window is no longer read
#pragma unroll
    for (int i = 0; i < WORDS_EACH; i++) shared.leaves[thread + i * SUPER_BLOCK] = 0;
    __syncthreads();  // no bit is set
    for_each_old_key([&](i32, i32, i32 time) {
      const i32 bit = time - window_first;
      if (0 <= bit && bit < WINDOW_WORDS * 32) atomicOr(&shared.leaves[bit >> 5], 1u << (bit & 31));
    });
    __syncthreads();  // all leaving times are marked
    // Count from the last words, which thread 0 holds, to the first.
    u32 counts[WORDS_EACH], sum = 0, in_window;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; i++) {
      counts[i] = __popc(shared.leaves[WINDOW_WORDS - 1 - (thread * WORDS_EACH + i)]);
      sum += counts[i];
    }
    u32 above = block_exclusive_sum<SUPER_BLOCK>(sum, shared.warp_sums, in_window);
#pragma unroll
    for (int i = 0; i < WORDS_EACH; i++) {
      shared.later[WINDOW_WORDS - 1 - (thread * WORDS_EACH + i)] = above;
      above += counts[i];
    }
    __syncthreads();  // counts are complete
    for_each_old_key([&](i32 key, i32 leaves, i32 time) {
      const i32 bit = time - window_first;
      if (bit < 0 || bit >= WINDOW_WORDS * 32) return;
      const u32 right = shared.leaves[bit >> 5] & ~(0xffffffffu >> (31 - (bit & 31)));
      const u32 place = num_entering + num_later + shared.later[bit >> 5] + __popc(right);
      if (place < capacity) out[place] = make_int2(key, leaves);
    });
    num_later += in_window;
  }
  const u32 length = min(num_entering + num_later, capacity);
  __syncthreads();  // entry 0 is written

  // Pad with a key that is safe to gather and never active; an empty list too, since tiles of queries read its first
  // entry.
  const u32 padded = min((max(length, 1u) + LIST_ALIGNMENT - 1) / LIST_ALIGNMENT * LIST_ALIGNMENT, capacity);
  if (length + thread < padded) out[length + thread] = make_int2(length == 0 ? q0 : out[0].x, 0);
  if (thread == 0) list_len[list_idx] = length;

  // Windows of the query tiles. The last window of times, still in shared memory, holds the times inside the block.
  const i32 tile_queries = (i32)params.tile_queries;
  const i32 num_tiles = (q1 - q0 + tile_queries - 1) / tile_queries;
  if (thread < num_tiles) {
    const i32 tile_first = thread * tile_queries, tile_end = min(tile_first + tile_queries, q1 - q0);
    u32 later_entering = 0;
    if (tile_end < SUPER_BLOCK) {
      const u32 earlier = shared.entering[tile_end >> 5] & ~(0xffffffffu << (tile_end & 31));
      later_entering = num_entering - shared.entering_before[tile_end >> 5] - __popc(earlier);
    }
    u32 alive = 0;
    if (num_times > 0 && q0 + tile_first < document_end)
      alive = num_above + shared.later[tile_first >> 5] +
              __popc(shared.leaves[tile_first >> 5] & 0xffffffffu << (tile_first & 31));
    const i64 num_all_tiles = (seq_len + tile_queries - 1) / tile_queries;
    tile_window[head * num_all_tiles + q0 / tile_queries + thread] = make_int2(later_entering, num_entering + alive);
  }
}
