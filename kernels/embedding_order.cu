// embedding_order: tokens sorted by id, those of one id in their own order: the fixed order in which the embedding's gradient is summed.
// Math       order = all {ids[t], t}, ascending; an id outside the table counts as vocab_size
// Layout     ids i32 [tokens]; order, scratch int2 [tokens]
// Buffers    ids, order, scratch
// Defines    none
// Tiling     grid (1); 1024 threads: a stable radix sort, eight bits a pass, in which each warp owns one stretch of the tokens
// Numerics   exact; latency-bound (about a microsecond for 2000 tokens a pass)
// Edges      tokens not a multiple of 1024; num_bits (of vocab_size) up to 31
#include "common/block_scan.cuh"

constexpr int NUM_THREADS = 1024, NUM_WARPS = NUM_THREADS / 32, DIGIT_BITS = 8, NUM_DIGITS = 1 << DIGIT_BITS;
constexpr int THREAD_COUNTS = NUM_DIGITS * NUM_WARPS / NUM_THREADS;  // counters a thread scans

struct EmbeddingOrderParams { u64 tokens, vocab_size, num_bits; };

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
embedding_order(const i32* ids, int2* order, int2* scratch, const __grid_constant__ EmbeddingOrderParams params) {
  __shared__ u32 counts[NUM_DIGITS * NUM_WARPS];  // [digit][warp]: then, where the warp's next token of that digit goes
  __shared__ u32 warp_sums[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tokens = (int)params.tokens, stretch = (tokens + NUM_THREADS - 1) / NUM_THREADS * 32;
  const int first = min(warp * stretch, tokens), end = min(first + stretch, tokens);
  const int passes = ((int)params.num_bits + DIGIT_BITS - 1) / DIGIT_BITS;

  const int2* from = nullptr;
  for (int pass = 0; pass < passes; pass++) {
    int2* to = (passes - 1 - pass) % 2 == 0 ? order : scratch;
    auto entry = [&](int at) {
      if (pass > 0) return from[at];
      const i32 id = ids[at];
      return make_int2(id < 0 || id >= (i32)params.vocab_size ? (i32)params.vocab_size : id, at);
    };
    auto digit_of = [&](int2 e) { return (e.x >> (pass * DIGIT_BITS)) & (NUM_DIGITS - 1); };

    // Count each warp's digits.
    for (int i = threadIdx.x; i < NUM_DIGITS * NUM_WARPS; i += NUM_THREADS) counts[i] = 0;
    __syncthreads();  // counters are zero, and the pass before has written all entries
#pragma unroll 4
    for (int at = first + lane; at - lane < end; at += 32) {
      const int digit = at < end ? digit_of(entry(at)) : NUM_DIGITS;
      const u32 same = __match_any_sync(0xffffffffu, digit);
      if (at < end && (same & ((1u << lane) - 1)) == 0) counts[digit * NUM_WARPS + warp] += __popc(same);
      __syncwarp();  // the next round may meet the same counter from another lane
    }
    __syncthreads();  // all counts are there

    // Scan: all smaller digits come before, and of one digit the warps in order.
    u32 own[THREAD_COUNTS], sum = 0, total;
#pragma unroll
    for (int i = 0; i < THREAD_COUNTS; i++) {
      own[i] = counts[threadIdx.x * THREAD_COUNTS + i];
      sum += own[i];
    }
    u32 before = block_exclusive_sum<NUM_THREADS>(sum, warp_sums, total);
#pragma unroll
    for (int i = 0; i < THREAD_COUNTS; i++) {
      counts[threadIdx.x * THREAD_COUNTS + i] = before;
      before += own[i];
    }
    __syncthreads();  // every warp's places are there

    // Store
#pragma unroll 4
    for (int at = first + lane; at - lane < end; at += 32) {
      int2 e = make_int2(0, 0);
      if (at < end) e = entry(at);
      const int digit = at < end ? digit_of(e) : NUM_DIGITS;
      const u32 same = __match_any_sync(0xffffffffu, digit), below = same & ((1u << lane) - 1);
      u32 place = 0;
      if (at < end) place = counts[digit * NUM_WARPS + warp] + __popc(below);
      __syncwarp();  // all lanes have read the counter that one of them now moves on
      if (at < end) {
        to[place] = e;
        if (below == 0) counts[digit * NUM_WARPS + warp] += __popc(same);
      }
      __syncwarp();  // the next round reads it
    }
    from = to;
    __syncthreads();  // the next pass clears the counters
  }
}
