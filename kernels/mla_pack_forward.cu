// mla_pack_forward: queries, keys and values of latent attention as one tensor, the rotary parts rotated.
// Math       per head q = [q_C ; R q_R], k = [k_C ; R k_R], v, with R x[i] = x[i] cos - x[i + r/2] sin, R x[i + r/2] =
//            x[i + r/2] cos + x[i] sin and one k_R for all heads (arXiv:2405.04434, section 2.1)
// Layout     q bf16 [tokens, num_heads, CONTENT_DIM + ROPE_DIM]; kv bf16 [tokens, num_heads, 2 CONTENT_DIM], k_C then v
//            of each head; k_rope bf16 [tokens, ROPE_DIM]; tokens q_stride, kv_stride and rope_stride apart (multiples
//            of 8); positions i32 [tokens]; cos, sin f32 [max_positions, ROPE_DIM / 2], rows table_stride apart (a
//            multiple of 4); packed bf16 [tokens, num_heads (3 CONTENT_DIM + 2 ROPE_DIM)], contiguous: all queries, all
//            keys, all values of a token
// Buffers    q, kv, k_rope, positions, cos, sin, packed
// Defines    CONTENT_DIM (a multiple of 8), ROPE_DIM (a multiple of 16, at most 256)
// Tiling     grid (ceil(tokens / 8)); 256 threads; a warp takes a token; no shared memory
// Numerics   f32 inside the rotation, one rounding at the store, the rest is copied; memory-bound; a position past the
//            tables counts as the last
// Edges      any number of heads; ROPE_DIM 48, 96, 192 leave lanes of each group idle
#define HEAD_DIM ROPE_DIM  // what rotary_head lays over lanes
#include "common/rotary_head.cuh"

static_assert(CONTENT_DIM % 8 == 0, "content is copied 16 bytes at a time");

constexpr int NUM_WARPS = 8, KEY_DIM = CONTENT_DIM + ROPE_DIM, CONTENT_WORDS = CONTENT_DIM / 8;

struct MlaPackForwardParams { u64 tokens, num_heads, q_stride, kv_stride, rope_stride, max_positions, table_stride; };

DEVICE HeadColumns rotated(const HeadColumns& x, const HeadColumns& angles) {
  HeadColumns y;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    y.low[i] = x.low[i] * angles.low[i] - x.high[i] * angles.high[i];
    y.high[i] = x.high[i] * angles.low[i] + x.low[i] * angles.high[i];
  }
  return y;
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 4)
    mla_pack_forward(const bf16* q, const bf16* kv, const bf16* k_rope, const i32* positions, const float* cos,
                     const float* sin, bf16* packed, const __grid_constant__ MlaPackForwardParams params) {
  const int lane = threadIdx.x & 31, column = lane % GROUP * LANE_COLUMNS, num_heads = (int)params.num_heads;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* from_q = q + token * params.q_stride;
  const bf16* from_kv = kv + token * params.kv_stride;
  bf16* to_q = packed + token * ((u64)num_heads * (2 * KEY_DIM + CONTENT_DIM));
  bf16* to_k = to_q + num_heads * KEY_DIM;
  bf16* to_v = to_k + num_heads * KEY_DIM;

  // Ask for what the rotation waits for longest.
  const bool holds = lane % GROUP < LANES;
  const i64 last = (i64)params.max_positions - 1, asked = positions[token];
  HeadColumns angles = {}, key = {};
  if (holds) {
    angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);
    key = rotated(load_head(k_rope + token * params.rope_stride, column).columns(), angles);
  }

  // Copy the parts without rotation.
#pragma unroll 4
  for (int i = lane; i < num_heads * CONTENT_WORDS; i += 32) {
    const int head = i / CONTENT_WORDS, at = i % CONTENT_WORDS * 8;
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
}
