// dma_scores_backward: gradients of dma_scores; W_dt's and A's as one partial sum a block, which column_sums adds up.
// Math       dx[h,t] = dz[h,t] A[h] sigmoid(x[h,t]); dv[t,c] += sum_h dx[h,t] W_dt[h,c]; dW_dt[h,c] = sum_t v[t,c]
//            dx[h,t];
//            dA[h] = sum_t dz[h,t] softplus(x[h,t]), softplus(x) = x for x > 20
// Layout     v bf16 [batch, seq_len, C = NUM_KV_HEADS * head_dim] with an element offset, a token and a batch stride
//            (multiples of 8), dv likewise, both usually in packed tensors; w_dt f32 [NUM_KV_HEADS, C]; a f32
//            [NUM_KV_HEADS]; x, dz f32 [batch, NUM_KV_HEADS, seq_len]; partials f32
//            [gridDim.x, NUM_KV_HEADS C + NUM_KV_HEADS], dA's columns last
// Buffers    v, w_dt, a, x, dz, dv (read and written), partials
// Defines    NUM_KV_HEADS (1 to 32)
// Tiling     grid (any number of blocks, ceil(C / (128 CHANNELS))); 128 threads; a thread owns CHANNELS consecutive
//            channels, their W_dt and dW_dt in registers; block b takes tiles of 16 tokens b, b + gridDim.x, ..;
//            dynamic shared bytes = 8192 CHANNELS: the thread's channels of v and dv for two groups of 8 tokens, one
//            being multiplied while the other arrives
// Numerics   f32 sums in a fixed order, which the grid is part of; dv is rounded once, after the sum; memory-bound
// Edges      the last tile of a row may be short; C not a multiple of 128 CHANNELS leaves threads idle
#include "common/async_copy.cuh"
#include "common/bf16x8.cuh"

constexpr int NUM_THREADS = 128, TILE_TOKENS = 16;
constexpr int CHANNELS = NUM_KV_HEADS <= 8 ? 8 : NUM_KV_HEADS <= 16 ? 4 : 2;  // channels of a thread
constexpr int WORDS = CHANNELS / 2, NUM_WEIGHTS = CHANNELS * NUM_KV_HEADS;
// channels of a head's row of W_dt and of partials that a thread moves at once; rows of partials begin on multiples of
// NUM_KV_HEADS, so that four need NUM_KV_HEADS % 4 == 0
constexpr int VECTOR = CHANNELS % 4 == 0 && NUM_KV_HEADS % 4 == 0 ? 4 : 1;
// pairs of head and token for which a thread computes dx
constexpr int PAIRS = (NUM_KV_HEADS * TILE_TOKENS + NUM_THREADS - 1) / NUM_THREADS;
constexpr float LINEAR_SOFTPLUS = 20.f;  // as in dma_scores

struct DmaScoresBackwardParams {
  u64 batch, seq_len, head_dim, v_offset, v_token_stride, v_batch_stride, dv_offset, dv_token_stride, dv_batch_stride;
};

constexpr int GROUP_TOKENS = 8, TILE_GROUPS = TILE_TOKENS / GROUP_TOKENS;

// A thread's channels of one token, in memory.
struct alignas(CHANNELS * 2) Channels {
  u32 words[WORDS];
};
typedef Channels Ring[2][2][GROUP_TOKENS][NUM_THREADS];  // [group][v, dv][token][thread]

