// select_votes: the mean score of the blocks that a tile's probes chose (MOMO, algorithm 2).
// Math       score[h, i, j] = mean of lse[h, p, j] over the probes p of tile i that chose block j; minus infinity where
//            none did
// Layout     lse f32 [heads, blocks, probes] of the heads from first_head on, chosen u32
//            [num_heads, probes, ceil(blocks / 32)] as select_gate writes it;
//            score f32 [heads, rows, blocks]
// Buffers    lse, chosen, score
// Defines    none
// Tiling     grid (ceil(blocks / 128), rows, heads); 128 threads, a block each; no dynamic shared memory
// Numerics   f32 sums by rising probe
// Edges      any sizes
#include "common/types.cuh"

struct SelectVotesParams {
  u64 num_probes, num_blocks, per_tile, first_head;
};

// A thread has one block of keys for one tile of queries of one head.
extern "C" __global__ void __launch_bounds__(128)
    select_votes(const float* lse, const u32* chosen, float* score, const __grid_constant__ SelectVotesParams params) {
  const int j = (int)(blockIdx.x * 128 + threadIdx.x), blocks = (int)params.num_blocks, probes = (int)params.num_probes,
            words = ceil_div(blocks, 32);
  if (j >= blocks) return;
  const int begin = (int)(blockIdx.y * params.per_tile), end = min(begin + (int)params.per_tile, probes);
  float sum = 0.0f;
  int votes = 0;
  for (int probe = begin; probe < end; ++probe) {
    const u64 line = ((u64)(params.first_head + blockIdx.z) * probes + probe) * words;
    if (!(chosen[line + j / 32] >> j % 32 & 1)) continue;
    sum += lse[((u64)blockIdx.z * blocks + j) * probes + probe];
    votes += 1;
  }
  score[((u64)blockIdx.z * gridDim.y + blockIdx.y) * blocks + j] = votes > 0 ? sum / (float)votes : -INFINITY_F32;
}
