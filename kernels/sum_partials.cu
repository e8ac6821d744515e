// sum_partials: first half of a sum in a fixed order: one partial sum for each 65536 elements, whatever the device.
// Math       partials[first_partial + b] = sum over the block's elements of x (SQUARE 0) or x^2 (SQUARE 1)
// Layout     x f32, or bf16 (IS_BF16), [num_elements] contiguous, 16-byte aligned; partials f32, with room behind
//            first_partial
// Buffers    x, partials
// Defines    SQUARE 0|1, IS_BF16 0|1
// Tiling     grid (ceil(num_elements / 65536)); 256 threads; 16-byte loads, eight at once
// Numerics   f32 in a fixed order; memory-bound
// Edges      num_elements of any size
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"

constexpr int NUM_THREADS = 256, NUM_WARPS = NUM_THREADS / 32, BLOCK_ELEMENTS = 65536;
#if IS_BF16
typedef bf16 element;
constexpr int VECTOR = 8;
DEVICE float to_f32(bf16 x) { return bf16_to_f32(x); }
#else
typedef float element;
constexpr int VECTOR = 4;
DEVICE float to_f32(float x) { return x; }
#endif
constexpr int ROUNDS = BLOCK_ELEMENTS / (NUM_THREADS * VECTOR);

struct SumPartialsParams { u64 num_elements, first_partial; };

DEVICE float term(float x) { return SQUARE ? x * x : x; }
// The sum of the terms of one 16-byte word: eight bf16, or four f32.
DEVICE float sum_words(const uint4& words) {
#if IS_BF16
  float values[8];
  unpack_bf16x8(words, values);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += term(values[i]);
  return sum;
#else
  return term(__uint_as_float(words.x)) + term(__uint_as_float(words.y)) + term(__uint_as_float(words.z)) +
         term(__uint_as_float(words.w));
#endif
}

// A block adds up 65536 consecutive elements.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
sum_partials(const element* x, float* partials, const __grid_constant__ SumPartialsParams params) {
  __shared__ float shared[NUM_WARPS];
  const u64 first = (u64)blockIdx.x * BLOCK_ELEMENTS;
  const element* from = x + first;
  const u64 left = params.num_elements - first;
  const int count = left < BLOCK_ELEMENTS ? (int)left : BLOCK_ELEMENTS;

  // Load and accumulate
  float sum = 0.f;
  if (count == BLOCK_ELEMENTS) {
#pragma unroll 8
    for (int round = 0; round < ROUNDS; round++)
      sum += sum_words(load_16_bytes(from + (round * NUM_THREADS + threadIdx.x) * VECTOR));
  } else {
#pragma unroll 4
    for (int at = threadIdx.x * VECTOR; at + VECTOR <= count; at += NUM_THREADS * VECTOR)
      sum += sum_words(load_16_bytes(from + at));
    const int tail = count / VECTOR * VECTOR + (int)threadIdx.x;
    if (tail < count) sum += term(to_f32(from[tail]));
  }
  sum = warps_sum<NUM_WARPS>(sum, shared);

  // Store the block's sum.
  if (threadIdx.x == 0) partials[params.first_partial + blockIdx.x] = sum;
}