// The thread's channels of every head's row; rows are `row` floats apart.
DEVICE void load_weights(float (&to)[NUM_WEIGHTS], const float* from, i32 row) {
#pragma unroll
  for (int h = 0; h < NUM_KV_HEADS; h++)
#pragma unroll
    for (int c = 0; c < CHANNELS; c += VECTOR) {
      const float* at = from + (i64)h * row + c;
      if constexpr (VECTOR == 4) {
        const float4 four = *(const float4*)at;
        to[c * NUM_KV_HEADS + h] = four.x, to[(c + 1) * NUM_KV_HEADS + h] = four.y;
        to[(c + 2) * NUM_KV_HEADS + h] = four.z, to[(c + 3) * NUM_KV_HEADS + h] = four.w;
      } else {
        to[c * NUM_KV_HEADS + h] = *at;
      }
    }
}
// Writes what load_weights reads, in the same order.
DEVICE void store_weights(float* to, const float (&from)[NUM_WEIGHTS], i32 row) {
#pragma unroll
  for (int h = 0; h < NUM_KV_HEADS; h++)
#pragma unroll
    for (int c = 0; c < CHANNELS; c += VECTOR) {
      float* at = to + (i64)h * row + c;
      if constexpr (VECTOR == 4)
        *(float4*)at = make_float4(from[c * NUM_KV_HEADS + h], from[(c + 1) * NUM_KV_HEADS + h],
                                   from[(c + 2) * NUM_KV_HEADS + h], from[(c + 3) * NUM_KV_HEADS + h]);
      else *at = from[c * NUM_KV_HEADS + h];
    }
}

