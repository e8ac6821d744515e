// finish_sum: second half of a sum in a fixed order; ROOT turns a sum of squares into a norm.
// Math       total = sum of partials; out = total, or with ROOT sqrt(total)
// Layout     partials f32 [num_partials]; out f32 [1]
// Buffers    partials, out
// Defines    ROOT 0|1
// Tiling     grid (1); 1024 threads
// Numerics   f32 in a fixed order; latency-bound
// Edges      num_partials of any size
#include "common/fixed_sum.cuh"

constexpr int NUM_THREADS = 1024, NUM_WARPS = NUM_THREADS / 32;

struct FinishSumParams { u64 num_partials; };

// One block: a thread adds every 1024th partial, then the threads' sums are added.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
finish_sum(const float* partials, float* out, const __grid_constant__ FinishSumParams params) {
  __shared__ float shared[NUM_WARPS];
  float sum = 0.f;
#pragma unroll 8
  for (u64 p = threadIdx.x; p < params.num_partials; p += NUM_THREADS) sum += partials[p];
  sum = warps_sum<NUM_WARPS>(sum, shared);
  if (threadIdx.x == 0) out[0] = ROOT ? sqrtf(sum) : sum;
}
