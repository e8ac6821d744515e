// attention_backward: gradients of dense causal or sliding-window attention, keys outermost; attention_backward_prepare
// (and, with a bias, attention_row_sums) runs before it, attention_backward_convert after it.
// Math       P_ij = exp(softmax_scale * q_i . k_j + delta_j - base_i - lse_i) over the pairs attention_forward sees;
//            dv_j = sum_i P_ij do_i;
//            dS_ij = P_ij (do_i . v_j - D_i), D_i = do_i . o_i = sum_j P_ij do_i . v_j; dk_j = softmax_scale * sum_i
//            dS_ij q_i; ddelta_j = sum_i dS_ij (sums over the heads of the group too); dq_sum_i = sum_j dS_ij k_j,
//            still without softmax_scale
// Layout     q, k, v as attention_forward; do bf16 [batch, seq_len, num_heads, HEAD_DIM_V] contiguous; row_stats f32
//            pairs [batch, num_heads, padded_len, 2] from attention_backward_prepare; doc_end i32 [batch, seq_len];
//            delta, base as attention_forward; ddelta f32 [batch, num_kv_heads, seq_len];
//            dk, dv bf16 with strides and offsets like k, v; dq_sum f32
//            [batch, num_heads, padded_len / 16, HEAD_DIM / 8, 32, 4]: 16 x 8 tiles in the order of tensor core
//            accumulators, zero before the launch; SHARES: dk_sum f32 (dv_sum alike)
//            [batch, num_kv_heads, head_shares * query_shares, padded_len / 16, HEAD_DIM / 8, 32, 4] in the same order,
//            before the scale, ddelta_sum f32 [head_shares * query_shares, batch, num_kv_heads, seq_len]
// Buffers    q, k, v, do, row_stats, doc_end, (HAS_FAR: doc_start,) (HAS_BIAS: delta, base,) (COMPUTE_DQ: dq_sum,)
//            (COMPUTE_DK: dk,) (COMPUTE_DV: dv,) (HAS_BIAS and COMPUTE_DK: ddelta); SHARES: dk_sum, dv_sum, ddelta_sum
//            in their places
// Defines    HEAD_DIM, HEAD_DIM_V; HAS_BIAS; HAS_FAR (as attention_forward; SHARES is 0); COMPUTE_DQ, COMPUTE_DK,
//            COMPUTE_DV (1; DETERMINISTIC mode sets COMPUTE_DQ
//            0 and runs attention_backward_query instead; HEAD_DIM + HEAD_DIM_V > 320 takes two launches, one with
//            COMPUTE_DV alone, one without it);
//            SHARES (0; 1: head_shares * query_shares blocks share a tile of keys (query_share.cuh), and
//            attention_backward_convert and column_sums add up what they leave);
//            TILE_LISTS (0; 1: each head and tile of queries sees the tiles of 64 or 128 keys that a mask names, up to
//            the query's own, in one batch row without documents, window and bias; tile_lists i32 (tile_steps.cuh)
//            take the place of doc_end);
//            tiling NUM_WARPS (even), BLOCK_Q 32|64, MIN_BLOCKS
// Tiling     BLOCK_KV = 16 * NUM_WARPS keys a block: grid (ceil(seq_len / BLOCK_KV),
//            num_kv_heads * head_shares * query_shares, batch), early keys (most queries) first (block_order.cuh);
//            NUM_WARPS * 32 threads;
//            dynamic shared bytes = (BLOCK_KV + 2 * BLOCK_Q) * (HEAD_DIM + HEAD_DIM_V) * 2 +
//            2 * BLOCK_KV * BLOCK_Q * (COMPUTE_DV + (COMPUTE_DQ ? 2 :
//              COMPUTE_DK ? 1 : 0)) + (HAS_BIAS ? 24 : 16) * BLOCK_Q + BLOCK_KV * (HAS_BIAS ? 12 : HAS_FAR ? 16 : 8)
//              + 128
// Numerics   P and dS rounded to bf16 for the products, f32 accumulators; dk, dv, ddelta: fixed order, one rounding,
//            every element written;
//            dq_sum: f32 atomics, so its order varies from run to run
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64; rows that see nothing give nothing
#include "common/attention_params.cuh"
#include "common/block_order.cuh"
#include "common/attention_backward.cuh"
#include "common/query_share.cuh"

constexpr u64 SECTION_BYTES = 64 << 20;  // queries and output gradients of the heads computed at a time

static_assert(!HAS_FAR || !SHARES, "a block has all queries of a tile");

#if SHARES
typedef float gradient;

// Writes the warp's columns of the warp pair's 32 rows of one gradient: the f32 sums of this share of the queries.
template <int ROW, int HALF_PAIRS>
DEVICE void store_sums(const float (&sums)[2][2 * HALF_PAIRS][4], float* to, int num_rows) {
  const int half = (int)threadIdx.x / 32 % 2, first = half * HALF_PAIRS * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2 * HALF_PAIRS; ++n)
      if (m * 16 < num_rows && first + n < ROW / 8)
        *(float4*)(to + (m * (ROW / 8) + first + n) * 128) =
            make_float4(sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]);
}
#else
typedef bf16 gradient;
#endif

