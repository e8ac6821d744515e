// nsa_local_blocks: divides each query's blocks into the run of local ones, which ends with its own, and the others.
// Math       first = start_i + max(floor((i - start_i) / local_size) + 1 - local_count, 0) * local_size;
//            first_key_i = first; end_query_j = where the last query that has key j among its local blocks ends, or its
//            document; far = the listed blocks that begin before first
// Layout     block_indices i32 [batch, seq_len, num_choosers, num_selected]: of block_size tokens, ascending, then -1;
//            doc_start, doc_end, first_key, end_query i32 [batch, seq_len]; far i32
//            [batch, seq_len, num_choosers, num_far], ascending, then -1
// Buffers    block_indices, doc_start, doc_end, far, first_key, end_query
// Defines    none
// Tiling     grid (ceil(tokens * num_choosers / 8)), tokens = batch * seq_len; 256 threads, a warp a query and chooser;
//            no shared memory
// Numerics   integers; every element written
// Edges      a query that has all of its local blocks has at most num_far others; local_size is a multiple of
//            block_size
#include "common/types.cuh"

constexpr int WARPS = 8;

struct NsaLocalBlocksParams {
  u64 lists, seq_len, num_choosers, num_selected, num_far, block_size;
  u64 local_size, local_count;  // tokens of a block as it was chosen, and local blocks of a query
};

// A warp has the list of one query and chooser; that of the first chooser also writes the token's bounds.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    nsa_local_blocks(const i32* block_indices, const i32* doc_start, const i32* doc_end, i32* far, i32* first_key,
                     i32* end_query, const __grid_constant__ NsaLocalBlocksParams params) {
  const u64 list = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (list >= params.lists) return;
  const int lane = (int)threadIdx.x % 32, size = (int)params.local_size, count = (int)params.local_count;
  const u64 token = list / params.num_choosers;
  const int start = doc_start[token], own = ((int)(token % params.seq_len) - start) / size,
            first = max(own + 1 - count, 0) * size;
  if (list % params.num_choosers == 0 && lane == 0) {
    first_key[token] = start + first;
    end_query[token] = min(doc_end[token], start + (own + count) * size);
  }
  for (int at = lane; at < (int)params.num_far; at += 32) {
    const int block = block_indices[list * params.num_selected + at];
    far[list * params.num_far + at] = block * (int)params.block_size < first ? block : -1;
  }
}
