// qk_norm_rope_forward: per-head RMSNorm of queries and keys, then rotary positions, on a packed tensor.
// Math       n = x / sqrt(mean(x^2) + epsilon) weight; y[i] = n[i] cos - n[i + d/2] sin; y[i + d/2] = n[i + d/2] cos +
//            n[i] sin (Qwen3;
//            arXiv:2104.09864 in the rotate-half form); values are copied
// Layout     qkv, out bf16 [tokens, num_heads + 2 num_kv_heads, HEAD_DIM], heads contiguous, tokens in_stride and
//            out_stride apart (multiples of 8); q_weight, k_weight bf16 [HEAD_DIM]; positions i32 [tokens]; cos, sin
//            f32 [max_positions, HEAD_DIM / 2], rows table_stride apart (a multiple of 4)
// Buffers    qkv, q_weight, k_weight, positions, cos, sin, out
// Defines    HEAD_DIM, QK_NORM (1; 0: n = x, and the weights are not read)
// Tiling     grid (ceil(tokens / 8), any number of slices of the heads); 256 threads; a warp takes a slice of a token,
//            a group of lanes a head; no shared memory
// Numerics   f32 inside, one rounding at the store; memory-bound, each input is read once; a position past the tables
//            counts as the last
// Edges      heads that do not fill a warp leave lanes idle; HEAD_DIM 48, 96, 192 leave lanes of each group idle
#include "common/programmatic_launch.cuh"
#include "common/rotary_head.cuh"

#ifndef QK_NORM
#define QK_NORM 1
#endif

constexpr int NUM_WARPS = 8;

struct QkNormRopeForwardParams {
  u64 tokens, num_heads, num_kv_heads, in_stride, out_stride, max_positions, table_stride, epsilon;
};

constexpr int BATCH = 4;  // heads that a lane loads at once

// Selects one of two arrays without moving them from registers to memory.
DEVICE HeadWords selected(bool first, const HeadWords& a, const HeadWords& b) {
  HeadWords words;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    words.low[i] = first ? a.low[i] : b.low[i];
    words.high[i] = first ? a.high[i] : b.high[i];
  }
  return words;
}

// A warp has one token and a slice of its heads: a group of lanes a head, a lane a few columns of BATCH heads at once.
extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 4)
    qk_norm_rope_forward(const bf16* qkv, const bf16* q_weight, const bf16* k_weight, const i32* positions,
                         const float* cos, const float* sin, bf16* out,
                         const __grid_constant__ QkNormRopeForwardParams params) {
  wait_for_previous();
  const int lane = threadIdx.x & 31, column = lane % GROUP * LANE_COLUMNS;
  const u64 token = (u64)blockIdx.x * NUM_WARPS + (threadIdx.x >> 5);
  if (token >= params.tokens) return;
  const bf16* in = qkv + token * params.in_stride;
  bf16* to = out + token * params.out_stride;
  const int num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const float epsilon = f32_word(params.epsilon);

  const int num_normed = num_heads + num_kv_heads, head_in_warp = lane / GROUP;
  const bool holds = lane % GROUP < LANES;  // whether the lane has columns of its head
  const int stride = (int)gridDim.y * BATCH * HEADS_PER_WARP;
  const i64 last = (i64)params.max_positions - 1, asked = positions[token];  // rows of the tables

  HeadColumns angles = {};
#if QK_NORM
  HeadWords q_words = {}, k_words = {};
#endif
#pragma unroll 1
  for (int base = (int)blockIdx.y * BATCH * HEADS_PER_WARP; base < num_normed; base += stride) {
    // Load the heads before the angles, whose address is itself loaded from memory and would delay them.
    HeadWords words[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * HEADS_PER_WARP + head_in_warp;
      if (holds && head < num_normed) words[i] = load_head(in + head * HEAD_DIM, column);
    }
    if (base < stride && holds) {
#if QK_NORM
      q_words = load_head(q_weight, column);
      k_words = load_head(k_weight, column);
#endif
      angles = load_angles(cos, sin, (asked < 0 ? 0 : asked > last ? last : asked) * (i64)params.table_stride + column);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int head = base + i * HEADS_PER_WARP + head_in_warp;
      if (base + i * HEADS_PER_WARP >= num_normed) break;
      HeadColumns x = words[i].columns();
#if QK_NORM
      const float inverse = inverse_rms(x, epsilon);
      x = weighed(x, selected(head < num_heads, q_words, k_words).columns(), inverse);
#endif
      if (holds && head < num_normed) store_head(to + head * HEAD_DIM, column, rotated(x, angles));
    }
  }
  // Copy the values, which follow the keys.
  const int first = (num_heads + num_kv_heads) * HEAD_DIM, end = first + num_kv_heads * HEAD_DIM;
#pragma unroll 4
  for (int at = first + ((int)blockIdx.y * 32 + lane) * 8; at < end; at += (int)gridDim.y * 256)
    store_16_bytes(to + at, load_16_bytes(in + at));
}
