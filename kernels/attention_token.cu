// attention_token: one new token per row against its key-value cache, dense or sliding window, with the bits that
// hopper_attention_forward gives the same token in a whole row (kernels/notes/one-order-of-sums.md); the token's k and v
// join the cache.
// Math       o_h = sum_j softmax_j(softmax_scale q_h . k_j) v_j over j in [max(0, length + 1 - window_size), length];
//            row `length` of the cache is k_new, v_new, written here. ROTATE: q and k_new are first rotated to position
//            `length` (ROTATE=2: after a norm of each head), as by qk_norm_rope_forward. SINKS: the softmax of head h
//            has the logit sinks[h] too, whose value is zero (gpt-oss, arXiv:2508.10925)
// Layout     as attention_decode with APPEND=1, with values as wide as keys
// Buffers    q, k_new, v_new, k_cache, v_cache, q_weight, k_weight, cos, sin, sinks, length, o; ROTATE=0: without the
//            weights, cos and sin, ROTATE=1: without the weights; SINKS=0: without sinks
// Defines    HEAD_DIM (64, 128), ROTATE 0|1|2, SINKS 0|1, NUM_STAGES (at least 3)
// Tiling     grid (num_kv_heads * ceil(group_size / 16), 1, batch); 256 threads; dynamic shared bytes =
//            (16 + NUM_STAGES * 256) * (2 HEAD_DIM + 16) + 16 * 272 + 16 * 544 + 640. Stages of 128 keys whose first
//            position is a multiple of 128, the last stage first. A warp has 16 keys of a stage for S = Q K^T, and an
//            eighth of the columns for O += P V, beside which it computes S of the next stage
// Numerics   as hopper_attention_forward without a bias: the same reference maximum, sums and roundings, stage by stage,
//            each sum over a stage's keys by rising position
// Edges      rows of different length in one batch; length 0 (only the new token); length = capacity attends but does
//            not store: the wrapper refuses it
#include "common/async_copy.cuh"
#include "common/attention_params.cuh"
#include "common/mma.cuh"
#include "common/online_softmax.cuh"
#include "common/programmatic_launch.cuh"
#include "common/quad.cuh"
#include "common/rotary_head.cuh"
#include "common/sink.cuh"

constexpr int NUM_WARPS = 8, NUM_THREADS = NUM_WARPS * 32;
constexpr int TOKEN_ROWS = 16;    // query heads of a block
constexpr int STAGE_KEYS = 128;   // as BLOCK_KV of hopper_attention_forward
constexpr int WARP_KEYS = STAGE_KEYS / NUM_WARPS;
constexpr int WARP_TILES = HEAD_DIM / 8 / NUM_WARPS;  // tiles of 8 columns of o that a warp sums: 1 or 2
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "as hopper_attention_forward");

// Shared memory. 16 bytes of padding make a row an odd number of 16-byte chunks, so that ldmatrix meets eight different
// groups of banks; with a pitch of 136 words four rows of eight weights lie in 32 different banks.
constexpr int PITCH = HEAD_DIM * 2 + 16, STAGE_BYTES = STAGE_KEYS * PITCH;
constexpr int WEIGHT_PITCH = STAGE_KEYS * 2 + 16, SUM_PITCH = 136;
constexpr int K_AT = TOKEN_ROWS * PITCH, V_AT = K_AT + NUM_STAGES * STAGE_BYTES;
constexpr int WEIGHTS_AT = V_AT + NUM_STAGES * STAGE_BYTES;          // bf16 [TOKEN_ROWS, STAGE_KEYS]
constexpr int UNROUNDED_AT = WEIGHTS_AT + TOKEN_ROWS * WEIGHT_PITCH;  // f32 [TOKEN_ROWS, STAGE_KEYS]
constexpr int MAXIMA_AT = UNROUNDED_AT + TOKEN_ROWS * SUM_PITCH * 4;  // f32 [TOKEN_ROWS, NUM_WARPS]
constexpr int FACTORS_AT = MAXIMA_AT + TOKEN_ROWS * NUM_WARPS * 4;    // f32 [TOKEN_ROWS]
constexpr int INVERSES_AT = FACTORS_AT + TOKEN_ROWS * 4;              // f32 [TOKEN_ROWS]
constexpr int SHARED_BYTES = INVERSES_AT + TOKEN_ROWS * 4;
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct AttentionTokenParams : TokenParams {
  u64 capacity, window_size, num_dropped;
  u64 max_positions, table_stride, epsilon;  // ROTATE; epsilon: f32 bits
};

