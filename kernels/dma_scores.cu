// dma_scores: what DMA ranks keys by, from the values.
// Math       x[b,h,t] = sum_c v[b,t,c] W_dt[h,c], c over the concatenated KV heads; z = A[h] softplus(x), softplus(x) =
//            x for x > 20; with SLOPES z + SLOPES[h] p, p the token's position: first_position + t, less start[b,t]
//            where has_start is set; with BIAS, bias = exp(min(z, 60)), which logits get
// Layout     v bf16 [batch, seq_len, NUM_KV_HEADS * head_dim], a row contiguous, with an element offset, a token and a
//            batch stride (multiples of 8); w_dt f32 [NUM_KV_HEADS, NUM_KV_HEADS * head_dim]; a f32 [NUM_KV_HEADS]; x,
//            z, bias f32 [batch, NUM_KV_HEADS, seq_len], contiguous; start i32 [batch, seq_len]
// Buffers    v, w_dt, a, start (not read without has_start), x, z, (BIAS: bias)
// Defines    NUM_KV_HEADS (1 to 32), SLOPES (absent, or NUM_KV_HEADS numbers with commas between), BIAS (absent, or 1)
// Tiling     grid (ceil(seq_len / 64), 1, batch); 256 threads; a warp takes TOKENS tokens at once, a lane 8 channels of
//            every 256; tiles of W_dt in shared memory: dynamic shared bytes = 32 NUM_KV_HEADS min(NUM_KV_HEADS
//            head_dim / 8, floor(1536 / NUM_KV_HEADS)), at most 48 KiB; v is read once, memory-bound
// Numerics   f32 products and sums in a fixed order; writes every element of x, z and bias; slope times position and
//            the sum are rounded one after the other. Ranking uses these z alone: computed once, stored, shared by
//            forward, backward and decode, since another rounding would swap near ties
// Edges      seq_len not a multiple of 64; head_dim a multiple of 8
#include "common/programmatic_launch.cuh"

constexpr int NUM_THREADS = 256, BLOCK_TOKENS = 64;
constexpr int TOKENS = NUM_KV_HEADS <= 8 ? 4 : NUM_KV_HEADS <= 16 ? 2 : 1;  // tokens a warp handles at once
constexpr int NUM_SUMS = NUM_KV_HEADS * TOKENS;
// chunks of 8 channels whose part of W_dt is in shared memory at once: 48 KiB
constexpr int TILE_CHUNKS = 1536 / NUM_KV_HEADS;
constexpr int PADDED_SUMS = NUM_SUMS <= 4 ? 4 : NUM_SUMS <= 8 ? 8 : NUM_SUMS <= 16 ? 16 : 32;
constexpr float LINEAR_SOFTPLUS = 20.f;  // softplus(x) = x beyond, to f32
#ifdef BIAS
constexpr float MAX_EXPONENT = 60.f;  // as in dma_decode
#endif
static_assert(NUM_SUMS <= 32, "a lane ends up with at most one sum");

struct DmaScoresParams {
  u64 seq_len, head_dim, v_offset, v_token_stride, v_batch_stride, first_position, has_start;
};

// Adds up `sums` over the warp; lane l receives the total number l % PADDED_SUMS in sums[0]. Half the sums change lanes
// at each step.
template <int HALF>
DEVICE void sum_over_warp(float (&sums)[PADDED_SUMS]) {
  const bool upper = threadIdx.x & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float sent = upper ? sums[i] : sums[i + HALF], kept = upper ? sums[i + HALF] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, HALF);
  }
  if constexpr (HALF > 1) sum_over_warp<HALF / 2>(sums);
}

