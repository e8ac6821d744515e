// cross_entropy: losses of rows of logits, and their gradients in the same launch.
// Math       lse = log sum exp(x); loss = lse - x[label]; dx = softmax(x) - onehot(label); a negative label is
//            ignored: loss 0, dx 0
// Layout     logits bf16 [rows, vocab_size], rows stride apart, a multiple of 8 and at least the next one after
//            vocab_size, up to which gradients are written; labels i32 [rows]; losses f32 [rows]
// Buffers    logits, labels, losses
// Defines    GRADIENT 0|1 (1: the gradients take the logits' place; 0: losses alone, the same ones)
// Tiling     grid (rows); 512 threads; the first CACHED_CHUNKS chunks of a thread stay in registers between the two
//            passes, the others are read again, from the L2
// Numerics   f32 inside, sums in a fixed order; memory-bound
// Edges      vocab_size not a multiple of 8: the padding columns are ignored. A label >= vocab_size makes the loss NaN
#include "common/bf16x8.cuh"
#include "common/mma.cuh"

constexpr int NUM_THREADS = 512, NUM_WARPS = NUM_THREADS / 32;
constexpr int CACHED_CHUNKS = GRADIENT ? 7 : 0;  // 28 registers

struct CrossEntropyParams { u64 vocab_size, stride; };

// A running maximum (in units of log 2) and the sum of 2^(x - maximum).
struct SoftmaxSum {
  float maximum, sum;
  DEVICE void merge(float other_maximum, float other_sum) {
    const float both = fmaxf(maximum, other_maximum);
    // Neither part has a logit above -inf yet: -inf minus -inf would be a NaN.
    const float shift = both == -INFINITY_F32 ? 0.f : both;
    sum = sum * exp2_fast(maximum - shift) + other_sum * exp2_fast(other_maximum - shift);
    maximum = both;
  }
};

// Columns at and past `count` become -inf.
DEVICE void mask_tail(float (&values)[8], int count) {
  if (count >= 8) return;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i >= count) values[i] = -INFINITY_F32;
}

// Adds the first `count` of eight logits.
DEVICE void add_chunk(SoftmaxSum& running, float (&values)[8], int count) {
  mask_tail(values, count);
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < 8; i++) largest = fmaxf(largest, values[i]);
  largest *= LOG2_E;
  if (largest > running.maximum) {
    running.sum *= exp2_fast(running.maximum - largest);
    running.maximum = largest;
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += exp2_fast(fmaf(values[i], LOG2_E, -running.maximum));
  // If all logits so far are -inf, the terms are NaN and are not added.
  if (running.maximum != -INFINITY_F32) running.sum += sum;
}

// A block has one row of logits; a thread has every 512th chunk of eight of them.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
cross_entropy(bf16* logits, const i32* labels, float* losses, const __grid_constant__ CrossEntropyParams params) {
  __shared__ float shared_maximum[NUM_WARPS], shared_sum[NUM_WARPS];
  const u64 row = blockIdx.x;
  const i32 label = labels[row];
  const int vocab_size = (int)params.vocab_size, num_chunks = ceil_div(vocab_size, 8);
  bf16* row_logits = logits + row * params.stride;

  if (label < 0) {
    if (threadIdx.x == 0) losses[row] = 0.f;
#if GRADIENT
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += NUM_THREADS)
      store_16_bytes(row_logits + (i64)chunk * 8, make_uint4(0, 0, 0, 0));
#endif
    return;
  }
  // Read before any thread may overwrite it.
  float picked = __uint_as_float(0x7fc00000u);
  if (label < vocab_size) picked = bf16_to_f32(row_logits[label]);

  // Load and score: the cached chunks together, then the others one after the other.
  uint4 cache[max_int(CACHED_CHUNKS, 1)];
#pragma unroll
  for (int c = 0; c < CACHED_CHUNKS; c++) {
    const int chunk = threadIdx.x + c * NUM_THREADS;
    if (chunk < num_chunks) cache[c] = load_16_bytes(row_logits + (i64)chunk * 8);
  }
  SoftmaxSum running = {-INFINITY_F32, 0.f};
#pragma unroll
  for (int c = 0; c < CACHED_CHUNKS; c++) {
    const int chunk = threadIdx.x + c * NUM_THREADS;
    if (chunk < num_chunks) {
      float values[8];
      unpack_bf16x8(cache[c], values);
      add_chunk(running, values, vocab_size - chunk * 8);
    }
  }
#pragma unroll 4
  for (int chunk = threadIdx.x + CACHED_CHUNKS * NUM_THREADS; chunk < num_chunks; chunk += NUM_THREADS) {
    float values[8];
    unpack_bf16x8(load_16_bytes(row_logits + (i64)chunk * 8), values);
    add_chunk(running, values, vocab_size - chunk * 8);
  }

  // Accumulate over lanes, then over warps, in a fixed order.
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float maximum = __shfl_xor_sync(0xffffffffu, running.maximum, distance),
                sum = __shfl_xor_sync(0xffffffffu, running.sum, distance);
    running.merge(maximum, sum);
  }
  if ((threadIdx.x & 31) == 0) {
    shared_maximum[threadIdx.x >> 5] = running.maximum;
    shared_sum[threadIdx.x >> 5] = running.sum;
  }
  __syncthreads();  // every warp's part is stored, and every thread has read `picked`
  running = {shared_maximum[0], shared_sum[0]};
#pragma unroll
  for (int warp = 1; warp < NUM_WARPS; warp++) running.merge(shared_maximum[warp], shared_sum[warp]);
  const float lse = running.maximum * LN_2 + logf(running.sum);
  if (threadIdx.x == 0) losses[row] = lse - picked;

#if GRADIENT
  // Store the gradient of the logits, probability minus label, over the logits.
  const float shift = running.maximum + log2f(running.sum);
  auto store_chunk = [&](int chunk, const uint4& words) {
    float values[8];
    unpack_bf16x8(words, values);
    mask_tail(values, vocab_size - chunk * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = exp2_fast(fmaf(values[i], LOG2_E, -shift));
    if (label / 8 == chunk) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (chunk * 8 + i == label) values[i] -= 1.f;
    }
    store_16_bytes(row_logits + (i64)chunk * 8, pack_bf16x8(values));
  };
#pragma unroll
  for (int c = 0; c < CACHED_CHUNKS; c++) {
    const int chunk = threadIdx.x + c * NUM_THREADS;
    if (chunk < num_chunks) store_chunk(chunk, cache[c]);
  }
#pragma unroll 4
  for (int chunk = threadIdx.x + CACHED_CHUNKS * NUM_THREADS; chunk < num_chunks; chunk += NUM_THREADS)
    store_chunk(chunk, load_16_bytes(row_logits + (i64)chunk * 8));
#endif
}
