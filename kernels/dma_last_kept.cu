// dma_last_kept: the keys that DMA still keeps at the last query of a row, in order: what a later part of the row can
// see of this one.
// Math       { j : expire[j] >= seq_len }, by position
// Layout     expire i32 [batch, num_kv_heads, seq_len]; kept i32 [batch, num_kv_heads, slots]; both contiguous
// Defines    none
// Tiling     grid (num_kv_heads, batch); 1024 threads walk the row from its end
// Numerics   integers only; writes every element of kept
// Edges      fewer keys than slots: the first slots hold -1; more: the earliest keys are left out
#include "common/block_scan.cuh"

constexpr int NUM_THREADS = 1024;

struct DmaLastKeptParams { u64 seq_len, num_kv_heads, slots; };

// A block has one KV head of a row. It walks from the row's end in steps of 1024 positions, one a thread, and fills the
// slots from the last one down.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
dma_last_kept(const i32* __restrict__ expire, i32* __restrict__ kept,
              const __grid_constant__ DmaLastKeptParams params) {
  __shared__ u32 warp_sums[32];
  const i32 seq_len = (i32)params.seq_len, slots = (i32)params.slots;
  const i64 head = (i64)blockIdx.y * params.num_kv_heads + blockIdx.x;
  const i32* row = expire + head * seq_len;
  i32* out = kept + head * slots;
  i32 taken = 0;
  for (i32 end = seq_len; end > 0 && taken < slots; end -= NUM_THREADS) {
    const i32 position = end - 1 - (i32)threadIdx.x;
    const bool stays = position >= 0 && row[position] >= seq_len;
    u32 count;
    const i32 later = taken + (i32)block_exclusive_sum<NUM_THREADS>(stays, warp_sums, count);
    if (stays && later < slots) out[slots - 1 - later] = position;
    taken += (i32)count;
    __syncthreads();  // the sums are read before the next step writes them
  }
  for (i32 slot = threadIdx.x; slot < slots - taken; slot += NUM_THREADS) out[slot] = -1;
}
