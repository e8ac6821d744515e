// latent_head: how MLA's packing kernels lay a head [content ; rotary part] over lanes where it is normed. A lane holds
// eight consecutive columns of the content and the columns of the rotary part that rotary_head gives it; LATENT_GROUP
// lanes hold a head, a warp LATENT_HEADS heads at once.
// Defines    CONTENT_DIM (a multiple of 8; with norms at most 256), HEAD_DIM (of the rotary part), NORM_DIM (0: none)
#pragma once
#include "common/fixed_sum.cuh"
#include "common/rotary_head.cuh"

constexpr int CONTENT_LANES = CONTENT_DIM / 8;
constexpr int LATENT_GROUP = min_int(power_of_two(max_int(CONTENT_LANES, LANES)), 32);
constexpr int LATENT_HEADS = 32 / LATENT_GROUP, LATENT_DIM = CONTENT_DIM + HEAD_DIM;
static_assert(CONTENT_DIM % 8 == 0, "content is read 16 bytes at a time");
static_assert(NORM_DIM == 0 || CONTENT_LANES <= 32, "the content of a normed head is on at most a warp");

// A lane's columns of a head; zeros past its end.
struct LatentColumns {
  float content[8];
  HeadColumns rope;
};

// Dot product of the rotated columns that a lane holds.
DEVICE float rope_products(const HeadColumns& a, const HeadColumns& b) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) sum = fmaf(a.low[i], b.low[i], fmaf(a.high[i], b.high[i], sum));
  return sum;
}
DEVICE float content_products(const float (&a)[8], const float (&b)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// The columns of the two parts of a head that a lane holds, if any.
struct LatentLane {
  int head, content, rope;
  bool has_content, has_rope;
};
DEVICE LatentLane latent_lane(int lane) {
  const int place = lane % LATENT_GROUP;
  return {lane / LATENT_GROUP, place * 8, place * LANE_COLUMNS, place < CONTENT_LANES, place < LANES};
}

// The columns in the types of memory; undefined where `holds` is false.
DEVICE uint4 load_content(const bf16* content, const LatentLane& lane, bool holds) {
  return holds && lane.has_content ? load_16_bytes(content + lane.content) : make_uint4(0, 0, 0, 0);
}
DEVICE HeadWords load_rope(const bf16* rope, const LatentLane& lane, bool holds) {
  HeadWords words = {};
  if (holds && lane.has_rope) words = load_head(rope, lane.rope);
  return words;
}

// 1 / rms of a head from the squares of each lane; every lane of the group receives it.
DEVICE float latent_inverse_rms(float squares, float epsilon) {
  return 1.f / sqrtf(lanes_sum<LATENT_GROUP>(squares) * (1.f / LATENT_DIM) + epsilon);
}

// The inverse rotation, which is the rotation's gradient.
DEVICE HeadColumns rotated_back(const HeadColumns& x, const HeadColumns& angles) {
  HeadColumns y;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) {
    y.low[i] = x.low[i] * angles.low[i] + x.high[i] * angles.high[i];
    y.high[i] = x.high[i] * angles.low[i] - x.low[i] * angles.high[i];
  }
  return y;
}

// Multiplies eight columns by weight and factor.
DEVICE void weigh(float (&x)[8], const uint4& weight, float factor) {
  float weights[8];
  unpack_bf16x8(weight, weights);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= factor * weights[i];
}
