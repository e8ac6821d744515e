// sink: a learned logit of a query head beside its keys, whose value is zero (gpt-oss, arXiv:2508.10925).
#pragma once
#include "common/types.cuh"

// A row's log-sum-exp with its sink, and what its output without the sink must be multiplied by.
struct WithSink {
  float lse, factor;
};

// `without`: the log-sum-exp of the keys alone, -inf if there is none. Without keys and with a sink of -inf nothing is
// seen, and the sum of no exponentials stays -inf.
DEVICE WithSink with_sink(float without, float logit) {
  const float largest = fmaxf(without, logit);
  const bool sees_nothing = largest == -INFINITY_F32;
  const float lse = sees_nothing ? largest : largest + logf(expf(without - largest) + expf(logit - largest));
  return WithSink{lse, without == -INFINITY_F32 ? 0.f : expf(without - lse)};
}
