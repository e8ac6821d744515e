// hopper_attention_token: one new token per row against its key-value cache, dense or sliding window, with the bits
// that hopper_attention_forward gives the same token in a whole row (kernels/notes/one-order-of-sums.md); the token's k
// and v join the cache.
// Math       o_h = sum_j softmax_j(softmax_scale q_h . k_j) v_j over j in [max(0, length + 1 - window_size), length];
//            row `length` of the cache is k_new, v_new, written here. HAS_FAR: also over the first sink_tokens j and
//            the head's band of distances (far_keys.cuh). ROTATE: q and k_new are first rotated to position `length`
//            (ROTATE=2: after a norm of each head), as by qk_norm_rope_forward. SINKS: the softmax of head h has the
//            logit sinks[h] too, whose value is zero (gpt-oss, arXiv:2508.10925)
// Layout     as attention_decode with APPEND=1, with values as wide as keys
// Buffers    q, k_new, v_new, k_cache, v_cache, q_weight, k_weight, cos, sin, sinks, length, o; ROTATE=0: without the
//            weights, cos and sin, ROTATE=1: without the weights; SINKS=0: without sinks
// Defines    HEAD_DIM (64, 128), ROTATE 0|1|2, SINKS 0|1, HAS_FAR (0), CLUSTER (1, 8), NUM_STAGES (2, or 3 with
//            CLUSTER=1)
// Tiling     grid (CLUSTER * num_kv_heads * ceil(group_size / 16), 1, batch); 256 threads; dynamic shared bytes:
//            sieve-gpu/src/attention/token.rs. The CLUSTER blocks of a row's head go through stages of 128 keys whose
//            first position is a multiple of 128, the last stage first, CLUSTER of them at a time; with HAS_FAR only
//            the stages in which the head sees a key. For S = Q K^T a block has a stage of its own, a warp 16 keys of
//            it. The weights of all stages then go to every block, because for O += P V a block has a share of the
//            columns and adds all keys to it, one after the other. Beside O += P V it computes S of its next stage.
//            More blocks read the cache faster, and change no bit
// Numerics   as hopper_attention_forward without a bias: the same reference maximum, sums and roundings, stage by
//            stage, each sum over a stage's keys by rising position
// Edges      rows of different length in one batch; length 0 (only the new token); length = capacity attends but does
//            not store: the wrapper refuses it; keys before num_dropped are not seen. HAS_FAR: num_dropped is a
//            multiple of 128, dropped behind whole stages of first keys; positions are rows of the cache
#include "common/async_copy.cuh"
#include "common/attention_params.cuh"
#include "common/cluster.cuh"
#include "common/far_keys.cuh"
#include "common/mma.cuh"
#include "common/online_softmax.cuh"
#include "common/programmatic_launch.cuh"
#include "common/quad.cuh"
#include "common/rotary_head.cuh"
#include "common/sink.cuh"

constexpr int NUM_WARPS = 8, NUM_THREADS = NUM_WARPS * 32;
constexpr int TOKEN_ROWS = 16;  // query heads of a block
constexpr int STAGE_KEYS = 128;  // as BLOCK_KV of hopper_attention_forward
constexpr int STEP_KEYS = CLUSTER * STAGE_KEYS;  // keys of a step, in which each block of the cluster has a stage
constexpr int WARP_KEYS = STAGE_KEYS / NUM_WARPS;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "as hopper_attention_forward");

// The block's share of the columns of o, in tiles of 8, and the warps that have them.
constexpr int COLUMNS = HEAD_DIM / CLUSTER, WARP_TILES = max_int(1, COLUMNS / 8 / NUM_WARPS);
constexpr int COLUMN_WARPS = COLUMNS / 8 / WARP_TILES;
static_assert(WARP_TILES <= 2 && COLUMN_WARPS <= NUM_WARPS, "a warp has one or two tiles");

