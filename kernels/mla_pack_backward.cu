// mla_pack_backward: gradients of mla_pack_forward; the norms' weights' as one partial sum a block, which column_sums
// adds up.
// Math       dq = [dq_C ; R^T dq_R], dkv = [dk_C ; dv] of each head, dk_rope = R^T (sum of dk_R over heads), R as in
//            the forward. With norms g = [dy_C ; R^T dy_R] of each query and key, n = x r, r = 1 / sqrt(mean(x^2) +
//            epsilon): dx = r (g w - n mean(g w n)); dweight = sum of g n over tokens and heads. The keys share k_R:
//            dk_rope = w_R R^T (sum_h r_h dk_R,h) - k_R sum_h r_h^2 mean_h
// Layout     q, kv, k_rope, positions, tables and weights as in the forward; dy bf16
//            [tokens, num_heads (3 CONTENT_DIM + 2 ROPE_DIM)], tokens dy_stride apart (a multiple of 8): the gradient
//            of the packed tensor; dq bf16 [tokens, num_heads, CONTENT_DIM + ROPE_DIM], dkv bf16
//            [tokens, num_heads, 2 CONTENT_DIM], dk_rope bf16 [tokens, ROPE_DIM], all contiguous; partials f32
//            [gridDim.x, 2 NORM_DIM], the q weight's columns first
// Buffers    q, kv, k_rope, q_weight, k_weight, positions, cos, sin, dy, dq, dkv, dk_rope, partials; with NORM_DIM 0
//            the first five and the last are not touched
// Defines    as in the forward
// Tiling     256 threads; without norms as in the forward, with norms grid (any number of blocks, fixed by the
//            wrapper): warp w of block b takes tokens 8 b + w and on in strides of the grid
// Numerics   f32 sums in a fixed order, which the grid is part of where there are norms; one rounding at each store;
//            memory-bound, each input is read once
// Edges      as in the forward
#define HEAD_DIM ROPE_DIM  // the columns that rotary_head.cuh distributes over lanes
#include "common/latent_head.cuh"

constexpr int NUM_WARPS = 8, KEY_DIM = CONTENT_DIM + ROPE_DIM;
static_assert(NORM_DIM == 0 || NORM_DIM == KEY_DIM, "norms are of whole heads");
constexpr int MIN_BLOCKS = NORM_DIM > 0 ? 2 : 4;  // per multiprocessor; the norm weights' sums need registers

struct MlaPackBackwardParams {
  u64 tokens, num_heads, q_stride, kv_stride, rope_stride, dy_stride, max_positions, table_stride, epsilon;
};

#if NORM_DIM > 0
constexpr int BATCH = 2;  // heads that a lane loads at once

// A lane's sums for the gradient of a weight.
DEVICE void add_products(HeadColumns& sum, const HeadColumns& a, const HeadColumns& b) {
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    sum.low[i] = fmaf(a.low[i], b.low[i], sum.low[i]);
    sum.high[i] = fmaf(a.high[i], b.high[i], sum.high[i]);
  }
}
DEVICE void scale(HeadColumns& x, float factor) {
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) x.low[i] *= factor, x.high[i] *= factor;
}
DEVICE void scale(float (&x)[8], float factor) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= factor;
}