DEVICE void copy_channels(Channels* to, const bf16* from) {
  if constexpr (WORDS == 4) copy_async_16(shared_address(to), from, 16);
  else if constexpr (WORDS == 2) copy_async_8(shared_address(to), from, 8);
  else copy_async_4(shared_address(to), from, 4);
}
DEVICE void store_channels(bf16* to, const Channels& channels) {
  if constexpr (WORDS == 4)
    store_16_bytes(to, make_uint4(channels.words[0], channels.words[1], channels.words[2], channels.words[3]));
  else *(Channels*)to = channels;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
    dma_scores_backward(const bf16* v, const float* w_dt, const float* a, const float* x, const float* dz, bf16* dv,
                        float* partials, const __grid_constant__ DmaScoresBackwardParams params) {
  extern __shared__ uint4 shared_words[];
  Ring& ring = *(Ring*)shared_words;
  __shared__ __align__(16) float dx[TILE_TOKENS][NUM_KV_HEADS];
  __shared__ float da_parts[NUM_KV_HEADS * TILE_TOKENS];
  const i32 seq_len = (i32)params.seq_len, num_channels = NUM_KV_HEADS * (i32)params.head_dim;
  const i32 channel = (blockIdx.y * NUM_THREADS + threadIdx.x) * CHANNELS;
  const bool active = channel < num_channels;
  const i32 row_tiles = (seq_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const i64 num_tiles = (i64)params.batch * row_tiles;

  // Entry c * NUM_KV_HEADS + h belongs to channel c and head h.
  float weights[NUM_WEIGHTS], dweights[NUM_WEIGHTS], da[PAIRS];
#pragma unroll
  for (int i = 0; i < NUM_WEIGHTS; i++) weights[i] = dweights[i] = 0.f;
  if (active) load_weights(weights, w_dt + channel, num_channels);
#pragma unroll
  for (int p = 0; p < PAIRS; p++) da[p] = 0.f;

  // Group g of this block: half of its tile g / 2. A thread reads back only what it copied itself.
  const i64 num_groups = blockIdx.x < num_tiles ? ((num_tiles - 1 - blockIdx.x) / gridDim.x + 1) * TILE_GROUPS : 0;
  auto locate = [&](i64 group, i64& row, i32& token) {
    const i64 tile = blockIdx.x + group / TILE_GROUPS * gridDim.x;
    row = tile / row_tiles;
    token = (i32)(tile - row * row_tiles) * TILE_TOKENS + (i32)(group % TILE_GROUPS) * GROUP_TOKENS;
  };
  auto copy_group = [&](i64 group) {
    if (active && group < num_groups) {
      i64 row;
      i32 first;
      locate(group, row, first);
      const bf16* from =
          v + params.v_offset + row * params.v_batch_stride + (i64)first * params.v_token_stride + channel;
      const bf16* grads =
          dv + params.dv_offset + row * params.dv_batch_stride + (i64)first * params.dv_token_stride + channel;
#pragma unroll
      for (int token = 0; token < GROUP_TOKENS; token++)
        if (first + token < seq_len) {
          copy_channels(&ring[group % 2][0][token][threadIdx.x], from + token * params.v_token_stride);
          copy_channels(&ring[group % 2][1][token][threadIdx.x], grads + token * params.dv_token_stride);
        }
    }
    copy_async_commit();
  };
  copy_group(0);

#pragma unroll 1
  for (i64 group = 0; group < num_groups; group++) {
    copy_group(group + 1);
    i64 row;
    i32 first;
    locate(group, row, first);
    if (group % TILE_GROUPS == 0) {
      // Score: dx of the tile. Consecutive threads take consecutive tokens of one head.
      __syncthreads();  // the last tile is no longer read
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        const int pair = p * NUM_THREADS + threadIdx.x, head = pair / TILE_TOKENS, token = pair % TILE_TOKENS;
        if (head < NUM_KV_HEADS) {
          float result = 0.f;
          if (first + token < seq_len) {
            const i64 at = (row * NUM_KV_HEADS + head) * seq_len + first + token;
            const float score = x[at], grad = dz[at];
            result = grad * a[head] / (1.f + expf(-score));
            da[p] += grad * (score > LINEAR_SOFTPLUS ? score : log1pf(expf(score)));
          }
          dx[token][head] = result;
        }
      }
      __syncthreads();  // dx of the tile is stored
    }
    copy_async_wait<1>();  // the copies of this group's channels are complete
    if (active) {
      bf16* to = dv + params.dv_offset + row * params.dv_batch_stride + (i64)first * params.dv_token_stride + channel;
      const int in_tile = (int)(group % TILE_GROUPS) * GROUP_TOKENS, count = min(GROUP_TOKENS, seq_len - first);
#pragma unroll 2
      for (int token = 0; token < count; token++) {
        const Channels values = ring[group % 2][0][token][threadIdx.x];
        Channels grads = ring[group % 2][1][token][threadIdx.x];
        float slopes[NUM_KV_HEADS];
#pragma unroll
        for (int h = 0; h < NUM_KV_HEADS; h++) slopes[h] = dx[in_tile + token][h];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
          const float pair[2] = {bf16_low(values.words[w]), bf16_high(values.words[w])};
          float sums[2] = {0.f, 0.f};
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < NUM_KV_HEADS; h++) {
              const int at = (2 * w + i) * NUM_KV_HEADS + h;
              dweights[at] = fmaf(pair[i], slopes[h], dweights[at]);
              sums[i] = fmaf(weights[at], slopes[h], sums[i]);
            }
          grads.words[w] = pack_bf16(bf16_low(grads.words[w]) + sums[0], bf16_high(grads.words[w]) + sums[1]);
        }
        store_channels(to + token * params.dv_token_stride, grads);
      }
    }
  }

  // Store the block's partial sums.
  float* out = partials + (u64)blockIdx.x * (num_channels + 1) * NUM_KV_HEADS;
  if (active) store_weights(out + channel, dweights, num_channels);
  if (blockIdx.y == 0) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (p * NUM_THREADS + threadIdx.x < NUM_KV_HEADS * TILE_TOKENS) da_parts[p * NUM_THREADS + threadIdx.x] = da[p];
    __syncthreads();  // every pair's sum is stored
    if (threadIdx.x < NUM_KV_HEADS) {
      float sum = 0.f;
#pragma unroll
      for (int token = 0; token < TILE_TOKENS; token++) sum += da_parts[threadIdx.x * TILE_TOKENS + token];
      out[(i64)num_channels * NUM_KV_HEADS + threadIdx.x] = sum;
    }
  }
}
