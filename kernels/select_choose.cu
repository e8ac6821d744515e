// select_choose: which blocks of keys each block of queries keeps, by mass or by number.
// Math       of the blocks that compete in a row, by falling score (equal ones by rising number): the shortest prefix
//            that holds `goal` of the softmax's mass (absolute: `goal` itself; strict: more than that), or `top`
//            blocks, or with tops as many as it has for the head (0: by mass; less: none), or with share that share of
//            the competing ones, rounded up. IS_MASS: scores are masses already. FORCED: the first block and those that
//            meet the row's queries are kept before all others and count. The first num_first have the highest score;
//            drops_absent: minus infinity is never kept
// Layout     score f32 [heads, rows, columns] of the heads from first_head on; kept u32
//            [num_heads, rows, ceil(columns / 32)], a bit a block; nan i32 [num_heads], added to: rows with a score
//            that is no number, by mass also one that is infinite; tops i32 [num_heads], read where has_tops
// Buffers    score, kept, nan, tops
// Defines    IS_MASS 0|1, FORCED 0|1; LONG 0|1: scores are read where they are, by rows of one block of queries
// Tiling     grid (rows, heads, 1); 128 threads a row, LONG 1024; dynamic shared bytes = LONG ? 0 : columns * 4
// Numerics   exact order of f32; a thread adds its masses in f32 and the threads' sums are added in f64, in a fixed
//            order, which is not that of the CPU: a prefix may differ where its mass meets the goal to 1e-6. Numbers of
//            entries are exact up to 2^24 a thread; of equal masses as many stay as the goal needs, by division in f64
// Edges      goal >= 1 (absolute: infinity) keeps all; at least one block stays of those that compete; top 0 and share
//            0: by mass; a row with NaN keeps nothing: its head is dense
#include "common/fixed_sum.cuh"
#include "common/order_key.cuh"
#include "common/select_blocks.cuh"

constexpr int NUM_THREADS = LONG ? 1024 : 128, NUM_WARPS = NUM_THREADS / 32;

struct SelectChooseParams {
  u64 num_queries, num_keys, block, offset, query_block;
  u64 first_head, top, has_tops, segment, num_first, drops_absent;
  u64 share;  // f64 bits
  u64 goal;   // f32 bits
  u64 absolute, strict;
};