// Writes this warp's half of the columns of the warp pair's 32 gradient rows, staged in the pair's rows of the K or V
// tile, which are no longer needed.
template <int ROW, int HALF_PAIRS>
DEVICE void store_rows(u32 shared, const float (&sums)[2][2 * HALF_PAIRS][4], float scale, bf16* to, u64 stride,
                       int first_key, int seq_len) {
  using Tile = SwizzledTile<ROW>;
  const int lane = (int)threadIdx.x % 32, half = (int)threadIdx.x / 32 % 2, g = lane / 4, t = lane % 4;
  const int first_chunk = half * HALF_PAIRS * 2, num_chunks = half ? ROW / 8 - HALF_PAIRS * 2 : HALF_PAIRS * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2 * HALF_PAIRS; ++n) {
      if (n >= num_chunks) break;
      store_shared_32(shared + Tile::offset(m * 16 + g, first_chunk + n) + t * 4,
                      pack_bf16(sums[m][n][0] * scale, sums[m][n][1] * scale));
      store_shared_32(shared + Tile::offset(m * 16 + g + 8, first_chunk + n) + t * 4,
                      pack_bf16(sums[m][n][2] * scale, sums[m][n][3] * scale));
    }
  __syncwarp();
  for (int at = lane; at < 32 * num_chunks; at += 32) {
    const int row = at / num_chunks, chunk = first_chunk + at % num_chunks;
    if (first_key + row < seq_len)
      *(uint4*)(to + (u64)(first_key + row) * stride + chunk * 8) = load_shared_128(shared + Tile::offset(row, chunk));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_backward(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float2* row_stats,
#if TILE_LISTS
    const i32* tile_lists,
#else
    const i32* doc_end,
#endif
#if HAS_FAR
    const i32* doc_start,
#endif
#if HAS_BIAS
    const float* delta, const float* base,
#endif
#if COMPUTE_DQ
    float* dq_sum,
#endif
#if COMPUTE_DK
    gradient* dk,
#endif
#if COMPUTE_DV
    gradient* dv,
#endif
#if HAS_BIAS && COMPUTE_DK
    float* ddelta,
#endif
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const int group_size = num_heads / num_kv_heads;
#if SHARES
  const int head_shares = (int)params.head_shares, query_shares = (int)params.query_shares;
  const BlockPlace place =
      block_place(num_kv_heads * head_shares,
                  share_bytes(params.seq_len, group_size, head_shares, (HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES);
  const QueryShare share(place.head, group_size, head_shares, query_shares);
  const int kv_head = share.kv_head, first_head = share.first_head, own_heads = share.num_heads;
#else
  const BlockPlace place =
      block_place(num_kv_heads, params.seq_len * group_size * (HEAD_DIM + HEAD_DIM_V) * 2, SECTION_BYTES);
  const int kv_head = place.head, first_head = 0, own_heads = group_size;
#endif
  const int batch = place.batch, head = kv_head * group_size + first_head;
  const int first_key = place.tile * BLOCK_KV;
  const u32 shared = shared_address(shared_memory);

  // Load: the block's keys and values stay for the whole launch.
  copy_rows<HEAD_DIM, BLOCK_KV>(shared, k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM,
                                (u32)params.k_token_stride, first_key, seq_len);
  copy_rows<HEAD_DIM_V, BLOCK_KV>(shared + K_BYTES,
                                  v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V,
                                  (u32)params.v_token_stride, first_key, seq_len);
  int2* entries = (int2*)(shared_memory + ENTRIES_AT);
#if !TILE_LISTS
  [[maybe_unused]] const int window = (int)(params.window < params.seq_len ? params.window : params.seq_len);
#endif
#if HAS_FAR
  const FarKeys far(params, kv_head);
#endif
  for (int at = (int)threadIdx.x; at < BLOCK_KV; at += THREADS) {
    const int key = first_key + at;
    int2 entry = {key, 0};
#if TILE_LISTS
    if (key < seq_len) entry.y = seq_len;
#else
    if (key < seq_len) entry.y = min(doc_end[(u64)batch * seq_len + key], key + window);
#endif
#if HAS_FAR
    int2 band = {0, 0};
    if (key < seq_len) {
      const int end = doc_end[(u64)batch * seq_len + key];
      entry.y = key < doc_start[(u64)batch * seq_len + key] + far.sinks ? end : min(end, key + far.window);
      if (far.band < far.band_end && key + far.band < end) band = {key + far.band, min(end, key + far.band_end)};
    }
    ((int2*)(shared_memory + BANDS_AT))[at] = band;
#endif
    entries[at] = entry;
#if HAS_BIAS
    ((float*)(shared_memory + BIAS_AT))[at] =
        key < seq_len ? in_scores(delta[((u64)batch * num_kv_heads + kv_head) * seq_len + key],
                                  1.0f / f32_word(params.softmax_scale))
                      : 0.0f;
#endif
  }
  __syncthreads();  // entries and bias are read by other threads
#if !TILE_LISTS && !HAS_FAR
  const int end_query = key_range(entries, BLOCK_KV).last_expire;
#endif

  BackwardBlock block;
  block.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  block.q_stride = (u32)params.q_token_stride;
  block.d_out = d_out + ((u64)batch * seq_len * num_heads + head) * HEAD_DIM_V;
  block.stats = row_stats + ((u64)batch * num_heads + head) * params.padded_len;
#if COMPUTE_DQ
  block.dq_sum = dq_sum + ((u64)batch * num_heads + head) * params.padded_len * HEAD_DIM;
#endif
  block.num_heads = num_heads;
  block.group_size = TILE_LISTS ? STEP_QUERIES / BLOCK_Q : own_heads;
  block.seq_len = seq_len;
  block.padded_len = (int)params.padded_len;
  block.dq_first = 0;
  block.dq_len = (int)params.padded_len;
#if TILE_LISTS
#if SHARES
  const int list_share = place.head / query_shares, list_shares = num_kv_heads * head_shares;
#else
  const int list_share = kv_head, list_shares = num_kv_heads;
#endif
  const int key_tiles = ceil_div(seq_len, STEP_KEYS);
  const TileSteps list(tile_lists, list_shares * key_tiles, list_share * key_tiles + first_key / STEP_KEYS, seq_len);
  block.steps = list.steps;
  block.first_tile = list.begin;
  block.num_tiles = list.end - list.begin;
#elif HAS_FAR
  const int last_key = min(first_key + BLOCK_KV, seq_len) - 1;
  const QueryTiles<BLOCK_Q> tiles(far, doc_start[(u64)batch * seq_len + last_key],
                                  doc_end[(u64)batch * seq_len + last_key], first_key, last_key);
  block.first_tile = tiles.first;
  block.num_tiles = tiles.count();
  block.num_near = tiles.near_end - tiles.first;
  block.left_out = tiles.band_first - tiles.near_end;
#else
  block.first_tile = first_key / BLOCK_Q;
  block.num_tiles = ceil_div(end_query, BLOCK_Q) - block.first_tile;
#endif
#if SHARES
  share.take_part(block);
#endif
  block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
#if HAS_BIAS
  block.base = base + ((u64)batch * num_kv_heads + kv_head) * params.padded_len;
  block.bias_unit = 1.0f / f32_word(params.softmax_scale);
#endif
  block.batch = place.batch;
  block.kv_head = kv_head;
#if SHARES
  block.share = share.place;
#endif
  block.first_key = first_key;
  KeyGradients sums;
  attention_backward_block(block, shared_memory, sums);

  // Store. The description is read again from shared memory: in registers it would slow the loop.
  const BackwardBlock& done = *(const BackwardBlock*)(shared_memory + BLOCK_AT);
  const int warp = (int)threadIdx.x / 32, pair = warp / 2, pair_key = done.first_key + pair * 32;
  [[maybe_unused]] const int seq_end = (int)params.seq_len;  // not read with SHARES
#if SHARES
  const int places = (int)(params.head_shares * params.query_shares), num_rows = (int)params.padded_len - pair_key;
  const u64 head_row = done.batch * params.num_kv_heads + done.kv_head;
#if COMPUTE_DK
  store_sums<HEAD_DIM, HALF_K_PAIRS>(
      sums.dk, sum_tile<HEAD_DIM>(dk, head_row, places, done.share, params.padded_len, pair_key), num_rows);
#endif
#if COMPUTE_DV
  store_sums<HEAD_DIM_V, HALF_V_PAIRS>(
      sums.dv, sum_tile<HEAD_DIM_V>(dv, head_row, places, done.share, params.padded_len, pair_key), num_rows);
#endif
#else
#if COMPUTE_DK
  store_rows<HEAD_DIM, HALF_K_PAIRS>(
      shared + pair * 32 * KTile::ROW_BYTES, sums.dk, f32_word(params.softmax_scale),
      dk + params.dk_offset + done.batch * params.dk_batch_stride + (u64)done.kv_head * HEAD_DIM,
      params.dk_token_stride, pair_key, seq_end);
#endif
#if COMPUTE_DV
  store_rows<HEAD_DIM_V, HALF_V_PAIRS>(
      shared + K_BYTES + pair * 32 * VTile::ROW_BYTES, sums.dv, 1.0f,
      dv + params.dv_offset + done.batch * params.dv_batch_stride + (u64)done.kv_head * HEAD_DIM_V,
      params.dv_token_stride, pair_key, seq_end);
#endif
#endif
#if HAS_BIAS && COMPUTE_DK
  const u64 bias_batch = (SHARES ? (u64)done.share * gridDim.z : 0) + done.batch;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int key = pair_key + r * 8 + (int)threadIdx.x % 32 / 4;
    if (warp % 2 == 0 && threadIdx.x % 4 == 0 && key < seq_end)
      ddelta[(bias_batch * params.num_kv_heads + done.kv_head) * params.seq_len + key] = sums.ddelta[r / 2][r % 2];
  }
#endif
}