// Shared memory. Rows are an odd number of 16-byte chunks, so that ldmatrix meets eight different groups of banks; with
// a pitch of 136 words four rows of eight weights lie in 32 different banks.
__host__ __device__ constexpr int odd_chunks(int bytes) { return bytes / 16 % 2 ? bytes : bytes + 16; }
constexpr int PITCH = odd_chunks(HEAD_DIM * 2), V_PITCH = odd_chunks(COLUMNS * 2);
constexpr int K_BYTES = STAGE_KEYS * PITCH, V_BYTES = STEP_KEYS * V_PITCH;
constexpr int WEIGHT_PITCH = odd_chunks(STEP_KEYS * 2), SUM_PITCH = 136;
constexpr int K_AT = TOKEN_ROWS * PITCH, V_AT = K_AT + NUM_STAGES * K_BYTES;
constexpr int WEIGHTS_AT = V_AT + NUM_STAGES * V_BYTES;               // bf16 [TOKEN_ROWS, STEP_KEYS]
constexpr int UNROUNDED_AT = WEIGHTS_AT + TOKEN_ROWS * WEIGHT_PITCH;  // f32 [TOKEN_ROWS, STAGE_KEYS], of its own stage
constexpr int MAXIMA_AT = UNROUNDED_AT + TOKEN_ROWS * SUM_PITCH * 4;  // f32 [TOKEN_ROWS, NUM_WARPS], of its own stage
constexpr int LARGEST_AT = MAXIMA_AT + TOKEN_ROWS * NUM_WARPS * 4;    // f32 [CLUSTER, TOKEN_ROWS]
constexpr int FACTORS_AT = LARGEST_AT + CLUSTER * TOKEN_ROWS * 4;     // f32 [CLUSTER, TOKEN_ROWS]
constexpr int SUMS_AT = FACTORS_AT + CLUSTER * TOKEN_ROWS * 4;        // f32 [CLUSTER, TOKEN_ROWS, 4]
constexpr int INVERSES_AT = SUMS_AT + CLUSTER * TOKEN_ROWS * 16;      // f32 [TOKEN_ROWS]
constexpr int TOTALS_AT = INVERSES_AT + TOKEN_ROWS * 4;               // f32 [TOKEN_ROWS]
constexpr int SHARED_BYTES = TOTALS_AT + TOKEN_ROWS * 4;
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct AttentionTokenParams : TokenParams {
  u64 capacity, window_size, num_dropped;
  u64 max_positions, table_stride, epsilon;  // ROTATE; epsilon: f32 bits
  u64 sink_tokens, first_distance, last_distance, num_bands, first_band;  // HAS_FAR, as in AttentionFarForwardParams
};

// Waits for all threads of the block, or of the cluster.
DEVICE void sync_blocks() {
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();
}

// Stores a word at `shared` in every block of the cluster.
DEVICE void store_everywhere(u32 shared, float value) {
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) {
    if constexpr (CLUSTER > 1) store_cluster_32(of_block(shared, block), __float_as_uint(value));
    else store_shared_32(shared, __float_as_uint(value));
  }
}

// The keys of a row that its token sees, and where they lie.
struct SeenKeys {
  const bf16* k;  // the row's cache of its KV head
  const bf16* v;
  int token, lowest;  // positions: the token's own, and the first that it sees
  int num_dropped;    // position of the cache's first row
#if HAS_FAR
  FarKeys far;
#endif

  // Starts the copies of COUNT keys from position `first` on, WIDTH columns of each from `from` on, to shared address
  // `to`. Keys that are not seen arrive as zeros; the token's own row is left out, because its key and value are not in
  // the cache yet. All threads of the block call it.
  template <int COUNT, int WIDTH, int ROW_PITCH>
  DEVICE void copy(u32 to, const bf16* from, int first) const {
    constexpr int CHUNKS = WIDTH / 8, ROWS = NUM_THREADS / CHUNKS;  // rows that the block copies at once
    const int chunk = (int)threadIdx.x % CHUNKS, row = (int)threadIdx.x / CHUNKS;
#pragma unroll
    for (int i = 0; i < max_int(1, COUNT / ROWS); i++) {
      const int at = row + i * ROWS, position = first + at;
      if (position == token || at >= COUNT) continue;
#if HAS_FAR
      const bool seen = far.sees(token, 0, position);
#else
      const bool seen = lowest <= position && position < token;
#endif
      const bf16* source = from + (seen ? (i64)(position - num_dropped) * HEAD_DIM + chunk * 8 : 0);
      copy_async_16(to + at * ROW_PITCH + chunk * 16, source, seen ? 16 : 0);
    }
  }
};

