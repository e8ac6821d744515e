// fp8_amax: largest magnitudes of a bf16 tensor, one a block; fp8_quantise takes the largest of them.
// Math       amax[b] = max |x| over the 16-byte words b*256 + t + i*grid*256
// Layout     x bf16 [num_elements] contiguous, 16-byte aligned; amax [grid], bits of an f32
// Buffers    x, amax
// Defines    none
// Tiling     grid (at most 1024); 256 threads; four 16-byte loads at once
// Numerics   exact, whatever the order: magnitudes are compared as integers, so a NaN is larger than everything;
//            memory-bound
// Edges      num_elements a multiple of 8
#include "common/bf16x8.cuh"

constexpr int NUM_THREADS = 256, NUM_WARPS = NUM_THREADS / 32, LOADS = 4;

struct Fp8AmaxParams { u64 num_elements; };

// The larger of `largest` and the magnitudes of a pair, as the bits of f32s.
DEVICE u32 fold(u32 largest, u32 pair) { return max(max(largest, pair & 0x7fff0000u), pair << 16 & 0x7fff0000u); }

// A block finds the largest magnitude of its words of eight numbers, which are spread over all blocks in turn.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
fp8_amax(const bf16* x, u32* amax, const __grid_constant__ Fp8AmaxParams params) {
  __shared__ u32 of_warps[NUM_WARPS];
  const u64 num_words = params.num_elements / 8, stride = (u64)gridDim.x * NUM_THREADS;
  u32 largest = 0;
  for (u64 at = (u64)blockIdx.x * NUM_THREADS + threadIdx.x; at < num_words; at += LOADS * stride) {
    uint4 words[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      words[i] = at + i * stride < num_words ? load_16_bytes(x + (at + i * stride) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      largest = fold(fold(fold(fold(largest, words[i].x), words[i].y), words[i].z), words[i].w);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();  // every warp's maximum is stored
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < NUM_WARPS; warp++) largest = max(largest, of_warps[warp]);
    amax[blockIdx.x] = largest;
  }
}
