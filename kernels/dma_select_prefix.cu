// dma_select_prefix: first of two launches of the DMA selection in sequences of more than 2 * PREFIX_BLOCK tokens: for
// each boundary S of PREFIX_BLOCK positions the w keys that survive at S, so that dma_select need not look further back
// than one block.
// Math       survivors(S) = the w = num_ranked largest (z_j, j) over doc_start[S] <= j < S (-0 counts as +0, ties
//            to the more recent key). Written only where S - doc_start[S] > w; elsewhere every key of the document
//            survives.
// Layout     z f32 [batch, num_kv_heads, seq_len]; doc_start i32 [batch, seq_len];
//            survivors u64 [batch, num_kv_heads, max(num_blocks - 1, 1), w], num_blocks = ceil(seq_len / PREFIX_BLOCK):
//            entry b - 1 holds boundary b * PREFIX_BLOCK, unordered; low word position, high word order_of_score(z).
//            All contiguous.
// Defines    PREFIX_BLOCK (8192; a multiple of 1024; the same in dma_select and dma_lists)
// Tiling     grid (num_blocks - 1, num_kv_heads, batch); 1024 threads; one block a boundary, the longest prefixes
//            first; 41 KiB static shared memory, no dynamic. Radix select from the top digit: as soon as at most 4096
//            keys share the threshold's digits, one more walk writes the keys above them and gathers those, which
//            decide the rest in shared memory: as a rule the prefix is read twice
// Numerics   integer comparisons only: exact. Writes every element of the survivors named above; accumulates into
//            nothing
// Edges      seq_len below 2^22 (radix_select.cuh); w >= 1; seq_len = 0 is refused by the wrapper
#include "common/block_stream.cuh"
#include "common/radix_select.cuh"

static_assert(PREFIX_BLOCK % 1024 == 0, "a block of dma_select must not straddle a boundary");
constexpr int MAX_CANDIDATES = 4096;  // keys that share the threshold's digits, in shared memory

struct DmaSelectPrefixParams {
  u64 seq_len, num_kv_heads, num_ranked;
};

struct Shared {
  RadixSelect<1> select;
  u64 candidates[MAX_CANDIDATES];
  u32 num_candidates, num_survivors;
};

// Key sources are structs with a templated call: NVRTC takes a generic lambda of a kernel for host code and refuses it.
struct NoKeys {
  template <class Visit>
  DEVICE void operator()(Visit) const {}
};

// Visits all keys before the boundary.
struct PrefixKeys {
  const u32* z;
  i32 first, boundary;
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    for_each_word<SELECT_THREADS, 4>(z, first, boundary,
                                     [&](u32 bits, i32 position) { visit(order_of_bits(bits), (u32)position); });
  }
};

// The keys that share the threshold's first digits.
struct Candidates {
  const Shared& shared;
  i32 count;
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    for (i32 i = threadIdx.x; i < count; i += SELECT_THREADS)
      visit((u32)(shared.candidates[i] >> 32), (u32)shared.candidates[i]);
  }
};

// A block finds the survivors of one KV head at one boundary; the keys before it are spread over the threads.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    dma_select_prefix(const float* __restrict__ z, const i32* __restrict__ doc_start, u64* __restrict__ survivors,
                      const __grid_constant__ DmaSelectPrefixParams params) {
  __shared__ Shared shared;
  const int block = gridDim.x - blockIdx.x;  // the longest prefix starts first
  const i32 seq_len = (i32)params.seq_len, window = (i32)params.num_ranked;
  const i64 head = (i64)blockIdx.z * params.num_kv_heads + blockIdx.y;
  const u32* row_z = (const u32*)(z + head * seq_len);
  const i32 boundary = block * PREFIX_BLOCK;
  const i32 first = doc_start[(i64)blockIdx.z * seq_len + boundary];
  if (boundary - first <= window) return;  // uniform over the block

  // Select: digits over the whole prefix, until few keys share them.
  if (threadIdx.x == 0) shared.num_candidates = shared.num_survivors = 0;
  radix_begin<1>(shared.select, 0, window);
  int pass = 0;
#pragma unroll 1
  do {
    radix_pass<1>(shared.select, pass, PrefixKeys{row_z, first, boundary}, NoKeys{});
    pass++;
  } while (shared.select.num_tied[0] > MAX_CANDIDATES);

  // Collect: keys above those digits survive, keys that share them are candidates.
  u64* out = survivors + (head * gridDim.x + block - 1) * window;
  const u64 lowest = shared.select.threshold[0], highest = lowest | ~radix_fixed_bits(pass - 1);
  for_each_word<SELECT_THREADS, 4>(row_z, first, boundary, [&](u32 bits, i32 position) {
    const u64 key = order_key(order_of_bits(bits), (u32)position);
    if (key > highest) out[atomicAdd(&shared.num_survivors, 1u)] = key;
    else if (key >= lowest) shared.candidates[atomicAdd(&shared.num_candidates, 1u)] = key;
  });
  __syncthreads();  // the candidates are complete
  const i32 num_candidates = (i32)shared.num_candidates;
  radix_select<1>(shared.select, pass, Candidates{shared, num_candidates}, NoKeys{});
  const u64 threshold = shared.select.threshold[0];
  for (i32 i = threadIdx.x; i < num_candidates; i += SELECT_THREADS)
    if (shared.candidates[i] >= threshold) out[atomicAdd(&shared.num_survivors, 1u)] = shared.candidates[i];
}
