// select_smooth: what the first keys received, smoothed over their neighbours (SnapKV, arXiv:2404.14469).
// Math       score[h, j] = sum of received[h, i] over |i - j| <= width / 2 and 0 <= i < count, divided by width;
//            by_largest: the largest of them
// Layout     received f32 [num_kv_heads, num_keys], score f32 [num_kv_heads, count]
// Buffers    received, score
// Defines    none
// Tiling     grid (ceil(count / 256), num_kv_heads, 1); 256 threads, a key each; no dynamic shared memory
// Numerics   f32 sums by rising key
// Edges      an odd width, also one above count; NaN spreads to its neighbours
#include "common/types.cuh"

struct SelectSmoothParams {
  u64 num_keys, count, width, by_largest;
};

// A thread smooths the score of one key of a KV head.
extern "C" __global__ void __launch_bounds__(256)
    select_smooth(const float* received, float* score, const __grid_constant__ SelectSmoothParams params) {
  const int j = (int)(blockIdx.x * 256 + threadIdx.x), count = (int)params.count, half = (int)params.width / 2;
  if (j >= count) return;
  received += (u64)blockIdx.y * params.num_keys;
  float sum = 0.0f, largest = -INFINITY_F32;
  for (int i = max(j - half, 0); i <= min(j + half, count - 1); ++i) {
    const float x = received[i];
    sum += x;
    if (x > largest || x != x) largest = x;
  }
  score[(u64)blockIdx.y * count + j] = params.by_largest ? largest : sum / (float)params.width;
}
