// hopper_attention_backward: attention_backward for sm_90a; the same mathematics, layout, buffers, params words and
// results to rounding.
// attention_backward_prepare runs before it (with a bias followed by hopper_attention_row_sums, or replaced by
// hopper_attention_backward_prepare), attention_backward_convert after it.
// Math       P_ij = exp(softmax_scale * q_i . k_j + delta_j - base_i - lse_i) over the pairs attention_forward sees;
//            dv_j = sum_i P_ij do_i;
//            dS_ij = P_ij (do_i . v_j - D_i); dk_j = softmax_scale * sum_i dS_ij q_i; ddelta_j = sum_i dS_ij;
//            dq_sum_i = sum_j dS_ij k_j
// Layout     as attention_backward
// Buffers    q_map, do_map by value: of bf16 [batch, seq_len, num_heads * HEAD_DIM or HEAD_DIM_V], q (its strides, base
//            at its offset) and do, box 1 x 64 x 64, 128-byte swizzle; then q, k, v, do,
//            row_stats, doc_end, (HAS_FAR: doc_start,) (HAS_BIAS: delta, base,) dq_sum, (ORDERED: dq_semaphores,)
//            (HAS_FAR: sink_sums f32 [batch, num_kv_heads, blocks of chunks, 128 * (HEAD_DIM + HEAD_DIM_V)], sink_flags
//            i32 [batch, num_kv_heads, blocks of chunks], zero before the launch,)
//            dk, dv, (HAS_BIAS: ddelta);
//            SHARES: dk_sum, dv_sum instead of dk, dv, and ddelta_sum. dq_semaphores i32
//            [batch, num_heads, padded_len / 64], zero before the launch
// Defines    HEAD_DIM (64, 128; 192 with HEAD_DIM_V 128, DQ_BULK and no bias), HEAD_DIM_V (HEAD_DIM), HAS_BIAS,
//            HAS_FAR (as attention_forward, up to 128 wide; HEAD_BY_HEAD is 1, SHARES 0),
//            ORDERED (0; 1: a fixed order of dq's sums too, which need not be zero before), HEAD_BY_HEAD (0; 1 with
//            ORDERED where there is a window), DQ_BULK, DQ_STAGES (1), SENDERS (1), Q_STAGES, DO_STAGES,
//            CONSUMER_REGISTERS, PRODUCER_REGISTERS; SHARES (0): as attention_backward
// Tiling     128 keys a block: grid (ceil(seq_len / 128), num_kv_heads * head_shares * query_shares, batch), early keys
//            (most queries) first (block_order.cuh); HAS_FAR: before these the blocks of the chunks of queries that see
//            first keys (sink_chunk.cuh), ceil(seq_len / chunk_queries) - 1 times sink_tiles of them more in the first
//            dimension; 384 threads, one block a multiprocessor; dynamic shared bytes =
//            (256 + Q_STAGES * 128) * HEAD_DIM + (256 + DO_STAGES * 128) * HEAD_DIM_V + 32768 +
//            DQ_BULK * DQ_STAGES * 256 * min(HEAD_DIM, 128)
//              + (HAS_BIAS ? Q_STAGES * 1024 + DO_STAGES * 1280 + 2048 : HEAD_DIM == 64 ? (Q_STAGES + DO_STAGES) * 1024
//              : DO_STAGES * 512) + (2 * Q_STAGES + 2 * DO_STAGES + 1
//              + 2 * ORDERED * max(DQ_STAGES, SENDERS)) * 8 + 1024
// Numerics   as attention_backward; ORDERED: tiles of keys add to a tile of dq one after the other, the first stores.
//            A block waits for blocks with smaller numbers alone, which have started before it; with HAS_FAR its turn
//            is its place among the tiles of keys that hold a pair that is seen.
// Edges      any seq_len >= 1; padded_len = seq_len rounded up to 64; rows that see nothing give nothing
#include "common/attention_params.cuh"
#include "common/block_order.cuh"
#include "common/hopper_backward.cuh"
#include "common/hopper_backward_wide.cuh"
#include "common/key_gradients.cuh"
#include "common/query_share.cuh"
#include "common/sink_chunk.cuh"

