// dma_attention_backward: gradients of exact dynamic mask attention, keys outermost: a block owns BLOCK_KV entries of a
// super-block's list, gathers their K and V once and streams the queries that see them. attention_backward_prepare and
// dma_attention_row_sums run before it, attention_backward_convert (dq) and dma_attention_backward_convert (dk, dv)
// after it.
// Math       as attention_backward over the pairs j <= i < expire_j: dq_sum_i += sum_j dS_ij k_j (without
//            softmax_scale), dk_sum_j += sum_i dS_ij q_i (without softmax_scale), dv_sum_j += sum_i P_ij do_i, ddelta_j
//            += sum_i dS_ij, i over the queries of the launch's super-blocks
// Layout     q, k, v, delta, base, list as dma_attention_forward, list_len i32 [batch, num_kv_heads, num_super_blocks];
//            do bf16 [batch, seq_len, num_heads, HEAD_DIM_V] contiguous; row_stats f32 pairs
//            [batch, num_heads, padded_len, 2]; ddelta f32 [batch, num_kv_heads, seq_len];
//            dk_sum f32 [batch, num_kv_heads, seq_len, HEAD_DIM], dv_sum likewise with HEAD_DIM_V: within a row, groups
//            of 16 columns hold {2t, 2t+1, 2t+8, 2t+9} for t = 0 .. 3; dq_sum f32
//            [batch, num_heads, dq_len / 16, HEAD_DIM / 8, 32, 4] for the launch's queries only, dq_len =
//            super_blocks * SUPER_BLOCK. All sums are added to: zero before the first launch. dk, dv bf16
//            [batch, seq_len, num_kv_heads, width], any strides that are multiples of 8
// Buffers    q, k, v, do, row_stats, delta, base, list, list_len, (WHOLE_KEYS: chunk_end,) (COMPUTE_DQ: dq_sum,)
//            (WHOLE_KEYS: dk, dv,) (COMPUTE_DK: dk_sum,) (COMPUTE_DV: dv_sum,) (COMPUTE_DK: ddelta)
// Defines    as attention_backward (HAS_BIAS is always 1); SHARES (0; 1: head_shares blocks share a chunk of a list);
//            DETERMINISTIC 0|1: with 1 sums are made without atomics, COMPUTE_DQ and SHARES must be
//            0 and a launch covers one super-block (launches in ascending order fix the order of every sum; dq comes
//            from dma_attention_backward_query); WHOLE_KEYS 0|1: with 1 lists and chunk_end come from
//            dma_backward_lists: a block takes the queries before its chunk's end, and writes dk (with softmax_scale)
//            and dv in place of sums for the keys which no other block has
// Tiling     grid (super_blocks * ceil(list_capacity / BLOCK_KV), num_kv_heads * head_shares, batch),
//            super_blocks = the launch's number of them, any from first_super_block on (fewer need less dq_sum);
//            blocks past a list's end leave at once. NUM_WARPS * 32 threads;
//            dynamic shared bytes as attention_backward with HAS_BIAS
// Numerics   as attention_backward; dk_sum, dv_sum, ddelta: one f32 atomic add per key and super-block; never-active
//            keys are not touched
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64
#define HAS_BIAS 1
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#include "common/attention_params.cuh"
#include "common/add_rows.cuh"
#include "common/query_share.cuh"

#ifndef WHOLE_KEYS
#define WHOLE_KEYS 0
#endif
static_assert(!WHOLE_KEYS || (!DETERMINISTIC && !SHARES), "a whole key's rows are written by one block, in any order");
static_assert(!DETERMINISTIC || !COMPUTE_DQ, "dq over keys in many blocks has no fixed order");
static_assert(!DETERMINISTIC || !SHARES, "blocks that share keys add to the same rows");
static_assert(SUPER_BLOCK % BLOCK_Q == 0, "a step stays inside one super-block");

