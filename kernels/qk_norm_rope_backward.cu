// qk_norm_rope_backward: gradients of qk_norm_rope_forward; those of the weights as one partial sum a block, which column_sums adds up.
// Math       g = the inverse rotation of dy; n = x r, r = 1 / sqrt(mean(x^2) + epsilon): dx = r (g w - n mean(g w n)); dweight = sum of g n
//            over tokens and heads; the values' gradient is copied (COPY_V)
// Layout     qkv (the forward's input), dy, dqkv bf16 [tokens, num_heads + 2 num_kv_heads, HEAD_DIM], heads contiguous, tokens in_stride,
//            dy_stride and out_stride apart (multiples of 8); weights, positions and tables as in the forward; partials f32 [gridDim.x,
//            2 HEAD_DIM], the q weight's columns first
// Buffers    qkv, q_weight, k_weight, positions, cos, sin, dy, dqkv, partials; dqkv may be dy (then COPY_V 0)
// Defines    HEAD_DIM, COPY_V (1)
// Tiling     grid (any number of blocks, fixed by the wrapper); 256 threads; warp w of block b takes tokens 8 b + w and on in strides of
//            the grid
// Numerics   f32 sums in a fixed order, which the grid is part of; memory-bound, each input is read once
// Edges      as in the forward
#include "common/fixed_sum.cuh"
#include "common/rotary_head.cuh"

#ifndef COPY_V
#define COPY_V 1
#endif

constexpr int NUM_WARPS = 8;

struct QkNormRopeBackwardParams { u64 tokens, num_heads, num_kv_heads, in_stride, dy_stride, out_stride, max_positions, table_stride, epsilon; };

// Heads first .. first + count - 1 of a token, all with one weight.
DEVICE void unrotate_and_norm(const bf16* in, const bf16* grad, bf16* out, const bf16* weight, const HeadColumns& angles, HeadColumns& dweight,
                              int first, int count, int column, float epsilon) {
  const int lane = threadIdx.x & 31, head_in_warp = lane / GROUP;
  const bool holds = lane % GROUP < LANES;
  HeadColumns factors = {};
  if (holds) factors = load_head(weight, column);
#pragma unroll 2
  for (int base = 0; base < count; base += HEADS_PER_WARP) {
    const int head = first + base + head_in_warp;
    const bool active = holds && base + head_in_warp < count;
    HeadColumns x = {}, dy = {};
    if (active) {
      x = load_head(in + head * HEAD_DIM, column);
      dy = load_head(grad + head * HEAD_DIM, column);
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(x.low[i], x.low[i], fmaf(x.high[i], x.high[i], squares));
    const float inverse = 1.f / sqrtf(lanes_sum<GROUP>(squares) * (1.f / HEAD_DIM) + epsilon);
    float products = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float low = dy.low[i] * angles.low[i] + dy.high[i] * angles.high[i];
      const float high = dy.high[i] * angles.low[i] - dy.low[i] * angles.high[i];
      x.low[i] *= inverse;
      x.high[i] *= inverse;
      dweight.low[i] = fmaf(low, x.low[i], dweight.low[i]);
      dweight.high[i] = fmaf(high, x.high[i], dweight.high[i]);
      dy.low[i] = low * factors.low[i];
      dy.high[i] = high * factors.high[i];
      products = fmaf(dy.low[i], x.low[i], fmaf(dy.high[i], x.high[i], products));
    }
    const float mean = lanes_sum<GROUP>(products) * (1.f / HEAD_DIM);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x.low[i] = inverse * (dy.low[i] - x.low[i] * mean);
      x.high[i] = inverse * (dy.high[i] - x.high[i] * mean);
    }
    if (active) store_head(out + head * HEAD_DIM, column, x);
  }
}

// Sum over the heads that a warp held at once, then over warps in order, into `to`.
DEVICE void store_weight_sums(HeadColumns& sums, float (*shared)[HEAD_DIM], float* to, int column) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < 8; i++) {
#pragma unroll
    for (int distance = GROUP; distance < 32; distance *= 2) {
      sums.low[i] += __shfl_xor_sync(0xffffffffu, sums.low[i], distance);
      sums.high[i] += __shfl_xor_sync(0xffffffffu, sums.high[i], distance);
    }
  }
  __syncthreads();  // the sums of the weight before have been read
  if (lane < LANES) {
    store_f32x8(shared[warp] + column, sums.low);
    store_f32x8(shared[warp] + HALF + column, sums.high);
  }
  __syncthreads();  // every warp's sums must be there
  for (int at = threadIdx.x; at < HEAD_DIM; at += NUM_WARPS * 32) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; i++) sum += shared[i][at];
    to[at] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 2)
qk_norm_rope_backward(const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const i32* positions, const float* cos, const float* sin,
                      const bf16* dy, bf16* dqkv, float* partials, const __grid_constant__ QkNormRopeBackwardParams params) {
  __shared__ __align__(16) float shared[NUM_WARPS][HEAD_DIM];
  const int lane = threadIdx.x & 31, column = lane % GROUP * 8;
  const int num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const float epsilon = f32_word(params.epsilon);
  const i64 last = (i64)params.max_positions - 1;

  HeadColumns q_sums = {}, k_sums = {};
#pragma unroll 1
  for (u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5); token < params.tokens; token += (u64)gridDim.x * NUM_WARPS) {
    const bf16* in = qkv + token * params.in_stride;
    const bf16* grad = dy + token * params.dy_stride;
    bf16* out = dqkv + token * params.out_stride;
    const i64 asked = positions[token];
    HeadColumns angles = {};
    if (lane % GROUP < LANES) angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);
    unrotate_and_norm(in, grad, out, q_weight, angles, q_sums, 0, num_heads, column, epsilon);
    unrotate_and_norm(in, grad, out, k_weight, angles, k_sums, num_heads, num_kv_heads, column, epsilon);
#if COPY_V
    const int first = (num_heads + num_kv_heads) * HEAD_DIM, end = first + num_kv_heads * HEAD_DIM;
#pragma unroll 1
    for (int at = first + lane * 8; at < end; at += 256) store_16_bytes(out + at, load_16_bytes(grad + at));
#endif
  }
  float* to = partials + (u64)blockIdx.x * 2 * HEAD_DIM;
  store_weight_sums(q_sums, shared, to, column);
  store_weight_sums(k_sums, shared, to + HEAD_DIM, column);
}
