// key_gradients: how the Hopper backward kernels over successive keys write dk and dv.
// Defines    SHARES 0|1: f32 sums of a share of the queries (query_share.cuh), or the gradients in bf16
#pragma once
#include "common/quad.cuh"
#include "common/query_share.cuh"

// Writes the warp's 16 rows of 2 N columns of one gradient.
template <int N>
DEVICE void store_gradient(const float (&sums)[N], float scale, bf16* to, u64 stride, int first_key, int seq_len) {
  const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + g + 8 * r;
    bf16* row = to + (u64)key * stride + t * 8;
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      u32 x[4];
      quad_pack(x, sums + 16 * n, r, scale);
      if (key < seq_len) *(uint4*)(row + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// Writes the warp's 16 rows of 2 N columns of one gradient: the f32 sums of this block's part of the queries.
template <int N>
DEVICE void store_sums(const float (&sums)[N], float* to) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
    *(float4*)(to + n * 128) = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
}
// Adds what another block's store_sums has written.
template <int N>
DEVICE void add_sums(float (&sums)[N], const float* from) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    const float4 more = __ldcg((const float4*)(from + n * 128));
    sums[4 * n] += more.x, sums[4 * n + 1] += more.y, sums[4 * n + 2] += more.z, sums[4 * n + 3] += more.w;
  }
}

#if SHARES
typedef float gradient;
#else
typedef bf16 gradient;
#endif
