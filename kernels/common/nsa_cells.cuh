// nsa_cells: the blocks that queries chose, indexed by the cell of select_size positions of the row in which a block
// begins. In a row of several documents blocks of different documents may begin in one cell, at most one of each; the
// queries of a later document come later. Where blocks come in pairs, two neighbours from an even one on, a pair counts
// as one block of select_size positions.
#pragma once
#include "common/types.cuh"

constexpr int PART_QUERIES = 256;

struct NsaCellsParams {
  u64 seq_len, num_kv_heads, num_selected, select_size, num_cells, first_query, num_queries;  // num_selected: of cells
  u64 item_queries, max_items;  // nsa_lists: most queries of an item, and the capacity in items
  u64 per_cell;                 // block_indices for each choice of a cell: 1, or 2 for pairs
};

// The choices of a part of the queries, for the launch's (part, KV head, batch row).
struct Choices {
  const i32 *indices, *doc_start;
  int num_heads, num_selected, select_size, per_cell, first_query, num_queries, range_first;

  // Takes block_indices i32 [batch, seq_len, num_kv_heads, num_selected * per_cell], blocks counted from the query's
  // document on, -1 for none, and doc_start i32 [batch, seq_len]. The first block of a pair names it.
  DEVICE Choices(const i32* block_indices, const i32* doc_start, const NsaCellsParams& params)
      : indices(block_indices +
                ((u64)blockIdx.z * params.seq_len * params.num_kv_heads + blockIdx.y) * params.num_selected *
                    params.per_cell),
        doc_start(doc_start + (u64)blockIdx.z * params.seq_len),
        num_heads((int)params.num_kv_heads),
        num_selected((int)params.num_selected),
        select_size((int)params.select_size),
        per_cell((int)params.per_cell),
        first_query((int)params.first_query + (int)blockIdx.x * PART_QUERIES),
        range_first((int)params.first_query) {
    num_queries =
        max(min((int)min(params.first_query + params.num_queries, params.seq_len) - first_query, PART_QUERIES), 0);
  }
  DEVICE u64 row() const { return (u64)blockIdx.z * gridDim.y + blockIdx.y; }
  // The cell of a query's choice; -1 for none.
  DEVICE int cell(int query, int slot) const {
    const int token = first_query + query,
              block = indices[((u64)token * num_heads * num_selected + slot) * per_cell];
    return block < 0 ? -1 : doc_start[token] / select_size + block / per_cell;
  }
};