static_assert(!HAS_FAR || !SHARES, "a block has all queries of a tile, or those of a chunk");

// Bytes of the queries and output gradients of the heads computed at a time; their sums of dq take as much of the L2
// cache again. Where the key tiles of a head follow each other through the same queries, the last of those that start
// together waits longest: more heads at a time are fewer tiles of each, and the queries in work still fit the cache.
constexpr u64 SECTION_BYTES = (ORDERED && !HEAD_BY_HEAD ? 64 : 32) << 20;

// Keys of a block: 128 successive ones.
struct DenseKeys {
  const i32* doc_end;
  int first_key, seq_len, window;
#if SHARES
  const QueryShare* share;
#endif
#if HAS_FAR
  const i32* doc_start;
  FarKeys far;
  QueryTiles<BLOCK_Q> tiles;  // of this block

  // As below; a document's first keys expire with it.
  DEVICE int2 entry(int at) const {
    const int key = first_key + at;
    if (key >= seq_len) return make_int2(key, 0);
    return make_int2(key, key < doc_start[key] + far.sinks ? doc_end[key] : min(doc_end[key], key + far.window));
  }
  // {first query that has key `at` in its band, first one that no longer does}; no band is empty at its begin.
  DEVICE int2 band(int at) const {
    const int key = first_key + at, first = key + far.band;
    return make_int2(first, key < seq_len ? max(min(doc_end[key], key + far.band_end), first) : first);
  }
  // The bands as entries for key_range; a key without one counts as padding.
  struct Bands {
    const DenseKeys& keys;
    DEVICE int2 entry(int at) const {
      const int2 band = keys.band(at);
      return make_int2(band.x, band.y > band.x ? band.y : 0);
    }
  };
  DEVICE Bands bands() const { return {*this}; }
#else
  // {position, expire} of key `at` of the tile, 0 .. 127: expire is where its document or its window ends.
  DEVICE int2 entry(int at) const {
    const int key = first_key + at;
    return make_int2(key, key < seq_len ? min(doc_end[key], key + window) : 0);
  }
#endif
  // The position whose rows of k and v are loaded for key `at`; past the end the last one.
  DEVICE int row(int at) const { return min(first_key + at, seq_len - 1); }
  // Sets the range of query tiles in which a key of the tile is seen. Every lane of a warp calls it, and each warp of
  // the block does so by itself.
  DEVICE void find_tiles(BackwardBlock& block) const {
#if HAS_FAR
    block.tiles = tiles;
    block.num_tiles = tiles.count();
#else
    block.first_tile = first_key / BLOCK_Q;
    block.num_tiles = ceil_div(key_range(*this, 0, BLOCK_KV).last_expire, BLOCK_Q) - block.first_tile;
#if ORDERED
    // Keys expire in order, so a query tile's first keys belong to one key tile, and no key tile is skipped.
    block.other_end = first_key == 0 ? 0 : ceil_div(key_range(*this, -BLOCK_KV, BLOCK_KV).last_expire, BLOCK_Q);
#endif
#endif
#if SHARES
    share->take_part(block);
#endif
  }
};

// A block computes the gradients of one tile of 128 keys of a KV head, or its share of them: warpgroup 0 loads,
// warpgroups 1 and 2 have 64 keys each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_attention_backward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
    const bf16* /*q*/, const bf16* k, const bf16* v, const bf16* /*do*/, const float2* row_stats,
    const i32* doc_end,
#if HAS_FAR
    const i32* doc_start,
#endif
#if HAS_BIAS
    const float* delta, const float* base,
#endif
    float* dq_sum,
#if ORDERED
    i32* dq_semaphores,
#endif
#if HAS_FAR
    float* sink_sums, i32* sink_flags,
#endif
    gradient* dk, gradient* dv,
#if HAS_BIAS
    float* ddelta,
