// swiglu_forward: the gated activation of Qwen3's feed-forward block.
// Math       y[r,c] = silu(g[r,c]) * u[r,c], silu(g) = g / (1 + exp(-g)); g and u are the halves of a packed row
//            (arXiv:2002.05202)
// Layout     gate_up [rows, 2*d_ff], a row's gate columns first, rows row_stride elements apart (Burn pads rows); y
//            [rows, d_ff] contiguous; all bf16
// Buffers    gate_up, y, amax (AMAX_PARTIALS)
// Defines    AMAX_PARTIALS (0; else the number of partial maxima of |y|, common/amax.cuh), IS_BF16 (1), VECTOR
//            (elements a thread loads at once: 8, or 1 when d_ff or row_stride is no multiple of 8) (set by
//            sieve-gpu/src/step/swiglu_forward.rs)
// Tiling     grid (rows, ceil(d_ff / (256*VECTOR))); 256 threads; a thread owns VECTOR consecutive columns of one row;
//            no shared memory
// Numerics   f32 inside, one rounding at the store; writes every element of y, accumulates into nothing; memory-bound,
//            each input is read once
// Edges      the last block of columns may be short; rows = 0 or d_ff = 0 is refused by the wrapper
#include "common/amax.cuh"
#include "common/row_vector.cuh"

struct SwigluForwardParams { u64 d_ff, row_stride; };

// A thread has VECTOR consecutive columns of one row.
extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(const element* gate_up, element* y, AMAX_BUFFER const __grid_constant__ SwigluForwardParams params) {
  const u64 row = blockIdx.x;
  const u64 column = (u64(blockIdx.y) * 256 + threadIdx.x) * VECTOR;
  Amax largest;
  if (column < params.d_ff) {
    // Load: one 16-byte access each for gate and up.
    float gate[VECTOR], up[VECTOR];
    load_vector(gate_up + row * params.row_stride + column, gate);
    load_vector(gate_up + row * params.row_stride + params.d_ff + column, up);

    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      result[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
      largest.keep(result[i]);
    }

    store_vector(y + row * params.d_ff + column, result);
  }
#if AMAX_PARTIALS
  largest.store(amax);
#endif
}
