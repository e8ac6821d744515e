// select_gate: which blocks each dense probe row chooses while their scores stream past (MOMO): a small buffer of the
// best, and a Gaussian gate for what it refuses or lets go.
// Math       of the blocks sinks .. complete - 1 of the probe's tile, complete those that end no later than the tile's
//            first probe: all, where they are at most k.
//            Else the num_exact best so far, and of the others each score that exceeds mean + deviation * quantile(1 -
//            slots left / scores left)
// Layout     lse f32 [heads, blocks, probes] as sparse_attention_forward writes it, of the heads from first_head on;
//            chosen u32 [num_heads, probes, ceil(blocks / 32)];
//            nan i32 [num_heads], added to: probes with a score of a block they see that is no number or infinite
// Buffers    lse, chosen, nan
// Defines    none
// Tiling     grid (ceil(probes / 64), heads, 1); 64 threads, a probe each; num_exact * 512 dynamic shared bytes
// Numerics   f32 scores, f64 gate; the quantile is Acklam's rational approximation
// Edges      num_exact: what shared memory holds; equal scores: the earlier block is the better one
#include "common/types.cuh"

struct SelectGateParams {
  u64 num_probes, num_blocks, block, context, gamma, query_block, first_head;
  u64 first_tiles, k, num_exact;
};

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

// A thread walks through the blocks of keys of one probe row, in their order.
extern "C" __global__ void __launch_bounds__(64)
    select_gate(const float* lse, u32* chosen, i32* nan, const __grid_constant__ SelectGateParams params) {
  const int probe = (int)(blockIdx.x * 64 + threadIdx.x), probes = (int)params.num_probes,
            blocks = (int)params.num_blocks, block = (int)params.block;
  if (probe >= probes) return;
  const int gamma = (int)params.gamma, context = (int)params.context, tile = (int)params.query_block,
            head = (int)params.first_head + (int)blockIdx.y, words = ceil_div(blocks, 32);
  lse += (u64)blockIdx.y * blocks * probes + probe;
  chosen += ((u64)head * probes + probe) * words;
  for (int word = 0; word < words; ++word) chosen[word] = 0;
  // A score that is no number or infinite counts for the head, and the probe chooses nothing.
  bool bad = false;
  for (int j = 0; j <= (context + probe * gamma) / block; ++j) bad |= !(lse[(u64)j * probes] < INFINITY_F32);
  if (bad) {
    atomicAdd(nan + head, 1);
    return;
  }
  const int first_probe = probe * gamma / tile * tile, end = max((context + first_probe + 1) / block - 1, 0),
            begin = min((int)params.first_tiles, end), count = end - begin;
  const auto choose = [&](int j) { chosen[j / 32] |= 1u << j % 32; };
  if (count <= (int)params.k) {
    for (int j = begin; j < end; ++j) choose(j);
    return;
  }
  const int capacity = min((int)params.num_exact, (int)params.k);
  // One column a thread: the best scores and their blocks.
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const auto best = [&](int i) -> float& { return ((float*)shared_memory)[i * 64 + (int)threadIdx.x]; };
  const auto place = [&](int i) -> int& { return ((int*)shared_memory)[(capacity + i) * 64 + (int)threadIdx.x]; };
  // Scores in the buffer, the place of the worst of them, and blocks that the gate may still choose.
  int held = 0, worst = 0, slots = (int)params.k - capacity;
  double num_scores = 0.0, mean = 0.0, squares = 0.0;  // of the scores that the gate got
  const auto find_worst = [&] {
    worst = 0;
    for (int i = 1; i < held; ++i)
      if (best(i) < best(worst) || (best(i) == best(worst) && place(i) > place(worst))) worst = i;
  };
  for (int j = begin; j < end; ++j) {
    float score = lse[(u64)j * probes];
    int at = j;
    if (held < capacity) {
      best(held) = score, place(held) = at, held += 1;
      find_worst();
      continue;
    }
    // A better score takes the place of the worst one, which goes to the gate instead.
    if (capacity > 0 && score > best(worst)) {
      const float out = best(worst);
      const int out_at = place(worst);
      best(worst) = score, place(worst) = at;
      score = out, at = out_at;
      find_worst();
    }
    // The gate updates its mean and variance with every score.
    const double x = score, delta = x - mean;
    num_scores += 1.0;
    mean += delta / num_scores;
    squares += delta * (x - mean);
    if (slots == 0) continue;
    const double p = 1.0 - (double)slots / (double)(end - j);
    if (p <= 0.0 || x > mean + sqrt(squares / num_scores) * normal_quantile(p)) {
      slots -= 1;
      choose(at);
    }
  }
  for (int i = 0; i < held; ++i) choose(place(i));
}
