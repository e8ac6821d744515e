// mla_pack_backward: gradients of mla_pack_forward.
// Math       dq = [dq_C ; R^T dq_R], dkv = [dk_C ; dv] of each head, dk_rope = R^T (sum of dk_R over heads), R as in
//            the forward
// Layout     dy bf16 [tokens, num_heads (3 CONTENT_DIM + 2 ROPE_DIM)], tokens dy_stride apart (a multiple of 8): the
//            gradient of the packed tensor; positions and tables as in the forward; dq bf16
//            [tokens, num_heads, CONTENT_DIM + ROPE_DIM], dkv bf16 [tokens, num_heads, 2 CONTENT_DIM], dk_rope bf16
//            [tokens, ROPE_DIM], all contiguous
// Buffers    dy, positions, cos, sin, dq, dkv, dk_rope
// Defines    as in the forward
// Tiling     as in the forward
// Numerics   f32 sums over heads in a fixed order, one rounding at each store; memory-bound, each input is read once
// Edges      as in the forward
#define HEAD_DIM ROPE_DIM  // what rotary_head lays over lanes
#include "common/rotary_head.cuh"

static_assert(CONTENT_DIM % 8 == 0, "content is copied 16 bytes at a time");

constexpr int NUM_WARPS = 8, KEY_DIM = CONTENT_DIM + ROPE_DIM, CONTENT_WORDS = CONTENT_DIM / 8;

struct MlaPackBackwardParams { u64 tokens, num_heads, dy_stride, max_positions, table_stride; };

DEVICE HeadColumns rotated_back(const HeadColumns& x, const HeadColumns& angles) {
  HeadColumns y;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    y.low[i] = x.low[i] * angles.low[i] + x.high[i] * angles.high[i];
    y.high[i] = x.high[i] * angles.low[i] - x.low[i] * angles.high[i];
  }
  return y;
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 4)
    mla_pack_backward(const bf16* dy, const i32* positions, const float* cos, const float* sin, bf16* dq, bf16* dkv,
                      bf16* dk_rope, const __grid_constant__ MlaPackBackwardParams params) {
  const int lane = threadIdx.x & 31, column = lane % GROUP * LANE_COLUMNS, num_heads = (int)params.num_heads;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* from_q = dy + token * params.dy_stride;
  const bf16* from_k = from_q + num_heads * KEY_DIM;
  const bf16* from_v = from_k + num_heads * KEY_DIM;
  bf16* to_q = dq + token * ((u64)num_heads * KEY_DIM);
  bf16* to_kv = dkv + token * ((u64)num_heads * 2 * CONTENT_DIM);

  const bool holds = lane % GROUP < LANES;
  const i64 last = (i64)params.max_positions - 1, asked = positions[token];
  HeadColumns angles = {}, sum = {};
  if (holds)
    angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);

  // Copy the parts without rotation.
#pragma unroll 4
  for (int i = lane; i < num_heads * CONTENT_WORDS; i += 32) {
    const int head = i / CONTENT_WORDS, at = i % CONTENT_WORDS * 8;
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
}
