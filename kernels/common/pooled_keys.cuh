// pooled_keys: the pooled keys of a text that grows token by token: key c is the mean of `size` tokens from c `stride`.
#pragma once
#include "common/types.cuh"

struct PooledKeys {
  i32 seen, size, stride;  // tokens so far, including the new one

  // The number of pools that have ended.
  DEVICE i32 num() const { return seen < size ? 0 : (seen - size) / stride + 1; }
  // Whether a pool ends at the new token.
  DEVICE bool one_ends() const { return seen >= size && (seen - size) % stride == 0; }
};
