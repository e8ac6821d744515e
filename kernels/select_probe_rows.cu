// select_probe_rows: the largest logit and the sum of exponentials of each query of a probe, over the keys not after
// it.
// Math       scale[h, r] = {max_j x[h, r, j], 1 / sum_j exp(x[h, r, j] - max)} over j <= first_position + r; {0, 0}
//            where all logits are minus infinity
// Layout     logit f32 [heads, rows, num_keys]; scale f32 [heads, rows, 2]; nan i32 [num_heads], added to at first_head
//            + h: rows with a NaN logit or an infinite largest one
// Buffers    logit, scale, nan
// Defines    none
// Tiling     grid (rows, heads, 1); 256 threads; no dynamic shared memory
// Numerics   f32 sums in a fixed order
// Edges      any number of keys
#include "common/block_sums.cuh"

struct SelectProbeRowsParams {
  u64 rows, num_keys, first_position, first_head;
};

// A block has one row of logits, a query of the probe of one head; the keys are spread over its threads.
extern "C" __global__ void __launch_bounds__(256)
    select_probe_rows(const float* logit, float* scale, i32* nan,
                      const __grid_constant__ SelectProbeRowsParams params) {
  __shared__ float places[8];
  const int row = (int)blockIdx.x, seen = (int)params.first_position + row + 1;
  const u64 at = (u64)blockIdx.y * params.rows + row;
  logit += at * params.num_keys;
  float largest = -INFINITY_F32, bad = 0.0f, sum = 0.0f;
  for (int j = (int)threadIdx.x; j < seen; j += 256) {
    const float x = logit[j];
    if (x != x || x == INFINITY_F32) bad = 1.0f;
    largest = fmaxf(largest, x);
  }
  largest = block_largest<256>(largest, places);
  bad = block_sum<256>(bad, places);
  const float from = largest == -INFINITY_F32 ? 0.0f : largest;
  for (int j = (int)threadIdx.x; j < seen; j += 256) sum += exp2f((logit[j] - from) * LOG2_E);
  sum = block_sum<256>(sum, places);
  if (threadIdx.x != 0) return;
  if (bad > 0.0f) atomicAdd(nan + params.first_head + blockIdx.y, 1);
  scale[2 * at] = from;
  scale[2 * at + 1] = sum > 0.0f ? 1.0f / sum : 0.0f;
}
