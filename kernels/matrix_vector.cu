// matrix_vector: a weight matrix times the few rows of a decoding step, with what stands before and after it.
// Math       y[r,i] = sum_j w[i,j] h[r,j] (+ residual[r,i]); h = x, or x's RMSNorm (arXiv:1910.07467, eq. 4), or
//            silu(g) u of the halves g, u of a row of x (arXiv:2002.05202), rounded to bf16
// Layout     w bf16 [n, k], rows w_stride apart; x bf16 [rows, k], of gates and ups [rows, 2 k], rows x_stride apart;
//            norm bf16 [k]; residual bf16 [rows, n], rows residual_stride apart; y bf16 [rows, n] contiguous; k and
//            strides multiples of 8
// Buffers    x, w, norm (read with INPUT 1), residual (read with RESIDUAL), y
// Defines    INPUT (0: x, 1: its norm, 2: gates and ups), RESIDUAL (0, 1), X_ROWS (1, 2, 4: rows at most),
//            WARPS_PER_ROW (1, 2, 4, 8: warps that share a row of w) (set by step/matrix_vector.rs)
// Tiling     grid (up to 4 a multiprocessor); 256 threads; h in shared memory; a group of warps walks rows of w, with
//            the next UNROLL words of each lane on their way while these are multiplied; each byte of w is read once
// Numerics   f32 sums in an order that depends on k alone; one rounding at the store; writes every element of y
// Edges      rows of w past n and words past k are read as zeros; rows of h past `rows` are zeros and not stored
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 8, UNROLL = 4, THREADS = NUM_WARPS * 32;
constexpr int LANES = 32 * WARPS_PER_ROW, GROUPS = NUM_WARPS / WARPS_PER_ROW;

struct MatrixVectorParams { u64 rows, n, k, x_stride, w_stride, residual_stride, epsilon; };

// A lane's words of a piece of a row of w.
DEVICE void load_piece(uint4 (&words)[UNROLL], const bf16* w, u64 row, int piece, int num_chunks,
                       const MatrixVectorParams& params) {
#pragma unroll
  for (int i = 0; i < UNROLL; i++) {
    const int chunk = (int)(threadIdx.x % LANES) + (piece * UNROLL + i) * LANES;
    words[i] = make_uint4(0, 0, 0, 0);
    if (row < params.n && chunk < num_chunks) words[i] = load_16_bytes(w + row * params.w_stride + chunk * 8);
  }
}

// Row `row` of h to shared memory; `sums` are 8 floats of this row.
DEVICE void prepare_row(uint4* h, const bf16* x, const bf16* norm, int num_chunks, float* sums,
                        const MatrixVectorParams& params) {
#if INPUT == 1
  float squares = 0.f;
  for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) {
    float values[8];
    unpack_bf16x8(load_16_bytes(x + chunk * 8), values);
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(values[i], values[i], squares);
  }
  squares = warps_sum<NUM_WARPS>(squares, sums);
  const float inverse = 1.f / sqrtf(squares / (float)params.k + f32_word(params.epsilon));
#endif
  for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) {
    uint4 words = load_16_bytes(x + chunk * 8);
#if INPUT > 0
    float values[8], others[8];
    unpack_bf16x8(words, values);
    unpack_bf16x8(load_16_bytes(INPUT == 1 ? norm + chunk * 8 : x + params.k + chunk * 8), others);
#pragma unroll
    for (int i = 0; i < 8; i++) {
#if INPUT == 1
      values[i] = values[i] * inverse * others[i];
#else
      values[i] = values[i] / (1.f + expf(-values[i])) * others[i];
#endif
    }
    words = pack_bf16x8(values);
#endif
    h[chunk] = words;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    matrix_vector(const bf16* x, const bf16* w, const bf16* norm, const bf16* residual, bf16* y,
                  const __grid_constant__ MatrixVectorParams params) {
  extern __shared__ uint4 h[];  // [X_ROWS, k / 8]
  __shared__ float sums[X_ROWS * NUM_WARPS];
  const int num_chunks = (int)(params.k / 8), num_pieces = (num_chunks + LANES * UNROLL - 1) / (LANES * UNROLL);
  const u64 first = (u64)blockIdx.x * GROUPS, step = (u64)gridDim.x * GROUPS;
  u64 row = first + threadIdx.x / LANES;

  // The first words of w do not depend on the kernel before, which writes x or the residual.
  uint4 next[UNROLL];
  load_piece(next, w, row, 0, num_chunks, params);
  wait_for_previous();
  for (int r = 0; r < X_ROWS; r++) {
    if (r < (int)params.rows) {
      prepare_row(h + r * num_chunks, x + r * params.x_stride, norm, num_chunks, sums + r * NUM_WARPS, params);
    } else {
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) h[r * num_chunks + chunk] = zeros;
    }
  }
  __syncthreads();  // h is whole, and the sums of its norms have been read

  // Every group takes as many turns, so that all threads meet at the sums.
  for (u64 base = first; base < params.n; base += step, row += step) {
    float totals[X_ROWS] = {};
    for (int piece = 0; piece < num_pieces; piece++) {
      uint4 words[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++) words[i] = next[i];
      const bool is_last = piece + 1 == num_pieces;
      load_piece(next, w, is_last ? row + step : row, is_last ? 0 : piece + 1, num_chunks, params);
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        const int chunk = (int)(threadIdx.x % LANES) + (piece * UNROLL + i) * LANES;
        if (chunk >= num_chunks) continue;
        float weights[8];
        unpack_bf16x8(words[i], weights);
#pragma unroll
        for (int r = 0; r < X_ROWS; r++) {
          float values[8];
          unpack_bf16x8(h[r * num_chunks + chunk], values);
#pragma unroll
          for (int j = 0; j < 8; j++) totals[r] = fmaf(weights[j], values[j], totals[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < X_ROWS; r++) totals[r] = warps_sum<WARPS_PER_ROW>(totals[r], sums + r * NUM_WARPS);
    if (threadIdx.x % LANES == 0 && row < params.n) {
#pragma unroll
      for (int r = 0; r < X_ROWS; r++) {
        if (r >= (int)params.rows) continue;
#if RESIDUAL
        totals[r] += bf16_to_f32(residual[r * params.residual_stride + row]);
#endif
        y[r * params.n + row].bits = (unsigned short)round_bf16x2(totals[r], 0.f);
      }
    }
    if (WARPS_PER_ROW > 1) __syncthreads();  // the sums are read before the next turn's are written
  }
}
