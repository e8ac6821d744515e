// attention_decode: one new token per row against its key-value cache, dense or sliding window; the token's k and v
// join the cache.
// Math       o_h = sum_j softmax_j(softmax_scale q_h . k_j) v_j over j in [max(0, length + 1 - window_size), length];
//            row `length` of the cache is k_new, v_new, written here (APPEND=1). APPEND=0: over [max(0, length -
//            window_size), length), nothing is written. CHOSEN=0: also over the first num_first j of the cache.
//            HAS_FAR: also over the first sink_tokens j and the head's band of distances (far_keys.cuh), num_first is
//            0; distances count rows of the cache.
//            CHOSEN=1: over the tokens up to `length` of the blocks that are listed for each chooser, as many as there
//            are up to the token's own, the last of them its own or select_size 1; CHOSEN=2: over those of any blocks
//            up to the first -1 or the first behind the token's own; nothing is written. ROTATE: q and k_new are first
//            rotated to position `length` (ROTATE=2: after a norm of each head), as by qk_norm_rope_forward. SINKS: the
//            softmax of head h has the logit sinks[h] too, whose value is zero (gpt-oss, arXiv:2508.10925)
// Layout     q bf16 [batch, num_heads, HEAD_DIM], k_new bf16 [batch, num_kv_heads, HEAD_DIM], v_new bf16 [batch,
//            num_kv_heads, HEAD_DIM_V], each with an element offset and a batch stride (slices of one packed row,
//            multiples of 8); k_cache bf16 [batch, num_kv_heads, capacity, HEAD_DIM], v_cache bf16 [.., HEAD_DIM_V];
//            length i32 [batch], tokens before this one, whose first num_dropped are no longer in the cache (CHOSEN=0);
//            chosen i32 [batch, num_kv_heads, num_chosen]: blocks of select_size keys, ascending, then -1; with CHOSEN,
//            num_kv_heads counts choosers, and the caches have cache_heads of them; q_weight, k_weight bf16 [HEAD_DIM];
//            cos, sin f32 [max_positions, HEAD_DIM / 2], rows table_stride apart (a multiple of 4), a position past
//            them takes the last row; o bf16 [batch, num_heads, HEAD_DIM_V]; partials f32 [batch, num_heads,
//            num_splits, HEAD_DIM_V + 2] (any content, unused and of any size when num_splits = 1); counters u32
//            [batch, num_kv_heads], zero before the first launch, zero again after each; sinks bf16 [num_heads]
// Buffers    q, k_new, v_new, k_cache, v_cache, chosen, q_weight, k_weight, cos, sin, sinks, length, o, partials,
//            counters; APPEND=0: without k_new and v_new; CHOSEN=0: without chosen; ROTATE=0: without the weights, cos
//            and sin, ROTATE=1: without the weights; SINKS=0: without sinks
// Defines    HEAD_DIM, HEAD_DIM_V, APPEND 0|1, CHOSEN 0|1|2 (not 0 with APPEND=0), ROTATE 0|1|2 (1 or 2 with APPEND=1),
//            SINKS 0|1 (1 with CHOSEN=0), HAS_FAR (0; 1 with APPEND=1), NUM_STAGES (4 for HEAD_DIM <= 64, else 2),
//            NUM_WARPS (2 where a head_dim is above 128, else 4 or 8)
// Tiling     grid (num_splits, num_kv_heads * ceil(group_size / 16), batch); 32 NUM_WARPS threads;
//            dynamic shared bytes = 16 * (2 HEAD_DIM + 16)
//              + NUM_WARPS * NUM_STAGES * (32 HEAD_DIM + 32 HEAD_DIM_V + 576);
//            num_splits: eight warps or two blocks a multiprocessor (whole waves matter), a tile of 16 keys a warp at
//            least, at most 4096. Only as many splits as a row's keys need take part; split 0 attends the new token as
//            a tile of its own
// Numerics   logits, softmax and sums in f32, P rounded to bf16 for P V, one rounding at the store; fixed order: two
//            runs are bit-equal
// Edges      rows of different length in one batch; length 0 (only the new token); an empty row with APPEND=0 gives o =
//            0;
//            length = capacity with APPEND=1 attends but does not store: the wrapper refuses it
#include "common/attention_params.cuh"
#include "common/far_keys.cuh"
#include "common/programmatic_launch.cuh"
#include "common/rotary_head.cuh"
#include "common/split_decode.cuh"

