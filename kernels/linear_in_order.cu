// linear_in_order: rows times a weight matrix, in an order of sums that depends on the number of columns alone: for
// matrices that no GEMM of one order takes, and for those that a step multiplies in a kernel of its own.
// Math       y[r, i] = sum_j w[i, j] x[r, j]
// Layout     x bf16 [rows, k], w bf16 [n, k], y bf16 [rows, n], contiguous
// Buffers    x, w, y
// Defines    X_ROWS (1, 4: rows of x in shared memory); IS_EVEN (1: k is a multiple of 8) (set by
//            step/linear_in_order.rs)
// Tiling     grid (ceil(rows / X_ROWS)); 512 threads, a warp takes a row of w; dynamic shared bytes = X_ROWS * 16 *
//            ceil(k / 8)
// Numerics   f32 sums in the order of lane_product.cuh, one rounding; writes every element of y
// Edges      rows past `rows` are read as zeros and not stored
#include "common/lane_product.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 16, THREADS = NUM_WARPS * 32;

struct LinearInOrderParams { u64 rows, n, k; };

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_in_order(const bf16* x, const bf16* w, bf16* y, const __grid_constant__ LinearInOrderParams params) {
  extern __shared__ uint4 x_words[];  // [X_ROWS, words of a row]
  wait_for_previous();
  const int k = (int)params.k, n = (int)params.n, row_words = (k + 7) / 8;
  const u64 first_row = (u64)blockIdx.x * X_ROWS;
  for (int at = (int)threadIdx.x; at < X_ROWS * row_words; at += THREADS) {
    const u64 row = first_row + at / row_words;
    float numbers[8] = {};
    if (row < params.rows) load_word<IS_EVEN>(x + row * k, at % row_words * 8, k, numbers);
    x_words[at] = pack_bf16x8(numbers);
  }
  __syncthreads();  // the rows of x are stored
  const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
  for (int i = warp; i < n; i += NUM_WARPS) {
    float sums[X_ROWS];
    lane_products<IS_EVEN, X_ROWS>(sums, w + (u64)i * k, x_words, row_words, k);
#pragma unroll
    for (int r = 0; r < X_ROWS; ++r)
      if (lane == r && first_row + r < params.rows)
        y[(first_row + r) * n + i].bits = (unsigned short)pack_bf16(sums[r], 0.0f);
  }
}
