// matrix_vector: a weight matrix times the few rows of a decoding step, with a norm before and an epilogue after it.
// Math       y[r,i] = sum_j w[i,j] h[r,j] (+ residual[r,i]); h = x, or x's RMSNorm (arXiv:1910.07467, eq. 4), rounded
//            to bf16; OUTPUT 1: y[r,i] = silu(g) u (arXiv:2002.05202), where g and u are rows i and n + i of w times
//            h[r], rounded to bf16
// Layout     w bf16 [n, k], with OUTPUT 1 [2 n, k], rows w_stride apart; x bf16 [rows, k], rows x_stride apart; norm
//            bf16 [k]; residual bf16 [rows, n], rows residual_stride apart; y bf16 [rows, n] contiguous; k and strides
//            multiples of 8
// Buffers    x, w, norm (read with INPUT 1), residual (read with RESIDUAL), y
// Defines    INPUT (0: x, 1: its norm), OUTPUT (0, 1), RESIDUAL (0; 1: added to the f32 sum; 2: to the sum rounded to
//            bf16; 0 with OUTPUT 1), X_ROWS (1, 2, 4: rows at most), NUM_WARPS (1, 2, 4), NORM_WARPS (WARPS_PER_ROW of
//            rms_norm_forward for this k) (set by step/matrix_vector.rs)
// Tiling     grid (up to 4 a multiprocessor); 32 NUM_WARPS threads; h in shared memory, (k rounded up to 16 DEPTH, plus
//            16) * 2 bytes a row; a warp walks tiles of 8 rows of w by m16n8k16 with the rows of h as A, DEPTH steps of
//            16 columns on their way while the oldest are multiplied; each byte of w is read once
// Numerics   f32 sums over rising steps of 16 columns, one after the other: the bits of a GEMM on tensor cores that does
//            not split k (kernels/notes/one-order-of-sums.md), for any number of rows; the norm's bits are
//            rms_norm_forward's; writes every element of y
// Edges      rows of w past n and columns past k are zeros; rows of h past `rows` are zeros and not stored
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/mma.cuh"
#include "common/programmatic_launch.cuh"

constexpr int PARTS = OUTPUT == 1 ? 2 : 1;  // rows of w for each element of y
constexpr int DEPTH = 48 / PARTS;           // steps of 16 columns on their way, of each part
constexpr int THREADS = NUM_WARPS * 32, TILE = 8;
static_assert(!(OUTPUT && RESIDUAL), "an activation is not added to");

struct MatrixVectorParams { u64 rows, n, k, x_stride, w_stride, residual_stride, epsilon; };

// The lane's eight of the 32 columns of a pair of steps of a row of w; `row` begins at the lane's first column.
DEVICE uint4 load_pair(const bf16* row, int pair, bool exists, int k) {
  const int column = pair * 32 + (int)threadIdx.x % 4 * 8;
  if (!exists || column >= k) return make_uint4(0, 0, 0, 0);
  return load_16_bytes(row + pair * 32);
}

// B of both steps of a pair from the words that the four lanes of a row have loaded: lanes 0 and 1 the first step's
// columns, lanes 2 and 3 the second's. Each lane gives half of its own to the lane two further on. Inside a step the
// order of columns does not matter to the sum; step_column() says which a lane then has.
DEVICE void share_pair(uint2 (&b)[2], const uint4& words) {
  const bool upper = threadIdx.x & 2;
  const u32 x = __shfl_xor_sync(~0u, upper ? words.x : words.z, 2), y = __shfl_xor_sync(~0u, upper ? words.y : words.w, 2);
  b[0] = upper ? make_uint2(x, y) : make_uint2(words.x, words.y);
  b[1] = upper ? make_uint2(words.z, words.w) : make_uint2(x, y);
}
// The first of the lane's four columns of a step.
DEVICE int step_column() { return (int)(threadIdx.x & 1) * 8 + (int)(threadIdx.x >> 1 & 1) * 4; }

// 1 / RMS of a row, by each warp for itself: the sums of NORM_WARPS warps as rms_norm_forward has them.
[[maybe_unused]] DEVICE float inverse_rms_of_row(const bf16* x, const MatrixVectorParams& params) {
  const int num_chunks = (int)(params.k / 8);
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < NORM_WARPS; warp++) {
    float squares = 0.f;
    for (int first = warp * 32 + (int)threadIdx.x % 32; first < num_chunks; first += 256 * NORM_WARPS) {
      uint4 words[8];  // on their way together
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int chunk = first + i * 32 * NORM_WARPS;
        words[i] = chunk < num_chunks ? load_16_bytes(x + chunk * 8) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int c = 0; c < 8; c++) {
        float values[8];
        unpack_bf16x8(words[c], values);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(values[i], values[i], squares);
      }
    }
    squares = lanes_sum<32>(squares);
    total = NORM_WARPS == 1 ? squares : total + squares;
  }
  return 1.f / sqrtf(total / (float)params.k + f32_word(params.epsilon));
}

