// dma_scores_backward: gradients of dma_scores; those of W_dt and A as one partial sum a block, which column_sums adds up.
// Math       dx[h,t] = dz[h,t] A[h] sigmoid(x[h,t]); dv[t,c] += sum_h dx[h,t] W_dt[c,h]; dW_dt[c,h] = sum_t v[t,c] dx[h,t];
//            dA[h] = sum_t dz[h,t] softplus(x[h,t]), softplus(x) = x for x > 20
// Layout     v bf16 [batch, seq_len, C = NUM_KV_HEADS * head_dim] with an element offset, a token and a batch stride (multiples of 8), dv
//            likewise, both usually in packed tensors; w_dt f32 [C, NUM_KV_HEADS]; a f32 [NUM_KV_HEADS]; x, dz f32 [batch, NUM_KV_HEADS,
//            seq_len]; partials f32 [gridDim.x, C NUM_KV_HEADS + NUM_KV_HEADS], dA's columns last
// Buffers    v, w_dt, a, x, dz, dv (read and written), partials
// Defines    NUM_KV_HEADS (1 to 32)
// Tiling     grid (any number of blocks, ceil(C / (128 CHANNELS))); 128 threads; a thread owns CHANNELS neighbouring channels, their W_dt and
//            dW_dt in registers; block b takes tiles of 16 tokens b, b + gridDim.x, ..
// Numerics   f32 sums in a fixed order, which the grid is part of; dv is rounded once, after the sum; memory-bound
// Edges      the last tile of a row may be short; C not a multiple of 128 CHANNELS leaves threads idle
#include "common/bf16x8.cuh"

#ifndef NUM_KV_HEADS
#define NUM_KV_HEADS 8
#endif

constexpr int NUM_THREADS = 128, TILE_TOKENS = 16;
constexpr int CHANNELS = NUM_KV_HEADS <= 8 ? 8 : NUM_KV_HEADS <= 16 ? 4 : 2;  // of a thread
constexpr int WORDS = CHANNELS / 2;
constexpr int PAIRS = (NUM_KV_HEADS * TILE_TOKENS + NUM_THREADS - 1) / NUM_THREADS;  // of head and token, that a thread turns into dx
constexpr float LINEAR_SOFTPLUS = 20.f;  // as in dma_scores

struct DmaScoresBackwardParams {
  u64 batch, seq_len, head_dim, v_offset, v_token_stride, v_batch_stride, dv_offset, dv_token_stride, dv_batch_stride;
};