// The same column of every head that the warp holds at once.
DEVICE float over_heads(float x) {
#pragma unroll
  for (int distance = LATENT_GROUP; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Sum over the heads that a warp held at once, then over warps in order, into `to`.
DEVICE void store_weight_sums(const LatentColumns& sums, float (*shared)[KEY_DIM], float* to, const LatentLane& at) {
  const int warp = threadIdx.x >> 5;
  const bool writes = at.head == 0;
  __syncthreads();  // the sums of the last weight have been read
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float sum = over_heads(sums.content[i]);
    if (writes && at.has_content) shared[warp][at.content + i] = sum;
  }
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    const float low = over_heads(sums.rope.low[i]), high = over_heads(sums.rope.high[i]);
    if (writes && at.has_rope) {
      shared[warp][CONTENT_DIM + at.rope + i] = low;
      shared[warp][CONTENT_DIM + HALF + at.rope + i] = high;
    }
  }
  __syncthreads();  // every warp's sums are stored
  for (int column = threadIdx.x; column < KEY_DIM; column += NUM_WARPS * 32) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; i++) sum += shared[i][column];
    to[column] = sum;
  }
}
#endif

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, MIN_BLOCKS)
    mla_pack_backward(const bf16* q, const bf16* kv, const bf16* k_rope, const bf16* q_weight, const bf16* k_weight,
                      const i32* positions, const float* cos, const float* sin, const bf16* dy, bf16* dq, bf16* dkv,
                      bf16* dk_rope, float* partials, const __grid_constant__ MlaPackBackwardParams params) {
  const int lane = threadIdx.x & 31, num_heads = (int)params.num_heads;
  const i64 last = (i64)params.max_positions - 1;
#if NORM_DIM > 0
  __shared__ float shared[NUM_WARPS][KEY_DIM];
  const LatentLane at = latent_lane(lane);
  const float epsilon = f32_word(params.epsilon);
  LatentColumns q_sums = {}, k_sums = {};
#pragma unroll 1
  for (u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5); token < params.tokens;
       token += (u64)gridDim.x * NUM_WARPS) {
    const bf16* from_q = dy + token * params.dy_stride;
    const bf16* from_k = from_q + num_heads * KEY_DIM;
    const bf16* from_v = from_k + num_heads * KEY_DIM;
    bf16* to_q = dq + token * ((u64)num_heads * KEY_DIM);
    bf16* to_kv = dkv + token * ((u64)num_heads * 2 * CONTENT_DIM);
    const i64 asked = positions[token];
    HeadColumns angles = {};
    if (at.has_rope)
      angles = load_angles(cos, sin,
                           (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + at.rope);

    // Queries: unrotate, pass back through the norm.
    {
      const bf16* x = q + token * params.q_stride;
      const uint4 content_weight = load_content(q_weight, at, true);
      const HeadWords rope_weight = load_rope(q_weight + CONTENT_DIM, at, true);
#pragma unroll 1
      for (int base = 0; base < num_heads; base += BATCH * LATENT_HEADS) {
        uint4 x_content[BATCH], dy_content[BATCH];
        HeadWords x_rope[BATCH], dy_rope[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int head = base + i * LATENT_HEADS + at.head, first = head * KEY_DIM;
          x_content[i] = load_content(x + first, at, head < num_heads);
          x_rope[i] = load_rope(x + first + CONTENT_DIM, at, head < num_heads);
          dy_content[i] = load_content(from_q + first, at, head < num_heads);
          dy_rope[i] = load_rope(from_q + first + CONTENT_DIM, at, head < num_heads);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int head = base + i * LATENT_HEADS + at.head;
          if (base + i * LATENT_HEADS >= num_heads) break;
          float n[8], g[8];
          unpack_bf16x8(x_content[i], n);
          unpack_bf16x8(dy_content[i], g);
          HeadColumns n_rope = x_rope[i].columns(), g_rope = rotated_back(dy_rope[i].columns(), angles);
          const float inverse =
              latent_inverse_rms(content_products(n, n) + rope_products(n_rope, n_rope), epsilon);
          scale(n, inverse);
          scale(n_rope, inverse);
#pragma unroll
          for (int k = 0; k < 8; k++) q_sums.content[k] = fmaf(g[k], n[k], q_sums.content[k]);
          add_products(q_sums.rope, g_rope, n_rope);
          weigh(g, content_weight, 1.f);
          g_rope = weighed(g_rope, rope_weight.columns(), 1.f);
          const float mean =
              lanes_sum<LATENT_GROUP>(content_products(g, n) + rope_products(g_rope, n_rope)) * (1.f / KEY_DIM);
#pragma unroll
          for (int k = 0; k < 8; k++) g[k] = inverse * (g[k] - n[k] * mean);
#pragma unroll
          for (int k = 0; k < LANE_COLUMNS; k++) {
            g_rope.low[k] = inverse * (g_rope.low[k] - n_rope.low[k] * mean);
            g_rope.high[k] = inverse * (g_rope.high[k] - n_rope.high[k] * mean);
          }
          bf16* to = to_q + head * KEY_DIM;
          if (head < num_heads && at.has_content) store_16_bytes(to + at.content, pack_bf16x8(g));
          if (head < num_heads && at.has_rope) store_head(to + CONTENT_DIM, at.rope, g_rope);
        }
      }
    }

    // Keys: the same; of the rotary part, which heads share, two sums over heads.
    {
      const bf16* x = kv + token * params.kv_stride;
      const uint4 content_weight = load_content(k_weight, at, true);
      const HeadWords key_words = load_rope(k_rope + token * params.rope_stride, at, true);
      const HeadWords rope_weight = load_rope(k_weight + CONTENT_DIM, at, true);
      const HeadColumns weighed_key = rotated(weighed(key_words.columns(), rope_weight.columns(), 1.f), angles);
      const float key_squares = rope_products(key_words.columns(), key_words.columns());
      HeadColumns rope_sum = {};
      float key_sum = 0.f;
#pragma unroll 1
      for (int base = 0; base < num_heads; base += BATCH * LATENT_HEADS) {
        uint4 x_content[BATCH], dy_content[BATCH];
        HeadWords dy_rope[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int head = base + i * LATENT_HEADS + at.head;
          x_content[i] = load_content(x + head * 2 * CONTENT_DIM, at, head < num_heads);
          dy_content[i] = load_content(from_k + head * KEY_DIM, at, head < num_heads);
          dy_rope[i] = load_rope(from_k + head * KEY_DIM + CONTENT_DIM, at, head < num_heads);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int head = base + i * LATENT_HEADS + at.head;
          if (base + i * LATENT_HEADS >= num_heads) break;
          float n[8], g[8];
          unpack_bf16x8(x_content[i], n);
          unpack_bf16x8(dy_content[i], g);
          HeadColumns g_rope = dy_rope[i].columns();
          const float inverse = latent_inverse_rms(content_products(n, n) + key_squares, epsilon);
          scale(n, inverse);
          scale(g_rope, inverse);
#pragma unroll
          for (int k = 0; k < 8; k++) k_sums.content[k] = fmaf(g[k], n[k], k_sums.content[k]);
          weigh(g, content_weight, 1.f);
          // Rotating both vectors does not change their dot product.
          const float mean =
              lanes_sum<LATENT_GROUP>(content_products(g, n) + rope_products(g_rope, weighed_key)) * (1.f / KEY_DIM);
#pragma unroll
          for (int k = 0; k < LANE_COLUMNS; k++) {
            rope_sum.low[k] += g_rope.low[k];
            rope_sum.high[k] += g_rope.high[k];
          }
          key_sum += inverse * inverse * mean;
#pragma unroll
          for (int k = 0; k < 8; k++) g[k] = inverse * (g[k] - n[k] * mean);
          if (head < num_heads && at.has_content)
            store_16_bytes(to_kv + head * 2 * CONTENT_DIM + at.content, pack_bf16x8(g));
        }
      }
      key_sum = over_heads(key_sum);
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; i++) {
        rope_sum.low[i] = over_heads(rope_sum.low[i]);
        rope_sum.high[i] = over_heads(rope_sum.high[i]);
      }
      if (lane < LANES) {  // one of the groups of lanes, which all hold the same sums
        const HeadColumns key = key_words.columns(), weight = rope_weight.columns();
        const HeadColumns sum = rotated_back(rope_sum, angles);
        add_products(k_sums.rope, sum, key);
        HeadColumns gradient;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
          gradient.low[i] = weight.low[i] * sum.low[i] - key.low[i] * key_sum;
          gradient.high[i] = weight.high[i] * sum.high[i] - key.high[i] * key_sum;
        }
        store_head(dk_rope + token * ROPE_DIM, at.rope, gradient);
      }
    }

    // Copy the gradients of the values.