static_assert(!(CHOSEN && APPEND), "the token of a choice is in the cache");
static_assert(!ROTATE || APPEND, "a key is rotated before it joins the cache");
static_assert(!SINKS || !CHOSEN, "a query of chosen blocks has no sink");
static_assert(!HAS_FAR || APPEND, "a query that reads a band joins the cache");

struct AttentionDecodeParams : TokenParams {
  u64 capacity, window_size, num_splits;
  u64 cache_heads, num_chosen, select_size, num_dropped, num_first;
  u64 max_positions, table_stride, epsilon;  // ROTATE; epsilon: f32 bits
  u64 sink_tokens, first_distance, last_distance, num_bands, first_band;  // HAS_FAR, as in AttentionFarForwardParams
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, NUM_WARPS > 4 ? 1 : 3)
    attention_decode(const bf16* __restrict__ q,
#if APPEND
                     const bf16* __restrict__ k_new, const bf16* __restrict__ v_new,
#endif
                     bf16* k_cache, bf16* v_cache,
#if CHOSEN
                     const i32* __restrict__ chosen,
#endif
#if ROTATE == 2
                     const bf16* __restrict__ q_weight, const bf16* __restrict__ k_weight,
#endif
#if ROTATE
                     const float* __restrict__ cos, const float* __restrict__ sin,
#endif
#if SINKS
                     const bf16* __restrict__ sinks,
#endif
                     const i32* __restrict__ length, bf16* __restrict__ o,
                     float* partials, u32* counters, const __grid_constant__ AttentionDecodeParams params) {
#include "common/begin_decode.cuh"
  wait_for_previous();
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + kv_head, capacity = params.capacity;
  const i64 query_head = batch * params.num_heads + (i64)kv_head * group_size;  // first query head of the group

  // Keys of this split, in whole tiles of the block.
#if CHOSEN
  const i32 token = min(length[batch], (i32)capacity - 1), select_size = (i32)params.select_size, first_key = 0;
  const i32* blocks = chosen + head * params.num_chosen;
#if CHOSEN == 2
  const i32 own = token / select_size;
  i32 num_blocks = 0;
  while (num_blocks < (i32)params.num_chosen && blocks[num_blocks] >= 0 && blocks[num_blocks] <= own) ++num_blocks;
  const bool has_own = num_blocks > 0 && blocks[num_blocks - 1] == own;
  const i32 num_cached = has_own ? (num_blocks - 1) * select_size + token % select_size + 1 : num_blocks * select_size;
#else
  const i32 whole_blocks = min((i32)params.num_chosen, token / select_size + 1) - 1;
  const i32 num_cached = whole_blocks * select_size + token % select_size + 1;
#endif
  const i64 cache_head = batch * params.cache_heads + kv_head / (params.num_kv_heads / params.cache_heads);
  // Where a chosen key lies in the cache. All keys of a tile are in one block, unless blocks are read key by key.
  const bool by_key = select_size % DECODE_KEYS != 0;
  auto place = [&](i64 key) { return (i64)blocks[key / select_size] * select_size + key % select_size; };
#elif HAS_FAR
  const i32 num_cached = min(length[batch] - (i32)params.num_dropped, (i32)capacity);
  // The token is row num_cached. Its head's band stands before the window, and the first keys before the band, each in
  // tiles of their own.
  const FarKeys far(params, kv_head, params.window_size, capacity + 1);
  const i32 window_key = max(num_cached - far.window + 1, 0), num_first = min(far.sinks, window_key),
            band_low = max(num_cached - far.band_end + 1, num_first),
            num_band = max(min(num_cached - far.band + 1, window_key) - band_low, 0);
  const i32 band_key = window_key - (num_band + DECODE_KEYS - 1) / DECODE_KEYS * DECODE_KEYS;
  const i32 first_key = band_key - (num_first + DECODE_KEYS - 1) / DECODE_KEYS * DECODE_KEYS;
  const i64 cache_head = head;
  auto place = [&](i64 key) {
    return key >= window_key ? key : key >= band_key ? band_low + key - band_key : key - first_key;
  };
#else
  const i32 num_cached = min(length[batch] - (i32)params.num_dropped, (i32)capacity);
  const i32 window_key = (i32)max((i64)0, (i64)num_cached + APPEND - (i64)params.window_size);
  // The first keys stand before the window, in tiles of their own.
  const i32 num_first = min((i32)params.num_first, window_key);
  const i32 first_key = window_key - (num_first + DECODE_KEYS - 1) / DECODE_KEYS * DECODE_KEYS;
  const i64 cache_head = head;
  auto place = [&](i64 key) { return key < window_key ? key - first_key : key; };
#endif
  const i32 num_keys = max(num_cached - first_key, 0);
  const i32 per_split =
      ((num_keys + Decode::SPLIT_KEYS - 1) / Decode::SPLIT_KEYS + num_splits - 1) / num_splits * Decode::SPLIT_KEYS;
  // Splits that have keys; the others end here. A single one writes its output without partial results.
  const int num_live = num_keys > 0 ? (num_keys + per_split - 1) / per_split : 1;
  if (split >= num_live) return;
  const i32 begin = first_key + split * per_split, end = min(begin + per_split, num_cached);
  const i32 warp_begin = begin + warp * DECODE_KEYS;
  const int num_tiles = end > warp_begin ? (end - warp_begin + Decode::SPLIT_KEYS - 1) / Decode::SPLIT_KEYS : 0;
  bf16* row_k = k_cache + cache_head * capacity * HEAD_DIM;
  bf16* row_v = v_cache + cache_head * capacity * HEAD_DIM_V;

  // Load: fill this warp's ring, then the queries.
  const u32 stages = shared_address(shared_bytes) + Decode::Q_BYTES + warp * NUM_STAGES * Decode::STAGE_BYTES;
  // Keys of the tile that begins at `key`, at most 16.
  auto valid = [&](i32 key) {
#if HAS_FAR
    if (key < band_key) return min(first_key + num_first - key, DECODE_KEYS);
    if (key < window_key) return min(band_key + num_band - key, DECODE_KEYS);
#elif !CHOSEN
    if (key < window_key) return min(first_key + num_first - key, DECODE_KEYS);
#endif
    return min(end - key, DECODE_KEYS);
  };
#if APPEND
  // Warp 0 of split 0 takes the new token as one tile more, since this launch does not read row `length` of the cache.
  const bool has_token = split == 0 && warp == 0;
  const bf16* token_k = k_new + params.k_offset + batch * params.k_batch_stride + (i64)kv_head * HEAD_DIM;
  const bf16* token_v = v_new + params.v_offset + batch * params.v_batch_stride + (i64)kv_head * HEAD_DIM_V;
#else
  constexpr bool has_token = false;
#endif
  auto load = [&](int tile) {
    const i32 key = warp_begin + tile * Decode::SPLIT_KEYS;
    const u32 stage = stages + tile % NUM_STAGES * Decode::STAGE_BYTES;
    if (tile < num_tiles) {
#if CHOSEN
      if (by_key) {
        Decode::load_keys(stage, row_k, row_v, [&](int row) { return place(key + row); }, valid(key));
        copy_async_commit();
        return;
      }
#endif
      const i64 row = place(key);
      Decode::load_tile(stage, row_k + row * HEAD_DIM, row_v + row * HEAD_DIM_V, 0, valid(key));
    }
#if APPEND
    if (tile == num_tiles && has_token) Decode::load_tile(stage, token_k, token_v, 0, 1);
#endif
    copy_async_commit();
  };
  for (int tile = 0; tile < NUM_STAGES; tile++) load(tile);
  const bf16* token_q =
      q + params.q_offset + batch * params.q_batch_stride + ((i64)kv_head * group_size + first_row) * HEAD_DIM;
#if ROTATE
  // Queries, and the new key where this split attends it: GROUP lanes a head, each head to its row in shared memory.
  __shared__ __align__(16) bf16 rotated_key[HEAD_DIM];
  const int column = lane % GROUP * LANE_COLUMNS;
  const i64 position = max((i64)0, min((i64)length[batch], (i64)params.max_positions - 1));
  const int num_rotated = num_rows + (split == 0);
  for (int base = warp * HEADS_PER_WARP; base < num_rotated; base += NUM_WARPS * HEADS_PER_WARP) {
    const int row = base + lane / GROUP;
    const bool is_key = row == num_rows, holds = lane % GROUP < LANES && row < num_rotated;
    HeadWords words = {};
#if ROTATE == 2
    HeadWords factors = {};
#endif
    HeadColumns angles = {};
    if (holds) {
      words = load_head(is_key ? token_k : token_q + row * HEAD_DIM, column);
#if ROTATE == 2
      factors = load_head(is_key ? k_weight : q_weight, column);
#endif
      angles = load_angles(cos, sin, position * (i64)params.table_stride + column);
    }
    HeadColumns x = words.columns();
#if ROTATE == 2
    x = weighed(x, factors.columns(), inverse_rms(x, f32_word(params.epsilon)));
#endif
    bf16* to = is_key ? rotated_key : (bf16*)(shared_bytes + row * Decode::K_PITCH);
    if (holds) store_head(to, column, rotated(x, angles));
  }
  Decode::load_q(shared_bytes + num_rows * Decode::K_PITCH, token_q, 0, DECODE_ROWS - num_rows);
#else
  Decode::load_q(shared_bytes, token_q, num_rows, DECODE_ROWS);
#endif
  __syncthreads();  // the queries, and a rotated key, are in shared memory

  // Attend, tile by tile.
  const float scale = f32_word(params.softmax_scale) * LOG2_E;
  Decode decode;
  decode.init();
#if SINKS
  // A sink joins once, in the first warp of the first split, which exists for a row without keys, too.
  const bf16* first_sink = sinks + (i64)kv_head * group_size + first_row;
  if (split == 0 && warp == 0) decode.begin_with([&](int row) { return bf16_to_f32(first_sink[row]); }, num_rows);
#endif
  decode.take_q(shared_address(shared_bytes), num_rows);
  for (int tile = 0; tile < num_tiles + has_token; tile++) {
    copy_async_wait<NUM_STAGES - 1>();
    __syncwarp();  // the copies of all lanes are complete
    const int stage_offset = Decode::Q_BYTES + (warp * NUM_STAGES + tile % NUM_STAGES) * Decode::STAGE_BYTES;
    const bool is_token = tile == num_tiles;
    const int num_valid = is_token ? 1 : valid(warp_begin + tile * Decode::SPLIT_KEYS);
#if ROTATE
    if (is_token) {
      if (lane < HEAD_DIM / 8) ((uint4*)(shared_bytes + stage_offset))[lane] = ((const uint4*)rotated_key)[lane];
      __syncwarp();  // the rotated key has replaced the raw one
    }
#endif
    decode.attend(shared_address(shared_bytes) + stage_offset, scale,
                  lane % DECODE_KEYS < num_valid ? 0.f : -INFINITY_F32);
#if APPEND
    // The token's row of the stage joins the cache.
    if (is_token && first_row == 0 && num_cached < capacity) {
      const uint4* stage = (const uint4*)(shared_bytes + stage_offset);
      for (int chunk = lane; chunk < HEAD_DIM / 8; chunk += 32)
        ((uint4*)(row_k + (i64)num_cached * HEAD_DIM))[chunk] = stage[chunk];
      for (int chunk = lane; chunk < HEAD_DIM_V / 8; chunk += 32)
        ((uint4*)(row_v + (i64)num_cached * HEAD_DIM_V))[chunk] = stage[Decode::K_BYTES / 16 + chunk];
    }
#endif
    __syncwarp();  // all lanes have read the stage before it is filled again
    load(tile + NUM_STAGES);
  }

  // Join the results of the warps, then of the thread blocks that share the keys.
  copy_async_wait<0>();
  __syncthreads();  // no warp reads its stages any more
  float* shared_partials = (float*)(shared_bytes + Decode::Q_BYTES);
  decode.store_warp(shared_partials);
  __syncthreads();  // all partial rows are stored
  decode_finish<HEAD_DIM_V, NUM_WARPS>(shared_partials, partials + query_head * num_splits * (HEAD_DIM_V + 2),
                                       o + query_head * HEAD_DIM_V, counters + head, &last_flag, split, num_live,
                                       first_row, num_rows, group_size, num_live == 1 ? 1 : num_live * row_blocks);
}
