// mla_pack_forward: queries, keys and values of latent attention as one tensor, queries and keys normed head by head
// where NORM_DIM says so, the rotary parts rotated.
// Math       per head q = [q_C ; R q_R], k = [k_C ; R k_R], v, with R x[i] = x[i] cos - x[i + r/2] sin, R x[i + r/2] =
//            x[i + r/2] cos + x[i] sin and one k_R for all heads (arXiv:2405.04434, section 2.1). With norms, an
//            addition of ours, [q_C ; q_R] and [k_C ; k_R] go through x / sqrt(mean(x^2) + epsilon) weight before R;
//            rotated_keys = R (k_R weight) and key_scale = 1 / sqrt(mean(k^2) + epsilon) are what decoding caches
// Layout     q bf16 [tokens, num_heads, CONTENT_DIM + ROPE_DIM]; kv bf16 [tokens, num_heads, 2 CONTENT_DIM], k_C then v
//            of each head; k_rope bf16 [tokens, ROPE_DIM]; tokens q_stride, kv_stride and rope_stride apart (multiples
//            of 8); q_weight, k_weight bf16 [NORM_DIM]; positions i32 [tokens]; cos, sin f32
//            [max_positions, ROPE_DIM / 2], rows table_stride apart (a multiple of 4); packed bf16
//            [tokens, num_heads (3 CONTENT_DIM + 2 ROPE_DIM)], contiguous: all queries, all keys, all values of a
//            token; rotated_keys bf16 [tokens, ROPE_DIM], key_scale f32 [tokens, num_heads], contiguous
// Buffers    q, kv, k_rope, q_weight, k_weight, positions, cos, sin, packed, rotated_keys, key_scale; with NORM_DIM 0
//            the weights and the last two are not touched
// Defines    CONTENT_DIM (a multiple of 8; with norms at most 256), ROPE_DIM (a multiple of 16, at most 256), NORM_DIM
//            (0: no norms, or CONTENT_DIM + ROPE_DIM)
// Tiling     grid (ceil(tokens / 8)); 256 threads; a warp takes a token, with norms a group of lanes a head; no shared
//            memory
// Numerics   f32 inside norm and rotation, one rounding at the store, the rest is copied; memory-bound, each input is
//            read once; a position past the tables counts as the last
// Edges      any number of heads; ROPE_DIM 48, 96, 192 leave lanes of each group idle, as does CONTENT_DIM 96 where
//            heads are normed
#define HEAD_DIM ROPE_DIM  // the columns that rotary_head.cuh distributes over lanes
#include "common/latent_head.cuh"

constexpr int NUM_WARPS = 8, KEY_DIM = CONTENT_DIM + ROPE_DIM;
static_assert(NORM_DIM == 0 || NORM_DIM == KEY_DIM, "norms are of whole heads");

