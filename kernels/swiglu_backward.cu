// swiglu_backward: gradient of swiglu_forward; with HAS_OUTPUT it also recomputes the forward's output, for the weight
// gradient of the GEMM that reads it.
// Math       s = sigmoid(g); dg = dy * u * s * (1 + g * (1 - s)); du = dy * g * s  (derivative of arXiv:2002.05202, eq.
//            5); y as the forward
// Layout     gate_up [rows, 2*d_ff], rows row_stride elements apart; dy [rows, d_ff], rows dy_stride apart; dgate_up
//            [rows, 2*d_ff] contiguous, gate columns first; y [rows, d_ff] contiguous; all bf16
// Buffers    gate_up, dy, dgate_up, amax (AMAX_PARTIALS), y (HAS_OUTPUT); dgate_up may be gate_up and y may be dy where
//            those are contiguous: a thread reads its columns before it writes them
// Defines    HAS_OUTPUT (0), AMAX_PARTIALS (0; else the number of partial maxima of |dgate_up|, common/amax.cuh),
//            IS_BF16 (1), VECTOR (elements a thread loads at once: 8, or 1 when d_ff or a stride is no multiple of 8)
//            (set by sieve-gpu/src/step/swiglu_backward.rs)
// Tiling     grid (rows, ceil(d_ff / (256*VECTOR))); 256 threads; a thread owns VECTOR consecutive columns of one row;
//            no shared memory
// Numerics   f32 inside, one rounding at each store; writes every element of dgate_up and y, accumulates into nothing;
//            memory-bound, each input is read once
// Edges      the last block of columns may be short; rows = 0 or d_ff = 0 is refused by the wrapper
#include "common/amax.cuh"
#include "common/row_vector.cuh"

#ifndef HAS_OUTPUT
#define HAS_OUTPUT 0
#endif

struct SwigluBackwardParams { u64 d_ff, row_stride, dy_stride; };

// A thread has VECTOR consecutive columns of one row.
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward(const element* gate_up, const element* dy, element* dgate_up, AMAX_BUFFER
#if HAS_OUTPUT
                    element* y,
#endif
                    const __grid_constant__ SwigluBackwardParams params) {
  const u64 row = blockIdx.x;
  const u64 column = (u64(blockIdx.y) * 256 + threadIdx.x) * VECTOR;
  Amax largest;
  if (column < params.d_ff) {
    // Load gate, up and the output's gradient.
    float gate[VECTOR], up[VECTOR], grad[VECTOR];
    load_vector(gate_up + row * params.row_stride + column, gate);
    load_vector(gate_up + row * params.row_stride + params.d_ff + column, up);
    load_vector(dy + row * params.dy_stride + column, grad);

    float dgate[VECTOR], dup[VECTOR];
    [[maybe_unused]] float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float sigmoid = 1.0f / (1.0f + expf(-gate[i]));
      dgate[i] = grad[i] * up[i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
      dup[i] = grad[i] * gate[i] * sigmoid;
      largest.keep(dgate[i]), largest.keep(dup[i]);
#if HAS_OUTPUT
      result[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];  // as the forward rounds it
#endif
    }

    // Store both gradients side by side, and the output where it is recomputed.
    element* out = dgate_up + row * 2 * params.d_ff;
    store_vector(out + column, dgate);
    store_vector(out + params.d_ff + column, dup);
#if HAS_OUTPUT
    store_vector(y + row * params.d_ff + column, result);
#endif
  }
#if AMAX_PARTIALS
  largest.store(amax);
#endif
}
