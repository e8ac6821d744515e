// split_decode: one query per row against a cache of keys, the work of one warp and the ways to join warps and splits.
// A warp takes tiles of 16 keys: its own ring of cp.async stages, S = Q K^T and O += P V by m16n8k16 with the query
// heads of a KV head as the 16 rows (rows left over are zeros), so the arithmetic hides behind the loads for every
// group size.
// Warps never wait for each other until their keys are done; then a block joins its warps, and the last block its
// splits.
// Head sizes are K_DIM for q and k, V_DIM for v and o.
// Defines    HEAD_DIM, HEAD_DIM_V, NUM_WARPS, NUM_STAGES: of the entry kernel's `Decode`
#pragma once
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"

constexpr int NUM_THREADS = NUM_WARPS * 32;

constexpr int DECODE_ROWS = 16;  // query heads of a block
constexpr int DECODE_KEYS = 16;  // keys of a warp's tile

template <int K_DIM, int V_DIM, int WARPS, int STAGES>
struct SplitDecode {
  static_assert(K_DIM % 16 == 0 && V_DIM % 16 == 0, "whole m16n8k16 steps, and 16-byte rows");
  // 16 bytes of padding: a row is an odd number of 16-byte chunks, so ldmatrix meets eight different groups of banks.
  static constexpr int K_PITCH = K_DIM * 2 + 16, V_PITCH = V_DIM * 2 + 16;
  static constexpr int K_BYTES = DECODE_KEYS * K_PITCH, V_BYTES = DECODE_KEYS * V_PITCH;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES + DECODE_KEYS * 4;
  static constexpr int Q_BYTES = DECODE_ROWS * K_PITCH;
  static constexpr int SHARED_BYTES = Q_BYTES + WARPS * STAGES * STAGE_BYTES;
  static constexpr int SPLIT_KEYS = WARPS * DECODE_KEYS;  // keys of a split are a multiple of this
  static constexpr int NUM_O = V_DIM / 8;
  static_assert(4096 * 4 <= WARPS * STAGES * STAGE_BYTES, "so do the weights of the splits");
  static_assert(WARPS * DECODE_ROWS * (V_DIM + 2) * 4 <= WARPS * STAGES * STAGE_BYTES,
         "the partial results of the warps reuse the stages");

  // Fragments of the queries stay in registers where they fit beside the output.
  static constexpr bool KEEP_Q = K_DIM <= 128;
  static constexpr int Q_STEPS = KEEP_Q ? K_DIM / 16 : 1;

  u32 q[Q_STEPS][4], q_lane;
  bool upper_rows;         // whether some query lies in rows 8 to 15
  float o[NUM_O][4];       // accumulators: rows g and g + 8 of the lane 4 g + t
  float row_max[2], row_sum[2];  // of the scaled logits in base 2; row_sum over this lane's columns only

  // Begins without a key: sums of zero, and a maximum of -inf. Every warp calls it before its first tile.
  DEVICE void init() {
#pragma unroll
    for (int n = 0; n < NUM_O; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[n][i] = 0.f;
    row_max[0] = row_max[1] = -INFINITY_F32;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Begins the softmax of each row with one more logit, whose value is zero; `of_row` gives it for rows below
  // `num_rows`. One warp of one split calls it, before its first tile.
  template <class Logit>
  DEVICE void begin_with(Logit of_row, int num_rows) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = (lane >> 2) + 8 * h;
      if (row >= num_rows) continue;
      row_max[h] = of_row(row) * LOG2_E;
      // One of the four lanes counts it; a logit of -inf counts nothing.
      row_sum[h] = (lane & 3) == 0 && row_max[h] != -INFINITY_F32 ? 1.f : 0.f;
    }
  }

