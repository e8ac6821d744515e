// select_pool: means of blocks of queries or keys, by which selectors score blocks (MeanPool, arXiv:2510.21270,
// algorithm 2), and variances (BA-Att, arXiv:2605.19726).
// Math       mean[h, b, d] = 1 / n_b * sum_{t in block b} x[t, h, d]; n_b: the block's own tokens, of which the last
//            block may have fewer;
//            variance[h, b, d] = 1 / n_b * sum_t (x[t, h, d] - mean[h, b, d])^2
// Layout     x bf16, rows of head_dim side by side in a token; blocks count from first_token, the first of them lacks
//            `offset` tokens; has_order: order i32 [num_heads, num_tokens] says which token from first_token on each
//            place of a block holds; mean, variance f32 [num_heads, num_blocks, head_dim]
// Buffers    x, order, mean, variance
// Defines    none
// Tiling     grid (num_blocks, num_heads, 1); 128 threads: head_dim / 8 of them read a token, as many tokens at once as
//            that leaves; no dynamic shared memory
// Numerics   f32 sums in an order that depends on sizes alone, one factor 1 / n_b; memory-bound
// Edges      any head_dim that is a multiple of 8, up to 256. Variances only where has_variance
#include "common/bf16x8.cuh"

struct SelectPoolParams {
  u64 x_offset, token_stride;  // elements
  u64 head_dim, first_token, num_tokens, block, offset;
  u64 has_order, has_variance;
};

// The part of a block of tokens that a thread reduces.
struct PooledBlock {
  const bf16* from;  // this thread's columns of the first token
  const i32* order;
  u64 token_stride;
  int head_dim, first, end, lane_token, chunk, at_once;
  float* parts;

  // Means of the elements, or of their squared distances from the means; the means stay in `means`.
  template <bool VARIANCE>
  DEVICE void reduce(float* to, float* means) const {
    float sum[8] = {};
    if (lane_token < at_once) {
      for (int t = first + lane_token; t < end; t += at_once) {
        float values[8];
        unpack_bf16x8(load_16_bytes(from + (order ? (u64)order[t] : (u64)t) * token_stride), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float x = VARIANCE ? values[i] - means[chunk * 8 + i] : values[i];
          sum[i] += VARIANCE ? x * x : x;
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) parts[lane_token * head_dim + chunk * 8 + i] = sum[i];
    }
    __syncthreads();  // every token's part is stored
    const float factor = 1.0f / (float)max(end - first, 1);
    for (int d = (int)threadIdx.x; d < head_dim; d += 128) {
      float total = 0.0f;
      for (int part = 0; part < at_once; ++part) total += parts[part * head_dim + d];
      to[d] = total * factor;
      if (!VARIANCE) means[d] = total * factor;
    }
    __syncthreads();  // the results are stored, and no thread reads the parts any more
  }
};

// A block reduces one block of tokens of one head.
extern "C" __global__ void __launch_bounds__(128)
    select_pool(const bf16* x, const i32* order, float* mean, float* variance,
                const __grid_constant__ SelectPoolParams params) {
  __shared__ float parts[128 * 8], means[256];
  const int head_dim = (int)params.head_dim, chunks = head_dim / 8, at_once = 128 / chunks, thread = (int)threadIdx.x;
  const int block = (int)params.block, offset = (int)params.offset, number = (int)blockIdx.x;
  const int first = max(number * block - offset, 0), end = min((number + 1) * block - offset, (int)params.num_tokens);
  const int lane_token = thread / chunks, chunk = thread % chunks;
  const bf16* from =
      x + params.x_offset + params.first_token * params.token_stride + (u64)blockIdx.y * head_dim + chunk * 8;
  order += params.has_order ? blockIdx.y * params.num_tokens : 0;
  PooledBlock pooled = {
      from, params.has_order ? order : nullptr, params.token_stride, head_dim, first, end, lane_token, chunk, at_once,
      parts};
  const u64 to = ((u64)blockIdx.y * gridDim.x + number) * head_dim;
  pooled.reduce<false>(mean + to, means);
  if (params.has_variance) pooled.reduce<true>(variance + to, means);
}