// A warp's scores of its 16 keys: s = Q K^T for the queries in `q` and the keys at this lane's shared address `k`.
DEVICE void score_keys(float (&s)[2][4], const u32 (&q)[HEAD_DIM / 16][4], u32 k) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int x = 0; x < 4; x++) s[n][x] = 0.f;
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
  constexpr int STEPS = STAGE_KEYS / 16, LOADS = STEPS * WARP_TILES / 2;
  u32 a[STEPS][4], b[LOADS][4];  // loaded before the first product, since the sums wait for each other
#pragma unroll
  for (int step = 0; step < STEPS; step++) load_matrix_x4(a[step], weights + step * 32);
#pragma unroll
  for (int i = 0; i < LOADS; i++) load_matrix_x4_transposed(b[i], v + i * (STAGE_KEYS / LOADS) * V_PITCH);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    if constexpr (WARP_TILES == 2) {
      mma_bf16(o[0], a[step], b[step][0], b[step][1]);
      mma_bf16(o[WARP_TILES - 1], a[step], b[step][2], b[step][3]);
    } else {
      mma_bf16(o[0], a[step], b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    hopper_attention_token(const bf16* __restrict__ q, const bf16* __restrict__ k_new, const bf16* __restrict__ v_new,
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
  const int rank = (int)blockIdx.x % CLUSTER, first_column = rank * COLUMNS;
  const int group_size = (int)(params.num_heads / params.num_kv_heads),
            row_blocks = (group_size + TOKEN_ROWS - 1) / TOKEN_ROWS;
  const int kv_head = blockIdx.x / CLUSTER / row_blocks, first_row = blockIdx.x / CLUSTER % row_blocks * TOKEN_ROWS;
  const int num_rows = min(group_size - first_row, TOKEN_ROWS);
  wait_for_previous();
  const i64 batch = blockIdx.z, capacity = params.capacity;
  const i64 cache_row = (batch * params.num_kv_heads + kv_head) * capacity * HEAD_DIM;
#if HAS_FAR
  // The cache is a text without the tokens that were dropped, which are whole stages that the token does not see.
  const int before = length[batch], token = before - (int)params.num_dropped, num_dropped = 0;
#else
  const int before = length[batch], token = before, num_dropped = (int)params.num_dropped;
#endif
  const i64 slot = (i64)token - num_dropped;  // where the token joins the cache
#if HAS_FAR
  const FarKeys far(params, kv_head, params.window_size, capacity + 1);
  const SeenKeys seen = {k_cache + cache_row, v_cache + cache_row, token, 0, num_dropped, far};
  const KeyTiles<STAGE_KEYS> stages(far, 0, token, token, token);
  const int num_stages = stages.count, num_steps = (num_stages + CLUSTER - 1) / CLUSTER;
  // The first position of stage `block` of a step. A step's stages past the last are before the row, and are not seen.
  auto first_of = [&](int step, int block) {
    const int at = step * CLUSTER + block;
    return (at < num_stages ? stages.tile(at) : -1) * STAGE_KEYS;
  };
#else
  const i64 window_low = max((i64)0, (i64)token + 1 - (i64)params.window_size);
  const SeenKeys seen = {k_cache + cache_row, v_cache + cache_row, token,
                         (int)min((i64)token, max(window_low, (i64)num_dropped)), num_dropped};
  const int last_stage = token / STAGE_KEYS, num_stages = last_stage - seen.lowest / STAGE_KEYS + 1,
            num_steps = (num_stages + CLUSTER - 1) / CLUSTER;
  // The first position of stage `block` of a step. Stages past the row's first are before it, and are not seen.
  auto first_of = [&](int step, int block) { return (last_stage - step * CLUSTER - block) * STAGE_KEYS; };
#endif
  auto load_keys = [&](int step) {
    const u32 to = shared + K_AT + step % NUM_STAGES * K_BYTES;
    if (step < num_steps) seen.copy<STAGE_KEYS, HEAD_DIM, PITCH>(to, seen.k, first_of(step, rank));
    copy_async_commit();
  };
  auto load_values = [&](int step) {
    const u32 to = shared + V_AT + step % NUM_STAGES * V_BYTES;
    if (step < num_steps)
#pragma unroll
      for (int block = 0; block < CLUSTER; block++)
        seen.copy<STAGE_KEYS, COLUMNS, V_PITCH>(to + block * STAGE_KEYS * V_PITCH, seen.v + first_column,
                                                first_of(step, block));
    copy_async_commit();
  };
#pragma unroll
  for (int step = 0; step < NUM_STAGES; step++) load_keys(step), load_values(step);

  // The token's queries, key and value, in shared memory and in the cache. Its key is the first block's.
  const bf16* token_q =
      q + params.q_offset + batch * params.q_batch_stride + ((i64)kv_head * group_size + first_row) * HEAD_DIM;
  const bf16* token_k = k_new + params.k_offset + batch * params.k_batch_stride + (i64)kv_head * HEAD_DIM;
  const bf16* token_v = v_new + params.v_offset + batch * params.v_batch_stride + (i64)kv_head * HEAD_DIM;
  const bool joins = first_row == 0 && slot < capacity, has_key = rank == 0;
  unsigned char* key_row = shared_bytes + K_AT + token % STAGE_KEYS * PITCH;
  unsigned char* value_row = shared_bytes + V_AT + token % STAGE_KEYS * V_PITCH;
  bf16* cached_k = k_cache + cache_row + slot * HEAD_DIM;
  bf16* cached_v = v_cache + cache_row + slot * HEAD_DIM + first_column;
#if ROTATE
  // GROUP lanes a head, each head to its row.
  const int column = lane % GROUP * LANE_COLUMNS, num_rotated = num_rows + has_key;
  const i64 position = max((i64)0, min((i64)before, (i64)params.max_positions - 1));
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
    x = rotated(x, angles);
    if (holds) store_head((bf16*)(is_key ? key_row : shared_bytes + row * PITCH), column, x);
    if (holds && is_key && joins) store_head(cached_k, column, x);
  }
#endif
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = thread; i < TOKEN_ROWS * CHUNKS; i += NUM_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    uint4* to = (uint4*)(shared_bytes + row * PITCH + chunk * 16);
    if (row >= num_rows) *to = make_uint4(0, 0, 0, 0);
    else if (!ROTATE) *to = load_16_bytes(token_q + row * HEAD_DIM + chunk * 8);
  }
  if (!ROTATE && has_key && thread < CHUNKS) {
    const uint4 words = load_16_bytes(token_k + thread * 8);
    *(uint4*)(key_row + thread * 16) = words;
    if (joins) store_16_bytes(cached_k + thread * 8, words);
  }
  if (thread < COLUMNS / 8) {
    const uint4 words = load_16_bytes(token_v + first_column + thread * 8);
    *(uint4*)(value_row + thread * 16) = words;
    if (joins) store_16_bytes(cached_v + thread * 8, words);
  }
  // The rows of weights that no query has stay zero.
  for (int i = thread; i < TOKEN_ROWS * WEIGHT_PITCH / 16; i += NUM_THREADS)
    *(uint4*)(shared_bytes + WEIGHTS_AT + i * 16) = make_uint4(0, 0, 0, 0);

  copy_async_wait<2 * NUM_STAGES - 1>();
  sync_blocks();  // the first stage, the token and its queries are there; every block of the cluster runs

  u32 queries[HEAD_DIM / 16][4];
  const u32 q_lane = shared + (lane & 15) * PITCH + (lane >> 4) * 16;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) load_matrix_x4(queries[step], q_lane + step * 32);
  const u32 k_lane = shared + K_AT + (warp * WARP_KEYS + (lane & 7) + (lane >> 4) * 8) * PITCH + ((lane >> 3) & 1) * 16;
  const u32 weights_lane = shared + WEIGHTS_AT + (lane & 15) * WEIGHT_PITCH + (lane >> 4) * 16;
  // Two tiles of columns: the matrices of x4 are 16 keys by 16 columns; one: 32 keys by 8 columns.
  const u32 v_lane = shared + V_AT + (WARP_TILES == 2 ? lane & 15 : lane) * V_PITCH + warp * WARP_TILES * 16 +
                     (WARP_TILES == 2 ? (lane >> 4) * 16 : 0);
  float* maxima = (float*)(shared_bytes + MAXIMA_AT);
  float* largest_of = (float*)(shared_bytes + LARGEST_AT);
  float* factors = (float*)(shared_bytes + FACTORS_AT);
  float* sums = (float*)(shared_bytes + SUMS_AT);
  float* inverses = (float*)(shared_bytes + INVERSES_AT);
  float* totals = (float*)(shared_bytes + TOTALS_AT);
  float* unrounded = (float*)(shared_bytes + UNROUNDED_AT);

  const float logit_scale = f32_word(params.softmax_scale) * LOG2_E;
  float out[WARP_TILES][4] = {};
  float maximum[2] = {NO_KEY_MAXIMUM, NO_KEY_MAXIMUM};
  // Eight threads sum a row's weights of a stage, each over the columns that a lane of the whole row's kernel has and
  // that are even, or odd. Four threads keep a row's totals over the stages.
  const int sum_row = thread / 8, sum_column = thread % 8;
  float total = 0.f;

  float s[2][4];
  score_keys(s, queries, k_lane);
  for (int step = 0; step < num_steps; step++) {
    // Mask, then each row's largest score of the block's own stage, to all blocks.
    const int first_key = first_of(step, rank) + warp * WARP_KEYS + 2 * t;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int key = first_key + n * 8 + x % 2;
#if HAS_FAR
        const bool is_hidden = !far.sees(token, 0, key);
#else
        const bool is_hidden = key > token || key < seen.lowest;
#endif
        if (is_hidden) s[n][x] = -INFINITY_F32;
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float largest = quad_max(fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
      if (t == 0) maxima[(g + 8 * r) * NUM_WARPS + warp] = largest;
    }
    __syncthreads();  // the warps' maxima are stored, and the stage's keys have been read
    load_keys(step + NUM_STAGES);
    if (thread < num_rows) {
      float largest = maxima[thread * NUM_WARPS];
#pragma unroll
      for (int other = 1; other < NUM_WARPS; other++) largest = fmaxf(largest, maxima[thread * NUM_WARPS + other]);
      store_everywhere(shared + LARGEST_AT + (rank * TOKEN_ROWS + thread) * 4, largest);
    }
    sync_blocks();  // each stage's largest scores are everywhere, and the last step's weights have been read

    // The reference maximum from stage to stage, and the weights of the block's own: unrounded for their sum, rounded
    // for the values.
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = g + 8 * r;
      if (row >= num_rows) continue;
      float weigh_from = 0.f, weigh_growth = 0.f;
#pragma unroll
      for (int block = 0; block < CLUSTER; block++) {
        const float largest = largest_of[block * TOKEN_ROWS + row];
        float factor = first_maximum(maximum[r], largest, logit_scale);
        const float growth = maximum_growth(logit_below(largest, logit_scale, maximum[r]));
        if (growth > 0.f) factor = exp2_fast(-growth);
        if (block == rank) weigh_from = maximum[r], weigh_growth = growth;
        maximum[r] += growth;
        if (warp == 0 && t == 0) factors[block * TOKEN_ROWS + row] = factor;
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int at = warp * WARP_KEYS + n * 8 + 2 * t;
        float weight[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
          weight[x] = exp2_fast(logit_below(s[n][2 * r + x], logit_scale, weigh_from) - weigh_growth);
        *(float2*)(unrounded + row * SUM_PITCH + at) = make_float2(weight[0], weight[1]);
        *(u32*)(shared_bytes + WEIGHTS_AT + row * WEIGHT_PITCH + (rank * STAGE_KEYS + at) * 2) =
            pack_bf16(weight[0], weight[1]);
      }
    }
    __syncthreads();  // the block's weights are stored
    if constexpr (CLUSTER > 1) {
      constexpr int ROW_CHUNKS = STAGE_KEYS / 8;
      for (int i = thread; i < num_rows * ROW_CHUNKS * (CLUSTER - 1); i += NUM_THREADS) {
        const int row = i / ROW_CHUNKS % num_rows, block = (rank + 1 + i / ROW_CHUNKS / num_rows) % CLUSTER;
        const u32 at = WEIGHTS_AT + row * WEIGHT_PITCH + (rank * STAGE_KEYS + i % ROW_CHUNKS * 8) * 2;
        store_cluster_128(of_block(shared + at, block), *(const uint4*)(shared_bytes + at));
      }
    }
    if (warp * 4 < num_rows) {  // four rows a warp
      const bool exists = sum_row < num_rows;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < STAGE_KEYS / 8; n++)
        if (exists) sum += unrounded[sum_row * SUM_PITCH + n * 8 + sum_column];
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (exists && sum_column % 2 == 0)
        store_everywhere(shared + SUMS_AT + ((rank * TOKEN_ROWS + sum_row) * 4 + sum_column / 2) * 4, sum);
    }
    copy_async_wait<2 * (NUM_STAGES - 1)>();
    sync_blocks();  // weights and sums are everywhere; this step's values and the next one's keys have arrived

    if (warp < COLUMN_WARPS) {
#pragma unroll 1
      for (int block = 0; block < CLUSTER && step * CLUSTER + block < num_stages; block++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = g + 8 * r;
          const float factor = row < num_rows ? factors[block * TOKEN_ROWS + row] : 1.f;
#pragma unroll
          for (int n = 0; n < WARP_TILES; n++) out[n][2 * r] *= factor, out[n][2 * r + 1] *= factor;
        }
        weigh_values(out, weights_lane + block * STAGE_KEYS * 2,
                     v_lane + step % NUM_STAGES * V_BYTES + block * STAGE_KEYS * V_PITCH);
      }
    }
    if (step + 1 < num_steps) score_keys(s, queries, k_lane + (step + 1) % NUM_STAGES * K_BYTES);
    if (thread < 4 * num_rows) {
#pragma unroll
      for (int block = 0; block < CLUSTER; block++)
        total = sum_of_stages(total, factors[block * TOKEN_ROWS + thread / 4],
                              sums[(block * TOKEN_ROWS + thread / 4) * 4 + thread % 4]);
    }
    __syncthreads();  // the step's values have been read
    load_values(step + NUM_STAGES);
  }

  // Each row's sum over the four lanes that have its columns.
  if (warp < 2) {
    total = quad_sum(total);
    if (thread % 4 == 0 && thread < 4 * num_rows) {
      inverses[thread / 4] = total != 0.f ? 1.f / total : 0.f;
      totals[thread / 4] = total;
    }
  }
  __syncthreads();  // the sums are stored
  if (warp >= COLUMN_WARPS) return;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = g + 8 * r;
    if (row >= num_rows) continue;
    const float inverse = inverses[row];
    const i64 head = (i64)kv_head * group_size + first_row + row;
    bf16* to = o + (batch * params.num_heads + head) * HEAD_DIM + first_column + warp * WARP_TILES * 8 + 2 * t;
#if SINKS
    const float lse = totals[row] != 0.f ? maximum[r] * LN_2 + logf(totals[row]) : -INFINITY_F32;
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