// Row `row` of h to shared memory, with zeros behind its k columns.
DEVICE void prepare_row(uint4* h, const bf16* x, const bf16* norm, int chunks_of_h, const MatrixVectorParams& params) {
  constexpr int AHEAD = INPUT == 1 ? 4 : 8;  // chunks of a thread on their way together
  const int num_chunks = (int)(params.k / 8);
  [[maybe_unused]] float inverse = 1.f;
  for (int first = threadIdx.x; first < chunks_of_h; first += AHEAD * THREADS) {
    uint4 words[AHEAD];
    [[maybe_unused]] uint4 factor_words[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int chunk = first + i * THREADS;
      words[i] = chunk < num_chunks ? load_16_bytes(x + chunk * 8) : make_uint4(0, 0, 0, 0);
#if INPUT == 1
      factor_words[i] = chunk < num_chunks ? load_16_bytes(norm + chunk * 8) : make_uint4(0, 0, 0, 0);
#endif
    }
#if INPUT == 1
    if (first < THREADS) inverse = inverse_rms_of_row(x, params);
#endif
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int chunk = first + i * THREADS;
#if INPUT == 1
      float values[8], factors[8];
      unpack_bf16x8(words[i], values);
      unpack_bf16x8(factor_words[i], factors);
#pragma unroll
      for (int j = 0; j < 8; j++) values[j] = values[j] * inverse * factors[j];
      words[i] = pack_bf16x8(values);
#endif
      if (chunk < chunks_of_h) h[chunk] = words[i];
    }
  }
}

// Rounds the sum of each part and stores element `at` of row `r` of y.
DEVICE void store_sum(bf16* y, [[maybe_unused]] const bf16* residual, u64 r, u64 at, const float (&sums)[PARTS],
                      const MatrixVectorParams& params) {
  float value = sums[0];
#if OUTPUT == 1
  const float gate = bf16_low(pack_bf16(sums[0], 0.f)), up = bf16_low(pack_bf16(sums[1], 0.f));
  value = gate / (1.f + expf(-gate)) * up;
#endif
#if RESIDUAL
  if (RESIDUAL == 2) value = bf16_low(pack_bf16(value, 0.f));
  value = bf16_to_f32(residual[r * params.residual_stride + at]) + value;
#endif
  y[r * params.n + at].bits = (unsigned short)pack_bf16(value, 0.f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    matrix_vector(const bf16* x, const bf16* w, const bf16* norm, const bf16* residual, bf16* y,
                  const __grid_constant__ MatrixVectorParams params) {
  extern __shared__ uint4 h[];  // [X_ROWS, chunks_of_h + 2]
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, k = (int)params.k;
  const int num_rounds = ceil_div(k, 16 * DEPTH), chunks_of_h = num_rounds * DEPTH * 2, pitch = chunks_of_h + 2;
  const u64 step_of_tiles = (u64)gridDim.x * NUM_WARPS * TILE;
  u64 first = ((u64)blockIdx.x * NUM_WARPS + threadIdx.x / 32) * TILE;  // the tile's first row of w

  // The first words of w may be loaded before the last kernel, which writes x or the residual, has ended.
  uint4 words[PARTS][DEPTH / 2];
#pragma unroll
  for (int i = 0; i < DEPTH / 2; i++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      words[part][i] = load_pair(w + (first + g + part * params.n) * params.w_stride + t * 8, i, first + g < params.n, k);
  wait_for_previous();
  for (int r = 0; r < X_ROWS; r++) {
    if (r < (int)params.rows) {
      prepare_row(h + r * pitch, x + r * params.x_stride, norm, chunks_of_h, params);
    } else {
      for (int chunk = threadIdx.x; chunk < chunks_of_h; chunk += THREADS) h[r * pitch + chunk] = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();  // h is stored

  // The lane's columns of row g of A, if it is a row of h.
  const uint2* own = reinterpret_cast<const uint2*>(h + g % X_ROWS * pitch) + step_column() / 4;
  for (; first < params.n; first += step_of_tiles) {
    float sums[PARTS][4] = {};
    for (int round = 0; round < num_rounds; round++) {
      // The steps that take the place of those multiplied here: of the next round, or of the warp's next tile.
      const bool ends_tile = round + 1 == num_rounds;
      const int next = ends_tile ? 0 : (round + 1) * (DEPTH / 2);
      const u64 next_row = (ends_tile ? first + step_of_tiles : first) + g;
      const bf16* from = w + next_row * params.w_stride + t * 8;
#pragma unroll
      for (int i = 0; i < DEPTH / 2; i++) {
        uint2 b[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          share_pair(b[part], words[part][i]);
          words[part][i] = load_pair(from + part * params.n * params.w_stride, next + i, next_row < params.n, k);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint2 of_h = g < X_ROWS ? own[(round * DEPTH + i * 2 + half) * 4] : make_uint2(0, 0);
          const u32 a[4] = {of_h.x, 0, of_h.y, 0};
#pragma unroll
          for (int part = 0; part < PARTS; part++) mma_bf16(sums[part], a, b[part][half].x, b[part][half].y);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u64 at = first + 2 * t + i;
      float of_parts[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; part++) of_parts[part] = sums[part][i];
      if (g < (int)params.rows && at < params.n) store_sum(y, residual, g, at, of_parts, params);
    }
  }
}
