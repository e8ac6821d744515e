// finish_sum: second half of a sum in a fixed order; CLIP turns a sum of squares into a norm and the factor that clips
// by it.
// Math       total = sum of partials; out = total, or with CLIP: out = sqrt(total), scale = min(1, max_norm / (out +
//            1e-6)), and 0 where the norm is not finite: the gate of the update
// Layout     partials f32 [num_partials]; out, scale f32 [1]
// Buffers    partials, out, scale (CLIP)
// Defines    CLIP (0)
// Tiling     grid (1); 1024 threads
// Numerics   f32 in a fixed order; latency-bound
// Edges      num_partials of any size
#include "common/fixed_sum.cuh"

#ifndef CLIP
#define CLIP 0
#endif

constexpr int NUM_THREADS = 1024, NUM_WARPS = NUM_THREADS / 32;

struct FinishSumParams { u64 num_partials, max_norm; };

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
finish_sum(const float* partials, float* out
#if CLIP
           , float* scale
#endif
           , const __grid_constant__ FinishSumParams params) {
  __shared__ float shared[NUM_WARPS];
  float sum = 0.f;
#pragma unroll 8
  for (u64 p = threadIdx.x; p < params.num_partials; p += NUM_THREADS) sum += partials[p];
  sum = warps_sum<NUM_WARPS>(sum, shared);
  if (threadIdx.x == 0) {
#if CLIP
    const float norm = sqrtf(sum);
    out[0] = norm;
    scale[0] = norm < INFINITY_F32 ? fminf(1.f, f32_word(params.max_norm) / (norm + 1e-6f)) : 0.f;
#else
    out[0] = sum;
#endif
  }
}
