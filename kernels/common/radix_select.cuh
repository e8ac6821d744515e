// radix_select: exact k-th largest of a stream of (order, position) keys by a whole block of 1024 threads.
// Three histogram passes of 11, 11 and 10 bits fix the 32 score bits; only where the score that results is shared by
// more keys than are still needed, two more passes of 11 bits choose among their positions (so positions stay below
// 2^22).
// One or two selections run over one stream: the last selector sees every key, with two selectors number 0 sees a
// subset.
#pragma once
#include "common/block_scan.cuh"
#include "common/order_key.cuh"
#include "common/shared_count.cuh"

constexpr int SELECT_THREADS = 1024;
constexpr int SELECT_BINS = 2048;
constexpr int SELECT_PASSES = 5;

// Shared memory of one or two selections among the keys of one stream: `radix_begin` sets it up. After `radix_select`
// exactly k of the 64-bit keys that selection x sees are at least `threshold[x]`; one with k = 0 takes none, and its
// threshold stays 0.
template <int NUM_SELECTORS>
struct RadixSelect {
  alignas(16) u32 histogram[NUM_SELECTORS][SELECT_BINS];
  u64 threshold[NUM_SELECTORS];
  u32 remaining[NUM_SELECTORS];  // keys still to take among keys with the digits fixed so far
  u32 num_tied[NUM_SELECTORS];   // keys that share these digits
  u32 warp_sums[SELECT_THREADS / 32];
};

// Mask of the bits of a 64-bit key that are known after passes 0 to `pass`.
DEVICE u64 radix_fixed_bits(int pass) {
  return pass < 0    ? 0ull
         : pass == 0 ? ~0ull << 53
         : pass == 1 ? ~0ull << 42
         : pass == 2 ? ~0ull << 32
         : pass == 3 ? ~0ull << 11
                     : ~0ull;
}

// Begins a selection of the k-th largest (k = 0: selector off; the last selector is always on). Every thread of the
// block calls; no barrier is needed before, unless the state was in use, nor after.
template <int NUM_SELECTORS>
DEVICE void radix_begin(RadixSelect<NUM_SELECTORS>& state, u32 k_of_subset, u32 k_of_all) {
  u32* bins = &state.histogram[0][0];
#pragma unroll
  for (int i = 0; i < NUM_SELECTORS * SELECT_BINS / SELECT_THREADS; i++) bins[threadIdx.x + i * SELECT_THREADS] = 0;
  if (threadIdx.x < NUM_SELECTORS) {
    state.threshold[threadIdx.x] = 0;
    state.remaining[threadIdx.x] = threadIdx.x == NUM_SELECTORS - 1 ? k_of_all : k_of_subset;
  }
  __syncthreads();  // the state is complete
}

// Consecutive bins, the last first, in one access: separate accesses four bins apart would conflict in banks.
// kernels/notes/bins-in-one-access.md
DEVICE void load_bins(u32 (&counts)[4], const u32* bins) {
  const uint4 four = *(const uint4*)bins;
  counts[0] = four.w, counts[1] = four.z, counts[2] = four.y, counts[3] = four.x;
}
DEVICE void load_bins(u32 (&counts)[2], const u32* bins) {
  const uint2 two = *(const uint2*)bins;
  counts[0] = two.y, counts[1] = two.x;
}
template <int COUNT>
DEVICE void clear_bins(u32* bins) {
  if (COUNT == 4) *(uint4*)bins = make_uint4(0, 0, 0, 0);
  else *(uint2*)bins = make_uint2(0, 0);
}

// Fixes a digit of each selector from its histogram: the largest digit that at least `remaining` keys reach. Leaves the
// bins empty.
// `subset_in_first`: histogram 0 alone counted the subset's keys, for both selectors.
template <int NUM_SELECTORS>
DEVICE void radix_find_digit(RadixSelect<NUM_SELECTORS>& state, int shift, bool subset_in_first) {
  constexpr int THREADS_EACH = SELECT_THREADS / NUM_SELECTORS, BINS_EACH = SELECT_BINS / THREADS_EACH;
  constexpr int WARPS_EACH = THREADS_EACH / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int selector = threadIdx.x / THREADS_EACH;
  // Descending bins: thread 0 of a selector holds the largest digits.
  const int last = SELECT_BINS - 1 - threadIdx.x % THREADS_EACH * BINS_EACH;
  u32 *const bins = &state.histogram[selector][last + 1 - BINS_EACH], counts[BINS_EACH], sum = 0;
  load_bins(counts, bins);
  if (NUM_SELECTORS == 2 && selector == 1 && subset_in_first) {
    u32 more[BINS_EACH];
    load_bins(more, &state.histogram[0][last + 1 - BINS_EACH]);
#pragma unroll
    for (int i = 0; i < BINS_EACH; i++) counts[i] += more[i];
  }
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) sum += counts[i];
  const u32 wanted = state.remaining[selector];
  const u32 inclusive = warp_inclusive_sum(sum);
  if (lane == 31) state.warp_sums[warp] = inclusive;
  __syncthreads();  // sums visible; bins and `remaining` are read, so that their owners may write them below
  clear_bins<BINS_EACH>(bins);
  const u32 warps_above = __reduce_add_sync(
      0xffffffffu, lane < warp - selector * WARPS_EACH ? state.warp_sums[selector * WARPS_EACH + lane] : 0);
  u32 above = inclusive - sum + warps_above;
  // `above`: keys with a larger digit than the thread's bins.
  if (wanted != 0 && above < wanted && wanted <= above + sum) {  // exactly one thread of each running selector
    bool is_fixed = false;
#pragma unroll
    for (int i = 0; i < BINS_EACH; i++) {
      if (!is_fixed && wanted <= above + counts[i]) {
        is_fixed = true;
        state.threshold[selector] |= (u64)(last - i) << shift;
        state.remaining[selector] = wanted - above;
        state.num_tied[selector] = counts[i];
      }
      if (!is_fixed) above += counts[i];
    }
  }
  __syncthreads();  // the digit is known, the bins are empty
}

