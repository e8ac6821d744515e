// received_attention: the attention that each key of a prompt received from all later queries, from the log-sum-exp of
// a dense pass.
// Math       received[h, j] = sum over the query heads g of KV head h and queries i >= max(j, first_query) of
//            exp(softmax_scale q_ig . k_jh - lse_gi)
// Layout     q bf16 [num_keys, num_heads, HEAD_DIM], k bf16 [num_keys, num_kv_heads, HEAD_DIM], tokens a stride apart
//            from an element offset (multiples of 8); lse f32 [num_heads, num_keys]; received f32 [num_kv_heads,
//            num_keys]; nan i32 [>= num_kv_heads], counted up for each sum of a KV head that is NaN
// Buffers    q, k, lse, received, nan
// Defines    HEAD_DIM (a multiple of 16 up to 128)
// Tiling     grid (ceil(num_keys / 128), num_kv_heads); 128 threads: a warp holds 32 keys in registers as the rows of
//            S^T = K Q^T and streams 64 queries a stage, so that a key's sum never leaves its lanes; blocks of early
//            keys, which most queries see, start first; dynamic shared bytes = 2 * 64 * (2 HEAD_DIM + 4) + 128
// Numerics   bf16 products, f32 sums in a fixed order: a tile of queries, then all; every sum is written
// Edges      any number of keys; a query whose logits are all minus infinity weighs nothing
#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"

constexpr int NUM_WARPS = 4, THREADS = NUM_WARPS * 32, KEYS = NUM_WARPS * 32, QUERIES = 64, STEPS = HEAD_DIM / 16;
constexpr int STAGE_BYTES = QUERIES * HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8;
// Slices of 16 queries whose products and exponentials overlap, as far as registers last.
constexpr int SLICES_AT_ONCE = HEAD_DIM > 64 ? 2 : 4;
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "a warp's keys stay in registers");
typedef SwizzledTile<HEAD_DIM> Tile;

struct ReceivedAttentionParams {
  u64 num_keys, num_heads, num_kv_heads, first_query, softmax_scale, q_offset, q_token_stride, k_offset, k_token_stride;
};

// Starts the copies of `count` rows; those past num_keys arrive as zeros.
DEVICE void load_rows(u32 shared, const bf16* from, u64 stride, int first, int count, int num_keys) {
  for (int at = threadIdx.x; at < count * CHUNKS; at += THREADS) {
    const int row = at / CHUNKS, chunk = at % CHUNKS;
    const bool valid = first + row < num_keys;
    copy_async_16(shared + Tile::offset(row, chunk), from + (u64)(valid ? first + row : 0) * stride + chunk * 8,
                  valid ? 16 : 0);
  }
}

