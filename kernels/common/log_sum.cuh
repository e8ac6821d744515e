// log_sum: a row's log-sum-exp in one order, whatever kernel computes it: lane t of a quad has the columns 8 n + 2 t
// and 8 n + 2 t + 1 of each step. Columns of -inf add nothing, so that no number depends on how many steps follow.
#pragma once
#include "common/mma.cuh"

// Numbers are products of q and k; scale_log2 is positive. Sums of products are written out as fmaf, so that no
// compiler fuses them in one kernel and leaves them apart in another.
struct LogSum {
  float largest = -INFINITY_F32, total = 0.0f;

  // Joins other terms: `others` is the sum of exp2(scale_log2 (x - their largest x)).
  DEVICE void join(float their_largest, float others, float scale_log2) {
    if (their_largest == -INFINITY_F32) return;
    const float larger = fmaxf(largest, their_largest);
    total = fmaf(total, exp2_fast((largest - larger) * scale_log2),
                 others * exp2_fast((their_largest - larger) * scale_log2));
    largest = larger;
  }

  // Joins a lane's columns of a step: elements 4 n + 2 h and 4 n + 2 h + 1 of `score`, -inf where the row sees no key.
  template <int N>
  DEVICE void join_step(const float (&score)[N], int h, float scale_log2) {
    float most = -INFINITY_F32, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N / 4; ++n) most = fmaxf(most, fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
    const float reference = most == -INFINITY_F32 ? 0.0f : most;
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
#pragma unroll
      for (int x = 0; x < 2; ++x) sum += exp2_fast((score[4 * n + 2 * h + x] - reference) * scale_log2);
    join(most, sum, scale_log2);
  }

  // Joins the four lanes of the quad: lane t = 0 then has the row's. All 32 lanes call it.
  DEVICE void join_quad(float scale_log2) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float their_largest = __shfl_xor_sync(~0u, largest, lanes), others = __shfl_xor_sync(~0u, total, lanes);
      join(their_largest, others, scale_log2);
    }
  }

  // The log-sum-exp, to the base e; -inf of no terms.
  DEVICE float value(float scale_log2) const {
    return largest == -INFINITY_F32 ? -INFINITY_F32 : fmaf(largest, scale_log2, log2f(total)) * LN_2;
  }
};
