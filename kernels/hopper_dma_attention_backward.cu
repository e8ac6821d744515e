// hopper_dma_attention_backward: dma_attention_backward for sm_90a; the same mathematics, layout, buffers, params words
// and results to rounding.
// attention_backward_prepare and hopper_dma_attention_row_sums run before it (or hopper_attention_backward_prepare
// alone), attention_backward_convert (dq) and dma_attention_backward_convert (dk, dv) after it.
// Math       as hopper_attention_backward over the pairs j <= i < expire_j: dq_sum_i += sum_j dS_ij k_j (without
//            softmax_scale), dk_sum_j += sum_i dS_ij q_i (without softmax_scale), dv_sum_j += sum_i P_ij do_i, ddelta_j
//            += sum_i dS_ij, i over the queries of the launch's super-blocks
// Layout     as dma_attention_backward
// Buffers    q_map, do_map by value, q, k, v, do, row_stats, (HAS_BIAS: delta, base,)
//            list, list_len, (WHOLE_KEYS: chunk_end,) dq_sum, (ORDERED: dq_semaphores, key_semaphores,)
//            (WHOLE_KEYS: dk, dv,) dk_sum, dv_sum, (HAS_BIAS: ddelta).
//            dq_semaphores i32 [batch, num_heads, dq_len / 64], zero before each launch; key_semaphores i32
//            [batch, num_kv_heads, seq_len], zero before the first
// Defines    as hopper_attention_backward, HAS_BIAS (1); SHARES (0; 1: head_shares blocks share a chunk of a list);
//            ORDERED 0|1: a fixed order of all sums; launches are in ascending order;
//            WHOLE_KEYS 0|1: as dma_attention_backward
// Tiling     128 entries a block: grid (super_blocks * ceil(list_capacity / 128), num_kv_heads * head_shares, batch),
//            super_blocks: number in this launch; blocks past a list's end leave at once; threads and dynamic shared
//            bytes as hopper_attention_backward, and at most 2 KiB of static shared memory
// Numerics   as dma_attention_backward; never-active keys are not touched. ORDERED: to a tile of dq a list's chunks add
//            one after the other, the last first, and to a key's rows its lists in ascending order, in each of them the
//            shares. A block waits for blocks with smaller numbers alone, which have started before it
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#ifndef HAS_BIAS
#define HAS_BIAS 1
#endif
#define SPLIT_STATS 1  // faster at every head_dim where keys are gathered
#include "common/attention_params.cuh"
#include "common/hopper_backward.cuh"
#include "common/query_share.cuh"

#ifndef WHOLE_KEYS
#define WHOLE_KEYS 0
#endif
static_assert(SUPER_BLOCK % BLOCK_Q == 0, "a step stays inside one super-block");
static_assert(!WHOLE_KEYS || (!ORDERED && !SHARES), "a whole key's rows are written by one block, in any order");

// Up to 128 entries of a list, in shared memory; {0, 0} past their end.
struct ListKeys {
  const int2* entries;
  int first_query, end_query;  // queries of the super-block; WHOLE_KEYS: of the chunk
#if ORDERED
  const int* later_expires;  // [warps]: the largest expire that the warp has seen among the entries after these
  const int2* list;          // the entries before these end at this address
  int num_before;
#endif

  // {position, expire} of entry `at` of the chunk, 0 .. 127; of padding both are 0.
  DEVICE int2 entry(int at) const { return entries[at]; }
  // The position whose rows of k and v are loaded for entry `at`. Padding takes the chunk's first entry, which every
  // block has.
  DEVICE int row(int at) const { return entries[entries[at].y > 0 ? at : 0].x; }
  // Sets the range of query tiles in which a key of the chunk is seen; tiles of BLOCK_Q positions count from position
  // 0. Every lane of a warp calls it, and each warp of the block does so by itself.
  DEVICE void find_tiles(BackwardBlock& block) const {
    const KeyRange range = key_range(*this, 0, BLOCK_KV);
    int lowest = range.lowest, last_expire = range.last_expire;
#if ORDERED
    // Chunks add to dq from the list's end on: old keys, soonest to expire first, then entering keys, earliest first.
    // From then on no chunk's last query tile precedes an earlier chunk's, so that the chunks that see a tile are
    // consecutive and each knows whether it is the first. A chunk of padding begins where the next chunk does.
    for (int at = num_before - 1; lowest == 0x7fffffff && at >= 0; --at)
      if (list[at].y > 0) lowest = list[at].x;
    int later_expire = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) later_expire = max(later_expire, later_expires[warp]);
    last_expire = max(last_expire, later_expire);
    block.other_end = ceil_div(min(end_query, later_expire), BLOCK_Q);
#endif
    block.first_tile = max(first_query, lowest) / BLOCK_Q;
    block.num_tiles = max(ceil_div(min(end_query, last_expire), BLOCK_Q) - block.first_tile, 0);
  }
};

