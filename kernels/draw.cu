// draw: one token of each row of logits, with temperature, top-k, min-p (arXiv:2407.01082) and nucleus sampling
// (arXiv:1904.09751).
// Math       w_i = floor(2^44 exp2((x[r, i] - max_j x[r, j]) * scale_r)); tokens in order of falling logit, of equal
//            ones by id; K: the first top_k tokens with w >= least; N: the fewest first ones of K whose w reach
//            top_p * sum(K); the drawn token is the first whose prefix sum of w exceeds random * sum(N) / 2^64; -1
//            where an x[r, j] is NaN or infinite
// Layout     x bf16 [rows, width], rows x_stride apart; draws u32 [rows, 8]: scale's bits, top_k (0: all), and the
//            lower and upper halves of top_p (all ones: 1), of least (0: all) and of the random number; ids i32 [rows]
// Buffers    x, draws, ids
// Defines    none
// Tiling     grid (rows); 512 threads; a histogram of the 8192 largest keys in shared memory, then of the next ones
// Numerics   weights and sums are whole numbers, so equal logits give the token of sieve-cpu's `draw`
// Edges      fewer logits than threads; -0 is as large as +0; many equal logits; weights that are all 0 but one
#include "common/types.cuh"

constexpr int THREADS = 512, NUM_WARPS = THREADS / 32;
constexpr int BINS = 8192, THREAD_BINS = BINS / THREADS;
constexpr u32 NOT_FINITE = 0x10000;  // larger than every key

struct DrawParams { u64 num_tokens, x_stride; };

// The bits of a bf16 as a number that grows with it.
DEVICE u32 key_of(bf16 x) {
  const u32 bits = x.bits == 0x8000 ? 0 : x.bits;
  if ((bits & 0x7f80) == 0x7f80) return NOT_FINITE;
  return bits & 0x8000 ? bits ^ 0xffff : bits ^ 0x8000;
}

// The logit of a key: the inverse of key_of.
DEVICE float value_of(u32 key) {
  const u32 bits = key & 0x8000 ? key ^ 0x8000 : key ^ 0xffff;
  return __uint_as_float(bits << 16);
}

// 2^44 exp2((x - largest) * scale), rounded down. Each product and sum is rounded by itself, as on a CPU.
DEVICE u64 weight_of(float x, float largest, float scale) {
  constexpr float ROUND = 12582912.0f, ONE = 17592186044416.0f;
  float y = __fmul_rn(x - largest, scale);
  if (y < -63.0f) y = -63.0f;
  const float whole = __fadd_rn(__fadd_rn(y, ROUND), -ROUND);
  const float f = __fadd_rn(y, -whole);
  float p = 1.5403530e-4f;
  p = __fadd_rn(__fmul_rn(p, f), 1.3333558e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 9.6181291e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 5.5504109e-2f);
  p = __fadd_rn(__fmul_rn(p, f), 2.4022651e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 6.9314718e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  return (u64)__fmul_rn(p, ONE) >> (u32)-whole;
}

// A number of tokens and the sum of their weights.
struct Sums { u64 weight; u32 count; };

// The sums of all threads before this one; `all` gets those of the block. Every thread calls it.
DEVICE Sums sums_before(Sums own, Sums& all) {
  __shared__ u64 weights[NUM_WARPS];
  __shared__ u32 counts[NUM_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Sums until = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 low = __shfl_up_sync(0xffffffffu, (u32)until.weight, distance);
    const u32 high = __shfl_up_sync(0xffffffffu, (u32)(until.weight >> 32), distance);
    const u32 count = __shfl_up_sync(0xffffffffu, until.count, distance);
    if (lane >= distance) until.weight += (u64)high << 32 | low, until.count += count;
  }
  __syncthreads();  // the last call's sums are read
  if (lane == 31) weights[warp] = until.weight, counts[warp] = until.count;
  __syncthreads();  // every warp's sums are stored
  Sums before = {until.weight - own.weight, until.count - own.count};
  all = {0, 0};
  for (int other = 0; other < NUM_WARPS; ++other) {
    if (other < warp) before.weight += weights[other], before.count += counts[other];
    all.weight += weights[other], all.count += counts[other];
  }
  return before;
}

// A place in the order of tokens: the `nth` token of those with this key, and the weights up to it.
struct Place { u32 key, nth; u64 weight; };

// One row of logits, and a histogram of BINS of its keys in shared memory.
struct Row {
  const bf16* x;
  i32 width;
  u32 top;  // the largest key
  float largest, scale;
  u32* counts;  // of the keys from `high` downwards
  i32 high;

  // The weight w of a token with this key.
  DEVICE u64 weight(u32 key) const { return weight_of(value_of(key), largest, scale); }

  // Counts the tokens of each key from `from` downwards. Every thread calls it.
  DEVICE void count_from(i32 from) {
    if (high == from) return;
    high = from;
    __syncthreads();  // the last counts are read
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0;
    __syncthreads();  // all counts are 0
#pragma unroll 8
    for (i32 at = threadIdx.x; at < width; at += THREADS) {
      const i32 below = from - (i32)key_of(x[at]);
      if (below >= 0 && below < BINS) atomicAdd(&counts[below], 1u);
    }
    __syncthreads();  // all tokens are counted
  }

  // The first place in the order of falling keys up to which there are `wanted` tokens (by_count), or tokens whose
  // weights add up to `wanted`. Every thread calls it, and each gets the place.
  DEVICE Place find(bool by_count, u64 wanted) {
    __shared__ Place place;
    __shared__ bool is_found;
    __syncthreads();  // the last place is read
    if (threadIdx.x == 0) is_found = false;
    Sums passed = {0, 0};  // of the histograms before
    for (i32 from = top; from >= 0; from -= BINS) {
      count_from(from);
      // Bin b holds the tokens with key `from` - b. A thread has THREAD_BINS bins side by side, thread 0 those of the
      // largest keys.
      const int first = threadIdx.x * THREAD_BINS;
      Sums own = {0, 0};
      for (int bin = first; bin < first + THREAD_BINS && bin <= from; ++bin) {
        if (counts[bin] == 0) continue;
        own.count += counts[bin];
        own.weight += counts[bin] * weight(from - bin);
      }
      Sums all;
      Sums before = sums_before(own, all);
      before.weight += passed.weight, before.count += passed.count;
      // Tokens, or weights, before the thread's bins and up to their end. The place lies in one thread's bins.
      u64 measure = by_count ? before.count : before.weight;
      const u64 end = measure + (by_count ? own.count : own.weight);
      if (measure < wanted && wanted <= end) {
        for (int bin = first;; ++bin) {
          // The weight of one of the bin's tokens, and what such a token adds to `measure`.
          const u64 each = counts[bin] == 0 ? 0 : weight(from - bin), adds = by_count ? 1 : each;
          if (measure + counts[bin] * adds >= wanted) {
            const u64 nth = (wanted - measure + adds - 1) / adds;
            place = {(u32)(from - bin), (u32)nth, before.weight + nth * each};
            is_found = true;
            break;
          }
          measure += counts[bin] * adds, before.weight += counts[bin] * each;
        }
      }
      __syncthreads();  // the place is stored
      if (is_found) break;
      passed.weight += all.weight, passed.count += all.count;
    }
    return place;
  }
};

// The largest key of a row, in every thread.
DEVICE u32 largest_key(const bf16* x, i32 width) {
  __shared__ u32 keys[NUM_WARPS];
  u32 key = 0;
#pragma unroll 8
  for (i32 at = threadIdx.x; at < width; at += THREADS) key = max(key, key_of(x[at]));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, distance));
  if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = key;
  __syncthreads();  // every warp's key is stored
  for (int other = 0; other < NUM_WARPS; ++other) key = max(key, keys[other]);
  return key;
}