// A block scores BLOCK_TOKENS tokens for all KV heads: a warp has TOKENS tokens at a time, a lane every 32nd chunk of
// eight of their channels.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
    dma_scores(const bf16* __restrict__ v, const float* __restrict__ w_dt, const float* __restrict__ a,
               const i32* __restrict__ start, float* __restrict__ x, float* __restrict__ z,
#ifdef BIAS
               float* __restrict__ bias,
#endif
               const __grid_constant__ DmaScoresParams params) {
  // [head][half of a chunk][chunk]: lanes on successive chunks meet different banks
  extern __shared__ float4 shared_w[];
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i32 seq_len = (i32)params.seq_len, num_chunks = NUM_KV_HEADS * (i32)params.head_dim / 8;
  const i64 batch = blockIdx.z;

  const i32 block_first = blockIdx.x * BLOCK_TOKENS, block_end = min(block_first + BLOCK_TOKENS, seq_len);
  const bool one_tile = num_chunks <= TILE_CHUNKS;
#pragma unroll 1
  for (int group = 0; group < BLOCK_TOKENS; group += NUM_THREADS / 32 * TOKENS) {
    const i32 first = block_first + group + warp * TOKENS;  // this warp's first token
    float sums[PADDED_SUMS];
#pragma unroll
    for (int i = 0; i < PADDED_SUMS; i++) sums[i] = 0.f;

#pragma unroll 1
    for (int tile = 0; tile < num_chunks; tile += TILE_CHUNKS) {
      // Load W_dt, a float4 for four channels of one head; the whole of W_dt at once, if it fits.
      const int tile_chunks = min(TILE_CHUNKS, num_chunks - tile);
      if (group == 0 || !one_tile) {
        __syncthreads();  // the last tile is no longer read
        for (int half = threadIdx.x; half < tile_chunks * 2; half += NUM_THREADS) {
          const float* channels = w_dt + tile * 8 + half * 4;
#pragma unroll 4
          for (int head = 0; head < NUM_KV_HEADS; head++)
            shared_w[(head * 2 + half % 2) * tile_chunks + half / 2] =
                *(const float4*)(channels + (i64)head * num_chunks * 8);
        }
        __syncthreads();  // the tile is in shared memory
      }

      // Score: a lane's channels of TOKENS tokens against every head.
      uint4 next[TOKENS];
      auto load = [&](int chunk) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
          const i64 token = min(first + t, seq_len - 1);  // a token past the end repeats the last one and is not stored
          next[t] = *(const uint4*)(v + params.v_offset + batch * params.v_batch_stride +
                                    token * params.v_token_stride + (tile + chunk) * 8);
        }
      };
      if (lane < tile_chunks) load(lane);
#pragma unroll 1
      for (int chunk = lane; chunk < tile_chunks; chunk += 32) {
        float values[TOKENS][8];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
          const u32 words[4] = {next[t].x, next[t].y, next[t].z, next[t].w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            values[t][2 * i] = bf16_low(words[i]);
            values[t][2 * i + 1] = bf16_high(words[i]);
          }
        }
        if (chunk + 32 < tile_chunks) load(chunk + 32);  // loaded while this chunk is multiplied
#pragma unroll
        for (int head = 0; head < NUM_KV_HEADS; head++) {
          const float4 low = shared_w[head * 2 * tile_chunks + chunk],
                       high = shared_w[(head * 2 + 1) * tile_chunks + chunk];
          const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int i = 0; i < 8; i++) sums[head * TOKENS + t] = fmaf(values[t][i], w[i], sums[head * TOKENS + t]);
        }
      }
    }
    sum_over_warp<PADDED_SUMS / 2>(sums);
    float score = sums[0];
#pragma unroll
    for (int distance = PADDED_SUMS; distance < 32; distance *= 2)
      score += __shfl_xor_sync(0xffffffffu, score, distance);

    // Store: lane l holds head l / TOKENS, token l % TOKENS.
    const int head = lane / TOKENS;
    const i32 token = first + lane % TOKENS;
    if (lane < NUM_SUMS && token < block_end) {
      const float softplus = score > LINEAR_SOFTPLUS ? score : log1pf(expf(score));
      const i64 out = (batch * NUM_KV_HEADS + head) * seq_len + token;
      x[out] = score;
      float rank = __fmul_rn(a[head], softplus);
#ifdef SLOPES
      const float slopes[NUM_KV_HEADS] = {SLOPES};
      float slope = 0.f;
#pragma unroll
      for (int h = 0; h < NUM_KV_HEADS; h++) slope = h == head ? slopes[h] : slope;
      i32 position = (i32)params.first_position + token;
      if (params.has_start) position -= start[batch * seq_len + token];
      rank += __fmul_rn((float)position, slope);
#endif
      z[out] = rank;
#ifdef BIAS
      bias[out] = expf(rank > MAX_EXPONENT ? MAX_EXPONENT : rank);
#endif
    }
  }
}