#endif
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  __syncthreads();  // the barriers are set up
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const int group_size = num_heads / num_kv_heads;
#if SHARES
  const int head_shares = (int)params.head_shares, query_shares = (int)params.query_shares;
  const BlockPlace place =
      block_place(num_kv_heads * head_shares,
                  share_bytes(params.seq_len, group_size, head_shares, (HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES);
  const QueryShare share(place.head, group_size, head_shares, query_shares);
  const int kv_head = share.kv_head, first_head = share.first_head, own_heads = share.num_heads;
#elif HAS_FAR
  // First come the blocks of chunks, of one KV head after the other.
  const SinkChunks chunks(params);
  const u32 linear = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
            of_chunks = (u32)chunks.num_blocks * num_kv_heads * gridDim.z;
  const bool is_chunk = linear < of_chunks;
  BlockPlace place;
  if (is_chunk) {
    const int unit = (int)linear / chunks.num_blocks;
    place = {(int)linear % chunks.num_blocks, unit % num_kv_heads, unit / num_kv_heads};
  } else {
    place = block_place(num_kv_heads, params.seq_len * group_size * ((HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES,
                        of_chunks, (u32)chunks.num_blocks);
  }
  const int kv_head = place.head, first_head = 0, own_heads = group_size;
#else
  const BlockPlace place =
      block_place(num_kv_heads, params.seq_len * group_size * ((HEAD_DIM + HEAD_DIM_V) * 2), SECTION_BYTES);
  const int kv_head = place.head, first_head = 0, own_heads = group_size;
#endif
  const int batch = place.batch, head = kv_head * group_size + first_head;
  DenseKeys keys;
  keys.doc_end = doc_end + (u64)batch * seq_len;
#if HAS_FAR
  keys.doc_start = doc_start + (u64)batch * seq_len;
  keys.far = FarKeys(params, kv_head);
  const int chunk = place.tile;  // of a chunk's block: its number
  int next_chunk = 0, end_chunk = 0;
  if (is_chunk) {
    if (!chunks.find<BLOCK_KV, BLOCK_Q>(keys.far, keys.doc_start, keys.doc_end, chunk, place.tile, keys.tiles)) return;
  } else {
    const int key = place.tile * BLOCK_KV, last = min(key + BLOCK_KV, seq_len) - 1, start = keys.doc_start[last],
              document_end = keys.doc_end[last];
    keys.tiles = QueryTiles<BLOCK_Q>(keys.far, start, document_end, key, last);
    chunks.keep_own(keys.far, start, key, keys.tiles);
    chunks.blocks_of<BLOCK_KV>(keys.far, start, document_end, key, next_chunk, end_chunk);
  }
#endif
  keys.first_key = place.tile * BLOCK_KV;
  keys.seq_len = seq_len;
  keys.window = (int)(params.window < params.seq_len ? params.window : params.seq_len);
#if SHARES
  keys.share = &share;
#endif
  BackwardBlock block;
  block.q_map = &q_map;
  block.do_map = &do_map;
  block.batch = batch;
  block.head = head;
  block.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  block.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V;
  block.k_stride = (u32)params.k_token_stride;
  block.v_stride = (u32)params.v_token_stride;
  block.stats = row_stats + ((u64)batch * num_heads + head) * params.padded_len;
#if HAS_BIAS
  block.base = base + ((u64)batch * num_kv_heads + kv_head) * params.padded_len;
#endif
  block.dq_sum = dq_sum + ((u64)batch * num_heads + head) * params.padded_len * HEAD_DIM;
#if ORDERED
  block.semaphores = dq_semaphores + ((u64)batch * num_heads + head) * (params.padded_len / BLOCK_Q);
  block.own_turn = place.tile;
#endif
#if HAS_FAR
  block.far = keys.far;
  block.doc_start = keys.doc_start;
  block.doc_end = keys.doc_end;
  block.seq_len = seq_len;
#endif
  block.group_size = own_heads;
  block.padded_len = (int)params.padded_len;
  block.dq_first = 0;
  block.dq_len = (int)params.padded_len;
  block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  block.bias_unit = 1.0f / f32_word(params.softmax_scale);

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    registers_shrink<PRODUCER_REGISTERS>();
    float bias = 0.0f;
#if HAS_BIAS
    const int own_key = keys.first_key + (int)threadIdx.x;
    if (own_key < seq_len)
      bias = in_scores(delta[((u64)batch * num_kv_heads + kv_head) * seq_len + own_key], block.bias_unit);
#endif
    produce(block, keys, bias, shared);
  } else {
    registers_grow<CONSUMER_REGISTERS>();
    const int first_key = keys.first_key + (warpgroup - 1) * 64 + (int)threadIdx.x % 128 / 32 * 16;
    KeyGradients sums;
    consume(block, keys, shared, warpgroup - 1, sums);
#if HAS_FAR
    const u64 first_slot = ((u64)batch * num_kv_heads + kv_head) * chunks.num_blocks;
    const int tile_key = first_key - keys.first_key, lane = (int)threadIdx.x % 32;
    // Where this lane has its first four sums of dk and of dv of a chunk's block.
    auto dk_of = [&](int chunk) {
      return sink_sums + (first_slot + chunk) * (BLOCK_KV * (HEAD_DIM + HEAD_DIM_V)) + tile_key * HEAD_DIM + lane * 4;
    };
    auto dv_of = [&](int chunk) {
      return sink_sums + (first_slot + chunk) * (BLOCK_KV * (HEAD_DIM + HEAD_DIM_V)) + BLOCK_KV * HEAD_DIM +
             tile_key * HEAD_DIM_V + lane * 4;
    };
    if (is_chunk) {
      store_sums(sums.dk, dk_of(chunk));
      store_sums(sums.dv, dv_of(chunk));
      fence_sums();
      barrier_sync(1, NUM_CONSUMERS * 128);  // all sums are written
      if (threadIdx.x == 128) {
        fence_sums();
        write_semaphore(sink_flags + first_slot + chunk, 1);
      }
      return;
    }
    // These blocks have started before this one.
    for (; next_chunk < end_chunk; next_chunk += chunks.tiles) {
      wait_for_turn(true, sink_flags + first_slot + next_chunk, 1);
      fence_sums();
      add_sums(sums.dk, dk_of(next_chunk));
      add_sums(sums.dv, dv_of(next_chunk));
    }
#endif
#if SHARES
    const int places = head_shares * query_shares;
    const u64 head_row = (u64)batch * num_kv_heads + kv_head;
    if (first_key < (int)params.padded_len) {
      float* dk_tile = sum_tile<HEAD_DIM>(dk, head_row, places, share.place, params.padded_len, first_key);
      store_sums(sums.dk, dk_tile);
#if IS_WIDE
      store_sums(sums.dk_rest, dk_tile + HEAD_DIM_V / 8 * 128);
#endif
      store_sums(sums.dv, sum_tile<HEAD_DIM_V>(dv, head_row, places, share.place, params.padded_len, first_key));
    }
#else
    bf16* dk_rows = dk + params.dk_offset + batch * params.dk_batch_stride + (u64)kv_head * HEAD_DIM;
    store_gradient(sums.dk, f32_word(params.softmax_scale), dk_rows, params.dk_token_stride, first_key, seq_len);
#if IS_WIDE
    store_gradient(sums.dk_rest, f32_word(params.softmax_scale), dk_rows + HEAD_DIM_V, params.dk_token_stride,
                   first_key, seq_len);
#endif
    store_gradient(sums.dv, 1.0f, dv + params.dv_offset + batch * params.dv_batch_stride + (u64)kv_head * HEAD_DIM_V,
                   params.dv_token_stride, first_key, seq_len);
#endif
#if HAS_BIAS
#if SHARES
    const u64 bias_row = (((u64)share.place * gridDim.z + batch) * num_kv_heads + kv_head) * seq_len;
#else
    const u64 bias_row = ((u64)batch * num_kv_heads + kv_head) * seq_len;
#endif
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = first_key + (int)threadIdx.x % 32 / 4 + 8 * r;
      if (threadIdx.x % 4 == 0 && own < seq_len) ddelta[bias_row + own] = sums.ddelta[r];
    }
#endif
  }
}