// A block draws the token of one row of logits, which are spread over its 512 threads.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const bf16* x, const u32* draws, i32* ids, const __grid_constant__ DrawParams params) {
  __shared__ u32 counts[BINS];
  const u32* own = draws + 8 * blockIdx.x;
  const u32 top_k = own[1];
  const u64 top_p = (u64)own[3] << 32 | own[2], least = (u64)own[5] << 32 | own[4], random = (u64)own[7] << 32 | own[6];
  Row row = {x + blockIdx.x * params.x_stride, (i32)params.num_tokens};
  row.top = largest_key(row.x, row.width);
  if (row.top == NOT_FINITE) {
    if (threadIdx.x == 0) ids[blockIdx.x] = -1;
    return;
  }
  row.largest = value_of(row.top), row.scale = __uint_as_float(own[0]);
  row.counts = counts, row.high = -1;
  // The weights of the tokens that may be drawn: the first top_k with the least weight, which are the first of all.
  u64 total = ~0ull;
  const bool is_top_k = top_k > 0 && top_k < (u32)row.width;
  if (is_top_k) total = row.find(true, top_k).weight;
  if (!is_top_k || least > 0) {
    Sums sums = {0, 0}, all;
#pragma unroll 4
    for (i32 at = threadIdx.x; at < row.width; at += THREADS) {
      const u64 weight = row.weight(key_of(row.x[at]));
      if (weight >= least) sums.weight += weight;
    }
    sums_before(sums, all);
    if (all.weight < total) total = all.weight;
  }
  // Nucleus: the fewest first tokens that have this share of the weights.
  if (top_p != ~0ull) {
    const u64 wanted = __umul64hi(top_p, total);
    total = row.find(false, wanted == 0 ? 1 : wanted).weight;
  }
  const Place drawn = row.find(false, __umul64hi(random, total) + 1);
  // Of the tokens with the drawn key, the `nth` by id: each thread counts those of its part of the row.
  const i32 part = (row.width + THREADS - 1) / THREADS;
  const i32 first = min((i32)threadIdx.x * part, row.width), end = min(first + part, row.width);
  Sums equal = {0, 0}, all;
  for (i32 at = first; at < end; ++at) equal.count += key_of(row.x[at]) == drawn.key;
  u32 nth = drawn.nth - sums_before(equal, all).count;
  if (nth - 1 >= equal.count) return;  // the token lies in another thread's part
  for (i32 at = first;; ++at) {
    if (key_of(row.x[at]) == drawn.key && --nth == 0) {
      ids[blockIdx.x] = at;
      return;
    }
  }
}
