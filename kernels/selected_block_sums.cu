// selected_block_sums: how much of a query's attention lies on each block that it was given, which an indexer's loss
// compares its own probabilities with.
// Math       sums[i] = sum over the group's heads of sum_j p_j, over the keys j of the block of index i; 0 where the
//            index counts as none; a block that is given twice has its sum at each place
// Layout     indices, counts, block_indices as selected_blocks; part_lse f32 [batch, num_choosers, num_queries *
//            num_indices * pieces / per_part, group], base 2, of the queries from first_query on, as
//            nsa_selected_attention_forward writes it; lse f32 [batch, num_choosers * group, seq_len]; sums f32
//            [batch, seq_len, num_choosers, num_indices]
// Buffers    indices, (COUNTS 1: counts,) block_indices, part_lse, lse, sums
// Defines    COUNTS 0|1; 0: every query has num_indices
// Method     a binary search of each index among the query's blocks
// Tiling     grid (ceil(num_queries * num_choosers / 8), batch); 256 threads, a warp a list; no shared memory
// Numerics   f32, in the order of the heads; every element of these queries written
// Edges      any index, any count
#include "common/types.cuh"

constexpr int WARPS = 8;

struct SelectedBlockSumsParams {
  u64 seq_len, num_choosers, num_indices, pieces, group, first_query, num_queries;
  u64 per_part;  // pieces that have one log-sum-exp: 1 or 2
};

// A warp has one list: the indices of one query and chooser. A lane has every 32nd index.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    selected_block_sums(const i32* indices,
#if COUNTS
                        const i32* counts,
#endif
                        const i32* block_indices, const float* part_lse, const float* lse, float* sums,
                        const __grid_constant__ SelectedBlockSumsParams params) {
  const u32 list = blockIdx.x * WARPS + threadIdx.x / 32, num_choosers = (u32)params.num_choosers,
            in_range = list / num_choosers, chooser = list % num_choosers;
  if (in_range >= (u32)params.num_queries) return;
  const int lane = (int)threadIdx.x % 32, num_indices = (int)params.num_indices, pieces = (int)params.pieces,
            per_part = (int)params.per_part, group = (int)params.group, num_selected = num_indices * pieces;
  const u64 query = params.first_query + in_range, row = (blockIdx.y * params.seq_len + query) * num_choosers + chooser,
            head = ((u64)blockIdx.y * num_choosers + chooser) * group;
  indices += row * num_indices;
  block_indices += row * num_selected;
  part_lse += (((u64)blockIdx.y * num_choosers + chooser) * params.num_queries + in_range) * (num_selected / per_part) *
              group;
  lse += head * params.seq_len + query;
#if COUNTS
  const int count = max(min(counts[row], num_indices), 0);
#else
  const int count = num_indices;
#endif
  for (int at = lane; at < num_indices; at += 32) {
    const i64 first = at < count ? (i64)indices[at] * pieces : -1;
    float sum = 0.0f;
    for (i64 piece = first; piece >= 0 && piece < first + pieces; piece += per_part) {
      int low = 0, high = num_selected;
      while (low < high) {
        const int middle = (low + high) / 2, block = block_indices[middle];
        if (block >= 0 && block < piece) low = middle + 1; else high = middle;
      }
      if (low == num_selected || block_indices[low] != piece) continue;
      for (int i = 0; i < group; ++i)
        sum += exp2f(part_lse[(u64)(low / per_part) * group + i] - lse[(u64)i * params.seq_len] * LOG2_E);
    }
    sums[row * num_indices + at] = sum;
  }
}
