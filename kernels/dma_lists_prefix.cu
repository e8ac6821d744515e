// dma_lists_prefix: the keys alive at each boundary of PREFIX_BLOCK positions, from `expire` alone. dma_lists reads
// them; after dma_select they exist already (the survivors of dma_select_prefix), so this runs only for an `expire`
// from elsewhere.
// Math       alive(S) = { j : doc_start[S] <= j < S <= expire[j] }, at most w of them; written where S -
//            doc_start[S] > w
// Layout     expire i32 [batch, num_kv_heads, seq_len]; doc_start i32 [batch, seq_len]; survivors u64
//            [batch, num_kv_heads, max(num_blocks - 1, 1), w], low word position; places left over hold ~0. All
//            contiguous.
// Defines    PREFIX_BLOCK (8192, as in dma_lists)
// Tiling     grid (max(num_blocks - 1, 1), num_kv_heads, batch), num_blocks = ceil(seq_len / PREFIX_BLOCK); 1024
//            threads; reads a prefix once
// Numerics   none; writes all w places of every boundary named above
// Edges      one block of positions: nothing to do, the launch may be left out; more than w keys alive: the rest is
//            dropped, see dma_lists
#include "common/block_stream.cuh"

constexpr int NUM_THREADS = 1024;

struct DmaListsPrefixParams {
  u64 seq_len, num_kv_heads, keep_window_size;
};

// A block collects the keys that one KV head keeps at one boundary; the positions before it are spread over the
// threads.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
dma_lists_prefix(const i32* __restrict__ expire, const i32* __restrict__ doc_start, u64* __restrict__ survivors,
         const __grid_constant__ DmaListsPrefixParams params) {
  __shared__ u32 num_collected;
  const int block = gridDim.x - blockIdx.x;  // the longest prefix starts first
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.keep_window_size;
  const i64 head = (i64)blockIdx.z * params.num_kv_heads + blockIdx.y;
  const i32* row_expire = expire + head * seq_len;
  const i32 boundary = block * PREFIX_BLOCK;
  if (boundary >= seq_len) return;  // a sequence of one block
  const i32 first = doc_start[(i64)blockIdx.z * seq_len + boundary];
  if (boundary - first <= window) return;  // uniform over the block
  if (threadIdx.x == 0) num_collected = 0;
  __syncthreads();  // the counter is zero
  u64* out = survivors + (head * gridDim.x + block - 1) * window;
  for_each_word<NUM_THREADS, 4>((const u32*)row_expire, first, boundary, [&](u32 leaves, i32 position) {
    if ((i32)leaves < boundary) return;
    const u32 slot = atomicAdd(&num_collected, 1u);
    if (slot < (u32)window) out[slot] = (u64)position;
  });
  __syncthreads();  // the count is final
  for (i32 slot = num_collected + threadIdx.x; slot < window; slot += NUM_THREADS) out[slot] = ~0ull;
}