// A thread's channels of one token.
struct Channels {
  u32 words[WORDS];
  DEVICE void load(const bf16* from) {
    if constexpr (WORDS == 4) {
      const uint4 all = load_16_bytes(from);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (WORDS == 2) {
      const uint2 all = *(const uint2*)from;
      words[0] = all.x, words[1] = all.y;
    } else {
      words[0] = *(const u32*)from;
    }
  }
  DEVICE void store(bf16* to) const {
    if constexpr (WORDS == 4) store_16_bytes(to, make_uint4(words[0], words[1], words[2], words[3]));
    else if constexpr (WORDS == 2) *(uint2*)to = make_uint2(words[0], words[1]);
    else *(u32*)to = words[0];
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
dma_scores_backward(const bf16* v, const float* w_dt, const float* a, const float* x, const float* dz, bf16* dv, float* partials,
                    const __grid_constant__ DmaScoresBackwardParams params) {
  __shared__ float dx[TILE_TOKENS][NUM_KV_HEADS];
  __shared__ float da_parts[NUM_KV_HEADS * TILE_TOKENS];
  const i32 seq_len = (i32)params.seq_len, num_channels = NUM_KV_HEADS * (i32)params.head_dim;
  const i32 channel = (blockIdx.y * NUM_THREADS + threadIdx.x) * CHANNELS;
  const bool active = channel < num_channels;
  const i32 row_tiles = (seq_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const i64 num_tiles = (i64)params.batch * row_tiles;

  float weights[CHANNELS][NUM_KV_HEADS], dweights[CHANNELS][NUM_KV_HEADS], da[PAIRS];
#pragma unroll
  for (int c = 0; c < CHANNELS; c++)
#pragma unroll
    for (int h = 0; h < NUM_KV_HEADS; h++) {
      weights[c][h] = active ? w_dt[(i64)(channel + c) * NUM_KV_HEADS + h] : 0.f;
      dweights[c][h] = 0.f;
    }
#pragma unroll
  for (int p = 0; p < PAIRS; p++) da[p] = 0.f;

#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const i64 row = tile / row_tiles;
    const i32 first = (i32)(tile - row * row_tiles) * TILE_TOKENS, count = min(TILE_TOKENS, seq_len - first);

    // Score: dx of the tile. Neighbouring threads take neighbouring tokens of one head.
    __syncthreads();  // the tile before is no longer read
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int pair = p * NUM_THREADS + threadIdx.x, head = pair / TILE_TOKENS, token = pair % TILE_TOKENS;
      if (head < NUM_KV_HEADS) {
        float result = 0.f;
        if (token < count) {
          const i64 at = (row * NUM_KV_HEADS + head) * seq_len + first + token;
          const float score = x[at], grad = dz[at];
          result = grad * a[head] / (1.f + expf(-score));
          da[p] += grad * (score > LINEAR_SOFTPLUS ? score : log1pf(expf(score)));
        }
        dx[token][head] = result;
      }
    }
    __syncthreads();  // dx of the tile is there

    if (active) {
      const bf16* from = v + params.v_offset + row * params.v_batch_stride + (i64)first * params.v_token_stride + channel;
      bf16* to = dv + params.dv_offset + row * params.dv_batch_stride + (i64)first * params.dv_token_stride + channel;
      Channels values, grads;
      values.load(from);
      grads.load(to);
#pragma unroll 1
      for (int token = 0; token < count; token++) {
        // Load the next token's while this one's are multiplied.
        Channels next_values = values, next_grads = grads;
        if (token + 1 < count) {
          next_values.load(from + (token + 1) * params.v_token_stride);
          next_grads.load(to + (token + 1) * params.dv_token_stride);
        }
        float slopes[NUM_KV_HEADS];
#pragma unroll
        for (int h = 0; h < NUM_KV_HEADS; h++) slopes[h] = dx[token][h];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
          const float pair[2] = {bf16_low(values.words[w]), bf16_high(values.words[w])};
          float sums[2] = {0.f, 0.f};
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < NUM_KV_HEADS; h++) {
              dweights[2 * w + i][h] = fmaf(pair[i], slopes[h], dweights[2 * w + i][h]);
              sums[i] = fmaf(weights[2 * w + i][h], slopes[h], sums[i]);
            }
          grads.words[w] = round_bf16x2(bf16_low(grads.words[w]) + sums[0], bf16_high(grads.words[w]) + sums[1]);
        }
        grads.store(to + token * params.dv_token_stride);
        values = next_values, grads = next_grads;
      }
    }
  }

  // Store
  float* out = partials + (u64)blockIdx.x * (num_channels + 1) * NUM_KV_HEADS;
  if (active) {
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
#pragma unroll
      for (int h = 0; h < NUM_KV_HEADS; h++) out[(i64)(channel + c) * NUM_KV_HEADS + h] = dweights[c][h];
  }
  if (blockIdx.y == 0) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (p * NUM_THREADS + threadIdx.x < NUM_KV_HEADS * TILE_TOKENS) da_parts[p * NUM_THREADS + threadIdx.x] = da[p];
    __syncthreads();  // every pair's sum must be there
    if (threadIdx.x < NUM_KV_HEADS) {
      float sum = 0.f;
#pragma unroll
      for (int token = 0; token < TILE_TOKENS; token++) sum += da_parts[threadIdx.x * TILE_TOKENS + token];
      out[(i64)num_channels * NUM_KV_HEADS + threadIdx.x] = sum;
    }
  }
}
