// mla_decode: new tokens of latent attention against the cache of latents; W_UK is already multiplied into the queries,
// W_UV is applied to the output later (mla_values).
// Math       o_h = sum_j softmax_j(softmax_scale f_jh q_h . c_j) c_j[0 .. VALUE_DIM) over the first num_keys -
//            num_queries + i + 1 latents, for query i of a row (arXiv:2405.04434, section 2.1.2); a latent c_j =
//            [latent ; rotated key] is key and value of every head at once. f_jh = key_scale where keys are normed, 1
//            elsewhere; the norm's weight is in q and in the rotated keys
// Layout     q bf16 [batch, num_queries, num_heads, KEY_DIM], contiguous; latents bf16 [batch, num_keys, KEY_DIM], rows
//            key_stride and batch rows batch_stride apart (multiples of 8); key_scale f32 [batch, num_keys, num_heads],
//            rows scale_stride and batch rows scale_batch_stride apart; num_splits = 1: o bf16
//            [batch, num_queries, num_heads, VALUE_DIM]; else partials f32
//            [batch * num_queries, num_heads, num_splits, VALUE_DIM + 2]: a part's maximum in base 2, its sum, its
//            weighted columns, for mla_decode_join
//            LENGTHS 1: length i32 [batch]; a row has length + num_queries latents, and num_keys is their room
// Buffers    q, latents, key_scale, (LENGTHS 1: length,) o, partials; one of the last two is not touched, nor key_scale
//            with KEY_SCALE 0
// Defines    KEY_DIM, VALUE_DIM (multiples of 16, VALUE_DIM <= KEY_DIM), NUM_WARPS, KEY_SCALE (1: keys have factors),
//            LENGTHS (0)
// Tiling     grid (batch * num_queries, ceil(num_heads / 16), num_splits); NUM_WARPS * 32 threads. A tile is
//            NUM_WARPS * 16 keys, read once for 16 heads: for the scores a warp takes 16 of the keys, for the sum all
//            of them and a part of the columns. Dynamic shared bytes = (16 + 2 TILE_KEYS) (2 KEY_DIM + 16) + 16 (2
//            TILE_KEYS + 16) + NUM_WARPS * 128. One block a multiprocessor is right: num_splits =
//            multiprocessors / other blocks
// Numerics   logits, softmax and sums in f32, P rounded to bf16 for P V, one rounding at the store; fixed order: two
//            runs are bit-equal
// Edges      any number of heads and keys; rows of a tile past the last key arrive as zeros and weigh nothing
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/programmatic_launch.cuh"
#include "common/quad.cuh"

#ifndef LENGTHS
#define LENGTHS 0
#endif

constexpr int DECODE_ROWS = 16;  // query heads of a block
constexpr int DECODE_KEYS = 16;  // keys whose scores a warp computes

constexpr int NUM_THREADS = NUM_WARPS * 32, TILE_KEYS = NUM_WARPS * DECODE_KEYS, NUM_STAGES = 2;
static_assert(KEY_DIM % 16 == 0 && VALUE_DIM % 16 == 0 && VALUE_DIM <= KEY_DIM,
              "whole m16n8k16 steps; values are the first columns of keys");
// 16 bytes of padding: a row is an odd number of 16-byte chunks, so ldmatrix meets eight different groups of banks.
constexpr int KEY_PITCH = KEY_DIM * 2 + 16, WEIGHT_PITCH = TILE_KEYS * 2 + 16;
constexpr int CHUNKS = KEY_DIM / 8;  // 16-byte chunks of a row
constexpr int Q_BYTES = DECODE_ROWS * KEY_PITCH, STAGE_BYTES = TILE_KEYS * KEY_PITCH;
constexpr int WEIGHTS_AT = Q_BYTES + NUM_STAGES * STAGE_BYTES, MAXIMA_AT = WEIGHTS_AT + DECODE_ROWS * WEIGHT_PITCH;
constexpr int SUMS_AT = MAXIMA_AT + NUM_WARPS * DECODE_ROWS * 4;
// Columns of the sum, 16 at a time, and how many of these a warp takes.
constexpr int COLUMN_STEPS = VALUE_DIM / 16, WARP_STEPS = ceil_div(COLUMN_STEPS, NUM_WARPS);

struct MlaDecodeParams {
  u64 num_heads, num_queries, num_keys, key_stride, batch_stride, scale_stride, scale_batch_stride, num_splits,
      softmax_scale;
};