  // Fills `room` rows of shared memory with the query rows and zeros below them. Every thread of the block calls; a
  // barrier must follow.
  static DEVICE void load_q(unsigned char* shared_q, const bf16* q, int num_rows, int room) {
    constexpr int CHUNKS = K_DIM / 8;
    for (int i = threadIdx.x; i < room * CHUNKS; i += WARPS * 32) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < num_rows) value = *(const uint4*)(q + row * K_DIM + chunk * 8);
      *(uint4*)(shared_q + row * K_PITCH + chunk * 16) = value;
    }
  }

  // Starts the copies of up to 16 keys; rows from `num_valid` on arrive as zeros and are not read. `z` may be left out
  // (0).
  static DEVICE void load_tile(u32 stage, const bf16* k, const bf16* v, const float* z, int num_valid) {
    copy_rows<K_DIM, K_PITCH>(stage, k, num_valid);
    copy_rows<V_DIM, V_PITCH>(stage + K_BYTES, v, num_valid);
    const int lane = threadIdx.x & 31;
    if (z != 0 && lane < DECODE_KEYS)
      copy_async_4(stage + K_BYTES + V_BYTES + lane * 4, z + (lane < num_valid ? lane : 0), lane < num_valid ? 4 : 0);
  }

  // As load_tile, with a place in the caches for each row of the tile.
  template <class Place>
  static DEVICE void load_keys(u32 stage, const bf16* k, const bf16* v, Place place, int num_valid) {
    const int lane = threadIdx.x & 31, row = lane >> 1;
    const i64 from = row < num_valid ? place(row) : 0;
    const int bytes = row < num_valid ? 16 : 0;
#pragma unroll
    for (int chunk = lane & 1; chunk < K_DIM / 8; chunk += 2)
      copy_async_16(stage + row * K_PITCH + chunk * 16, k + from * K_DIM + chunk * 8, bytes);
#pragma unroll
    for (int chunk = lane & 1; chunk < V_DIM / 8; chunk += 2)
      copy_async_16(stage + K_BYTES + row * V_PITCH + chunk * 16, v + from * V_DIM + chunk * 8, bytes);
  }

  // Sixteen contiguous rows. Rows past the valid ones are addressed but not read.
  template <int WIDTH, int PITCH>
  static DEVICE void copy_rows(u32 to, const bf16* from, int num_valid) {
    constexpr int CHUNKS = WIDTH / 8, STEP = 32 / CHUNKS;  // whole rows that the warp copies at once, if any
    const int lane = threadIdx.x & 31;
    from += lane * 8;
    if constexpr (STEP * CHUNKS == 32) {
      to += lane / CHUNKS * PITCH + lane % CHUNKS * 16;
      num_valid -= lane / CHUNKS;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
      if constexpr (STEP * CHUNKS == 32) {
        copy_async_16(to + i * STEP * PITCH, from + i * 256, i * STEP < num_valid ? 16 : 0);
      } else {
        const int index = i * 32 + lane, row = index / CHUNKS;
        copy_async_16(to + row * (PITCH - WIDTH * 2) + index * 16, from + i * 256, row < num_valid ? 16 : 0);
      }
    }
  }

  // Sets the address of the queries in shared memory, and loads their fragments if registers have room for them.
  DEVICE void take_q(u32 shared_q, int num_rows) {
    const int lane = threadIdx.x & 31;
    q_lane = shared_q + (lane & 15) * K_PITCH + (lane >> 4) * 16;
    upper_rows = num_rows > 8;
    if constexpr (KEEP_Q) {
#pragma unroll
      for (int step = 0; step < Q_STEPS; step++) load_matrix_x4(q[step], q_lane + step * 32);
    }
  }

  // One tile. A logit in base 2 is the product times `scale` plus the key's `addend`, which lane j and lane j + 16 know
  // of key j (-inf: masked).
  DEVICE void attend(u32 stage, float scale, float addend) {
    const int lane = threadIdx.x & 31;
    float s[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    const u32 k_lane = stage + ((lane & 7) + (lane >> 4) * 8) * K_PITCH + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int step = 0; step < K_DIM / 16; step++) {
      u32 b[4];
      load_matrix_x4(b, k_lane + step * 32);
      if constexpr (!KEEP_Q) load_matrix_x4(q[0], q_lane + step * 32);
      const u32 (&a)[4] = q[KEEP_Q ? step : 0];
      mma_bf16(s[0], a, b[0], b[1]);
      mma_bf16(s[1], a, b[2], b[3]);
    }
    const int column = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const float of_key = __shfl_sync(0xffffffffu, addend, n * 8 + column + x);
        s[n][x] = s[n][x] * scale + of_key;
        s[n][2 + x] = s[n][2 + x] * scale + of_key;
      }
    // Online softmax of rows g (h = 0) and g + 8 (h = 1); a row's 16 columns lie in four lanes.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h == 1 && !upper_rows) {
        s[0][2] = s[0][3] = s[1][2] = s[1][3] = 0.f;
        break;
      }
      const float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
      const float new_max = fmaxf(row_max[h], quad_max(top));
      const float base = new_max == -INFINITY_F32 ? 0.f : new_max;  // no key seen yet: every exponential is 0
      const float rescale = exp2_fast(row_max[h] - base);
      row_max[h] = new_max;
      row_sum[h] *= rescale;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float p = exp2_fast(s[n][2 * h + i] - base);
          s[n][2 * h + i] = p;
          row_sum[h] += p;
        }
      if (__any_sync(0xffffffffu, rescale != 1.f)) {  // seldom, after the first tiles
#pragma unroll
        for (int n = 0; n < NUM_O; n++) {
          o[n][2 * h] *= rescale;
          o[n][2 * h + 1] *= rescale;
        }
      }
    }
    u32 p[4];
    pack_fragment(p, s[0], s[1]);
    const u32 v_lane = stage + K_BYTES + (lane & 15) * V_PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int n = 0; n < NUM_O; n += 2) {
      u32 b[4];
      load_matrix_x4_transposed(b, v_lane + n * 16);
      mma_bf16(o[n], p, b[0], b[1]);
      mma_bf16(o[n + 1], p, b[2], b[3]);
    }
  }

  // Leaves the warp's 16 rows in `partials`: [warp][row] of max, sum and V_DIM weighted values. `partials` is the
  // shared memory of the stages: a barrier must lie between the last `attend` of any warp and this, and another before
  // it is read.
  DEVICE void store_warp(float* partials) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h == 1 && !upper_rows) break;
      const float sum = quad_sum(row_sum[h]);
      float* row = partials + (warp * DECODE_ROWS + group + 8 * h) * (V_DIM + 2);
      if ((lane & 3) == 0) {
        row[0] = row_max[h];
        row[1] = sum;
      }
