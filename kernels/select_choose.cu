// select_choose: which blocks of keys each block of queries keeps, by mass or by number.
// Math       of the blocks that a row admits, by falling score (equal ones by rising number): the shortest prefix that holds `goal` of the softmax's mass, or `top`
//            blocks. IS_MASS: scores are masses already. FORCED: the first block and those that meet the row's queries are kept before all others and count
// Layout     score f32 [heads, rows, columns] of the heads from first_head on; kept u32 [num_heads, rows, ceil(columns / 32)], a bit a block; nan i32 [num_heads], added to: rows with a
//            score that is no number, by mass also one that is infinite
// Buffers    score, kept, nan
// Defines    IS_MASS 0|1, FORCED 0|1
// Tiling     grid (rows, heads, 1); 128 threads a row; dynamic shared bytes = columns * 4
// Numerics   exact order of f32; sums of masses in a fixed order, which is not that of the CPU: a prefix may differ where its mass meets the goal to 1e-6
// Edges      goal >= 1 keeps all; at least one block stays; top 0: by mass; a row with NaN keeps nothing: its head is dense
#include "common/order_key.cuh"
#include "common/select_blocks.cuh"

constexpr int NUM_WARPS = 4;

struct SelectChooseParams {
  u64 num_queries, num_keys, block, offset;
  u64 first_head, top;
  u64 goal;  // f32 bits
};

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// What the block of threads knows together; `places` are two, so that one barrier is enough between two uses.
struct Together {
  float* places;
  int turn;
  template <class Combine>
  DEVICE float of(float x, Combine combine) {
    float* place = places + turn * NUM_WARPS;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's part is there; those of the last use but one have been read
    x = place[0];
#pragma unroll
    for (int warp = 1; warp < NUM_WARPS; ++warp) x = combine(x, place[warp]);
    return x;
  }
  DEVICE float sum(float x) {
    return of(warp_sum(x), [](float a, float b) { return a + b; });
  }
  DEVICE float largest(float x) {
    return of(warp_max(x), [](float a, float b) { return fmaxf(a, b); });
  }
};

extern "C" __global__ void __launch_bounds__(128) select_choose(const float* score, u32* kept, i32* nan, const __grid_constant__ SelectChooseParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float places[2 * NUM_WARPS];
  u32* order = (u32*)shared_memory;  // of scores, or of masses up to a factor; 0: kept in any case
  Together together = {places, 0};
  const SelectBlocks blocks = {(int)params.num_queries, (int)params.num_keys, (int)params.block, (int)params.offset};
  const int row = (int)blockIdx.x, head = (int)params.first_head + (int)blockIdx.y, columns = blocks.num_columns(), words = ceil_div(columns, 32), thread = (int)threadIdx.x;
  const int admissible = blocks.admissible(row), top = (int)params.top;
  score += ((u64)blockIdx.y * blocks.num_rows() + row) * columns;
  kept += ((u64)head * blocks.num_rows() + row) * words;
  const auto is_forced = [&](int j) { return FORCED && (j == 0 || j >= blocks.first(row) / blocks.block); };

  // Load: masses relative to the largest, or scores as they are.
  float bad = 0.0f, largest = -INFINITY_F32;
  for (int j = thread; j < admissible; j += 128) {
    const float x = score[j];
    order[j] = __float_as_uint(x);
    if (x != x || (top == 0 && x == INFINITY_F32)) bad = 1.0f;
    largest = fmaxf(largest, x);
  }
  if (together.sum(bad) > 0.0f) {
    if (thread == 0) atomicAdd(nan + head, 1);
    for (int word = thread; word < words; word += 128) kept[word] = 0;
    return;
  }
  const bool by_mass = top == 0;
  largest = together.largest(largest);
  float total = 0.0f, forced = 0.0f, highest = 0.0f;
  for (int j = thread; j < admissible; j += 128) {
    float x = __uint_as_float(order[j]);
    if (by_mass && !IS_MASS) x = largest == -INFINITY_F32 ? 0.0f : exp2f((x - largest) * LOG2_E);
    const float weight = by_mass ? x : 1.0f;
    total += weight;
    if (is_forced(j)) forced += weight;
    else highest = 1.0f;
    order[j] = is_forced(j) ? 0 : order_of_score(x);
  }
  total = together.sum(total);
  forced = together.sum(forced);
  const bool has_others = together.largest(highest) > 0.0f;
  const float goal = by_mass ? f32_word(params.goal) * total : (float)top;
  const bool all = by_mass ? f32_word(params.goal) >= 1.0f : top >= admissible;
  const bool only_forced = FORCED && forced >= goal, searches = !all && !only_forced && has_others;
  // A mass is not negative: its order is its bits and the highest one.
  const auto weight_of = [&](u32 order) { return by_mass ? __uint_as_float(order ^ 0x80000000u) : 1.0f; };

  // The largest order that enough of the others reach: one at least, and with the forced ones the goal.
  u32 least = 0;
  if (searches)
    for (int bit = 31; bit >= 0; --bit) {
      const u32 tried = least | 1u << bit;
      // Masses are added up; one that is 0 counts as present.
      float reached = 0.0f, present = 0.0f;
      for (int j = thread; j < admissible; j += 128)
        if (order[j] >= tried) {
          reached += weight_of(order[j]);
          present = 1.0f;
        }
      reached = together.sum(reached) + forced;
      bool enough = reached >= goal;
      if (enough && reached <= forced) enough = together.largest(present) > 0.0f;  // the same for all threads
      if (enough) least = tried;
    }
  // How many of those that just reach it are needed beside the larger ones.
  float above = 0.0f, equal = 0.0f;
  if (searches) {
    for (int j = thread; j < admissible; j += 128) {
      if (order[j] > least) above += weight_of(order[j]);
      if (order[j] == least) equal += 1.0f;
    }
    above = together.sum(above) + forced;
    equal = together.sum(equal);
  }
  int needed = 1;
  const float mass = weight_of(least);
  for (float sum = above + mass; sum < goal && needed < (int)equal; sum += mass) needed += 1;

  // Each warp writes neighbouring words; of equal scores the first `needed` stay.
  const int lane = thread % 32, warp = thread / 32, per_warp = ceil_div(words, NUM_WARPS), end = min((warp + 1) * per_warp, words);
  const auto is_equal = [&](int j) { return j < admissible && order[j] == least && !is_forced(j); };
  int before = 0;
  if (searches) {
    for (int word = warp * per_warp; word < end; ++word) before += __popc(__ballot_sync(~0u, is_equal(word * 32 + lane)));
    float* place = places + together.turn * NUM_WARPS;
    if (lane == 0) place[warp] = (float)before;
    __syncthreads();  // every warp's number of equal ones is there
    before = 0;
    for (int other = 0; other < warp; ++other) before += (int)place[other];
  }
  for (int word = warp * per_warp; word < end; ++word) {
    const int j = word * 32 + lane;
    const bool same = searches && is_equal(j);
    const u32 equals = __ballot_sync(~0u, same);
    bool taken = j < admissible && (all || is_forced(j));
    if (j < admissible && searches) taken |= order[j] > least || (same && before + __popc(equals & ((1u << lane) - 1)) < needed);
    const u32 bits = __ballot_sync(~0u, taken);
    if (lane == 0) kept[word] = bits;
    before += __popc(equals);
  }
}