struct MlaPackForwardParams {
  u64 tokens, num_heads, q_stride, kv_stride, rope_stride, max_positions, table_stride, epsilon;
};

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 4)
    mla_pack_forward(const bf16* q, const bf16* kv, const bf16* k_rope, const bf16* q_weight, const bf16* k_weight,
                     const i32* positions, const float* cos, const float* sin, bf16* packed, bf16* rotated_keys,
                     float* key_scale, const __grid_constant__ MlaPackForwardParams params) {
  const int lane = threadIdx.x & 31, num_heads = (int)params.num_heads;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* from_q = q + token * params.q_stride;
  const bf16* from_kv = kv + token * params.kv_stride;
  const bf16* from_rope = k_rope + token * params.rope_stride;
  bf16* to_q = packed + token * ((u64)num_heads * (2 * KEY_DIM + CONTENT_DIM));
  bf16* to_k = to_q + num_heads * KEY_DIM;
  bf16* to_v = to_k + num_heads * KEY_DIM;
  const i64 last = (i64)params.max_positions - 1, asked = positions[token];
  const i64 table_row = (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride;

#if NORM_DIM > 0
  constexpr int BATCH = 2;  // heads that a lane loads at once
  const LatentLane at = latent_lane(lane);
  const float epsilon = f32_word(params.epsilon);
  HeadColumns angles = {};
  if (at.has_rope) angles = load_angles(cos, sin, table_row + at.rope);

  // Norm and rotate the queries.
  {
    const uint4 content_weight = load_content(q_weight, at, true);
    const HeadWords rope_weight = load_rope(q_weight + CONTENT_DIM, at, true);
#pragma unroll 1
    for (int base = 0; base < num_heads; base += BATCH * LATENT_HEADS) {
      uint4 content_words[BATCH];
      HeadWords rope_words[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int head = base + i * LATENT_HEADS + at.head;
        content_words[i] = load_content(from_q + head * KEY_DIM, at, head < num_heads);
        rope_words[i] = load_rope(from_q + head * KEY_DIM + CONTENT_DIM, at, head < num_heads);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int head = base + i * LATENT_HEADS + at.head;
        if (base + i * LATENT_HEADS >= num_heads) break;
        float content[8];
        unpack_bf16x8(content_words[i], content);
        const HeadColumns rope = rope_words[i].columns();
        const float squares = content_products(content, content) + rope_products(rope, rope);
        const float inverse = latent_inverse_rms(squares, epsilon);
        weigh(content, content_weight, inverse);
        bf16* to = to_q + head * KEY_DIM;
        if (head < num_heads && at.has_content) store_16_bytes(to + at.content, pack_bf16x8(content));
        if (head < num_heads && at.has_rope)
          store_head(to + CONTENT_DIM, at.rope, rotated(weighed(rope, rope_weight.columns(), inverse), angles));
      }
    }
  }

  // Keys: norm with the one rotary part, which is weighed and rotated once; values are copied.
  const uint4 content_weight = load_content(k_weight, at, true);
  const HeadColumns shared = load_rope(from_rope, at, true).columns();
  const float shared_squares = rope_products(shared, shared);
  const HeadColumns key =
      rotated(weighed(shared, load_rope(k_weight + CONTENT_DIM, at, true).columns(), 1.f), angles);
  if (lane < LANES) store_head(rotated_keys + token * ROPE_DIM, at.rope, key);
#pragma unroll 1
  for (int base = 0; base < num_heads; base += BATCH * LATENT_HEADS) {
    uint4 k_words[BATCH], v_words[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * LATENT_HEADS + at.head;
      k_words[i] = load_content(from_kv + head * 2 * CONTENT_DIM, at, head < num_heads);
      v_words[i] = load_content(from_kv + head * 2 * CONTENT_DIM + CONTENT_DIM, at, head < num_heads);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * LATENT_HEADS + at.head;
      if (base + i * LATENT_HEADS >= num_heads) break;
      float content[8];
      unpack_bf16x8(k_words[i], content);
      const float inverse = latent_inverse_rms(content_products(content, content) + shared_squares, epsilon);
      weigh(content, content_weight, inverse);
      bf16* to = to_k + head * KEY_DIM;
      if (head < num_heads && at.has_content) {
        store_16_bytes(to + at.content, pack_bf16x8(content));
        store_16_bytes(to_v + head * CONTENT_DIM + at.content, v_words[i]);
      }
      HeadColumns scaled;
#pragma unroll
      for (int k = 0; k < LANE_COLUMNS; k++) {
        scaled.low[k] = key.low[k] * inverse;
        scaled.high[k] = key.high[k] * inverse;
      }
      if (head < num_heads && at.has_rope) store_head(to + CONTENT_DIM, at.rope, scaled);
      if (head < num_heads && lane % LATENT_GROUP == 0) key_scale[token * (u64)num_heads + head] = inverse;
    }
  }
#else
  // Load first what the rotation would otherwise wait for longest.
  const int column = lane % GROUP * LANE_COLUMNS;
  const bool holds = lane % GROUP < LANES;
  HeadColumns angles = {}, key = {};
  if (holds) {
    angles = load_angles(cos, sin, table_row + column);
    key = rotated(load_head(from_rope, column).columns(), angles);
  }

  // Copy the parts without rotation.
#pragma unroll 4
  for (int i = lane; i < num_heads * CONTENT_LANES; i += 32) {
    const int head = i / CONTENT_LANES, at = i % CONTENT_LANES * 8;
    const uint4 q_words = load_16_bytes(from_q + head * KEY_DIM + at);
    const uint4 k_words = load_16_bytes(from_kv + head * 2 * CONTENT_DIM + at);
    const uint4 v_words = load_16_bytes(from_kv + head * 2 * CONTENT_DIM + CONTENT_DIM + at);
    store_16_bytes(to_q + head * KEY_DIM + at, q_words);
    store_16_bytes(to_k + head * KEY_DIM + at, k_words);
    store_16_bytes(to_v + head * CONTENT_DIM + at, v_words);
  }

  // Rotate; every head gets the one rotated key.
  if (!holds) return;
#pragma unroll 4
  for (int head = lane / GROUP; head < num_heads; head += HEADS_PER_WARP) {
    const int at = head * KEY_DIM + CONTENT_DIM;
    store_head(to_q + at, column, rotated(load_head(from_q + at, column).columns(), angles));
    store_head(to_k + at, column, key);
  }
#endif
}
