// probe_correct: corrects a sparse output by the error at its dense probe rows (MOMO, eq. 3; Delta Attention,
// arXiv:2505.11254).
// Math       o[t] += dense[p] - o[p] for the rows t between a probe p and the next one, except dense rows; not where p
//            itself is a dense row; then o[p] = dense[p].
//            replaces_only: the second alone
// Layout     o, dense bf16 [num_queries, width] contiguous, of dense the probe rows; probe p is row max(p * gamma -
//            offset, 0); rows dense_first .. dense_end are dense
// Buffers    o, dense
// Defines    none
// Tiling     grid (probes, ceil(width / 1024), 1); 128 threads, eight consecutive columns each; no dynamic shared
//            memory
// Numerics   f32, one rounding to bf16
// Edges      width a multiple of 8
#include "common/bf16x8.cuh"

struct ProbeCorrectParams {
  u64 num_queries, width, gamma, offset, dense_first, dense_end, replaces_only;
};

// A block has one probe row and the rows up to the next probe; a thread eight of their columns.
extern "C" __global__ void __launch_bounds__(128)
    probe_correct(bf16* o, const bf16* dense, const __grid_constant__ ProbeCorrectParams params) {
  const int probe = (int)blockIdx.x, gamma = (int)params.gamma, offset = (int)params.offset, width = (int)params.width;
  const int column = ((int)blockIdx.y * 128 + (int)threadIdx.x) * 8, first = max(probe * gamma - offset, 0),
            end = min((probe + 1) * gamma - offset, (int)params.num_queries);
  if (column >= width) return;
  const auto is_dense = [&](int row) { return row >= (int)params.dense_first && row < (int)params.dense_end; };
  const uint4 words = load_16_bytes(dense + (u64)first * width + column);
  if (!params.replaces_only && !is_dense(first)) {
    float exact[8], sparse[8];
    unpack_bf16x8(words, exact);
    unpack_bf16x8(load_16_bytes(o + (u64)first * width + column), sparse);
    for (int row = first + 1; row < end; ++row) {
      if (is_dense(row)) continue;
      float values[8];
      unpack_bf16x8(load_16_bytes(o + (u64)row * width + column), values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] += exact[i] - sparse[i];
      store_16_bytes(o + (u64)row * width + column, pack_bf16x8(values));
    }
  }
  store_16_bytes(o + (u64)first * width + column, words);
}