// sum += P V of a tile, for this warp's columns.
DEVICE void add_values(float (&sum)[WARP_STEPS * 2][4], u32 weights, u32 values) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < TILE_KEYS / 16; step++) {
    u32 a[4];
    load_matrix_x4(a, weights + (lane & 15) * WEIGHT_PITCH + (lane >> 4) * 16 + step * 32);
    const u32 v_lane = values + (step * 16 + (lane & 15)) * KEY_PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int n = 0; n < WARP_STEPS; n++) {
      const int columns = warp * WARP_STEPS + n;
      if (columns >= COLUMN_STEPS) break;
      u32 b[4];
      load_matrix_x4_transposed(b, v_lane + columns * 32);
      mma_bf16(sum[2 * n], a, b[0], b[1]);
      mma_bf16(sum[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// s = Q K^T for this warp's 16 keys of a tile.
DEVICE void score_keys(float (&s)[2][4], u32 queries, u32 keys) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 q_lane = queries + (lane & 15) * KEY_PITCH + (lane >> 4) * 16;
  const u32 k_lane = keys + (warp * DECODE_KEYS + (lane & 7) + (lane >> 4) * 8) * KEY_PITCH + ((lane >> 3) & 1) * 16;
#pragma unroll 4
  for (int step = 0; step < KEY_DIM / 16; step++) {
    u32 a[4], b[4];
    load_matrix_x4(a, q_lane + step * 32);
    load_matrix_x4(b, k_lane + step * 32);
    mma_bf16(s[0], a, b[0], b[1]);
    mma_bf16(s[1], a, b[2], b[3]);
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    mla_decode(const bf16* __restrict__ q, const bf16* __restrict__ latents, const float* __restrict__ key_scale,
#if LENGTHS
               const i32* __restrict__ length,
#endif
               bf16* __restrict__ o, float* __restrict__ partials, const __grid_constant__ MlaDecodeParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, column = (lane & 3) * 2;
  const int num_heads = (int)params.num_heads, num_queries = (int)params.num_queries,
            num_splits = (int)params.num_splits;
  const int first_row = blockIdx.y * DECODE_ROWS, num_rows = min(num_heads - first_row, DECODE_ROWS),
            split = blockIdx.z;
  const i64 query = blockIdx.x, batch = query / num_queries;

  // Keys of this split, in whole tiles.
#if LENGTHS
  const int num_keys = min(length[batch] + num_queries, (int)params.num_keys);
#else
  const int num_keys = (int)params.num_keys;
#endif
  const int num_seen = num_keys - num_queries + (int)(query % num_queries) + 1;
  const int per_split = ceil_div(ceil_div(num_seen, TILE_KEYS), num_splits) * TILE_KEYS;
  const int begin = (int)min((i64)split * per_split, (i64)num_seen), end = min(begin + per_split, num_seen);
  const int num_tiles = ceil_div(end - begin, TILE_KEYS);
  const bf16* keys = latents + batch * params.batch_stride;

  // Load: start the copies of two tiles, then of the queries.
  const u32 shared = shared_address(shared_bytes), stages = shared + Q_BYTES;
  auto load = [&](int tile) {
    const int first = begin + tile * TILE_KEYS;
    if (tile < num_tiles) {
#pragma unroll 4
      for (int i = threadIdx.x; i < TILE_KEYS * CHUNKS; i += NUM_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = first + row < end;
        copy_async_16(stages + tile % NUM_STAGES * STAGE_BYTES + row * KEY_PITCH + chunk * 16,
                      keys + (i64)(valid ? first + row : begin) * params.key_stride + chunk * 8, valid ? 16 : 0);
      }
    }
    copy_async_commit();
  };
  for (int tile = 0; tile < NUM_STAGES; tile++) load(tile);
  const bf16* rows = q + (query * num_heads + first_row) * KEY_DIM;
  for (int i = threadIdx.x; i < DECODE_ROWS * CHUNKS; i += NUM_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < num_rows) value = *(const uint4*)(rows + row * KEY_DIM + chunk * 8);
    *(uint4*)(shared_bytes + row * KEY_PITCH + chunk * 16) = value;
  }

  const float scale = f32_word(params.softmax_scale) * LOG2_E;
#if KEY_SCALE
  // The key scales of a tile, in the layout of the scores' registers, loaded one tile ahead.
  const float* factors_of_row = key_scale + batch * params.scale_batch_stride + first_row;
  float factors[2][4];
  auto load_factors = [&](int tile) {
    const int first = begin + tile * TILE_KEYS + warp * DECODE_KEYS;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + n * 8 + column + (i & 1), row = group + 8 * (i / 2);
        factors[n][i] = key < end && row < num_rows ? factors_of_row[(i64)key * params.scale_stride + row] : 0.f;
      }
  };
  load_factors(0);
#endif
  float* maxima = (float*)(shared_bytes + MAXIMA_AT);  // [warp][row]
  float sum[WARP_STEPS * 2][4] = {};
  float row_max[2] = {-INFINITY_F32, -INFINITY_F32}, row_sum[2] = {0.f, 0.f};  // row_sum over this lane's keys only

  for (int tile = 0; tile < num_tiles; tile++) {
    copy_async_wait<NUM_STAGES - 1>();
    __syncthreads();  // every warp may read the tile and the queries
    const u32 stage = stages + tile % NUM_STAGES * STAGE_BYTES;

    // Score the 16 keys of a warp.
    float s[2][4] = {};
    score_keys(s, shared, stage);
#if KEY_SCALE
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= factors[n][i];
    load_factors(tile + 1);
#endif
    const int num_valid = end - (begin + tile * TILE_KEYS + warp * DECODE_KEYS);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = n * 8 + column + (i & 1) < num_valid ? s[n][i] * scale : -INFINITY_F32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float top =
          quad_max(fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1])));
      if ((lane & 3) == 0) maxima[warp * DECODE_ROWS + group + 8 * h] = top;
    }
    __syncthreads();  // every warp reads the maxima of all warps

    // Exponentials relative to the maximum so far, which all warps share; every tile has a key, so it is finite.
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = row_max[h];
#pragma unroll
      for (int other = 0; other < NUM_WARPS; other++) top = fmaxf(top, maxima[other * DECODE_ROWS + group + 8 * h]);
      factor[h] = exp2_fast(row_max[h] - top);
      row_max[h] = top;
      row_sum[h] *= factor[h];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float first = exp2_fast(s[n][2 * h] - top), second = exp2_fast(s[n][2 * h + 1] - top);
        row_sum[h] += first + second;
        store_shared_32(
            shared + WEIGHTS_AT + (group + 8 * h) * WEIGHT_PITCH + (warp * DECODE_KEYS + n * 8 + column) * 2,
            pack_bf16(first, second));
      }
    }
    __syncthreads();  // the weights of all keys are stored

    // Add the weighted values of this warp's columns.