// Shared memory of the thread block. Two `places` are used alternately, so that one barrier is enough between two uses.
struct Together {
  double* places;
  int turn;
  // Joins one number a warp, which its first lane holds, by combine(a, b) in the order of warps. Every thread of the
  // block calls it and receives the result.
  template <class Combine>
  DEVICE double of(double x, Combine combine) {
    double* place = places + turn * NUM_WARPS;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's part is stored; the parts of the use before the last have been read
    x = place[0];
#pragma unroll
    for (int warp = 1; warp < NUM_WARPS; ++warp) x = combine(x, place[warp]);
    return x;
  }
  DEVICE double sum(float x) {
    return of(lanes_sum<32>((double)x), [](double a, double b) { return a + b; });
  }
  DEVICE float largest(float x) {
    return (float)of(warp_max(x), [](double a, double b) { return a < b ? b : a; });
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, LONG ? 1 : 8)
    select_choose(const float* score, u32* kept, i32* nan, const i32* tops,
                  const __grid_constant__ SelectChooseParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32* stored = (u32*)shared_memory;
  __shared__ double places[2 * NUM_WARPS];
  Together together = {places, 0};
  const SelectBlocks blocks = select_blocks(params);
  const int row = (int)blockIdx.x, head = (int)params.first_head + (int)blockIdx.y, columns = blocks.num_columns(),
            words = ceil_div(columns, 32), thread = (int)threadIdx.x;
  const int admissible = blocks.competing(row, (int)params.segment), num_first = (int)params.num_first;
  int top = params.has_tops ? tops[head] : (int)params.top;
  const double share = __longlong_as_double((i64)params.share);
  // In f64 1 - 0.7 is a little more than 0.3, which must not round up.
  if (share > 0.0) top = (int)ceil(share * admissible - 1e-9);
  score += ((u64)blockIdx.y * blocks.num_rows() + row) * columns;
  kept += ((u64)head * blocks.num_rows() + row) * words;
  const auto is_forced = [&](int j) { return FORCED && (j == 0 || j >= blocks.first(row) / blocks.block); };

  // Load: masses relative to the largest, or scores as they are.
  const bool none = top < 0 || (share > 0.0 && top == 0), by_mass = top == 0;
  float bad = 0.0f, largest = -INFINITY_F32;
  for (int j = thread; j < admissible && !none; j += NUM_THREADS) {
    const float x = score[j];
    if (!LONG) stored[j] = __float_as_uint(x);
    if (x != x || (by_mass && x == INFINITY_F32)) bad = 1.0f;
    largest = fmaxf(largest, x);
  }
  const bool is_bad = together.sum(bad) > 0.0;
  if (is_bad || none) {
    if (thread == 0 && is_bad) atomicAdd(nan + head, 1);
    for (int word = thread; word < words; word += NUM_THREADS) kept[word] = 0;
    return;
  }
  largest = together.largest(largest);
  float own_total = 0.0f, own_forced = 0.0f, highest = 0.0f;
  // The order key of a score, or of a mass up to a factor; 0 for a block that is kept in any case.
  const auto weighed = [&](float x) {
    return by_mass && !IS_MASS ? (largest == -INFINITY_F32 ? 0.0f : exp2f((x - largest) * LOG2_E)) : x;
  };
  const auto order_of = [&](int j, float x) {
    return is_forced(j) ? 0 : !by_mass && j < num_first ? ~0u : order_of_score(weighed(x));
  };
  for (int j = thread; j < admissible; j += NUM_THREADS) {
    const float x = LONG ? score[j] : __uint_as_float(stored[j]), weight = by_mass ? weighed(x) : 1.0f;
    own_total += weight;
    if (is_forced(j)) own_forced += weight;
    else highest = 1.0f;
    if (!LONG) stored[j] = order_of(j, x);
  }
  const auto order = [&](int j) { return LONG ? order_of(j, score[j]) : stored[j]; };
  const double total = together.sum(own_total), forced = together.sum(own_forced);
  const bool has_others = together.largest(highest) > 0.0f;
  const float given = f32_word(params.goal);
  const double goal = !by_mass ? (double)top : params.absolute ? (double)given : given * total;
  const bool all = by_mass ? (params.absolute ? given == INFINITY_F32 : given >= 1.0f) : top >= admissible,
             strict = params.strict;
  const auto enough_of = [&](double sum) { return strict ? sum > goal : sum >= goal; };
  const bool only_forced = FORCED && enough_of(forced), searches = !all && !only_forced && has_others;
  // A mass is not negative, so its order key is its bits with the highest bit set.
  const auto weight_of = [&](u32 order) { return by_mass ? __uint_as_float(order ^ 0x80000000u) : 1.0f; };

  // The largest order key that enough of the other blocks reach: at least one, and enough to meet the goal with the
  // forced ones.
  u32 least = 0;
  if (searches)
    for (int bit = 31; bit >= 0; --bit) {
      const u32 tried = least | 1u << bit;
      // Sums masses; a mass of 0 counts as present.
      float own = 0.0f, present = 0.0f;
      for (int j = thread; j < admissible; j += NUM_THREADS) {
        const u32 place = order(j);
        if (place >= tried) {
          own += weight_of(place);
          present = 1.0f;
        }
      }
      const double reached = together.sum(own) + forced;
      bool enough = enough_of(reached);
      if (enough && reached <= forced) enough = together.largest(present) > 0.0f;  // the same for all threads
      if (enough) least = tried;
    }
  // How many blocks with exactly this order key are needed in addition to the larger ones.
  int needed = 1;
  if (searches) {
    float own_above = 0.0f, own_equal = 0.0f;
    for (int j = thread; j < admissible; j += NUM_THREADS) {
      const u32 place = order(j);
      if (place > least) own_above += weight_of(place);
      if (place == least) own_equal += 1.0f;
    }
    const double above = together.sum(own_above) + forced, equal = together.sum(own_equal), mass = weight_of(least);
    // Added one by one in f32, small masses would stop growing long before the goal.
    const double wanted = (goal - above) / mass, whole = strict ? floor(wanted) + 1.0 : ceil(wanted);
    if (!enough_of(above + mass)) needed = (int)(mass > 0.0 ? fmin(whole, equal) : equal);
  }

  // Each warp writes consecutive words; of equal scores the first `needed` stay.
  const int lane = thread % 32, warp = thread / 32, per_warp = ceil_div(words, NUM_WARPS),
            end = min((warp + 1) * per_warp, words);
  const auto is_equal = [&](int j) { return j < admissible && order(j) == least && !is_forced(j); };
  const u32 absent = params.drops_absent ? order_of_score(-INFINITY_F32) : 0;
  int before = 0;
  if (searches) {
    for (int word = warp * per_warp; word < end; ++word)
      before += __popc(__ballot_sync(~0u, is_equal(word * 32 + lane)));
    double* place = places + together.turn * NUM_WARPS;
    if (lane == 0) place[warp] = (double)before;
    __syncthreads();  // every warp's number of equal scores is stored
    before = 0;
    for (int other = 0; other < warp; ++other) before += (int)place[other];
  }
  for (int word = warp * per_warp; word < end; ++word) {
    const int j = word * 32 + lane;
    const bool same = searches && is_equal(j);
    const u32 equals = __ballot_sync(~0u, same);
    bool taken = j < admissible && (all || is_forced(j));
    if (j < admissible && searches)
      taken |= order(j) > least || (same && before + __popc(equals & ((1u << lane) - 1)) < needed);
    if (taken && absent) taken = order(j) != absent;
    const u32 bits = __ballot_sync(~0u, taken);
    if (lane == 0) kept[word] = bits;
    before += __popc(equals);
  }
}
