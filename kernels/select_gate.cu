// select_gate: which blocks each dense probe row chooses while their scores stream past (MOMO): a small buffer of the
// best, and a Gaussian gate for what it refuses or lets go.
// Math       of the blocks sinks .. complete - 1 of the probe's tile, complete those that end no later than the tile's
//            first probe: all, where they are at most k.
//            Else the num_exact best so far, and of the others each score that exceeds mean + deviation * quantile(1 -
//            slots left / scores left)
// Layout     lse f32 [heads, probes, blocks] as select_cells writes it, of the heads from first_head on; chosen u32
//            [num_heads, probes, ceil(blocks / 32)];
//            nan i32 [num_heads], added to: probes with a score of a block they see that is no number or infinite
// Buffers    lse, chosen, nan
// Defines    none
// Tiling     grid (ceil(probes / 8), heads, 1); 256 threads, a warp a probe: lanes hold 32 neighbouring scores, and the
//            best so far one each; no shared memory
// Numerics   f32 scores, f64 gate, its sums in the order of a warp's scan and relative to the first score; the quantile
//            is Acklam's rational approximation
// Edges      num_exact at most 32; equal scores: the earlier block is the better one
#include "common/order_key.cuh"

struct SelectGateParams {
  u64 num_probes, num_blocks, block, context, gamma, tile, first_head;
  u64 sinks, k, num_exact;
};

constexpr int NUM_WARPS = 8, LAST_LANE = 31;
constexpr u32 ALL_LANES = ~0u;

// The x below which a standard normal variable stays with probability p.
DEVICE double normal_quantile(double p) {
  const auto tail = [](double p) {
    const double q = sqrt(-2.0 * log(p));
    const double over =
        ((((-7.784894002430293e-3 * q - 3.223964580411365e-1) * q - 2.400758277161838) * q - 2.549732539343734) * q +
         4.374664141464968) *
            q +
        2.938163982698783;
    return over /
           ((((7.784695709041462e-3 * q + 3.224671290700398e-1) * q + 2.445134137142996) * q + 3.754408661907416) * q +
            1.0);
  };
  if (p < 0.02425) return tail(p);
  if (p > 1.0 - 0.02425) return -tail(1.0 - p);
  const double q = p - 0.5, r = q * q;
  const double over =
      ((((-3.969683028665376e1 * r + 2.209460984245205e2) * r - 2.759285104469687e2) * r + 1.38357751867269e2) * r -
       3.066479806614716e1) *
          r +
      2.506628277459239;
  return over * q /
         (((((-5.447609879822406e1 * r + 1.615858368580409e2) * r - 1.556989798598866e2) * r + 6.680131188771972e1) *
               r -
           1.328068155288572e1) *
              r +
          1.0);
}

