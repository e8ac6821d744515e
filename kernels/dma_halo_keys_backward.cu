// dma_halo_keys_backward: adds the gradients of chosen keys, values and ranks to the gradients of the tensors they
// were gathered from.
// Math       dk[b,j,g] += d_keys[b,s,g], dv[b,j,g] += d_keys[b,s,G+g], d_rank[b,g,j] += d_ranks[b,g,s] with j =
//            kept[b,g,s] and G = num_kv_heads, where j is not negative
// Layout     as dma_halo_keys_forward, with gradients in the place of values
// Buffers    d_packed, d_rank (both read and written), kept, d_keys, d_ranks
// Defines    IS_BF16 (1), VECTOR (8)
// Tiling     grid (slots, batch); 256 threads; 8 consecutive columns each
// Numerics   f32 sums, one rounding; a key is in at most one slot of its head, so no two threads add to one element;
//            memory-bound
// Edges      head_dim is a multiple of 8; kept is below seq_len
#include "common/row_vector.cuh"

struct DmaHaloKeysBackwardParams { u64 seq_len, num_heads, num_kv_heads, head_dim, slots; };

// A block has one slot of a row of the batch, for all KV heads; a thread VECTOR columns of a key or a value at a time.
extern "C" __global__ void __launch_bounds__(256)
dma_halo_keys_backward(element* d_packed, float* d_rank, const i32* kept, const element* d_keys, const float* d_ranks,
                       const __grid_constant__ DmaHaloKeysBackwardParams params) {
  const u64 slot = blockIdx.x, row = blockIdx.y, kv_heads = params.num_kv_heads, width = params.head_dim;
  const i32* row_kept = kept + row * kv_heads * params.slots + slot;
  const u32 words = (u32)(width / VECTOR), all_words = (u32)(2 * kv_heads) * words;
  const u64 first_key = params.num_heads - 2 * kv_heads;
  for (u32 word = threadIdx.x; word < all_words; word += 256) {
    const u32 vector = word / words, column = word % words * VECTOR;
    const i32 token = row_kept[vector % (u32)kv_heads * params.slots];
    if (token < 0) continue;
    element* to =
        d_packed + ((row * params.seq_len + token) * params.num_heads + first_key + vector) * width + column;
    float sums[VECTOR], more[VECTOR];
    load_vector(to, sums);
    load_vector(d_keys + ((row * params.slots + slot) * 2 * kv_heads + vector) * width + column, more);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sums[i] += more[i];
    store_vector(to, sums);
  }
  for (u64 head = threadIdx.x; head < kv_heads; head += 256) {
    const i32 token = row_kept[head * params.slots];
    if (token < 0) continue;
    d_rank[(row * kv_heads + head) * params.seq_len + token] +=
        d_ranks[(row * kv_heads + head) * params.slots + slot];
  }
}
