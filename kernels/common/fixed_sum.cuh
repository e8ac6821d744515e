// fixed_sum: sums over lanes and warps in an order that depends on nothing but their number.
#pragma once
#include "common/types.cuh"

// Sum over groups of LANES consecutive lanes (a power of two); every lane receives it. The whole warp must call.
template <int LANES, class T>
DEVICE T lanes_sum(T value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
// Sums over a warp of each of NUM values (a power of two up to 16), each as by lanes_sum<32>, in fewer exchanges:
// lane l receives that of value l / (32 / NUM). The values are lost.
template <int NUM>
DEVICE float lanes_sums(float (&values)[NUM]) {
  const int lane = (int)threadIdx.x & 31;
#pragma unroll
  for (int half = NUM / 2; half > 0; half /= 2) {
    const int distance = half * 32 / NUM;
    const bool is_upper = lane & distance;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float kept = is_upper ? values[half + i] : values[i], given = is_upper ? values[i] : values[half + i];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
    }
  }
#pragma unroll
  for (int distance = 16 / NUM; distance > 0; distance /= 2)
    values[0] += __shfl_xor_sync(0xffffffffu, values[0], distance);
  return values[0];
}
// The largest value of a warp; every lane receives it.
DEVICE float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

// Sum over WARPS consecutive warps that work on one row; every thread receives it. `shared` holds a float a warp of
// the block; all threads of the block must call, and a barrier must lie between two calls that share it.
template <int WARPS>
DEVICE float warps_sum(float value, float* shared) {
  value = lanes_sum<32>(value);
  if constexpr (WARPS > 1) {
    const int warp = threadIdx.x >> 5, first = warp / WARPS * WARPS;
    if ((threadIdx.x & 31) == 0) shared[warp] = value;
    __syncthreads();  // every warp's sum must be there before any warp reads them
    value = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) value += shared[first + i];
  }
  return value;
}
