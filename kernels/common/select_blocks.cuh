// select_blocks: how selections cut the queries of a call and the keys into blocks. Shared by the select_* kernels.
// Queries are the last num_queries of num_keys tokens. A block of queries has `block` of them; the first one lacks `offset`. Blocks of keys begin at key 0.
#pragma once
#include "common/types.cuh"

struct SelectBlocks {
  int num_queries, num_keys, block, offset;

  DEVICE int context() const { return num_keys - num_queries; }
  DEVICE int num_rows() const { return ceil_div(num_queries + offset, block); }
  DEVICE int num_columns() const { return ceil_div(num_keys, block); }
  // Positions of the first and of the last query of a block.
  DEVICE int first(int row) const { return context() + max(row * block - offset, 0); }
  DEVICE int last(int row) const { return context() + min((row + 1) * block - offset, num_queries) - 1; }
  // Blocks of keys that begin no later than its last query: 0 .. admissible - 1.
  DEVICE int admissible(int row) const { return last(row) / block + 1; }
};