// Adds to `x` the values of the lanes below.
DEVICE double warp_inclusive_sum(double x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double below = __shfl_up_sync(ALL_LANES, x, distance);
    if (lane >= distance) x += below;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
    select_gate(const float* lse, u32* chosen, i32* nan, const __grid_constant__ SelectGateParams params) {
  const int lane = threadIdx.x % 32, probe = (int)(blockIdx.x * NUM_WARPS + threadIdx.x / 32),
            probes = (int)params.num_probes, blocks = (int)params.num_blocks, block = (int)params.block;
  if (probe >= probes) return;
  const int gamma = (int)params.gamma, context = (int)params.context, tile = (int)params.tile,
            head = (int)params.first_head + (int)blockIdx.y, words = ceil_div(blocks, 32);
  lse += ((u64)blockIdx.y * probes + probe) * blocks;
  chosen += ((u64)head * probes + probe) * words;
  bool bad = false;
  for (int j = lane; j <= (context + probe * gamma) / block; j += 32) bad |= !(lse[j] < INFINITY_F32);
  bad = __any_sync(ALL_LANES, bad);
  if (bad && lane == 0) atomicAdd(nan + head, 1);
  const int first_probe = probe * gamma / tile * tile, end = max((context + first_probe + 1) / block - 1, 0),
            begin = min((int)params.sinks, end), count = end - begin;
  // Few blocks are all chosen; otherwise bits are set one by one.
  const bool all = !bad && count <= (int)params.k;
  for (int word = lane; word < words; word += 32) {
    const int from = max(begin - word * 32, 0), to = min(end - word * 32, 32);
    chosen[word] = all && from < to ? ~0u >> (32 - to + from) << from : 0;
  }
  if (bad || all) return;
  __syncwarp();  // every word is 0 before bits are set
  const auto choose = [&](int j) { atomicOr(chosen + j / 32, 1u << j % 32); };

  // The best so far: the first scores begin. `worst` is the lane that holds the least of them, of equal ones the last.
  const int capacity = min((int)params.num_exact, (int)params.k);
  float best = lane < capacity ? lse[begin + lane] : INFINITY_F32, worst_score = INFINITY_F32;
  int place = begin + lane, worst = 0;
  const auto find_worst = [&] {
    const u32 order = lane < capacity ? order_of_score(best) : ~0u;
    const bool is_least = order == __reduce_min_sync(ALL_LANES, order);
    const int last = __reduce_max_sync(ALL_LANES, is_least ? place : -1);
    worst = __ffs(__ballot_sync(ALL_LANES, is_least && place == last)) - 1;
    worst_score = __shfl_sync(ALL_LANES, best, worst);
  };
  if (capacity > 0) find_worst();

  int slots = (int)params.k - capacity;
  double anchor = 0.0, sum = 0.0, squares = 0.0;
  for (int start = begin + capacity; start < end; start += 32) {
    const int j = start + lane;
    const bool valid = j < end;
    float score = valid ? lse[j] : -INFINITY_F32;
    int at = j;
    // Keep: a score above the worst takes its place, in the order of the blocks, and the gate sees what it evicts.
    u32 later = ALL_LANES;
    for (;;) {
      const u32 above = __ballot_sync(ALL_LANES, score > worst_score) & later;
      if (above == 0) break;
      const int next = __ffs(above) - 1;
      const float entering = __shfl_sync(ALL_LANES, score, next), leaving = worst_score;
      const int leaving_at = __shfl_sync(ALL_LANES, place, worst);
      if (lane == worst) best = entering, place = start + next;
      if (lane == next) score = leaving, at = leaving_at;
      later &= ~((2u << next) - 1);
      find_worst();
    }
    if (slots == 0) continue;

    // Gate: mean and variance of all scores up to each lane's.
    if (start == begin + capacity) anchor = __shfl_sync(ALL_LANES, score, 0);
    const double x = score, delta = valid ? x - anchor : 0.0;
    const double sums = sum + warp_inclusive_sum(delta), all_squares = squares + warp_inclusive_sum(delta * delta);
    sum = __shfl_sync(ALL_LANES, sums, LAST_LANE);
    squares = __shfl_sync(ALL_LANES, all_squares, LAST_LANE);
    const double seen = j - (begin + capacity) + 1, left = end - j, mean = sums / seen,
                 variance = all_squares / seen - mean * mean;
    // Rounding may leave it below 0. Behind a score of minus infinity it is NaN, and nothing passes.
    const double deviation = sqrt(variance < 0.0 ? 0.0 : variance);
    // With fewer slots the gate is higher: only the lanes behind the first that passes, and that pass too, are asked
    // again.
    bool passes = valid;
    while (slots > 0) {
      if (passes) {
        const double p = 1.0 - (double)slots / left;
        passes = p <= 0.0 || x > anchor + mean + deviation * normal_quantile(p);
      }
      const u32 passing = __ballot_sync(ALL_LANES, passes);
      if (passing == 0) break;
      const int next = __ffs(passing) - 1;
      if (lane == next) choose(at);
      slots -= 1;
      passes = passes && lane > next;
    }
  }
  if (lane < capacity) choose(place);
}