// One pass. `for_subset(visit)` and `for_rest(visit)` call visit(order, position) once for each key of the subset and
// of the rest, spread over the threads in any way (one selector: the subset is everything). Every thread of the block
// calls; barriers are inside.
template <int NUM_SELECTORS, class ForSubset, class ForRest>
DEVICE void radix_pass(RadixSelect<NUM_SELECTORS>& state, int pass, ForSubset for_subset, ForRest for_rest) {
  constexpr int ALL = NUM_SELECTORS - 1;
  const u64 of_all = state.threshold[ALL], of_subset = state.threshold[0];
  // While both selectors look at the same digits, a key of the subset is counted once for both.
  const bool together = NUM_SELECTORS == 1 || state.remaining[0] == 0 || of_all == of_subset;
  u32 *const bins = state.histogram[0], *const bins_all = state.histogram[ALL];
  const u32 score_all = (u32)(of_all >> 32), score_subset = (u32)(of_subset >> 32);
  if (pass < 3) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const u32 fixed = (u32)(radix_fixed_bits(pass - 1) >> 32);
    const u32 digit_bytes = pass == 2 ? 1023u << 2 : 2047u << 2;  // of a digit times 4, a bin's offset
    // rotated: shift - 2 may be -2
    auto offset = [&](u32 order) { return __funnelshift_r(order, order, shift - 2) & digit_bytes; };
    if (together) {
      for_subset([&](u32 order, u32) { count_if_zero(bins, offset(order), (order ^ score_all) & fixed); });
    } else {
      for_subset([&](u32 order, u32) {
        count_if_zero(bins, offset(order), (order ^ score_subset) & fixed);
        count_if_zero(bins_all, offset(order), (order ^ score_all) & fixed);
      });
    }
    if (NUM_SELECTORS == 2)
      for_rest([&](u32 order, u32) { count_if_zero(bins_all, offset(order), (order ^ score_all) & fixed); });
    __syncthreads();  // histograms complete
    radix_find_digit<NUM_SELECTORS>(state, 32 + shift, together);
  } else {
    const int shift = pass == 3 ? 11 : 0;
    const u32 fixed = (u32)radix_fixed_bits(pass - 1);
    auto count = [&](u32* into, u32 score, u32 low, u32 order, u32 position) {
      count_if_zero(into, (position >> shift & 2047u) << 2, (order ^ score) | ((position ^ low) & fixed));
    };
    for_subset([&](u32 order, u32 position) {
      count(bins, score_subset, (u32)of_subset, order, position);
      if (NUM_SELECTORS == 2) count(bins_all, score_all, (u32)of_all, order, position);
    });
    if (NUM_SELECTORS == 2)
      for_rest([&](u32 order, u32 position) { count(bins_all, score_all, (u32)of_all, order, position); });
    __syncthreads();  // histograms complete
    radix_find_digit<NUM_SELECTORS>(state, shift, false);
  }
}

// Runs the passes from `first_pass` on until each selector's threshold is known: after the three passes over the bits
// of the score, those over positions are left out where every key that shares a threshold's score is taken. Every
// thread of the block calls it; for_subset and for_rest are as in radix_pass.
template <int NUM_SELECTORS, class ForSubset, class ForRest>
DEVICE void radix_select(RadixSelect<NUM_SELECTORS>& state, int first_pass, ForSubset for_subset, ForRest for_rest) {
#pragma unroll 1
  for (int pass = first_pass; pass < SELECT_PASSES; pass++) {
    if (pass >= 3) {
      bool ambiguous = false;
#pragma unroll
      for (int x = 0; x < NUM_SELECTORS; x++)
        ambiguous |= state.remaining[x] != 0 && state.remaining[x] != state.num_tied[x];
      if (!ambiguous) break;  // uniform over the block: every key tied at a threshold is taken
    }
    radix_pass<NUM_SELECTORS>(state, pass, for_subset, for_rest);
  }
}