// The keys of a row that its token sees, and where they lie.
struct SeenKeys {
  const bf16* k;  // the row's cache of its KV head
  const bf16* v;
  int token, lowest;  // positions: the token's own, and the first that it sees
  int num_dropped;    // position of the cache's first row

  // Starts the copies of the stage whose first key is at position `first` to its slot at shared addresses `to_k` and
  // `to_v`. Keys that are not seen arrive as zeros; the token's own row is left out, because its key and value are not
  // in the cache yet. All threads of the block call it.
  DEVICE void load(u32 to_k, u32 to_v, int first) const {
    constexpr int CHUNKS = HEAD_DIM / 8, ROWS = NUM_THREADS / CHUNKS;  // rows that the block copies at once
    const int chunk = (int)threadIdx.x % CHUNKS, row = (int)threadIdx.x / CHUNKS;
#pragma unroll
    for (int i = 0; i < STAGE_KEYS / ROWS; i++) {
      const int position = first + row + i * ROWS;
      if (position == token) continue;
      const bool seen = lowest <= position && position < token;
      const i64 at = seen ? (i64)(position - num_dropped) * HEAD_DIM + chunk * 8 : 0;
      const u32 offset = (u32)((row + i * ROWS) * PITCH + chunk * 16);
      copy_async_16(to_k + offset, k + at, seen ? 16 : 0);
      copy_async_16(to_v + offset, v + at, seen ? 16 : 0);
    }
  }
};

// A warp's scores of its 16 keys: s = Q K^T for the queries at shared address `q` (this lane's) and the keys at `k`.
DEVICE void score_keys(float (&s)[2][4], const u32 (&q)[HEAD_DIM / 16][4], u32 k) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    u32 b[4];
    load_matrix_x4(b, k + step * 32);
    mma_bf16(s[0], q[step], b[0], b[1]);
    mma_bf16(s[1], q[step], b[2], b[3]);
  }
}

