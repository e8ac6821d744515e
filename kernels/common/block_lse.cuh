// block_lse: the log-sum-exp of a row's logits in each block of BLOCK_LSE consecutive keys, in powers of two, stored
// beside the attention of probe rows: every gamma-th query. Keys are in order.
// Defines    BLOCK_LSE: keys of a block, a power of two up to 128; 0: none
#pragma once
#include "common/mma.cuh"
#include "common/quad.cuh"

#ifndef BLOCK_LSE
#define BLOCK_LSE 0
#endif

#if BLOCK_LSE
struct BlockLse {
  float* data;  // [heads of the launch, num_blocks, num_probes]
  int first_head, num_blocks, num_probes, context, gamma;
};

template <class Params>
DEVICE BlockLse block_lse_of(float* data, const Params& params) {
  return {data, (int)params.first_head, (int)params.num_blocks, (int)params.num_probes,
          (int)(params.seq_len - params.num_queries), (int)params.gamma};
}

// Where a thread's two rows of a fragment go.
struct BlockLseRows {
  float* head;   // [num_blocks, num_probes]
  int probe[2];  // num_probes: the row is empty
  int num_blocks, num_probes;

  // `begins`: the block begins with these keys; else the value is joined to the value of the keys before.
  DEVICE void put(int block, bool upper, float value, bool begins = true) const {
    const int row = upper ? probe[1] : probe[0];
    if (block >= num_blocks || row >= num_probes) return;
    float* at = head + (u64)block * num_probes + row;
    if (!begins && *at != -INFINITY_F32) {  // a NaN stays NaN
      const float larger = fmaxf(*at, value);
      value = larger + log2f(exp2f(*at - larger) + exp2f(value - larger));
    }
    *at = value;
  }

  // Stores the log-sum-exps of the blocks that the scores of a stage meet, for the thread's two rows; all lanes of a
  // warp call it. The stage begins at key `first`; `scale` makes scores powers of two. A thread's N scores are two rows
  // of two columns in each of N / 4 fragments of eight keys, so a stage has 2 N keys.
  template <int N>
  DEVICE void store(const float (&score)[N], int first, float scale) const {
    // UNIT keys of the 2 N are reduced to one number: those of a block, or fewer where 2 N is not a multiple of
    // BLOCK_LSE (2 * N & -2 * N is the largest power of two that divides 2 N). They lie in TILES fragments of eight
    // columns, in PAIR of a lane's two columns of each, and in LANES of a quad's lanes.
    constexpr int UNIT = min_int(BLOCK_LSE, 2 * N & -2 * N), TILES = max_int(UNIT / 8, 1), PAIR = min_int(UNIT, 2),
                  LANES = max_int(min_int(UNIT / 2, 4), 1);
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int at = 0; at < N / TILES; at += PAIR) {
      const int n = at / 4 * TILES, r = at / 2 % 2, x = at % 2;  // first fragment, row and column of the unit
      float largest = -INFINITY_F32, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < TILES * PAIR; ++i) largest = fmaxf(largest, score[4 * (n + i / PAIR) + 2 * r + x + i % PAIR]);
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      // Finite, so that no infinity is subtracted from another.
      const float reference = fmaxf(largest * scale, -3.0e38f);
#pragma unroll
      for (int i = 0; i < TILES * PAIR; ++i)
        sum += exp2_fast(score[4 * (n + i / PAIR) + 2 * r + x + i % PAIR] * scale - reference);
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int key = first + n * 8 + 2 * t + x;
      if (t % LANES == 0) put(key / BLOCK_LSE, r, reference + log2f(sum), UNIT == BLOCK_LSE || key % BLOCK_LSE == 0);
    }
  }

  // Stores the log-sum-exps of the two blocks that begin at key `first`, from the sums of this thread's weights
  // 2^(score * scale - maximum), [row][block]; all lanes of a warp call it.
  DEVICE void store_sums(const float (&sum)[2][2], const float (&maximum)[2], int first) const {
    // The lanes of a quad end with a row and a block each.
    const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 >= 2;
    float part[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      part[r] = (odd ? sum[r][1] : sum[r][0]) + __shfl_xor_sync(~0u, odd ? sum[r][0] : sum[r][1], 1);
    const float total = (upper ? part[1] : part[0]) + __shfl_xor_sync(~0u, upper ? part[0] : part[1], 2);
    put(first / BLOCK_LSE + odd, upper, (upper ? maximum[1] : maximum[0]) + log2f(total));
  }
};

// The rows of the queries at two positions; a row is empty from the position `end` on.
DEVICE BlockLseRows block_lse_rows(const BlockLse& out, int head, int first, int second, int end) {
  const auto probe = [&](int query) { return query < end ? (query - out.context) / out.gamma : out.num_probes; };
  float* here = out.data + (u64)(head - out.first_head) * out.num_blocks * out.num_probes;
  return {here, {probe(first), probe(second)}, out.num_blocks, out.num_probes};
}
#endif
