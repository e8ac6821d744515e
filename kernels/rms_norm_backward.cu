// rms_norm_backward: gradients of rms_norm_forward; the weight's as one partial sum a block, which column_sums adds up.
// It can recompute the norm's output, for the weight gradient of the GEMM that follows.
// Math       r = 1 / sqrt(mean(s^2) + epsilon), n = s r, g = dy weight: ds = r (g - n mean(g n)) [+ d_residual];
//            dweight = sum over rows of dy n; y = n weight
// Layout     x (the normalised input s), dy, d_residual bf16 [rows, width], rows x_stride, dy_stride and
//            d_residual_stride apart; weight bf16 [width]; dx, y bf16 [rows, width] contiguous; partials f32
//            [gridDim.x, width]; width and strides multiples of 8
// Buffers    x, weight, dy, d_residual (HAS_RESIDUAL), dx, partials, y (HAS_OUTPUT); dx may be dy or d_residual, y may
//            be dy if dx is not
// Defines    HAS_OUTPUT (0), HAS_RESIDUAL 0|1: d_residual is the gradient that reaches s past this norm, WARPS_PER_ROW
//            (1, 2, 4, 8, 16: width up to 512 times that)
// Tiling     grid (any number of blocks, fixed by the wrapper); 512 threads; block b takes rows b ROWS .. and on in
//            strides of the grid; a row is two chunks a lane, so that registers leave room for many rows on their way
// Numerics   f32 sums in a fixed order, which the grid is part of; writes every element of dx, partials and y;
//            memory-bound
// Edges      the last rows may be missing; lanes past the width hold nothing
#include "common/async_copy.cuh"
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#define CHUNKS_PER_LANE 2
#include "common/norm_row.cuh"

#ifndef HAS_OUTPUT
#define HAS_OUTPUT 0
#endif

constexpr int NUM_WARPS = 16, ROWS = NUM_WARPS / WARPS_PER_ROW;
static_assert(NUM_WARPS % WARPS_PER_ROW == 0, "a row's warps are in one block");

struct RmsNormBackwardParams { u64 rows, width, x_stride, dy_stride, d_residual_stride, epsilon; };

// Sums of two values over the warps of a row. Each row has its own barrier and does not wait for other rows.
DEVICE void row_sums(float& a, float& b, float2* shared, int row_in_block) {
  a = lanes_sum<32>(a), b = lanes_sum<32>(b);
  if constexpr (WARPS_PER_ROW > 1) {
    const int warp = threadIdx.x >> 5, first = row_in_block * WARPS_PER_ROW;
    if ((threadIdx.x & 31) == 0) shared[warp] = make_float2(a, b);
    // Every warp's sums are stored before a warp of the row reads them.
    barrier_sync(row_in_block + 1, CHUNK_STEP);
    a = b = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS_PER_ROW; i++) {
      const float2 part = shared[first + i];
      a += part.x, b += part.y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32, 2)
    rms_norm_backward(const bf16* x, const bf16* weight, const bf16* dy,
#if HAS_RESIDUAL
                      const bf16* d_residual,
#endif
                      bf16* dx, float* partials,
#if HAS_OUTPUT
                      bf16* y,
#endif
                      const __grid_constant__ RmsNormBackwardParams params) {
  __shared__ float2 shared[2][NUM_WARPS];
  __shared__ __align__(16) float sums[ROWS > 1 ? MAX_WIDTH : 4];
  const int num_chunks = (int)(params.width / 8), first = first_chunk(), row_in_block = threadIdx.x / CHUNK_STEP;
  const u64 rounds = (params.rows + (u64)gridDim.x * ROWS - 1) / ((u64)gridDim.x * ROWS);

  float dweight[CHUNKS][8] = {};
#pragma unroll 1
  for (u64 round = 0; round < rounds; round++) {
    const u64 row = (round * gridDim.x + blockIdx.x) * ROWS + row_in_block;
    const bool exists = row < params.rows;
    const int here = exists ? num_chunks : 0;

    // Load the row of x and dy (and of the residual stream's gradient).
    uint4 x_words[CHUNKS], dy_words[CHUNKS];
#if HAS_RESIDUAL
    uint4 residual_words[CHUNKS];
#endif
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      x_words[c] = dy_words[c] = make_uint4(0, 0, 0, 0);
      const int chunk = first + c * CHUNK_STEP;
      if (chunk < here) {
        x_words[c] = load_16_bytes(x + row * params.x_stride + chunk * 8);
        dy_words[c] = load_16_bytes(dy + row * params.dy_stride + chunk * 8);
#if HAS_RESIDUAL
        residual_words[c] = load_16_bytes(d_residual + row * params.d_residual_stride + chunk * 8);
#endif
      }
    }

    // Score: both sums of the row together; 1 / r is known only after them.
    float squares = 0.f, products = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int chunk = first + c * CHUNK_STEP;
      if (chunk < num_chunks) {
        float values[8], grads[8], factors[8];
        unpack_bf16x8(x_words[c], values);
        unpack_bf16x8(dy_words[c], grads);
        unpack_bf16x8(load_16_bytes(weight + chunk * 8), factors);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          squares = fmaf(values[i], values[i], squares);
          products = fmaf(grads[i] * factors[i], values[i], products);
        }
      }
    }
    // Two buffers, used alternately, so that one barrier a round is enough.
    row_sums(squares, products, shared[round & 1], row_in_block);
    const float inverse = 1.f / sqrtf(squares / (float)params.width + f32_word(params.epsilon));
    const float mean = products * inverse / (float)params.width;

    // Store dx, and add dy * x / rms to the lane's sums of dweight.
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int chunk = first + c * CHUNK_STEP;
      if (chunk < here) {
        float values[8], grads[8], factors[8], result[8];
        unpack_bf16x8(x_words[c], values);
        unpack_bf16x8(dy_words[c], grads);
        unpack_bf16x8(load_16_bytes(weight + chunk * 8), factors);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float normal = values[i] * inverse;
          dweight[c][i] = fmaf(grads[i], normal, dweight[c][i]);
          result[i] = inverse * (grads[i] * factors[i] - normal * mean);
          if (HAS_OUTPUT) grads[i] = normal * factors[i];
        }
#if HAS_OUTPUT
        store_16_bytes(y + row * params.width + chunk * 8, pack_bf16x8(grads));
#endif
#if HAS_RESIDUAL
        float beside[8];
        unpack_bf16x8(residual_words[c], beside);
#pragma unroll
        for (int i = 0; i < 8; i++) result[i] += beside[i];
#endif
        store_16_bytes(dx + row * params.width + chunk * 8, pack_bf16x8(result));
      }
    }
  }

  // Accumulate the block's rows in order, then store.
  float* out = partials + (u64)blockIdx.x * params.width;
  if constexpr (ROWS == 1) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int chunk = first + c * CHUNK_STEP;
      if (chunk < num_chunks) store_f32x8(out + chunk * 8, dweight[c]);
    }
  } else {
    for (int turn = 0; turn < ROWS; turn++) {
      if (turn == row_in_block) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          const int chunk = first + c * CHUNK_STEP;
          if (chunk < num_chunks) {
            float before[8];
            if (turn > 0) {
              load_f32x8(sums + chunk * 8, before);
#pragma unroll
              for (int i = 0; i < 8; i++) dweight[c][i] += before[i];
            }
            store_f32x8(turn == ROWS - 1 ? out + chunk * 8 : sums + chunk * 8, dweight[c]);
          }
        }
      }
      __syncthreads();  // the next rows add to these sums
    }
  }
}