// The place of a block in a launch; `head` counts KV heads and in each its shares.
struct ListPlace {
  int super_block, chunk, head, batch;
};

#if ORDERED
// Number of lists whose chunks start alternately, so that a list's chunk starts about when the chunk before it has
// finished the first tiles; more lists would not fit into the L2 cache together. Super-blocks follow one another, since
// a key's gradient rows wait for the list before.
constexpr u32 LISTS_TOGETHER = 8;

// Blocks start in the order of their linear number: super-block after super-block. A super-block has one list for each
// KV head (or share of its query heads) of each batch row. Groups of LISTS_TOGETHER lists follow one another; in a
// group the last chunks of all its lists start first, then the chunks before them, down to the first. `block` is
// blockIdx.x.
DEVICE ListPlace list_place(const DmaAttentionBackwardParams& params, u32 block) {
  const u32 num_chunks = (u32)ceil_div((int)params.list_capacity, BLOCK_KV),
            lists = gridDim.y * gridDim.z;  // of one super-block
  // The block's number in the launch, among the blocks of its super-block, and among those of its group of lists. A
  // super-block's last group may have fewer lists than LISTS_TOGETHER.
  const u32 linear = block + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
            in_super_block = linear % (lists * num_chunks), group = in_super_block / (LISTS_TOGETHER * num_chunks);
  const u32 group_lists = min(lists - group * LISTS_TOGETHER, LISTS_TOGETHER),
            in_group = in_super_block % (LISTS_TOGETHER * num_chunks),
            list = group * LISTS_TOGETHER + in_group % group_lists;
  ListPlace place;
  place.super_block = (int)(params.first_super_block + linear / (lists * num_chunks));
  place.chunk = (int)(num_chunks - 1 - in_group / group_lists);
  place.head = (int)(list % gridDim.y);
  place.batch = (int)(list / gridDim.y);
  return place;
}
#else
// Number of lists at a launch's end whose chunks start longest first. More would not fit into the L2 cache together.
// kernels/notes/longest-chunks-of-the-last-lists.md
constexpr u32 LAST_LISTS = 8;

// Blocks start in the order of their linear number, list after list. In the launch's last LAST_LISTS lists all first
// chunks precede all second ones, longest first: the middle of a list is seen by most queries, where keys enter and
// leave one by one. Else the middle of the last list would end long after everything else.
DEVICE ListPlace list_place(const DmaAttentionBackwardParams& params, u32 block) {
  const u32 num_chunks = (u32)ceil_div((int)params.list_capacity, BLOCK_KV), super_blocks = gridDim.x / num_chunks,
            lists = super_blocks * gridDim.y * gridDim.z, num_last = min(lists, LAST_LISTS);
  const u32 linear = block + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
            first_last = (lists - num_last) * num_chunks;  // number of the first block of the last lists
  u32 list = linear / num_chunks, chunk = linear % num_chunks;
  if (linear >= first_last) {
    // Chunks of a list by their length: the middle one, the one before it, the one after it, and so on outwards.
    const u32 rank = (linear - first_last) / num_last;
    list = lists - num_last + (linear - first_last) % num_last;
    chunk = num_chunks / 2 + (rank % 2 ? 0 - (rank + 1) / 2 : rank / 2);
  }
  ListPlace place;
  place.super_block = (int)(params.first_super_block + list % super_blocks);
  place.chunk = (int)chunk;
  place.head = (int)(list / super_blocks % gridDim.y);
  place.batch = (int)(list / super_blocks / gridDim.y);
  return place;
}

#endif

// The first of a consumer thread's two entries of the chunk, 0 .. 127; the other is 8 further. `thread` is threadIdx.x,
// `warpgroup` the number of the consumer, 0 or 1.
DEVICE int row_of_thread(u32 thread, int warpgroup) {
  return warpgroup * 64 + (int)thread % 128 / 32 * 16 + (int)thread % 32 / 4;
}