// o += P V over a stage's keys, by rising position: weights at shared address `weights`, the warp's columns of the
// values at `v` (both this lane's).
DEVICE void weigh_values(float (&o)[WARP_TILES][4], u32 weights, u32 v) {
#pragma unroll
  for (int step = 0; step < STAGE_KEYS / 16; step += 2) {
    u32 a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) load_matrix_x4(a[i], weights + (step + i) * 32);
    if constexpr (WARP_TILES == 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) load_matrix_x4_transposed(b[i], v + (step + i) * 16 * PITCH);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma_bf16(o[0], a[i], b[i][0], b[i][1]);
        mma_bf16(o[WARP_TILES - 1], a[i], b[i][2], b[i][3]);
      }
    } else {
      load_matrix_x4_transposed(b[0], v + step * 16 * PITCH);
      mma_bf16(o[0], a[0], b[0][0], b[0][1]);
      mma_bf16(o[0], a[1], b[0][2], b[0][3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_token(const bf16* __restrict__ q, const bf16* __restrict__ k_new, const bf16* __restrict__ v_new,
                    bf16* k_cache, bf16* v_cache,
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
                    const __grid_constant__ AttentionTokenParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const u32 shared = shared_address(shared_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane / 4, t = lane % 4;
  const int group_size = (int)(params.num_heads / params.num_kv_heads),
            row_blocks = (group_size + TOKEN_ROWS - 1) / TOKEN_ROWS;
  const int kv_head = blockIdx.x / row_blocks, first_row = blockIdx.x % row_blocks * TOKEN_ROWS;
  const int num_rows = min(group_size - first_row, TOKEN_ROWS);
  wait_for_previous();
  const i64 batch = blockIdx.z, capacity = params.capacity;
  const i64 cache_row = (batch * params.num_kv_heads + kv_head) * capacity * HEAD_DIM;
  const int token = length[batch];
  const i64 slot = (i64)token - (i64)params.num_dropped;  // where the token joins the cache
  const i64 window = (i64)params.window_size;
  const SeenKeys seen = {k_cache + cache_row, v_cache + cache_row, token, (int)max((i64)0, (i64)token + 1 - window),
                         (int)params.num_dropped};
  const int last_stage = token / STAGE_KEYS, num_stages = last_stage - seen.lowest / STAGE_KEYS + 1;
  auto stage_slot = [&](int it) { return (u32)(it % NUM_STAGES * STAGE_BYTES); };
  auto load = [&](int it) {
    const u32 at = shared + stage_slot(it);
    if (it < num_stages) seen.load(at + K_AT, at + V_AT, (last_stage - it) * STAGE_KEYS);
    copy_async_commit();
  };
#pragma unroll
  for (int it = 0; it < NUM_STAGES; it++) load(it);

  // The token's queries, key and value, in shared memory and in the cache.
  const bf16* token_q =
      q + params.q_offset + batch * params.q_batch_stride + ((i64)kv_head * group_size + first_row) * HEAD_DIM;
  const bf16* token_k = k_new + params.k_offset + batch * params.k_batch_stride + (i64)kv_head * HEAD_DIM;
  const bf16* token_v = v_new + params.v_offset + batch * params.v_batch_stride + (i64)kv_head * HEAD_DIM;
  const int token_row = token % STAGE_KEYS * PITCH;
  const bool joins = first_row == 0 && slot < capacity;
  bf16* cached_k = k_cache + cache_row + slot * HEAD_DIM;
  bf16* cached_v = v_cache + cache_row + slot * HEAD_DIM;
#if ROTATE
  // GROUP lanes a head, each head to its row.
  const int column = lane % GROUP * LANE_COLUMNS;
  const i64 position = max((i64)0, min((i64)token, (i64)params.max_positions - 1));
  for (int base = warp * HEADS_PER_WARP; base < num_rows + 1; base += NUM_WARPS * HEADS_PER_WARP) {
    const int row = base + lane / GROUP;
    const bool is_key = row == num_rows, holds = lane % GROUP < LANES && row < num_rows + 1;
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
    x = rotated(x, angles);
    if (holds) store_head((bf16*)(shared_bytes + (is_key ? K_AT + token_row : row * PITCH)), column, x);
    if (holds && is_key && joins) store_head(cached_k, column, x);
  }
#endif
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = thread; i < TOKEN_ROWS * CHUNKS; i += NUM_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (!ROTATE && row < num_rows) {
      *(uint4*)(shared_bytes + row * PITCH + chunk * 16) = load_16_bytes(token_q + row * HEAD_DIM + chunk * 8);
    } else if (row >= num_rows) {
      *(uint4*)(shared_bytes + row * PITCH + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  if (thread < 2 * CHUNKS && (thread >= CHUNKS || !ROTATE)) {
    const bool is_value = thread >= CHUNKS;
    const int chunk = thread % CHUNKS;
    const uint4 words = load_16_bytes((is_value ? token_v : token_k) + chunk * 8);
    *(uint4*)(shared_bytes + (is_value ? V_AT : K_AT) + token_row + chunk * 16) = words;
    if (joins) store_16_bytes((is_value ? cached_v : cached_k) + chunk * 8, words);
  }
  // The rows of weights that no query has stay zero.
  for (int i = thread; i < TOKEN_ROWS * WEIGHT_PITCH / 16; i += NUM_THREADS)
    *(uint4*)(shared_bytes + WEIGHTS_AT + i * 16) = make_uint4(0, 0, 0, 0);

  copy_async_wait<NUM_STAGES - 1>();
  __syncthreads();  // the first stage, the token and its queries are there

  u32 queries[HEAD_DIM / 16][4];
  const u32 q_lane = shared + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) load_matrix_x4(queries[step], q_lane + step * 32);
  const u32 k_lane = shared + K_AT + (warp * WARP_KEYS + (lane & 7) + (lane >> 4) * 8) * PITCH + ((lane >> 3) & 1) * 16;
  const u32 weights_lane = shared + WEIGHTS_AT + (lane & 15) * WEIGHT_PITCH + (lane >> 4) * 16;
  // Two tiles of columns: the matrices of x4 are 16 keys by 16 columns; one: 32 keys by 8 columns.
  const u32 v_lane = shared + V_AT + (WARP_TILES == 2 ? lane & 15 : lane) * PITCH + warp * WARP_TILES * 16 +
                     (WARP_TILES == 2 ? (lane >> 4) * 16 : 0);
  float* maxima = (float*)(shared_bytes + MAXIMA_AT);
  float* factors = (float*)(shared_bytes + FACTORS_AT);
  float* inverses = (float*)(shared_bytes + INVERSES_AT);
  float* unrounded = (float*)(shared_bytes + UNROUNDED_AT);

  const float logit_scale = f32_word(params.softmax_scale) * LOG2_E;
  float out[WARP_TILES][4] = {};
  float maximum[2] = {NO_KEY_MAXIMUM, NO_KEY_MAXIMUM};
  // Threads up to 8 num_rows sum a row's weights, each over the columns that a lane of the whole row's kernel has and
  // that are even, or odd.
  const int sum_row = thread / 8, sum_column = thread % 8;
  float total = 0.f;

  float s[2][4] = {};
  score_keys(s, queries, k_lane);
  for (int it = 0; it < num_stages; it++) {
    // Mask, then each row's largest score of this warp's keys.
    const int first_key = (last_stage - it) * STAGE_KEYS + warp * WARP_KEYS + 2 * t;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int key = first_key + n * 8 + x % 2;
        if (key > token || key < seen.lowest) s[n][x] = -INFINITY_F32;
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float largest = quad_max(fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
      if (t == 0) maxima[(g + 8 * r) * NUM_WARPS + warp] = largest;
    }
    __syncthreads();  // maxima are stored, and the last stage's values and weights have been read
    if (it > 0) load(it - 1 + NUM_STAGES);

    // Weights, unrounded for their sum and rounded for the values.
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r;
      float largest = maxima[row * NUM_WARPS];
#pragma unroll
      for (int other = 1; other < NUM_WARPS; other++) largest = fmaxf(largest, maxima[row * NUM_WARPS + other]);
      float factor = first_maximum(maximum[r], largest, logit_scale);
      const float growth = maximum_growth(logit_below(largest, logit_scale, maximum[r])), weigh_from = maximum[r];
      if (growth > 0.f) factor = exp2_fast(-growth);
      maximum[r] += growth;
      float weight[2][2];
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int x = 0; x < 2; x++)
          weight[n][x] = exp2_fast(logit_below(s[n][2 * r + x], logit_scale, weigh_from) - growth);
      if (row < num_rows) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int at = warp * WARP_KEYS + n * 8 + 2 * t;
          *(float2*)(unrounded + row * SUM_PITCH + at) = make_float2(weight[n][0], weight[n][1]);
          *(u32*)(shared_bytes + WEIGHTS_AT + row * WEIGHT_PITCH + at * 2) = pack_bf16(weight[n][0], weight[n][1]);
        }
        if (warp == 0 && t == 0) factors[row] = factor;
      }
#pragma unroll
      for (int n = 0; n < WARP_TILES; n++) {
        out[n][2 * r] *= factor;
        out[n][2 * r + 1] *= factor;
      }
    }
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();  // weights are stored, and the next stage has arrived

    if (it + 1 < num_stages) {
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) s[n][x] = 0.f;
      score_keys(s, queries, k_lane + stage_slot(it + 1));
    }
    weigh_values(out, weights_lane, v_lane + stage_slot(it));
    if (warp * 4 < num_rows) {  // four rows a warp
      const bool exists = sum_row < num_rows;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < STAGE_KEYS / 8; n++)
        if (exists) sum += unrounded[sum_row * SUM_PITCH + n * 8 + sum_column];
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (exists) total = sum_of_stages(total, factors[sum_row], sum);
    }
  }

  // Each row's sum over the four lanes that have its columns.
  if (warp < 4) {
    total += __shfl_xor_sync(~0u, total, 2);
    total += __shfl_xor_sync(~0u, total, 4);
    if (sum_column == 0 && sum_row < num_rows) inverses[sum_row] = total != 0.f ? 1.f / total : 0.f;
#if SINKS
    if (sum_column == 0 && sum_row < num_rows) factors[sum_row] = total;
#endif
  }
  __syncthreads();  // the inverses are stored
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = g + 8 * r;
    if (row >= num_rows) continue;
    const float inverse = inverses[row];
    const i64 head = (i64)kv_head * group_size + first_row + row;
    bf16* to = o + (batch * params.num_heads + head) * HEAD_DIM + warp * WARP_TILES * 8 + 2 * t;
#if SINKS
    const float sum = factors[row], lse = sum != 0.f ? maximum[r] * LN_2 + logf(sum) : -INFINITY_F32;
    const float beside_sink = with_sink(lse, bf16_to_f32(sinks[head])).factor;
#endif
#pragma unroll
    for (int n = 0; n < WARP_TILES; n++) {
      u32 pair = pack_bf16(out[n][2 * r] * inverse, out[n][2 * r + 1] * inverse);
#if SINKS
      pair = pack_bf16(bf16_low(pair) * beside_sink, bf16_high(pair) * beside_sink);
#endif
      *(u32*)(to + n * 8) = pair;
    }
  }
}
