// dma_backward_lists: key lists for a backward pass in a free order, in which a thread block holds keys for all queries
// that see them where it can. Runs between dma_lists and dma_attention_backward; clears what the latter adds to.
// Math       A chunk is 128 successive entries of a list: the keys of a block. q1 is the end of its super-block. A
//            chunk whose keys all enter in its super-block has an end: if T > q1, its block takes the queries before T
//            of the keys with expire <= T, and the later lists lose these keys; the others are in its block up to q1.
//            T = argmax sum_j (expire_j - q1 + worth) - 128 (T - q1) over the keys with q1 < expire_j <= T, at most
//            REACH super-blocks after q1 and not after the launch; q1 if the maximum is not positive. The sum is what
//            other lists have less of: queries of a key, and for each key its part of a block and of a sum. If all keys
//            of the chunk leave until T + SLACK, T is the last expire: few keys in a later list are a block there, too.
//            Chunks of the last row and KV head end at q1: their short blocks fill the end of the launch.
//            Key j is summed, from several blocks, if expire_j > end of the chunk in which it enters (q1, if not all
//            keys of the chunk enter); other keys have one block, or no query
// Layout     list, list_len as dma_lists writes them; own_list, own_list_len alike; chunk_end i32
//            [batch, num_kv_heads, num_super_blocks, 8], of the chunks that may have entering keys; summed i32
//            [batch, num_kv_heads, seq_len]; dk_sum, dv_sum, ddelta, dk, dv as in dma_attention_backward
// Buffers    list, list_len, own_list, own_list_len, chunk_end, summed, dk_sum, dv_sum, ddelta, dk, dv
// Defines    HEAD_DIM, HEAD_DIM_V
// Tiling     grid (num_super_blocks, num_kv_heads, batch); 1024 threads; 10 KiB static shared memory, no dynamic
// Numerics   exact; clears ddelta, the rows of dk_sum and dv_sum of summed keys, and the rows of dk and dv of keys
//            without a query
// Edges      any seq_len >= 1; own_list is not written past own_list_len
#include "common/block_scan.cuh"

constexpr int SUPER_BLOCK = 1024, CHUNK = 128, CHUNKS = SUPER_BLOCK / CHUNK;
constexpr int REACH = 3;
constexpr int STEP = REACH * SUPER_BLOCK / 32;  // queries between two ends that are tried, one a lane
constexpr int SLACK = 160;                      // queries
constexpr int LISTS = REACH + 1;
static_assert(LISTS * CHUNKS == SUPER_BLOCK / 32, "a warp for each chunk of this list and of REACH lists before it");

struct DmaBackwardListsParams {
  u64 seq_len, num_kv_heads;
  u64 list_capacity;   // capacity of a list in entries
  u64 launch_queries;  // queries of a launch of the backward kernel, a multiple of SUPER_BLOCK
  u64 worth;           // queries
  u64 dk_offset, dv_offset;  // elements
  u64 dk_token_stride, dv_token_stride;
  u64 dk_batch_stride, dv_batch_stride;
};

enum KeyKind : unsigned char { UNSEEN, WHOLE, SUMMED };

struct Shared {
  u32 leaving[LISTS * CHUNKS][32], after[LISTS * CHUNKS][32];  // keys of a chunk by expire, and their expire - q1
  int lowest[LISTS][CHUNKS];  // position of a chunk's first key; -1 if not all of its keys enter
  int ends[LISTS][CHUNKS];
  KeyKind kinds[SUPER_BLOCK];
  u32 warp_sums[32];
};

// Clears a row of WIDTH elements; called by a warp.
template <int WIDTH, class T>
DEVICE void clear_row(T* row) {
  constexpr int EACH = 16 / (int)sizeof(T);
  for (int at = (int)threadIdx.x % 32 * EACH; at < WIDTH; at += 32 * EACH) *(uint4*)(row + at) = make_uint4(0, 0, 0, 0);
}

