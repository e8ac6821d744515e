// qk_norm_rope_backward: gradients of qk_norm_rope_forward; the weights' as one partial sum a block, which column_sums
// adds up.
// Math       g = the inverse rotation of dy; n = x r, r = 1 / sqrt(mean(x^2) + epsilon): dx = r (g w - n mean(g w n));
//            dweight = sum of g n over tokens and heads; the values' gradient is copied (COPY_V)
// Layout     qkv (the forward's input), dy, dqkv bf16 [tokens, num_heads + 2 num_kv_heads, HEAD_DIM], heads contiguous,
//            tokens in_stride, dy_stride and out_stride apart (multiples of 8); weights, positions and tables as in the
//            forward; partials f32 [gridDim.x, 2 HEAD_DIM], the q weight's columns first
// Buffers    qkv, q_weight, k_weight, positions, cos, sin, dy, dqkv, partials; dqkv may be dy (then COPY_V 0)
// Defines    HEAD_DIM, COPY_V 0|1
// Tiling     grid (any number of blocks, fixed by the wrapper); 256 threads; warp w of block b takes tokens 8 b + w and
//            on in strides of the grid
// Numerics   f32 sums in a fixed order, which the grid is part of; memory-bound, each input is read once
// Edges      as in the forward
#include "common/fixed_sum.cuh"
#include "common/rotary_head.cuh"

constexpr int NUM_WARPS = 8;

struct QkNormRopeBackwardParams {
  u64 tokens, num_heads, num_kv_heads, in_stride, dy_stride, out_stride, max_positions, table_stride, epsilon;
};

constexpr int BATCH = 4;  // heads that a lane loads at once

// The pointers and the column by which a lane reads its token.
struct Token {
  const bf16 *in, *grad;
  bf16* out;
  int column;
  bool holds;  // whether the lane has columns of its head
};

// x and dy of BATCH heads of a token for each group of lanes, from head `base` on; zeros from head `end` on.
struct HeadBatch {
  HeadWords x[BATCH], dy[BATCH];

  // Loads the lane's columns of BATCH heads, every HEADS_PER_WARP-th from `base` plus the number of its group of lanes
  // on.
  DEVICE void load(const Token& token, int base, int end) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * HEADS_PER_WARP + (int)(threadIdx.x & 31) / GROUP;
      x[i] = dy[i] = {};
      if (token.holds && head < end) {
        x[i] = load_head(token.in + head * HEAD_DIM, token.column);
        dy[i] = load_head(token.grad + head * HEAD_DIM, token.column);
      }
    }
  }

  // Unrotates and passes back through the norm; all heads have one weight, whose gradient is added to `dweight`.
  DEVICE void finish(const Token& token, int base, int end, const HeadWords& weight, const HeadColumns& angles,
                     HeadColumns& dweight, float epsilon) const {
    const HeadColumns factors = weight.columns();
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * HEADS_PER_WARP + (int)(threadIdx.x & 31) / GROUP;
      if (base + i * HEADS_PER_WARP >= end) break;
      HeadColumns n = x[i].columns(), g = dy[i].columns();
      const float inverse = inverse_rms(n, epsilon);
      float products = 0.f;
#pragma unroll
      for (int k = 0; k < LANE_COLUMNS; k++) {
        const float low = g.low[k] * angles.low[k] + g.high[k] * angles.high[k];
        const float high = g.high[k] * angles.low[k] - g.low[k] * angles.high[k];
        n.low[k] *= inverse;
        n.high[k] *= inverse;
        dweight.low[k] = fmaf(low, n.low[k], dweight.low[k]);
        dweight.high[k] = fmaf(high, n.high[k], dweight.high[k]);
        g.low[k] = low * factors.low[k];
        g.high[k] = high * factors.high[k];
        products = fmaf(g.low[k], n.low[k], fmaf(g.high[k], n.high[k], products));
      }
      const float mean = lanes_sum<GROUP>(products) * (1.f / HEAD_DIM);
#pragma unroll
      for (int k = 0; k < LANE_COLUMNS; k++) {
        n.low[k] = inverse * (g.low[k] - n.low[k] * mean);
        n.high[k] = inverse * (g.high[k] - n.high[k] * mean);
      }
      if (token.holds && head < end) store_head(token.out + head * HEAD_DIM, token.column, n);
    }
  }
};

// Sum over the heads that a warp held at once, then over warps in order, into `to`.
DEVICE void store_weight_sums(HeadColumns& sums, float (*shared)[HEAD_DIM], float* to, int column) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
#pragma unroll
    for (int distance = GROUP; distance < 32; distance *= 2) {
      sums.low[i] += __shfl_xor_sync(0xffffffffu, sums.low[i], distance);
      sums.high[i] += __shfl_xor_sync(0xffffffffu, sums.high[i], distance);
    }
  }
  __syncthreads();  // the sums of the last weight have been read
  if (lane < LANES) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++)
      shared[warp][column + i] = sums.low[i], shared[warp][HALF + column + i] = sums.high[i];
  }
  __syncthreads();  // every warp's sums are stored
  for (int at = threadIdx.x; at < HEAD_DIM; at += NUM_WARPS * 32) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; i++) sum += shared[i][at];
    to[at] = sum;
  }
}

// A warp has a token at a time: its query heads, then its key heads, BATCH heads a lane. The gradients of both weights
// stay in registers until all tokens are done.
extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 2)
    qk_norm_rope_backward(const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const i32* positions,
                          const float* cos, const float* sin, const bf16* dy, bf16* dqkv, float* partials,
                          const __grid_constant__ QkNormRopeBackwardParams params) {
  __shared__ __align__(16) float shared[NUM_WARPS][HEAD_DIM];
  const int lane = threadIdx.x & 31, column = lane % GROUP * LANE_COLUMNS;
  const int num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const float epsilon = f32_word(params.epsilon);
  const i64 last = (i64)params.max_positions - 1;

  HeadColumns q_sums = {}, k_sums = {};
  const u64 step = (u64)gridDim.x * NUM_WARPS;
  u64 index = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  i64 asked = index < params.tokens ? positions[index] : 0;
#pragma unroll 1
  for (; index < params.tokens; index += step) {
    const bf16* grad = dy + index * params.dy_stride;
    bf16* out = dqkv + index * params.out_stride;
    const Token token = {qkv + index * params.in_stride, grad, out, column, lane % GROUP < LANES};
    const int q_end = num_heads, k_end = num_heads + num_kv_heads;
    // Load heads first and the angles after: they are needed last.
    HeadBatch heads;
    heads.load(token, 0, q_end);
    HeadColumns angles = {};
    HeadWords weight = {};
    if (token.holds) {
      angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);
      weight = load_head(q_weight, column);
    }
    if (index + step < params.tokens) asked = positions[index + step];  // of the next token
#pragma unroll 1
    for (int base = 0; base < q_end; base += BATCH * HEADS_PER_WARP) {
      if (base > 0) heads.load(token, base, q_end);
      heads.finish(token, base, q_end, weight, angles, q_sums, epsilon);
    }
    if (token.holds) weight = load_head(k_weight, column);
#pragma unroll 1
    for (int base = q_end; base < k_end; base += BATCH * HEADS_PER_WARP) {
      heads.load(token, base, k_end);
      heads.finish(token, base, k_end, weight, angles, k_sums, epsilon);
    }
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
