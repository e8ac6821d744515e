// mla_join_token: one new token per row of latent attention joins its cache, and W_UK is folded into its queries.
// Math       q_h = [W_UK,h^T (q_h[0 .. HEAD_DIM) * w) ; q_h[HEAD_DIM ..)] (arXiv:2405.04434, section 2.1.2), w the
//            weight of the keys' norm (NORM 1) or 1 (NORM 0), the product with w rounded to bf16; row `length` of the
//            cache is [latent ; rotated key], and with NORM 1 row `length` of the scales is key_scale
// Layout     packed bf16 [batch, q_stride], a token's queries [num_heads, HEAD_DIM + ROPE_DIM] first; norm bf16
//            [HEAD_DIM + ..]; up bf16 [num_heads, 2, HEAD_DIM, rank], W_UK first; latent bf16 [batch, rank]; rotated
//            bf16 [batch, ROPE_DIM], rows rotated_stride apart from an element offset; key_scale f32 [batch,
//            num_heads]; length i32 [batch], tokens before; latents bf16 [batch, capacity, rank + ROPE_DIM], scales f32
//            [batch, capacity, num_heads]; folded bf16 [batch, num_heads, rank + ROPE_DIM]; contiguous but where
//            strides are named
// Buffers    packed, norm, up, latent, rotated, key_scale, length, latents, scales, folded; norm, key_scale and scales
//            are not touched with NORM 0
// Defines    HEAD_DIM, ROPE_DIM (multiples of 8), NORM 0|1
// Tiling     grid (num_heads, ceil(rank / 128), batch); 256 threads: 16 words of 8 columns by 16 shares of the rows of
//            W_UK; block (0, 0) of a row writes the cache; each byte of W_UK is read once
// Numerics   f32 sums in a fixed order, one rounding at the store
// Edges      rank a multiple of 8; length >= capacity is refused by the wrapper
#include "common/bf16x8.cuh"
#include "common/programmatic_launch.cuh"

constexpr int THREADS = 256, WORDS = 16, SHARES = THREADS / WORDS;

struct MlaJoinTokenParams { u64 num_heads, rank, capacity, q_stride, rotated_offset, rotated_stride; };

// A block folds 128 columns of W_UK into the query of one head; a thread has eight of the columns, over every 16th row
// of W_UK.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mla_join_token(const bf16* packed, const bf16* norm, const bf16* up, const bf16* latent, const bf16* rotated,
                   const float* key_scale, const i32* length, bf16* latents, float* scales, bf16* folded,
                   const __grid_constant__ MlaJoinTokenParams params) {
  __shared__ float query[HEAD_DIM];
  __shared__ float sums[SHARES][WORDS][8 + 1];  // a word of padding, because lanes read consecutive shares
  wait_for_previous();
  const int head = blockIdx.x, num_heads = (int)params.num_heads, rank = (int)params.rank, width = rank + ROPE_DIM;
  const i64 batch = blockIdx.z;
  const bf16* q = packed + batch * params.q_stride + (i64)head * (HEAD_DIM + ROPE_DIM);
  bf16* to = folded + (batch * num_heads + head) * width;

  // Store the token in the latent cache.
  if (head == 0 && blockIdx.y == 0) {
    const i64 row = batch * params.capacity + min((i64)length[batch], (i64)params.capacity - 1);
    const bf16* key = rotated + params.rotated_offset + batch * params.rotated_stride;
    for (int at = threadIdx.x; at < width / 8; at += THREADS) {
      const bf16* from = at < rank / 8 ? latent + batch * rank + at * 8 : key + (at - rank / 8) * 8;
      store_16_bytes(latents + row * width + at * 8, load_16_bytes(from));
    }
#if NORM
    for (int at = threadIdx.x; at < num_heads; at += THREADS)
      scales[row * num_heads + at] = key_scale[batch * num_heads + at];
#endif
  }

  // Fold the weight of the keys' norm into the query.
  for (int at = threadIdx.x; at < HEAD_DIM; at += THREADS) {
    float x = bf16_to_f32(q[at]);
#if NORM
    x = bf16_low(pack_bf16(x * bf16_to_f32(norm[at]), 0.f));
#endif
    query[at] = x;
  }
  __syncthreads();  // the query is stored
  const int word = threadIdx.x % WORDS, share = threadIdx.x / WORDS, column = ((int)blockIdx.y * WORDS + word) * 8;
  float sum[8] = {};
  if (column < rank) {
    const bf16* rows = up + (i64)head * 2 * HEAD_DIM * rank + column;
#pragma unroll 4
    for (int row = share; row < HEAD_DIM; row += SHARES) {
      float weights[8];
      unpack_bf16x8(load_16_bytes(rows + (i64)row * rank), weights);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = fmaf(query[row], weights[i], sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sums[share][word][i] = sum[i];
  __syncthreads();  // every share is stored
  if (share == 0 && column < rank) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum[i] = 0.f;
#pragma unroll
      for (int other = 0; other < SHARES; other++) sum[i] += sums[other][word][i];
    }
    store_16_bytes(to + column, pack_bf16x8(sum));
  }
  if (blockIdx.y == 0)
    for (int at = threadIdx.x; at < ROPE_DIM / 8; at += THREADS)
      store_16_bytes(to + rank + at * 8, load_16_bytes(q + HEAD_DIM + at * 8));
}