// Adds the thread's two rows of a gradient to the f32 sums of their keys. `to` is the row of position 0 of the KV head;
// entries with expire 0 are left out. A quad writes 64 contiguous bytes: columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16 side
// by side. Every thread of the consumers calls it.
DEVICE void add_rows(float* to, const float (&sums)[SUM_REGISTERS], const int2 (&entries)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (entries[r].y <= 0) continue;
    float* row = to + (u64)(u32)entries[r].x * HEAD_DIM + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n)
      reduce_add_f32x4(row + n * 16, sums[8 * n + 2 * r], sums[8 * n + 2 * r + 1], sums[8 * n + 4 + 2 * r],
                       sums[8 * n + 5 + 2 * r]);
  }
}

#if WHOLE_KEYS
// Writes 2 N columns of one gradient in bf16, times `scale`, to the rows of the thread's two keys that are `whole`;
// `to` is the row of position 0, `stride` counts elements from token to token. All four lanes of a quad call it, since
// they share the rows. hopper_attention_backward has its own form, because it spills where it takes rows in this one.
template <int N>
DEVICE void store_whole_rows(bf16* to, u64 stride, float scale, const float (&sums)[N], const int2 (&entries)[2],
                             const bool (&whole)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bf16* row = to + (u64)(u32)entries[r].x * stride + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      u32 x[4];
      quad_pack(x, sums + 16 * n, r, scale);
      if (whole[r]) *(uint4*)(row + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}
#endif

// A block computes the gradients of one chunk of a list: warpgroup 0 loads, warpgroups 1 and 2 have 64 of its 128 keys
// each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_dma_attention_backward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const bf16* /*q*/, const bf16* k, const bf16* v, const bf16* /*do*/, const float2* row_stats,
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    const int2* list, const i32* list_len,
#if WHOLE_KEYS
    const i32* chunk_end,
#endif
    float* dq_sum,
#if ORDERED
    i32* dq_semaphores, i32* key_semaphores,
#endif
#if WHOLE_KEYS
    bf16* dk, bf16* dv,
#endif
    float* dk_sum, float* dv_sum,
#if HAS_BIAS
    float* ddelta,
#endif
    const __grid_constant__ DmaAttentionBackwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ int2 entries[BLOCK_KV];
#if WHOLE_KEYS
  __shared__ bool is_whole[BLOCK_KV];  // this block has all queries of the key
#endif
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const ListPlace place = list_place(params, blockIdx.x);
#if SHARES
  const int head_shares = (int)params.head_shares;
#else
  constexpr int head_shares = 1;
#endif
  const int group_size = num_heads / num_kv_heads;
  const QueryShare share(place.head, group_size, head_shares, 1);
  const int batch = place.batch, kv_head = share.kv_head, head = kv_head * group_size + share.first_head,
            num_super_blocks = ceil_div(seq_len, SUPER_BLOCK);
  if (place.super_block >= num_super_blocks) return;
  const u64 list_row = (u64)batch * num_kv_heads + kv_head;
  const u64 list_index = list_row * num_super_blocks + place.super_block;
  // Entries and the list's length are loaded at once; places past a list's end hold arbitrary values.
  const int first_entry = place.chunk * BLOCK_KV, at = first_entry + (int)threadIdx.x;
  int2 entry = make_int2(0, 0);
  if (threadIdx.x < BLOCK_KV && at < (int)params.list_capacity) entry = list[list_index * params.list_capacity + at];
  const int length = list_len[list_index];
  ListKeys keys;
  keys.entries = entries;
  keys.first_query = place.super_block * SUPER_BLOCK;
  keys.end_query = min(keys.first_query + SUPER_BLOCK, seq_len);
#if WHOLE_KEYS
  constexpr int CHUNKS = SUPER_BLOCK / BLOCK_KV;
  if (place.chunk < CHUNKS) keys.end_query = chunk_end[list_index * CHUNKS + place.chunk];
#endif
#if ORDERED
  // The largest expire after the chunk. Old keys are sorted by it, so after the entering ones the first is enough.
  __shared__ int later_expires[THREADS / 32];
  int later_expire = 0;
  const int behind = first_entry + BLOCK_KV,
            end_behind = min(max(behind + 1, SUPER_BLOCK + BLOCK_KV), (int)params.list_capacity);
  for (int i = behind + (int)threadIdx.x; i < end_behind; i += THREADS) {
    const int expire = list[list_index * params.list_capacity + i].y;
    if (i < length) later_expire = max(later_expire, expire);
  }
  later_expire = __reduce_max_sync(~0u, later_expire);
  if (threadIdx.x % 32 == 0) later_expires[threadIdx.x / 32] = later_expire;
#endif
  const u32 shared = start_block(shared_memory);
  if (length <= first_entry) return;
  if (at >= length) entry = make_int2(0, 0);
  if (threadIdx.x < BLOCK_KV) {
#if WHOLE_KEYS
    is_whole[threadIdx.x] = keys.first_query <= entry.x && 0 < entry.y && entry.y <= keys.end_query;
    if (entry.y > keys.end_query) entry.y = keys.first_query + SUPER_BLOCK;  // later queries are in later lists
#endif
    entries[threadIdx.x] = entry;
  }
  __syncthreads();  // the barriers are set up, and the entries stored
#if ORDERED
  keys.later_expires = later_expires;
  keys.list = list + list_index * params.list_capacity;
  keys.num_before = first_entry;
#endif

  BackwardBlock block;
  block.q_map = &q_map;
  block.do_map = &do_map;
  block.batch = batch;
  block.head = head;
  block.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  block.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM;
  block.k_stride = (u32)params.k_token_stride;
  block.v_stride = (u32)params.v_token_stride;
  block.stats = row_stats + ((u64)batch * num_heads + head) * params.padded_len;
#if HAS_BIAS
  block.base = base + list_row * params.padded_len;
#endif
  block.dq_sum = dq_sum + ((u64)batch * num_heads + head) * params.dq_len * HEAD_DIM;
#if ORDERED
  block.semaphores = dq_semaphores + ((u64)batch * num_heads + head) * (params.dq_len / BLOCK_Q);
  block.own_turn = ceil_div((int)params.list_capacity, BLOCK_KV) - 1 - place.chunk;
#endif
  block.group_size = share.num_heads;
  block.padded_len = (int)params.padded_len;
  block.dq_first = (int)params.first_super_block * SUPER_BLOCK;
  block.dq_len = (int)params.dq_len;
  block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  block.bias_unit = 1.0f / f32_word(params.softmax_scale);

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    float bias = 0.0f;
#if HAS_BIAS
    if (entry.y > 0) bias = in_scores(delta[list_row * seq_len + entry.x], block.bias_unit);
#endif
    produce(block, keys, bias, shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    KeyGradients sums;
    consume(block, keys, shared, warpgroup - 1, sums);

    // Accumulate. Places are recomputed: held in registers they would spill.
    const ListPlace done = list_place(params, opaque(blockIdx.x));
    const u64 done_row = (u64)done.batch * num_kv_heads + done.head / head_shares;
    const int first_row = row_of_thread(opaque(threadIdx.x), warpgroup - 1);
    int2 own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) own[r] = entries[first_row + 8 * r];
#if ORDERED
    // A key is in every list from its own super-block until it expires. Each of the four lanes that share its row adds
    // 1, so a block counts 4: a __syncwarp here would make the compiler spill in the loop.
    i32* semaphores = key_semaphores + done_row * seq_len;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lists = done.super_block - own[r].x / SUPER_BLOCK;
      while (own[r].y > 0 &&
             read_semaphore(semaphores + own[r].x) < 4 * (lists * head_shares + done.head % head_shares)) {}
    }
