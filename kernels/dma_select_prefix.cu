// dma_select_prefix: first of two launches of the DMA selection. Fills `expire` with document ends, and for each boundary S of
// PREFIX_BLOCK positions finds the w keys that survive at S, so that dma_select need not look further back than one block.
// Math       survivors(S) = the w = keep_window_size largest (z_j, j) over doc_start[S] <= j < S (DESIGN: -0 counts as +0, ties to the
//            more recent key). Written only where S - doc_start[S] > w; elsewhere every key of the document survives.
// Layout     z f32 [batch, num_kv_heads, seq_len]; doc_start, doc_end i32 [batch, seq_len]; expire i32 [batch, num_kv_heads, seq_len];
//            survivors u64 [batch, num_kv_heads, max(num_blocks - 1, 1), w], num_blocks = ceil(seq_len / PREFIX_BLOCK): entry b - 1 holds
//            boundary b * PREFIX_BLOCK, unordered; low word position, high word order_of_score(z). All contiguous.
// Defines    PREFIX_BLOCK (8192; a multiple of 1024; the same in dma_select and dma_lists)
// Tiling     grid (num_blocks, num_kv_heads, batch); 1024 threads; one block a boundary, the longest prefixes first; radix select over
//            the prefix, read three to five times from L2 plus once to collect; 8.5 KiB static shared memory, no dynamic
// Numerics   integer comparisons only: exact. Writes every element of expire and of the survivors named above; accumulates into nothing
// Edges      seq_len below 2^22 (radix_select.cuh); w >= 1; seq_len = 0 is refused by the wrapper
#include "common/radix_select.cuh"

#ifndef PREFIX_BLOCK
#define PREFIX_BLOCK 8192
#endif
static_assert(PREFIX_BLOCK % 1024 == 0, "a block of dma_select must not straddle a boundary");

struct DmaSelectPrefixParams {
  u64 seq_len, num_kv_heads, keep_window_size;
};

extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
dma_select_prefix(const float* __restrict__ z, const i32* __restrict__ doc_start, const i32* __restrict__ doc_end,
         i32* __restrict__ expire, u64* __restrict__ survivors, const __grid_constant__ DmaSelectPrefixParams params) {
  __shared__ RadixSelect<1> select;
  __shared__ u32 num_collected;
  const int block = gridDim.x - 1 - blockIdx.x;  // the longest prefix starts first
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.keep_window_size;
  const i64 head = (i64)blockIdx.z * params.num_kv_heads + blockIdx.y;
  const float* row_z = z + head * seq_len;
  const i32 boundary = block * PREFIX_BLOCK;
  const i64 tokens = (i64)blockIdx.z * seq_len;

  // Nobody has left yet: keys live to the end of their document.
  const i32 block_end = min(boundary + PREFIX_BLOCK, seq_len);
  for (i32 position = boundary + threadIdx.x; position < block_end; position += SELECT_THREADS)
    expire[head * seq_len + position] = doc_end[tokens + position];

  const i32 first = doc_start[tokens + boundary];
  if (boundary - first <= window) return;  // uniform over the block; also boundary 0

  if (threadIdx.x == 0) {
    select.remaining[0] = window;
    num_collected = 0;
  }
  __syncthreads();  // radix_select reads `remaining`
  radix_select<1>(select, [&](auto visit) {
#pragma unroll 8
    for (i32 position = first + threadIdx.x; position < boundary; position += SELECT_THREADS)
      visit(order_of_score(row_z[position]), (u32)position, true);
  });

  // Collect: exactly `window` keys reach the threshold.
  const u64 threshold = select.threshold[0];
  u64* out = survivors + (head * (gridDim.x - 1) + block - 1) * window;
#pragma unroll 4
  for (i32 position = first + threadIdx.x; position < boundary; position += SELECT_THREADS) {
    const u64 key = order_key(order_of_score(row_z[position]), position);
    if (key >= threshold) out[atomicAdd(&num_collected, 1u)] = key;
  }
}
