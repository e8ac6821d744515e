// likeliest: argmax of each row of logits, the first of equal ones.
// Math       ids[r] = min {i : x[r, i] = max_j x[r, j]}, or -1 where an x[r, j] is NaN or infinite
// Layout     x bf16 [rows, width], rows x_stride apart; ids i32 [rows]
// Buffers    x, ids
// Defines    none
// Tiling     grid (rows); 1024 threads, each takes every 1024th logit
// Numerics   exact; writes every element of ids
// Edges      fewer logits than threads; -0 is as large as +0
#include "common/types.cuh"

constexpr int THREADS = 1024, NUM_WARPS = THREADS / 32;

struct LikeliestParams { u64 num_tokens, x_stride; };

// A logit and its index; index -1 stands for a NaN, which counts as larger than all logits.
struct Place {
  float value;
  i32 at;

  DEVICE void join(float other_value, i32 other_at) {
    const bool wins = other_at < 0 || other_value > value || (other_value == value && other_at < at);
    if (at >= 0 && wins) value = other_value, at = other_at;
  }
};

// Gives every lane the largest logit that a lane of the warp holds.
DEVICE void join_warp(Place& best) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, distance);
    const i32 at = __shfl_xor_sync(0xffffffffu, best.at, distance);
    best.join(value, at);
  }
}

// A block finds the largest logit of one row; warp 0 joins what the warps have found.
extern "C" __global__ void __launch_bounds__(THREADS)
    likeliest(const bf16* x, i32* ids, const __grid_constant__ LikeliestParams params) {
  __shared__ float values[NUM_WARPS];
  __shared__ i32 places[NUM_WARPS];
  const bf16* row = x + blockIdx.x * params.x_stride;
  const i32 width = (i32)params.num_tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Place best = {-INFINITY_F32, width};
#pragma unroll 8
  for (i32 at = threadIdx.x; at < width; at += THREADS) {
    const bf16 logit = row[at];
    best.join(bf16_to_f32(logit), (logit.bits & 0x7f80) == 0x7f80 ? -1 : at);
  }
  join_warp(best);
  if (lane == 0) values[warp] = best.value, places[warp] = best.at;
  __syncthreads();  // every warp's result is stored
  if (warp > 0) return;
  best.value = values[lane], best.at = places[lane];
  join_warp(best);
  if (lane == 0) ids[blockIdx.x] = best.at;
}
