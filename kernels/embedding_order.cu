// embedding_order: tokens sorted by id (a stable sort): the fixed order in which the embedding's gradient is summed.
// Math       order = all {ids[t], t}, ascending; an id outside the table counts as vocab_size
// Layout     ids i32 [tokens]; order, scratch int2 [tokens]
// Buffers    ids, order, scratch
// Defines    none
// Tiling     grid (1); 1024 threads: a stable radix sort, eight bits a pass, in which each warp owns one stretch of the
//            tokens
// Numerics   exact; latency-bound
// Edges      tokens not a multiple of 1024; num_bits (of vocab_size) up to 31
#include "common/block_scan.cuh"

constexpr int NUM_THREADS = 1024, NUM_WARPS = NUM_THREADS / 32, DIGIT_BITS = 8, NUM_DIGITS = 1 << DIGIT_BITS;
constexpr int PITCH = NUM_WARPS + 1;  // so that one warp's counters of different digits lie in different banks
constexpr int BATCH = 8;  // tokens that a lane loads at once
constexpr int THREAD_COUNTS = NUM_DIGITS * NUM_WARPS / NUM_THREADS;  // counters a thread scans

struct EmbeddingOrderParams { u64 tokens, vocab_size, num_bits; };

// The place of a warp's counter of a digit.
DEVICE int slot(int digit, int warp) { return digit * PITCH + warp; }

// Mask of the `valid` lanes with the same digit as this one; 0 for a lane that is not valid. One ballot a bit, since
// match_any takes one iteration for every distinct digit.
DEVICE u32 same_digit(int digit, bool valid) {
  u32 same = __ballot_sync(0xffffffffu, valid);
#pragma unroll
  for (int bit = 0; bit < DIGIT_BITS; bit++) {
    const bool set = digit >> bit & 1;
    const u32 votes = __ballot_sync(0xffffffffu, set);
    same &= set ? votes : ~votes;
  }
  return valid ? same : 0;
}

// One block sorts all tokens. A warp owns one stretch of them, of which each lane has every 32nd.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
embedding_order(const i32* ids, int2* order, int2* scratch, const __grid_constant__ EmbeddingOrderParams params) {
  __shared__ u32 counts[NUM_DIGITS * PITCH];  // [digit][warp]: counts, then the next token's place
  __shared__ u32 warp_sums[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tokens = (int)params.tokens, stretch = ceil_div(tokens, NUM_THREADS) * 32;
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
    auto load_batch = [&](int2 (&batch)[BATCH], int base) {
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int at = base + i * 32 + lane;
        batch[i] = at < end ? entry(at) : make_int2(0, 0);
      }
    };
    auto digit_of = [&](int2 e) { return (e.x >> (pass * DIGIT_BITS)) & (NUM_DIGITS - 1); };

    // Count each warp's digits.
    for (int i = threadIdx.x; i < NUM_DIGITS * PITCH; i += NUM_THREADS) counts[i] = 0;
    __syncthreads();  // the counters are zero, and the last pass has written all entries
#pragma unroll 1
    for (int base = first; base < end; base += BATCH * 32) {
      int2 batch[BATCH];
      load_batch(batch, base);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const bool valid = base + i * 32 + lane < end;
        const int digit = digit_of(batch[i]);
        const u32 same = same_digit(digit, valid);
        if (valid && (same & ((1u << lane) - 1)) == 0) counts[slot(digit, warp)] += __popc(same);
        __syncwarp();  // in the next round another lane may add to the same counter
      }
    }
    __syncthreads();  // all counts are stored

    // Scan: all smaller digits come before, and of one digit the warps in order.
    const int own_digit = threadIdx.x * THREAD_COUNTS / NUM_WARPS, own_warp = threadIdx.x * THREAD_COUNTS % NUM_WARPS;
    u32 own[THREAD_COUNTS], sum = 0, total;
#pragma unroll
    for (int i = 0; i < THREAD_COUNTS; i++) {
      own[i] = counts[slot(own_digit, own_warp + i)];
      sum += own[i];
    }
    u32 before = block_exclusive_sum<NUM_THREADS>(sum, warp_sums, total);
#pragma unroll
    for (int i = 0; i < THREAD_COUNTS; i++) {
      counts[slot(own_digit, own_warp + i)] = before;
      before += own[i];
    }
    __syncthreads();  // every warp's places are stored

    // Store each pair at its digit's next place.
#pragma unroll 1
    for (int base = first; base < end; base += BATCH * 32) {
      int2 batch[BATCH];
      load_batch(batch, base);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const bool valid = base + i * 32 + lane < end;
        const int digit = digit_of(batch[i]);
        const u32 same = same_digit(digit, valid), below = same & ((1u << lane) - 1);
        u32 place = 0;
        if (valid) place = counts[slot(digit, warp)] + __popc(below);
        __syncwarp();  // all lanes have read the counter that one of them now increases
        if (valid) {
          to[place] = batch[i];
          if (below == 0) counts[slot(digit, warp)] += __popc(same);
        }
        __syncwarp();  // the next round reads the counter
      }
    }
    from = to;
    __syncthreads();  // the next pass clears the counters
  }
}
