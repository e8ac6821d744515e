// attention_sinks_forward: joins a learned logit of each query head (a sink) to the softmax of attention that ran
// without it.
// Math       joined = log(exp(lse) + exp(sinks[head])), o *= exp(lse - joined): the softmax over the keys and one more
//            logit, whose value is zero (gpt-oss, arXiv:2508.10925)
// Layout     o bf16 [batch, seq_len, num_heads, width]; lse, joined f32 [batch, num_heads, seq_len]; sinks bf16 or f32
//            [num_heads]; all contiguous
// Buffers    o, lse, sinks, joined
// Defines    IS_BF16 (1), VECTOR (1, 8), SINKS_BF16 0|1 (set by sieve-gpu/src/attention/sinks.rs)
// Tiling     grid (ceil(rows * num_heads * width / (256 VECTOR))); 256 threads; VECTOR consecutive columns each
// Numerics   f32 inside; o is rounded a second time; memory-bound: reads and writes o in place
// Edges      a row without a key (lse = -inf) has joined = the sink and o = 0; a sink of -inf changes nothing
#include "common/attention_sinks.cuh"
#include "common/sink.cuh"

// A thread has VECTOR columns of one row of a head; the row's first thread writes its new log-sum-exp.
extern "C" __global__ void __launch_bounds__(256)
attention_sinks_forward(element* o, const float* lse, const sink* sinks, float* joined,
                        const __grid_constant__ AttentionSinksParams params) {
  const u64 chunks = params.width / VECTOR, at = (u64)blockIdx.x * 256 + threadIdx.x, pair = at / chunks;
  if (pair >= params.rows * params.num_heads) return;
  const u64 row = pair / params.num_heads, head = pair % params.num_heads, place = lse_place(params, row, head);
  const WithSink with = with_sink(lse[place], sink_of(sinks, head));
  float value[VECTOR];
  load_vector(o + at * VECTOR, value);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) value[i] *= with.factor;
  store_vector(o + at * VECTOR, value);
  if (at % chunks == 0) joined[place] = with.lse;
}
