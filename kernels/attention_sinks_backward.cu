// attention_sinks_backward: partial sums of the gradient of each query head's sink, from the joined output.
// Math       dsink[head] = - sum over rows of exp(sink - lse) * (o . do), with the lse and o that hold the sink: its
//            value is zero, so its part of the softmax's gradient is -p (o . do)
// Layout     o, do bf16 [batch, seq_len, num_heads, width]; lse f32 [batch, num_heads, seq_len]; sinks bf16 or f32
//            [num_heads]; partials f32 [gridDim.x, num_heads]; all contiguous
// Buffers    o, do, lse, sinks, partials
// Defines    IS_BF16 (1), VECTOR (1, 8), SINKS_BF16 0|1 (set by sieve-gpu/src/attention/sinks.rs)
// Tiling     grid (at most 264, num_heads); 256 threads: a warp takes every (8 gridDim.x)-th row of a head
// Numerics   f32, in an order that depends on the sizes alone; column_sums adds the partials; memory-bound
// Edges      a row that sees nothing (lse = -inf) and a sink of -inf add 0; a block without rows writes 0
#include "common/attention_sinks.cuh"
#include "common/block_sums.cuh"

// A block sums over its rows of one query head: a warp has a row at a time, a lane VECTOR columns of it. Thread 0
// writes the block's partial sum.
extern "C" __global__ void __launch_bounds__(256)
attention_sinks_backward(const element* o, const element* d_o, const float* lse, const sink* sinks, float* partials,
                         const __grid_constant__ AttentionSinksParams params) {
  __shared__ float places[8];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const u64 head = blockIdx.y;
  const float logit = sink_of(sinks, head);
  float sum = 0.f;
  for (u64 row = (u64)blockIdx.x * 8 + warp; row < params.rows; row += (u64)gridDim.x * 8) {
    const float with = lse[lse_place(params, row, head)];
    const u64 first = (row * params.num_heads + head) * params.width;
    float dot = 0.f;
    for (u64 column = (u64)lane * VECTOR; column < params.width; column += 32 * VECTOR) {
      float left[VECTOR], right[VECTOR];
      load_vector(o + first + column, left);
      load_vector(d_o + first + column, right);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) dot = fmaf(left[i], right[i], dot);
    }
    // exp(-inf + inf) is NaN where neither a key nor the sink counts.
    if (logit != -INFINITY_F32) sum -= expf(logit - with) * dot;
  }
  sum = block_sum<256>(sum, places);
  if (threadIdx.x == 0) partials[(u64)blockIdx.x * params.num_heads + head] = sum;
}
