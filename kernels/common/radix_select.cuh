// radix_select: exact k-th largest of a stream of (order, position) keys by a whole block of 1024 threads.
// Three histogram passes of 11, 11 and 10 bits fix the 32 score bits; only where the score that results is shared by more
// keys than are still needed, two more passes of 11 bits choose among their positions (so positions stay below 2^22).
// One or two selections run over the same stream: selector 1 sees every key, selector 0 only those marked `in_subset`
// (with one selector, selector 0 sees every key).
#pragma once
#include "common/block_scan.cuh"
#include "common/order_key.cuh"

constexpr int SELECT_THREADS = 1024;
constexpr int SELECT_BINS = 2048;
constexpr int SELECT_MAX_POSITION_BITS = 22;

/// Shared memory of a selection. Before `radix_select`, `remaining[x]` holds k (0: selector x is off, its threshold 0);
/// afterwards `threshold[x]` is an order key that exactly k keys of the stream reach.
template <int NUM_SELECTORS>
struct RadixSelect {
  u32 histogram[NUM_SELECTORS][SELECT_BINS];
  u64 threshold[NUM_SELECTORS];
  u32 remaining[NUM_SELECTORS];  // keys still to take at or below the digits fixed so far
  u32 num_tied[NUM_SELECTORS];   // keys that share the digits fixed so far
  u32 warp_sums[SELECT_THREADS / 32];
};

/// Fixes the next digit of each selector from its histogram: the largest digit that at least `remaining` keys reach.
template <int NUM_SELECTORS>
DEVICE void radix_select_digit(RadixSelect<NUM_SELECTORS>& state, int shift) {
  constexpr int THREADS_EACH = SELECT_THREADS / NUM_SELECTORS, BINS_EACH = SELECT_BINS / THREADS_EACH;
  constexpr int WARPS_EACH = THREADS_EACH / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int selector = threadIdx.x / THREADS_EACH, first = threadIdx.x % THREADS_EACH * BINS_EACH;
  // Descending bins: thread 0 of a selector holds the largest digits.
  u32 counts[BINS_EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    counts[i] = state.histogram[selector][SELECT_BINS - 1 - first - i];
    sum += counts[i];
  }
  const u32 wanted = state.remaining[selector];
  const u32 inclusive = warp_inclusive_sum(sum);
  if (lane == 31) state.warp_sums[warp] = inclusive;
  __syncthreads();  // sums visible; and nobody may still read `remaining` when its owner rewrites it below
  const u32 sums = warp_inclusive_sum(lane < WARPS_EACH ? state.warp_sums[selector * WARPS_EACH + lane] : 0);
  const int warp_in_selector = warp - selector * WARPS_EACH;
  const u32 warps_above = __shfl_sync(0xffffffffu, sums, warp_in_selector == 0 ? 0 : warp_in_selector - 1);
  u32 above = inclusive - sum + (warp_in_selector == 0 ? 0 : warps_above);
  if (wanted != 0 && above < wanted && wanted <= above + sum) {  // exactly one thread of each running selector
    bool found = false;
#pragma unroll
    for (int i = 0; i < BINS_EACH; i++) {
      if (!found && wanted <= above + counts[i]) {
        found = true;
        state.threshold[selector] |= (u64)(SELECT_BINS - 1 - first - i) << shift;
        state.remaining[selector] = wanted - above;
        state.num_tied[selector] = counts[i];
      }
      if (!found) above += counts[i];
    }
  }
  __syncthreads();  // the digit must be known before the next pass compares with it
}

/// `for_each_key(visit)` must call `visit(order, position, in_subset)` once for each key of the stream, spread over the
/// block's threads in any way, the same for every call. Every thread of the block calls; `state` is ready when it returns.
template <int NUM_SELECTORS, class ForEachKey>
DEVICE void radix_select(RadixSelect<NUM_SELECTORS>& state, ForEachKey for_each_key) {
  constexpr int ALL = NUM_SELECTORS - 1;  // the selector that sees every key
  if (threadIdx.x < NUM_SELECTORS) {
    state.threshold[threadIdx.x] = 0;
    state.num_tied[threadIdx.x] = state.remaining[threadIdx.x];
  }
#pragma unroll 1
  for (int pass = 0; pass < 5; pass++) {
    const bool on_positions = pass >= 3;
    u32* bins = &state.histogram[0][0];
#pragma unroll
    for (int i = 0; i < NUM_SELECTORS * SELECT_BINS / SELECT_THREADS; i++) bins[threadIdx.x + i * SELECT_THREADS] = 0;
    __syncthreads();  // bins are empty, and the state of the pass before is complete
    if (pass == 3) {
      bool ambiguous = false;
#pragma unroll
      for (int x = 0; x < NUM_SELECTORS; x++) ambiguous |= state.remaining[x] != state.num_tied[x];
      if (!ambiguous) break;  // uniform over the block: every key tied at the threshold is taken
    }
    const bool subset_on = state.remaining[0] != 0;
    const u64 of_all = state.threshold[ALL], of_subset = state.threshold[0];
    if (!on_positions) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      const u32 fixed = pass == 0 ? 0u : pass == 1 ? 0xffe00000u : 0xfffffc00u;  // score bits of earlier passes
      const u32 digit_mask = pass == 2 ? 1023u : 2047u;
      const u32 score_all = (u32)(of_all >> 32), score_subset = (u32)(of_subset >> 32);
      for_each_key([&](u32 order, u32, bool in_subset) {
        const u32 digit = order >> shift & digit_mask;
        if (((order ^ score_all) & fixed) == 0) atomicAdd(&state.histogram[ALL][digit], 1u);
        if (NUM_SELECTORS == 2 && in_subset && subset_on && ((order ^ score_subset) & fixed) == 0)
          atomicAdd(&state.histogram[0][digit], 1u);
      });
      __syncthreads();  // histograms complete
      radix_select_digit<NUM_SELECTORS>(state, 32 + shift);
    } else {
      const int shift = pass == 3 ? 11 : 0;
      const u32 fixed = pass == 3 ? 0u : ~2047u;
      for_each_key([&](u32 order, u32 position, bool in_subset) {
        const u32 digit = position >> shift & 2047u;
        if (order == (u32)(of_all >> 32) && ((position ^ (u32)of_all) & fixed) == 0)
          atomicAdd(&state.histogram[ALL][digit], 1u);
        if (NUM_SELECTORS == 2 && in_subset && subset_on && order == (u32)(of_subset >> 32) &&
          ((position ^ (u32)of_subset) & fixed) == 0)
          atomicAdd(&state.histogram[0][digit], 1u);
      });
      __syncthreads();  // histograms complete
      radix_select_digit<NUM_SELECTORS>(state, shift);
    }
  }
}
