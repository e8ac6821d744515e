// qk_norm_rope_forward: per-head RMSNorm of queries and keys, then rotary positions, on a packed tensor.
// Math       n = x / sqrt(mean(x^2) + epsilon) weight; y[i] = n[i] cos - n[i + d/2] sin; y[i + d/2] = n[i + d/2] cos + n[i] sin (Qwen3;
//            arXiv:2104.09864 in the rotate-half form); values are copied (COPY_V)
// Layout     qkv, out bf16 [tokens, num_heads + 2 num_kv_heads, HEAD_DIM], heads contiguous, tokens in_stride and out_stride apart
//            (multiples of 8); q_weight, k_weight bf16 [HEAD_DIM]; positions i32 [tokens]; cos, sin f32 [max_positions,
//            HEAD_DIM / 2], rows table_stride apart (a multiple of 4)
// Buffers    qkv, q_weight, k_weight, positions, cos, sin, out; out may be qkv (then COPY_V 0)
// Defines    HEAD_DIM, COPY_V (1)
// Tiling     grid (ceil(tokens / 8)); 256 threads; a warp takes a token, a group of lanes a head; no shared memory
// Numerics   f32 inside, one rounding at the store; memory-bound, each input is read once; a position past the tables counts as the last
// Edges      heads that do not fill a warp leave lanes idle; HEAD_DIM 48, 96, 192 leave lanes of each group idle
#include "common/fixed_sum.cuh"
#include "common/rotary_head.cuh"

#ifndef COPY_V
#define COPY_V 1
#endif

constexpr int NUM_WARPS = 8;

struct QkNormRopeForwardParams { u64 tokens, num_heads, num_kv_heads, in_stride, out_stride, max_positions, table_stride, epsilon; };

// Heads first .. first + count - 1 of a token, all with one weight.
DEVICE void norm_and_rotate(const bf16* in, bf16* out, const bf16* weight, const HeadColumns& angles, int first, int count, int column,
                            float epsilon) {
  const int lane = threadIdx.x & 31, head_in_warp = lane / GROUP;
  const bool holds = lane % GROUP < LANES;
  HeadColumns factors = {};
  if (holds) factors = load_head(weight, column);
#pragma unroll 2
  for (int base = 0; base < count; base += HEADS_PER_WARP) {
    const int head = first + base + head_in_warp;
    const bool active = holds && base + head_in_warp < count;
    HeadColumns x = {};
    if (active) x = load_head(in + head * HEAD_DIM, column);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(x.low[i], x.low[i], fmaf(x.high[i], x.high[i], squares));
    const float inverse = 1.f / sqrtf(lanes_sum<GROUP>(squares) * (1.f / HEAD_DIM) + epsilon);
    HeadColumns y;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float low = x.low[i] * inverse * factors.low[i], high = x.high[i] * inverse * factors.high[i];
      y.low[i] = low * angles.low[i] - high * angles.high[i];
      y.high[i] = high * angles.low[i] + low * angles.high[i];
    }
    if (active) store_head(out + head * HEAD_DIM, column, y);
  }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
qk_norm_rope_forward(const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const i32* positions, const float* cos, const float* sin,
                     bf16* out, const __grid_constant__ QkNormRopeForwardParams params) {
  const int lane = threadIdx.x & 31, column = lane % GROUP * 8;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* in = qkv + token * params.in_stride;
  bf16* to = out + token * params.out_stride;
  const int num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const float epsilon = f32_word(params.epsilon);

  const i64 last = (i64)params.max_positions - 1, asked = positions[token];
  HeadColumns angles = {};
  if (lane % GROUP < LANES) angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);
  norm_and_rotate(in, to, q_weight, angles, 0, num_heads, column, epsilon);
  norm_and_rotate(in, to, k_weight, angles, num_heads, num_kv_heads, column, epsilon);
#if COPY_V
  const int first = (num_heads + num_kv_heads) * HEAD_DIM, end = first + num_kv_heads * HEAD_DIM;
#pragma unroll 4
  for (int at = first + lane * 8; at < end; at += 256) store_16_bytes(to + at, load_16_bytes(in + at));
#endif
}