#pragma unroll
      for (int n = 0; n < NUM_O; n++) {
        row[2 + n * 8 + column] = o[n][2 * h];
        row[2 + n * 8 + column + 1] = o[n][2 * h + 1];
      }
    }
  }
};

// A row's softmax state: base-2 maximum, sum, and one column's weighted value.
struct DecodeSum {
  float max, sum, value;
};

// The sum of two parts of a row; a part without keys has max = -inf.
DEVICE DecodeSum decode_join(DecodeSum a, DecodeSum b) {
  const float top = fmaxf(a.max, b.max), base = top == -INFINITY_F32 ? 0.f : top;
  const float scale_a = exp2_fast(a.max - base), scale_b = exp2_fast(b.max - base);
  return DecodeSum{top, a.sum * scale_a + b.sum * scale_b, a.value * scale_a + b.value * scale_b};
}

// True in every thread of the block that arrives last of `num_blocks` at `counter` (shared by them, 0 before the first
// launch;
// it returns to 0 by itself). What the other blocks wrote to global memory before is visible to it.
DEVICE bool decode_is_last_block(u32* counter, u32 num_blocks, u32* shared_flag) {
  __threadfence();   // this thread's partial results are visible before the ticket
  __syncthreads();   // all threads of the block have fenced
  if (threadIdx.x == 0) *shared_flag = atomicInc(counter, num_blocks - 1) == num_blocks - 1;
  __syncthreads();   // the flag is known to the block
  if (*shared_flag != 0) __threadfence();  // the results of the other blocks are read only after this fence
  return *shared_flag != 0;
}

