// attention_sinks: what the kernels of a learned logit per query head (a sink) share.
// Defines    IS_BF16 (1), VECTOR (1, 8), SINKS_BF16 0|1
#pragma once
#include "common/row_vector.cuh"

struct AttentionSinksParams {
  u64 rows, seq_len;  // rows = batch * seq_len
  u64 num_heads, width;
};

#if SINKS_BF16
typedef bf16 sink;
DEVICE float sink_of(const sink* sinks, u64 head) { return bf16_to_f32(sinks[head]); }
#else
typedef float sink;
DEVICE float sink_of(const sink* sinks, u64 head) { return sinks[head]; }
#endif

// Where the log-sum-exp of a row and a head lies in [batch, num_heads, seq_len].
DEVICE u64 lse_place(const AttentionSinksParams& params, u64 row, u64 head) {
  return (row / params.seq_len * params.num_heads + head) * params.seq_len + row % params.seq_len;
}
