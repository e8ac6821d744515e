// hopper_chosen_gradients: what gradients of attention over chosen blocks share on Hopper: dq of a block's keys from
// dS^T in shared memory, and sums of a run's keys that go out.
// Defines    as hopper_chosen.cuh, with GRADIENT 1
#pragma once
#include "common/hopper_chosen.cuh"
#include "common/reduce_add.cuh"

// 64 columns of dq = dS K: dS^T in shared memory, rows are keys.
DEVICE void multiply_keys(float (&dq)[32], u32 ds, u32 keys) {
  const u64 a = wgmma_across(ds, 0), b = wgmma_across(keys, 0);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step)
    wgmma<1, 1>(dq, wgmma_step(a, step * 2048), wgmma_step(b, step * 2048), step > 0);
  wgmma_commit();
}

// Adds the thread's two keys; a quad writes 64 contiguous bytes: columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16 side by side.
DEVICE void add_rows(float* sums, u64 first_row, int first, int num_keys, const float (&x)[HEAD_DIM / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= num_keys) continue;
    float* row = sums + (first_row + first + 8 * r) * HEAD_DIM + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n)
      reduce_add_f32x4(row + n * 16, x[8 * n + 2 * r], x[8 * n + 2 * r + 1], x[8 * n + 4 + 2 * r],
                       x[8 * n + 5 + 2 * r]);
  }
}
