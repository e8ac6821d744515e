// rotary_head: how the q/k-norm kernels lay a head over lanes. A lane holds LANE_COLUMNS consecutive columns of the
// first half of a head and the columns of the second half that rotate with them; GROUP lanes hold a head, a warp
// HEADS_PER_WARP heads at once.
// Defines    HEAD_DIM (a multiple of 16, at most 256)
#pragma once
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"

// Four: with eight columns a lane, 16-byte accesses, too few warps fit an SM to keep the memory busy.
constexpr int LANE_COLUMNS = 4, PAIRS = LANE_COLUMNS / 2;
constexpr int HALF = HEAD_DIM / 2, LANES = HALF / LANE_COLUMNS;
constexpr int GROUP = power_of_two(LANES);
constexpr int HEADS_PER_WARP = 32 / GROUP;
static_assert(HEAD_DIM % 16 == 0 && LANES <= 32, "a head is whole lanes, on at most a warp");

// A lane's columns of a head: the same columns of the lower and of the upper half, which rotation pairs.
struct HeadColumns {
  float low[LANE_COLUMNS], high[LANE_COLUMNS];
};

DEVICE void load_pairs(u32 (&to)[PAIRS], const bf16* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  to[0] = words.x, to[1] = words.y;
}
DEVICE void store_columns(bf16* to, const float (&from)[LANE_COLUMNS]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
}

// A lane's columns in the types of memory.
struct HeadWords {
  u32 low[PAIRS], high[PAIRS];
  // The same columns as f32.
  DEVICE HeadColumns columns() const {
    HeadColumns columns;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      columns.low[2 * i] = bf16_low(low[i]), columns.low[2 * i + 1] = bf16_high(low[i]);
      columns.high[2 * i] = bf16_low(high[i]), columns.high[2 * i + 1] = bf16_high(high[i]);
    }
    return columns;
  }
};

DEVICE HeadWords load_head(const bf16* head, int column) {
  HeadWords words;
  load_pairs(words.low, head + column);
  load_pairs(words.high, head + HALF + column);
  return words;
}
DEVICE void store_head(bf16* head, int column, const HeadColumns& columns) {
  store_columns(head + column, columns.low);
  store_columns(head + HALF + column, columns.high);
}

DEVICE void load_f32_columns(float (&to)[LANE_COLUMNS], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
// Cosines and sines of a token's angles, for the same columns.
DEVICE HeadColumns load_angles(const float* cos, const float* sin, i64 at) {
  HeadColumns angles;
  load_f32_columns(angles.low, cos + at);
  load_f32_columns(angles.high, sin + at);
  return angles;
}

// Rotates the pairs (low[i], high[i]) by their angles.
DEVICE HeadColumns rotated(const HeadColumns& x, const HeadColumns& angles) {
  HeadColumns y;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    y.low[i] = x.low[i] * angles.low[i] - x.high[i] * angles.high[i];
    y.high[i] = x.high[i] * angles.low[i] + x.low[i] * angles.high[i];
  }
  return y;
}

// Multiplies x by weight and factor, column by column.
DEVICE HeadColumns weighed(const HeadColumns& x, const HeadColumns& weight, float factor) {
  HeadColumns y;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    y.low[i] = x.low[i] * factor * weight.low[i];
    y.high[i] = x.high[i] * factor * weight.high[i];
  }
  return y;
}

// 1 / RMS of a head (arXiv:1910.07467, eq. 4) from the columns of its GROUP lanes, which call together.
DEVICE float inverse_rms(const HeadColumns& x, float epsilon) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) squares = fmaf(x.low[i], x.low[i], fmaf(x.high[i], x.high[i], squares));
  return 1.f / sqrtf(lanes_sum<GROUP>(squares) * (1.f / HEAD_DIM) + epsilon);
}

// A head of GROUP lanes, normed where it is and rotated, from memory; zeros where the lane `holds` nothing of one. The
// warp calls together. `angle`: the elements of cos and sin before the head's position.
DEVICE HeadColumns rotated_head(const bf16* head, bool is_normed, const bf16* weight, float epsilon, const float* cos,
                                const float* sin, i64 angle, bool holds) {
  const int column = (int)threadIdx.x % GROUP * LANE_COLUMNS;
  HeadWords words = {}, factors = {};
  HeadColumns angles = {};
  if (holds) {
    words = load_head(head, column);
    if (is_normed) factors = load_head(weight, column);
    angles = load_angles(cos, sin, angle + column);
  }
  HeadColumns x = words.columns();
  const HeadColumns normed = weighed(x, factors.columns(), inverse_rms(x, epsilon));
  return rotated(is_normed ? normed : x, angles);
}

// Stores a lane's columns as f32 numbers, rounded to bf16 as store_head rounds them.
DEVICE void store_rounded(float* head, int column, const HeadColumns& columns) {
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i += 2) {
    const u32 low = pack_bf16(columns.low[i], columns.low[i + 1]),
              high = pack_bf16(columns.high[i], columns.high[i + 1]);
    head[column + i] = bf16_low(low), head[column + i + 1] = bf16_high(low);
    head[HALF + column + i] = bf16_low(high), head[HALF + column + i + 1] = bf16_high(high);
  }
}
