// select_blocks: how selections cut the queries of a call and the keys into blocks. Shared by the select_* kernels.
// Queries are the last num_queries of num_keys tokens. A block of queries has `query_block` of them; the first one
// lacks `offset`. Blocks of keys have `block` and begin at key 0. Where tokens move inside segments, a block competes
// with others of its kind before its segment only.
#pragma once
#include "common/types.cuh"

struct SelectBlocks {
  int num_queries, num_keys, block, offset, query_block;

  DEVICE int context() const { return num_keys - num_queries; }
  DEVICE int num_rows() const { return ceil_div(num_queries + offset, query_block); }
  DEVICE int num_columns() const { return ceil_div(num_keys, block); }
  // Positions of the first and of the last query of a block.
  DEVICE int first(int row) const { return context() + max(row * query_block - offset, 0); }
  DEVICE int last(int row) const { return context() + min((row + 1) * query_block - offset, num_queries) - 1; }
  // Blocks of keys that begin no later than its last query: 0 .. admissible - 1.
  DEVICE int admissible(int row) const { return last(row) / block + 1; }
  // Blocks that compete for a row's mass: all blocks that the row admits, or the blocks of the segments before its own.
  DEVICE int competing(int row, int segment) const {
    return segment > 0 ? first(row) / segment * (segment / block) : admissible(row);
  }
  // The blocks that a row keeps in any case: blocks that overlap its queries, or its segments.
  DEVICE int own(int row, int segment) const { return segment > 0 ? competing(row, segment) : first(row) / block; }
  DEVICE int own_end(int row, int segment) const {
    return segment > 0 ? min((last(row) / segment + 1) * (segment / block), num_columns()) : admissible(row);
  }
};

template <class Params>
DEVICE SelectBlocks select_blocks(const Params& params) {
  return {(int)params.num_queries, (int)params.num_keys, (int)params.block, (int)params.offset,
          (int)params.query_block};
}