// Adds the probabilities of the 64 queries at `stage` to sums[m][h], those of the lane's keys 16 m + 8 h + lane / 4 of
// the warp's 32, which `keys` holds as operands. `of_queries` are the queries' log-sum-exps in powers of two.
// IS_DIAGONAL: some queries come before keys of the block; the lane's first key is seen from the tile's query
// `first_seeing` on. Two forms, as a branch at each probability would part the products from the exponentials that hide
// them.
template <bool IS_DIAGONAL>
DEVICE void add_tile(float (&sums)[2][2], const u32 (&keys)[STEPS][2][4], u32 stage, const float* of_queries,
                     float scale, int first_seeing) {
  const int lane = threadIdx.x & 31, column = (lane & 3) * 2;
  float of_tile[2][2] = {};  // as sums, of this tile
#pragma unroll SLICES_AT_ONCE
  for (int slice = 0; slice < QUERIES / 16; slice++) {
    float s[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 b[4];
      load_matrix_x4(b, stage + Tile::offset(slice * 16 + (lane & 7) + (lane >> 4) * 8, step * 2 + ((lane >> 3) & 1)));
      mma_columns(s, keys[step], 0, b);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int at = slice * 16 + n * 8 + column;  // the lane's first query of the fragment
      const float2 pair = *(const float2*)(of_queries + at);
#pragma unroll
      for (int x = 0; x < 2; x++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float p = exp2_fast(s[m][n][2 * h + x] * scale - (x ? pair.y : pair.x));
            if (IS_DIAGONAL && at + x < first_seeing + m * 16 + h * 8) p = 0.f;
            of_tile[m][h] += p;
          }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) sums[m][h] += of_tile[m][h];
}

// A block has 128 keys of one KV head, a warp 32 of them, and streams the queries of all heads of the group past them,
// head after head.
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 64 ? 3 : 4)
    received_attention(const bf16* q, const bf16* k, const float* lse, float* received, i32* nan,
                       const __grid_constant__ ReceivedAttentionParams params) {
  extern __shared__ unsigned char shared_memory[];
  const u32 stages = (shared_address(shared_memory) + 127) & ~127u;
  // lse of the queries in log2, of two stages: [2][QUERIES]
  float* offsets = (float*)(shared_memory + (stages - shared_address(shared_memory)) + 2 * STAGE_BYTES);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2;
  const int num_keys = (int)params.num_keys, kv_head = blockIdx.y, first_key = blockIdx.x * KEYS,
            heads = (int)(params.num_heads / params.num_kv_heads), first_query = (int)params.first_query;
  const float scale = f32_word(params.softmax_scale) * LOG2_E;
  const int first_row = max(first_query, first_key) / QUERIES * QUERIES,
            tiles = first_row < num_keys ? ceil_div(num_keys - first_row, QUERIES) : 0;

  // Keys: two tiles of 16 rows a warp, for the whole launch. They pass through both stages.
  u32 keys[STEPS][2][4];
  load_rows(stages, k + params.k_offset + (u64)kv_head * HEAD_DIM, params.k_token_stride, first_key, KEYS, num_keys);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();  // the copies of all keys are complete
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      load_matrix_x4(keys[step][m],
                     stages + Tile::offset(warp * 32 + m * 16 + (lane & 15), step * 2 + (lane >> 4)));
  __syncthreads();  // every warp has loaded its keys; queries overwrite their place

  auto load = [&](int index) {
    if (index < tiles * heads) {
      const int head = kv_head * heads + index / tiles, first = first_row + index % tiles * QUERIES;
      load_rows(stages + index % 2 * STAGE_BYTES, q + params.q_offset + (u64)head * HEAD_DIM, params.q_token_stride,
                first, QUERIES, num_keys);
      if (threadIdx.x < QUERIES) {
        const int query = first + (int)threadIdx.x;
        const bool counts = query >= first_query && query < num_keys;
        const float value = counts ? lse[(u64)head * num_keys + query] * LOG2_E : INFINITY_F32;
        offsets[index % 2 * QUERIES + threadIdx.x] = value == -INFINITY_F32 ? INFINITY_F32 : value;
      }
    }
    copy_async_commit();
  };
  float sums[2][2] = {};
  load(0);
  for (int index = 0; index < tiles * heads; index++) {
    load(index + 1);
    copy_async_wait<1>();
    __syncthreads();  // every warp may read this stage's queries and offsets
    const u32 stage = stages + index % 2 * STAGE_BYTES;
    const float* of_queries = offsets + index % 2 * QUERIES;
    const int first = first_row + index % tiles * QUERIES;
    const int first_seeing = first_key + warp * 32 + group - first;
    if (first < first_key + KEYS) add_tile<true>(sums, keys, stage, of_queries, scale, first_seeing);
    else add_tile<false>(sums, keys, stage, of_queries, scale, first_seeing);
    __syncthreads();  // every warp has read the stage before it is filled again
  }

  // The sums of a key are spread over four lanes.
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = quad_sum(sums[m][h]);
      const int key = first_key + warp * 32 + m * 16 + h * 8 + group;
      if ((lane & 3) == 0 && key < num_keys) {
        received[(u64)kv_head * num_keys + key] = sum;
        if (sum != sum) atomicAdd(nan + kv_head, 1);
      }
    }
}