#pragma unroll
    for (int n = 0; n < WARP_STEPS * 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] *= factor[i / 2];
    add_values(sum, shared + WEIGHTS_AT, stage);
    __syncthreads();  // all warps have read the stage and the weights
    load(tile + NUM_STAGES);
  }

  // The sum of each row's weights, over the warps.
  copy_async_wait<0>();
  float* sums = (float*)(shared_bytes + SUMS_AT);  // [warp][row]
#pragma unroll
  for (int h = 0; h < 2; h++) {
    row_sum[h] = quad_sum(row_sum[h]);
    if ((lane & 3) == 0) sums[warp * DECODE_ROWS + group + 8 * h] = row_sum[h];
  }
  __syncthreads();  // the sums are stored

  // Store: the result if there is one split, else partial results.
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = group + 8 * h;
    if (row >= num_rows) continue;
    float all = 0.f;
#pragma unroll
    for (int other = 0; other < NUM_WARPS; other++) all += sums[other * DECODE_ROWS + row];
    const i64 head = query * num_heads + first_row + row;
    float* part = partials + (head * num_splits + split) * (VALUE_DIM + 2);
    if (num_splits > 1 && warp == 0 && (lane & 3) == 0) *(float2*)part = make_float2(row_max[h], all);
    const float inverse = all > 0.f ? 1.f / all : 0.f;
#pragma unroll
    for (int n = 0; n < WARP_STEPS * 2; n++) {
      const int at = warp * WARP_STEPS * 16 + n * 8 + column;
      if (at >= VALUE_DIM) break;
      const float first = sum[n][2 * h], second = sum[n][2 * h + 1];
      if (num_splits > 1) *(float2*)(part + 2 + at) = make_float2(first, second);
      else *(u32*)(o + head * VALUE_DIM + at) = pack_bf16(first * inverse, second * inverse);
    }
  }
}
