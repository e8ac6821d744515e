// online_softmax: the arithmetic of a row's online softmax (arXiv:2407.08608) that hopper_attention_forward and
// hopper_attention_token share, so that a row has the same bits in both: a reference maximum that moves only when the
// row outgrows it, and sums stage by stage. kernels/notes/one-order-of-sums.md
#pragma once
#include "common/mma.cuh"

// The reference maximum of a row that has seen no key: finite, so that no infinity is subtracted from another.
[[maybe_unused]] constexpr float NO_KEY_MAXIMUM = -3.0e38f;
// The reference maximum moves only when a row outgrows it by this many powers of two.
[[maybe_unused]] constexpr float OUTGROWN_AT = 8.0f;

// A score times `logit_scale`, in powers of two, relative to the row's reference maximum. One rounding.
DEVICE float logit_below(float score, float logit_scale, float maximum) { return fmaf(score, logit_scale, -maximum); }

// Sets the reference maximum of a row that has seen no key, where `largest` is the largest score of its first keys.
// Returns the factor on the row's earlier sums.
DEVICE float first_maximum(float& maximum, float largest, float logit_scale) {
  const bool begins = maximum == NO_KEY_MAXIMUM && largest > -INFINITY_F32;
  if (begins) maximum = largest * logit_scale;
  return begins ? 0.0f : 1.0f;
}

// By how much the reference maximum of a row must grow, whose largest logit relative to it is `largest`.
DEVICE float maximum_growth(float largest) { return largest > OUTGROWN_AT ? largest : 0.0f; }

// The sum of a row's weights after one more stage, whose own is `of_stage`; `factor`: what earlier ones are
// multiplied by.
DEVICE float sum_of_stages(float total, float factor, float of_stage) { return fmaf(total, factor, of_stage); }
