// select_probe_sums: attention probabilities of probe queries, summed over each key and over each distance (MInference,
// arXiv:2407.02490; PBS-Attn, arXiv:2510.21270; SnapKV, arXiv:2404.14469; H2O, arXiv:2306.14048).
// Math       p[h, r, j] = exp(x[h, r, j] - max[h, r]) / sum[h, r] over j <= first_position + r; with the sums over the
//            rows r and the heads of a group:
//            column[g, j] = factor * sum p[h, r, j], diagonal[g, o] = factor * sum p[h, r, first_position + r - o];
//            factor weighs each probability; adds: the sums are added to what column and diagonal hold, else they
//            replace it
// Layout     logit f32 [heads, rows, num_keys], scale f32 [heads, rows, 2], max and 1 / sum of a row's exponentials
//            (select_probe_rows writes them); column, diagonal f32 [heads / group, num_keys]
// Buffers    logit, scale, column, diagonal
// Defines    none
// Tiling     grid (ceil(num_keys / 256), heads / group, 1 or, with diagonals, 2); 256 threads, each a key or a
//            distance; no dynamic shared memory
// Numerics   f32 sums by rising head and row
// Edges      any number of keys
#include "common/types.cuh"

struct SelectProbeSumsParams {
  u64 rows, num_keys, first_position, group;
  u64 factor;  // f32 bits
  u64 adds;
};

// A thread sums over the rows and heads of a group for one key (blockIdx.z 0) or one distance (1).
extern "C" __global__ void __launch_bounds__(256)
    select_probe_sums(const float* logit, const float* scale, float* column, float* diagonal,
                      const __grid_constant__ SelectProbeSumsParams params) {
  const int at = (int)(blockIdx.x * 256 + threadIdx.x), rows = (int)params.rows, num_keys = (int)params.num_keys,
            group = (int)params.group;
  if (at >= num_keys) return;
  float sum = 0.0f;
  for (int head = (int)blockIdx.y * group; head < ((int)blockIdx.y + 1) * group; ++head)
    for (int row = 0; row < rows; ++row) {
      const u64 line = (u64)head * rows + row;
      const int own = (int)params.first_position + row, j = blockIdx.z == 0 ? at : own - at;
      if (j < 0 || j > own) continue;
      sum += exp2f((logit[line * num_keys + j] - scale[2 * line]) * LOG2_E) * scale[2 * line + 1];
    }
  float* to = (blockIdx.z == 0 ? column : diagonal) + (u64)blockIdx.y * num_keys + at;
  *to = sum * f32_word(params.factor) + (params.adds ? *to : 0.0f);
}
