// rotary_head: how the q/k-norm kernels lay a head over lanes. A lane holds eight columns of the first half of a head and the eight of
// the second half that rotate with them; GROUP lanes hold a head, a warp HEADS_PER_WARP heads at once.
// Defines    HEAD_DIM (a multiple of 16, at most 512)
#pragma once
#include "common/bf16x8.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

constexpr int HALF = HEAD_DIM / 2, LANES = HALF / 8;
constexpr int GROUP = LANES <= 1 ? 1 : LANES <= 2 ? 2 : LANES <= 4 ? 4 : LANES <= 8 ? 8 : LANES <= 16 ? 16 : 32;
constexpr int HEADS_PER_WARP = 32 / GROUP;
static_assert(HEAD_DIM % 16 == 0 && LANES <= 32, "a head is 16 columns a lane, on at most a warp");

// Sixteen columns of a head: c .. c + 7 of each half.
struct HeadColumns {
  float low[8], high[8];
};

DEVICE HeadColumns load_head(const bf16* head, int column) {
  HeadColumns columns;
  unpack_bf16x8(load_16_bytes(head + column), columns.low);
  unpack_bf16x8(load_16_bytes(head + HALF + column), columns.high);
  return columns;
}
DEVICE void store_head(bf16* head, int column, const HeadColumns& columns) {
  store_16_bytes(head + column, pack_bf16x8(columns.low));
  store_16_bytes(head + HALF + column, pack_bf16x8(columns.high));
}
// Cosines and sines of a token's angles, for the same columns.
DEVICE HeadColumns load_angles(const float* cos, const float* sin, i64 at) {
  HeadColumns angles;
  load_f32x8(cos + at, angles.low);
  load_f32x8(sin + at, angles.high);
  return angles;
}
