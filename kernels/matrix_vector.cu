// matrix_vector: a weight matrix times the few rows of a decoding step, with a norm before and an epilogue after it.
// Math       y[r,i] = sum_j w[i,j] h[r,j] (+ residual[r,i]); h = x, or x's RMSNorm (arXiv:1910.07467, eq. 4), rounded
//            to bf16; OUTPUT 1: y[r,i] = silu(g) u (arXiv:2002.05202), where g and u are rows i and n + i of w times
//            h[r], rounded to bf16
// Layout     w bf16 [n, k], with OUTPUT 1 [2 n, k], rows w_stride apart; x bf16 [rows, k], rows x_stride apart; norm
//            bf16 [k]; residual bf16 [rows, n], rows residual_stride apart; y bf16 [rows, n] contiguous; k and strides
//            multiples of 8
// Buffers    x, w, norm (read with INPUT 1), residual (read with RESIDUAL), y
// Defines    INPUT (0: x, 1: its norm), OUTPUT (0, 1), RESIDUAL (0, 1; 0 with OUTPUT 1), X_ROWS (1, 2, 4: rows at
//            most), WARPS_PER_ROW (1, 2, 4, 8: warps that share a row of w) (set by step/matrix_vector.rs)
// Tiling     grid (up to 4 a multiprocessor); 256 threads; h in shared memory; a group of warps walks rows of w, with
//            the next UNROLL words of each lane on their way while these are multiplied; each byte of w is read once
// Numerics   f32 sums in an order that depends on k alone; one rounding at the store; writes every element of y
// Edges      rows of w past n and words past k are read as zeros; rows of h past `rows` are zeros and not stored
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 8, UNROLL = 4, THREADS = NUM_WARPS * 32;
constexpr int LANES = 32 * WARPS_PER_ROW, GROUPS = NUM_WARPS / WARPS_PER_ROW;
constexpr int PARTS = OUTPUT == 1 ? 2 : 1;  // rows of w for each element of y
static_assert(!(OUTPUT && RESIDUAL), "an activation is not added to");

struct MatrixVectorParams { u64 rows, n, k, x_stride, w_stride, residual_stride, epsilon; };

// A lane's words of a piece of one of the rows of w that row `row` of y takes.
DEVICE void load_piece(uint4 (&words)[UNROLL], const bf16* w, u64 row, int part, int piece, int num_chunks,
                       const MatrixVectorParams& params) {
  const bf16* from = w + (row + part * params.n) * params.w_stride;
#pragma unroll
  for (int i = 0; i < UNROLL; i++) {
    const int chunk = (int)(threadIdx.x % LANES) + (piece * UNROLL + i) * LANES;
    words[i] = make_uint4(0, 0, 0, 0);
    if (row < params.n && chunk < num_chunks) words[i] = load_16_bytes(from + chunk * 8);
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
#if INPUT == 1
    float values[8], others[8];
    unpack_bf16x8(words, values);
    unpack_bf16x8(load_16_bytes(norm + chunk * 8), others);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = values[i] * inverse * others[i];
    words = pack_bf16x8(values);
#endif
    h[chunk] = words;
  }
}

// Gates of four rows beside their sums take more registers than four blocks leave.
extern "C" __global__ void __launch_bounds__(THREADS, OUTPUT == 1 && X_ROWS == 4 ? 3 : 4)
    matrix_vector(const bf16* x, const bf16* w, const bf16* norm, const bf16* residual, bf16* y,
                  const __grid_constant__ MatrixVectorParams params) {
  extern __shared__ uint4 h[];  // [X_ROWS, k / 8]
  __shared__ float sums[X_ROWS * NUM_WARPS];
  const int num_chunks = (int)(params.k / 8), num_pieces = ceil_div(num_chunks, LANES * UNROLL);
  const u64 first = (u64)blockIdx.x * GROUPS, step = (u64)gridDim.x * GROUPS;
  u64 row = first + threadIdx.x / LANES;

  // The first words of w may be loaded before the last kernel, which writes x or the residual, has ended.
  uint4 next[UNROLL];
  load_piece(next, w, row, 0, 0, num_chunks, params);
  wait_for_previous();
  for (int r = 0; r < X_ROWS; r++) {
    if (r < (int)params.rows) {
      prepare_row(h + r * num_chunks, x + r * params.x_stride, norm, num_chunks, sums + r * NUM_WARPS, params);
    } else {
      for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS)
        h[r * num_chunks + chunk] = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();  // h is stored, and the sums of its norms have been read

  // Every group takes the same number of rounds, so that all threads reach the barriers.
  for (u64 base = first; base < params.n; base += step, row += step) {
    float totals[X_ROWS];
    [[maybe_unused]] float gates[X_ROWS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
      for (int r = 0; r < X_ROWS; r++) totals[r] = 0.f;
      for (int piece = 0; piece < num_pieces; piece++) {
        uint4 words[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) words[i] = next[i];
        const bool ends_part = piece + 1 == num_pieces, ends_row = ends_part && part + 1 == PARTS;
        load_piece(next, w, ends_row ? row + step : row, ends_row ? 0 : part + ends_part, ends_part ? 0 : piece + 1,
                   num_chunks, params);
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
#if OUTPUT == 1
      if (part == 0) {
#pragma unroll
        for (int r = 0; r < X_ROWS; r++) gates[r] = totals[r];
        if (WARPS_PER_ROW > 1) __syncthreads();  // the sums are read before the second row of w overwrites them
      }
#endif
    }
    if (threadIdx.x % LANES == 0 && row < params.n) {
#pragma unroll
      for (int r = 0; r < X_ROWS; r++) {
        if (r >= (int)params.rows) continue;
#if OUTPUT == 1
        const float gate = bf16_low(pack_bf16(gates[r], 0.f)), up = bf16_low(pack_bf16(totals[r], 0.f));
        totals[r] = gate / (1.f + expf(-gate)) * up;
#endif
#if RESIDUAL
        totals[r] += bf16_to_f32(residual[r * params.residual_stride + row]);
#endif
        y[r * params.n + row].bits = (unsigned short)pack_bf16(totals[r], 0.f);
      }
    }
    if (WARPS_PER_ROW > 1) __syncthreads();  // the sums are read before the next round overwrites them
  }
}
