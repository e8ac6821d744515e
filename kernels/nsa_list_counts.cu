// nsa_list_counts: how many queries of each part chose a block; nsa_lists makes lists of them.
// Math       counts[part, cell] = choices of the part's queries in the cell; a cell of select_size positions holds the
//            first token of at most one block of a document
// Layout     block_indices i32 [batch, seq_len, num_kv_heads, num_selected * per_cell], in pairs where per_cell is 2;
//            doc_start i32 [batch, seq_len]; counts i32 [batch, num_kv_heads, parts, num_cells]
// Buffers    block_indices, doc_start, counts
// Defines    none
// Tiling     grid (parts, num_kv_heads, batch), a part is 256 queries from first_query on; 256 threads; dynamic shared
//            bytes = num_cells * 4
// Numerics   integers, any order of adding gives the same
// Edges      indices below 0 are none
#include "common/nsa_cells.cuh"

// A block counts the choices of one part, 256 queries, for one KV head; the choices are spread over its threads.
extern "C" __global__ void __launch_bounds__(256)
    nsa_list_counts(const i32* block_indices, const i32* doc_start, i32* counts,
                    const __grid_constant__ NsaCellsParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  u32* cell_counts = (u32*)shared_memory;
  const Choices choices(block_indices, doc_start, params);
  const int num_cells = (int)params.num_cells;
  for (int cell = (int)threadIdx.x; cell < num_cells; cell += 256) cell_counts[cell] = 0;
  __syncthreads();  // the counts are zero
  for (int at = (int)threadIdx.x; at < choices.num_queries * choices.num_selected; at += 256) {
    const int cell = choices.cell(at / choices.num_selected, at % choices.num_selected);
    if (cell >= 0) atomicAdd(&cell_counts[cell], 1u);
  }
  __syncthreads();  // all choices are counted
  i32* to = counts + choices.row() * gridDim.x * num_cells + (u64)blockIdx.x * num_cells;
  for (int cell = (int)threadIdx.x; cell < num_cells; cell += 256) to[cell] = (i32)cell_counts[cell];
}
