// row_sums: sums over consecutive rows of an accumulator fragment, whose columns the lanes of those rows then share
// out.
#pragma once
#include "common/types.cuh"

// Sums over STEPS bits of a lane's row (lane / 4): of the two halves of `values` a lane sends one and keeps the other,
// by its bit, so that each step halves what is left. Column tiles 0 .. 7 lie side by side, WIDTH values each; the tiles
// that stay begin at first_tile().
template <int STEPS, int WIDTH>
struct RowSums {
  static constexpr int TILES = 8 >> STEPS;
  static DEVICE int first_tile() {
    const int g = (int)threadIdx.x % 32 / 4;
    return STEPS == 0   ? 0
           : STEPS == 1 ? g % 2 * 4
           : STEPS == 2 ? g % 2 * 4 + g / 2 % 2 * 2
                        : g % 2 * 4 + g / 2 % 2 * 2 + g / 4;
  }
  // Adds up the rows whose numbers, lane / 4, differ in the lowest STEPS bits only. The first TILES * WIDTH values are
  // then sums of the tiles from first_tile() on, and the others are of no use; all 32 lanes call it. STEP counts the
  // bits that are done.
  template <int STEP = 0>
  static DEVICE void add(float (&values)[8 * WIDTH]) {
    if constexpr (STEP < STEPS) {
      constexpr int HALF = (4 >> STEP) * WIDTH;
      const bool upper = threadIdx.x % 32 / 4 >> STEP & 1;
#pragma unroll
      for (int i = 0; i < HALF; ++i) {
        const float low = values[i], high = values[HALF + i],
                    other = __shfl_xor_sync(~0u, upper ? low : high, 4 << STEP);
        values[i] = (upper ? high : low) + other;
      }
      add<STEP + 1>(values);
    }
  }
};