// A block makes the list of one super-block and KV head. Warp w first finds the end of chunk w % 8 of the list that
// lies w / 8 super-blocks before; then thread t has entry t of every 1024 of the list.
extern "C" __global__ void __launch_bounds__(SUPER_BLOCK, 1)
    dma_backward_lists(const int2* list, const i32* list_len, int2* own_list, i32* own_list_len, i32* chunk_end,
                       i32* summed, float* dk_sum, float* dv_sum, float* ddelta, bf16* dk, bf16* dv,
                       const __grid_constant__ DmaBackwardListsParams params) {
  __shared__ Shared shared;
  const int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32, super_block = (int)blockIdx.x;
  const int seq_len = (int)params.seq_len, first_query = super_block * SUPER_BLOCK,
            end_query = min(first_query + SUPER_BLOCK, seq_len);
  const u64 list_row = (u64)blockIdx.z * params.num_kv_heads + blockIdx.y,
            list_index = list_row * gridDim.x + super_block;
  const int length = list_len[list_index];

  // Find the ends of chunks, in this list and in the lists before it whose keys this list may have.
  const int before = warp / CHUNKS, chunk = warp % CHUNKS, entered_at = (super_block - before) * SUPER_BLOCK;
  const int own_end = min(entered_at + SUPER_BLOCK, seq_len), launch = (int)params.launch_queries;
  int lowest = -1, end = own_end;
  shared.leaving[warp][lane] = shared.after[warp][lane] = 0;
  __syncwarp();
  if (entered_at >= 0) {
    const int2* entries = list + (list_index - before) * params.list_capacity;
    const int num_entries = list_len[list_index - before];
    const int last_end = list_row + 1 < gridDim.y * gridDim.z
                             ? min(own_end + REACH * SUPER_BLOCK, (entered_at / launch + 1) * launch)
                             : own_end;
    int expires[CHUNK / 32];
    lowest = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
      const int at = chunk * CHUNK + i * 32 + lane;
      const int2 entry = at < num_entries ? entries[at] : make_int2(-1, 0);
      lowest = min(lowest, entry.x);
      expires[i] = entry.y;
      if (own_end < entry.y && entry.y <= last_end) {
        atomicAdd(&shared.leaving[warp][(entry.y - own_end - 1) / STEP], 1u);
        atomicAdd(&shared.after[warp][(entry.y - own_end - 1) / STEP], (u32)(entry.y - own_end));
      }
    }
    __syncwarp();
    const u32 num_leaving = warp_inclusive_sum(shared.leaving[warp][lane]),
              spared = warp_inclusive_sum(shared.after[warp][lane]) + num_leaving * (u32)params.worth;
    const int gain = (int)spared - CHUNK * STEP * (lane + 1);
    const u32 best = __reduce_max_sync(~0u, (u32)max(gain, 0) * 32 + lane);
    lowest = __reduce_min_sync(~0u, lowest);
    if (lowest < entered_at) {
      lowest = -1;
    } else if (best >= 32) {
      const int limit = min(own_end + STEP * ((int)best % 32 + 1), last_end);
      int latest = 0;
#pragma unroll
      for (int i = 0; i < CHUNK / 32; ++i) {
        latest = max(latest, expires[i]);
        if (expires[i] <= limit) end = max(end, expires[i]);
      }
      latest = __reduce_max_sync(~0u, latest);
      end = __reduce_max_sync(~0u, end);
      if (latest <= min(end + SLACK, last_end)) end = latest;
    }
  }
  if (lane == 0) {
    shared.lowest[before][chunk] = lowest;
    shared.ends[before][chunk] = end;
    if (before == 0) chunk_end[list_index * CHUNKS + chunk] = end;
  }
  shared.kinds[thread] = UNSEEN;
  __syncthreads();  // all ends are known

  // Store the list without the keys that blocks of earlier chunks take. Entering keys come first.
  int2* const out = own_list + list_index * params.list_capacity;
  u32 num_kept = 0, num_here;
  for (int first = 0; first < length; first += SUPER_BLOCK) {
    const int at = first + thread;
    const int2 entry = at < length ? list[list_index * params.list_capacity + at] : make_int2(-1, 0);
    bool keeps = entry.y > 0;
    const int entered = super_block - entry.x / SUPER_BLOCK;
    if (keeps && entered == 0) {
      shared.kinds[entry.x - first_query] = entry.y > shared.ends[0][at / CHUNK] ? SUMMED : WHOLE;
    } else if (keeps && entered < LISTS) {
      int c = 0;
      while (c < CHUNKS - 1 && shared.lowest[entered][c] > entry.x) ++c;
      keeps = entry.y > shared.ends[entered][c];
    }
    const u32 place = num_kept + block_exclusive_sum<SUPER_BLOCK>(keeps, shared.warp_sums, num_here);
    if (keeps) out[place] = entry;
    num_kept += num_here;
    __syncthreads();  // the sums of the warps are read
  }
  if (thread == 0) own_list_len[list_index] = (i32)num_kept;
  __syncthreads();  // the keys' kinds are known

  // Clear.
  const u64 first_row = list_row * seq_len + first_query;
  if (first_query + thread < end_query) {
    summed[first_row + thread] = shared.kinds[thread] == SUMMED;
    ddelta[first_row + thread] = 0.0f;
  }
  dk += params.dk_offset + blockIdx.z * params.dk_batch_stride + (u64)blockIdx.y * HEAD_DIM;
  dv += params.dv_offset + blockIdx.z * params.dv_batch_stride + (u64)blockIdx.y * HEAD_DIM_V;
  for (int at = warp; first_query + at < end_query; at += SUPER_BLOCK / 32) {
    const KeyKind kind = shared.kinds[at];
    if (kind == SUMMED) {
      clear_row<HEAD_DIM>(dk_sum + (first_row + at) * HEAD_DIM);
      clear_row<HEAD_DIM_V>(dv_sum + (first_row + at) * HEAD_DIM_V);
    } else if (kind == UNSEEN) {
      clear_row<HEAD_DIM>(dk + (u64)(first_query + at) * params.dk_token_stride);
      clear_row<HEAD_DIM_V>(dv + (u64)(first_query + at) * params.dv_token_stride);
    }
  }
}
