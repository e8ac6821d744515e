// dma_halo_keys_forward: chosen keys of each KV head, with their values and ranks, out of a packed tensor.
// Math       keys[b,s,g] = k[b,j,g], keys[b,s,G+g] = v[b,j,g], ranks[b,g,s] = rank[b,g,j] with j = kept[b,g,s] and G =
//            num_kv_heads; zeros where j is negative
// Layout     packed bf16 [batch, seq_len, num_heads, head_dim], k and v its last 2 G heads; rank f32
//            [batch, G, seq_len]; kept i32 [batch, G, slots]; keys bf16 [batch, slots, 2 G, head_dim]; ranks f32
//            [batch, G, slots]; all contiguous
// Buffers    packed, rank, kept, keys, ranks
// Defines    IS_BF16 (1), VECTOR (8)
// Tiling     grid (slots, batch); 256 threads; 8 consecutive columns each
// Numerics   copies; writes every element of keys and ranks; memory-bound
// Edges      head_dim is a multiple of 8; kept is below seq_len
#include "common/row_vector.cuh"

struct DmaHaloKeysForwardParams { u64 seq_len, num_heads, num_kv_heads, head_dim, slots; };

// A block has one slot of a row of the batch, for all KV heads; a thread VECTOR columns of a key or a value at a time.
extern "C" __global__ void __launch_bounds__(256)
dma_halo_keys_forward(const element* packed, const float* rank, const i32* kept, element* keys, float* ranks,
                      const __grid_constant__ DmaHaloKeysForwardParams params) {
  const u64 slot = blockIdx.x, row = blockIdx.y, kv_heads = params.num_kv_heads, width = params.head_dim;
  const i32* row_kept = kept + row * kv_heads * params.slots + slot;
  const u32 words = (u32)(width / VECTOR), all_words = (u32)(2 * kv_heads) * words;
  const u64 first_key = params.num_heads - 2 * kv_heads;
  for (u32 word = threadIdx.x; word < all_words; word += 256) {
    const u32 vector = word / words, column = word % words * VECTOR;
    const i32 token = row_kept[vector % (u32)kv_heads * params.slots];
    float values[VECTOR] = {};
    if (token >= 0)
      load_vector(packed + ((row * params.seq_len + token) * params.num_heads + first_key + vector) * width + column,
                  values);
    store_vector(keys + ((row * params.slots + slot) * 2 * kv_heads + vector) * width + column, values);
  }
  for (u64 head = threadIdx.x; head < kv_heads; head += 256) {
    const i32 token = row_kept[head * params.slots];
    ranks[(row * kv_heads + head) * params.slots + slot] =
        token >= 0 ? rank[(row * kv_heads + head) * params.seq_len + token] : 0.0f;
  }
}