// Joins the warps of a block (`shared_partials`, as SplitDecode::store_warp leaves it), then the splits of a row.
// `partials` f32 [batch, num_heads, num_splits, V_DIM + 2] and `o` bf16 [batch, num_heads, V_DIM] point at the block's
// batch row and its KV head's first query head; this block holds rows `first_row` .. `first_row + num_rows` of
// `group_size`.
// num_splits is at most 4096. The order of the sums is fixed, whichever block is last. Returns true in all threads of
// the last of the `num_blocks` blocks.
template <int V_DIM, int WARPS>
DEVICE bool decode_finish(float* shared_partials, float* partials, bf16* o, u32* counter, u32* shared_flag, int split,
             int num_splits, int first_row, int num_rows, int group_size, u32 num_blocks) {
  constexpr int ROW = V_DIM + 2;
  const DecodeSum nothing = {-INFINITY_F32, 0.f, 0.f};
  for (int i = threadIdx.x; i < num_rows * V_DIM; i += WARPS * 32) {
    const int row = i / V_DIM, column = i % V_DIM;
    DecodeSum all = nothing;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      const float* part = shared_partials + (warp * DECODE_ROWS + row) * ROW;
      all = decode_join(all, DecodeSum{part[0], part[1], part[2 + column]});
    }
    if (num_splits == 1) {
      const u32 rounded = pack_bf16(all.sum != 0.f ? all.value / all.sum : 0.f, 0.f);  // a NaN stays NaN
      o[(i64)(first_row + row) * V_DIM + column].bits = (unsigned short)rounded;
    } else {
      float* out = partials + ((i64)(first_row + row) * num_splits + split) * ROW;
      out[2 + column] = all.value;
      if (column == 0) {
        out[0] = all.max;
        out[1] = all.sum;
      }
    }
  }
  if (num_blocks == 1) return true;
  if (!decode_is_last_block(counter, num_blocks, shared_flag)) return false;
  if (num_splits == 1) return true;

  // The last block joins the splits, some rows at a time. Loads bypass L1: other blocks wrote the data.
  const int join_rows = max(1, min(8, 4096 / num_splits));  // their weights fit into the stages
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float* weights = shared_partials;  // [row][split]; its last readers are before the barrier of the ticket
#pragma unroll 1
  for (int block_row = 0; block_row < group_size; block_row += join_rows) {
    const int rows = min(group_size - block_row, join_rows);
    const float* in = partials + (i64)block_row * num_splits * ROW;
    for (int row = warp; row < rows; row += WARPS) {  // the weight of each split, exp2(its maximum - the row's) / sum
      DecodeSum all = nothing;
      for (int other = lane; other < num_splits; other += 32) {
        const float* part = in + ((i64)row * num_splits + other) * ROW;
        const DecodeSum sum = {__ldcg(part), __ldcg(part + 1), 0.f};
        weights[row * num_splits + other] = sum.max;
        all = decode_join(all, sum);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        all = decode_join(all, DecodeSum{__shfl_xor_sync(0xffffffffu, all.max, distance),
                                         __shfl_xor_sync(0xffffffffu, all.sum, distance), 0.f});
      const float base = all.max == -INFINITY_F32 ? 0.f : all.max, inverse = all.sum != 0.f ? 1.f / all.sum : 0.f;
      for (int other = lane; other < num_splits; other += 32)
        weights[row * num_splits + other] = exp2_fast(weights[row * num_splits + other] - base) * inverse;
    }
    __syncthreads();  // the weights are stored
    for (int i = threadIdx.x; i < rows * (V_DIM / 2); i += WARPS * 32) {
      const int row = i / (V_DIM / 2), column = i % (V_DIM / 2) * 2;
      const float* part = in + (i64)row * num_splits * ROW + 2 + column;
      float first = 0.f, second = 0.f;
#pragma unroll 16
      for (int other = 0; other < num_splits; other++) {
        const float2 value = __ldcg((const float2*)(part + (i64)other * ROW));
        first = fmaf(weights[row * num_splits + other], value.x, first);
        second = fmaf(weights[row * num_splits + other], value.y, second);
      }
      *(u32*)(o + (i64)(block_row + row) * V_DIM + column) = pack_bf16(first, second);
    }
    __syncthreads();  // the weights are no longer read
  }
  return true;
}

typedef SplitDecode<HEAD_DIM, HEAD_DIM_V, NUM_WARPS, NUM_STAGES> Decode;