#if WHOLE_KEYS
// Writes the warp's half of the ROW columns of dk or dv, times `scale`, for the whole keys among the 32 that two warps
// share: those which no other block has. `sums` are fragments of 16 keys x 8 columns, `entries` and `is_whole` the 32
// keys' {position, expire} and whether each is whole; `to` is column 0 of the KV head at position 0, and positions are
// `stride` elements apart. The first warp of the pair has 2 * HALF_PAIRS tiles of columns, the second the rest.
template <int ROW, int HALF_PAIRS>
DEVICE void store_whole_rows(bf16* to, u64 stride, float scale, const float (&sums)[2][2 * HALF_PAIRS][4],
                             const int2* entries, const bool* is_whole) {
  const int lane = (int)threadIdx.x % 32, half = (int)threadIdx.x / 32 % 2, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (!is_whole[r * 8 + g]) continue;
    bf16* row = to + (u64)(u32)entries[r * 8 + g].x * stride + half * HALF_PAIRS * 16 + t * 2;
#pragma unroll
    for (int n = 0; n < 2 * HALF_PAIRS; ++n) {
      if (half * HALF_PAIRS * 2 + n >= ROW / 8) break;
      const float* pair = &sums[r / 2][n][r % 2 * 2];
      *(u32*)(row + n * 8) = pack_bf16(pair[0] * scale, pair[1] * scale);
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dma_attention_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float2* row_stats,
                           const float* delta, const float* base, const int2* list, const i32* list_len,
#if WHOLE_KEYS
                           const i32* chunk_end,
#endif
#if COMPUTE_DQ
                           float* dq_sum,
#endif
#if WHOLE_KEYS
                           bf16* dk, bf16* dv,
#endif
#if COMPUTE_DK
                           float* dk_sum,
#endif
#if COMPUTE_DV
                           float* dv_sum,
#endif
#if COMPUTE_DK
                           float* ddelta,
#endif
                           const __grid_constant__ DmaAttentionBackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
#if SHARES
  const int head_shares = (int)params.head_shares;
#else
  constexpr int head_shares = 1;
#endif
  const int group_size = num_heads / num_kv_heads;
  const QueryShare share((int)blockIdx.y, group_size, head_shares, 1);
  const int batch = (int)blockIdx.z, kv_head = share.kv_head, head = kv_head * group_size + share.first_head;
  const int num_chunks = ceil_div((int)params.list_capacity, BLOCK_KV),
            num_super_blocks = ceil_div(seq_len, SUPER_BLOCK);
  const int super_block = (int)params.first_super_block + (int)blockIdx.x / num_chunks,
            first_entry = (int)blockIdx.x % num_chunks * BLOCK_KV;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const u64 list_row = (u64)batch * num_kv_heads + kv_head;
  if (super_block >= num_super_blocks) return;
  const int num_entries = list_len[list_row * num_super_blocks + super_block];
  if (first_entry >= num_entries) return;
  const u32 shared = shared_address(shared_memory);

  const int block_first = super_block * SUPER_BLOCK;
  int block_end = min(block_first + SUPER_BLOCK, seq_len);
#if WHOLE_KEYS
  constexpr int CHUNK = 128, CHUNKS = SUPER_BLOCK / CHUNK;  // of chunk_end
  __shared__ bool is_whole[BLOCK_KV];                       // this block has all queries of the key
  if (first_entry < SUPER_BLOCK)
    block_end = chunk_end[(list_row * num_super_blocks + super_block) * CHUNKS + first_entry / CHUNK];
#endif

  // Load: entries first, then the rows they name, which stay for the whole launch.
  int2* entries = (int2*)(shared_memory + ENTRIES_AT);
  const int2* from = list + (list_row * num_super_blocks + super_block) * params.list_capacity + first_entry;
  for (int at = (int)threadIdx.x; at < BLOCK_KV; at += THREADS) {
    int2 entry = {0, 0};
    if (first_entry + at < num_entries) entry = from[at];
#if WHOLE_KEYS
    is_whole[at] = block_first <= entry.x && 0 < entry.y && entry.y <= block_end;
    if (entry.y > block_end) entry.y = block_first + SUPER_BLOCK;  // later queries are in later lists
#endif
    entries[at] = entry;
    ((float*)(shared_memory + BIAS_AT))[at] =
        entry.y > 0 ? in_scores(delta[list_row * seq_len + entry.x], 1.0f / f32_word(params.softmax_scale)) : 0.0f;
  }
  __syncthreads();  // entries and bias are read by other threads
  gather_rows<HEAD_DIM, BLOCK_KV>(shared, k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM,
                                  (u32)params.k_token_stride, entries);
  gather_rows<HEAD_DIM_V, BLOCK_KV>(shared + K_BYTES,
                                    v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V,
                                    (u32)params.v_token_stride, entries);
  const KeyRange range = key_range(entries, BLOCK_KV);
  const int first_query = max(block_first, range.lowest), end_query = min(block_end, range.last_expire);

  BackwardBlock block;
  block.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  block.q_stride = (u32)params.q_token_stride;
  block.d_out = d_out + ((u64)batch * seq_len * num_heads + head) * HEAD_DIM_V;
  block.stats = row_stats + ((u64)batch * num_heads + head) * params.padded_len;
#if COMPUTE_DQ
  block.dq_sum = dq_sum + ((u64)batch * num_heads + head) * params.dq_len * HEAD_DIM;
#endif
  block.num_heads = num_heads;
  block.group_size = share.num_heads;
  block.seq_len = seq_len;
  block.padded_len = (int)params.padded_len;
  block.dq_first = (int)params.first_super_block * SUPER_BLOCK;
  block.dq_len = (int)params.dq_len;
  block.first_tile = first_query / BLOCK_Q;
  block.num_tiles = max(ceil_div(end_query, BLOCK_Q) - block.first_tile, 0);
  block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  block.base = base + list_row * params.padded_len;
  block.bias_unit = 1.0f / f32_word(params.softmax_scale);
  KeyGradients sums;
  attention_backward_block(block, shared_memory, sums);

  // Accumulate: gradients of whole keys are written, others added to f32 sums, which other blocks add to as well.
  entries += warp / 2 * 32;
#if WHOLE_KEYS
  const bool* pair_whole = is_whole + warp / 2 * 32;
#if COMPUTE_DK
  store_whole_rows<HEAD_DIM, HALF_K_PAIRS>(
      dk + params.dk_offset + batch * params.dk_batch_stride + (u64)kv_head * HEAD_DIM, params.dk_token_stride,
      f32_word(params.softmax_scale), sums.dk, entries, pair_whole);
#endif
#if COMPUTE_DV
  store_whole_rows<HEAD_DIM_V, HALF_V_PAIRS>(
      dv + params.dv_offset + batch * params.dv_batch_stride + (u64)kv_head * HEAD_DIM_V, params.dv_token_stride, 1.0f,
      sums.dv, entries, pair_whole);
#endif
  // After the loop nothing needs a whole key's expire; below 0, add_rows skips it.
  if (threadIdx.x < BLOCK_KV && is_whole[threadIdx.x]) ((int2*)(shared_memory + ENTRIES_AT))[threadIdx.x].y = -1;
  __syncthreads();  // every thread reads the entries
#endif
#if COMPUTE_DK
  add_rows<HEAD_DIM, HALF_K_PAIRS>(dk_sum + list_row * seq_len * HEAD_DIM, sums.dk, entries);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int2 entry = entries[r * 8 + lane / 4];
    if (warp % 2 == 0 && lane % 4 == 0 && entry.y != 0) {
      float* to = ddelta + list_row * seq_len + entry.x;
#if DETERMINISTIC
      *to += sums.ddelta[r / 2][r % 2];
#else
      atomicAdd(to, sums.ddelta[r / 2][r % 2]);
#endif
    }
  }
#endif
#if COMPUTE_DV
  add_rows<HEAD_DIM_V, HALF_V_PAIRS>(dv_sum + list_row * seq_len * HEAD_DIM_V, sums.dv, entries);
#endif
}