#endif
    int2 added[2] = {own[0], own[1]};
#if WHOLE_KEYS
    const bool whole[2] = {is_whole[first_row], is_whole[first_row + 8]};
    store_whole_rows(dk + params.dk_offset + done.batch * params.dk_batch_stride + (u64)done.head * HEAD_DIM,
                     params.dk_token_stride, f32_word(params.softmax_scale), sums.dk, own, whole);
    store_whole_rows(dv + params.dv_offset + done.batch * params.dv_batch_stride + (u64)done.head * HEAD_DIM,
                     params.dv_token_stride, 1.0f, sums.dv, own, whole);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (whole[r]) added[r].y = 0;
#endif
    add_rows(dk_sum + done_row * seq_len * HEAD_DIM, sums.dk, added);
    add_rows(dv_sum + done_row * seq_len * HEAD_DIM, sums.dv, added);
#if HAS_BIAS
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (threadIdx.x % 4 != 0 || own[r].y <= 0) continue;
      float* to = ddelta + done_row * seq_len + own[r].x;
      atomicAdd(to, sums.ddelta[r]);
    }
#endif
#if ORDERED
    fence_sums();  // the next block adds to the same rows
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (own[r].y > 0) atomicAdd(semaphores + own[r].x, 1);
#endif
  }
}