#pragma unroll 4
    for (int i = lane; i < num_heads * CONTENT_LANES; i += 32) {
      const int head = i / CONTENT_LANES, column = i % CONTENT_LANES * 8;
      const uint4 words = load_16_bytes(from_v + head * CONTENT_DIM + column);
      store_16_bytes(to_kv + head * 2 * CONTENT_DIM + CONTENT_DIM + column, words);
    }
  }
  float* to = partials + (u64)blockIdx.x * 2 * KEY_DIM;
  store_weight_sums(q_sums, shared, to, at);
  store_weight_sums(k_sums, shared, to + KEY_DIM, at);
#else
  const int column = lane % GROUP * LANE_COLUMNS;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* from_q = dy + token * params.dy_stride;
  const bf16* from_k = from_q + num_heads * KEY_DIM;
  const bf16* from_v = from_k + num_heads * KEY_DIM;
  bf16* to_q = dq + token * ((u64)num_heads * KEY_DIM);
  bf16* to_kv = dkv + token * ((u64)num_heads * 2 * CONTENT_DIM);

  const bool holds = lane % GROUP < LANES;
  const i64 asked = positions[token];
  HeadColumns angles = {}, sum = {};
  if (holds)
    angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);

  // Copy the parts without rotation.
#pragma unroll 4
  for (int i = lane; i < num_heads * CONTENT_LANES; i += 32) {
    const int head = i / CONTENT_LANES, at = i % CONTENT_LANES * 8;
    const uint4 q_words = load_16_bytes(from_q + head * KEY_DIM + at);
    const uint4 k_words = load_16_bytes(from_k + head * KEY_DIM + at);
    const uint4 v_words = load_16_bytes(from_v + head * CONTENT_DIM + at);
    store_16_bytes(to_q + head * KEY_DIM + at, q_words);
    store_16_bytes(to_kv + head * 2 * CONTENT_DIM + at, k_words);
    store_16_bytes(to_kv + head * 2 * CONTENT_DIM + CONTENT_DIM + at, v_words);
  }

  // Rotate the queries' gradients back; sum the keys' over this lane's heads.
  if (holds) {
#pragma unroll 4
    for (int head = lane / GROUP; head < num_heads; head += HEADS_PER_WARP) {
      const int at = head * KEY_DIM + CONTENT_DIM;
      const HeadColumns q_columns = load_head(from_q + at, column).columns(),
                        k_columns = load_head(from_k + at, column).columns();
      store_head(to_q + at, column, rotated_back(q_columns, angles));
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; i++) {
        sum.low[i] += k_columns.low[i];
        sum.high[i] += k_columns.high[i];
      }
    }
  }
  // Then over the groups of lanes, which hold other heads.
#pragma unroll
  for (int distance = GROUP; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
      sum.low[i] += __shfl_xor_sync(0xffffffffu, sum.low[i], distance);
      sum.high[i] += __shfl_xor_sync(0xffffffffu, sum.high[i], distance);
    }
  }
  if (lane < LANES) store_head(dk_rope + token * ROPE_DIM, column, rotated_back(sum, angles));
#endif
}
