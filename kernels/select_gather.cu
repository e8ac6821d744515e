// select_gather: the keys and values that stay of a prompt, side by side, as decoding reads them.
// Math       slot s of a head holds the s-th token that stays: the marked ones of the first `count`, and all others
// Layout     kept u32 [num_kv_heads, ceil(count / 32)], a bit a token; k, v bf16, rows of head_dim side by side in a
//            token; received f32 [num_kv_heads, num_keys]; k_out, v_out bf16 [num_kv_heads, slots, head_dim],
//            received_out f32, position i32 [num_kv_heads, slots]
// Buffers    kept, k, v, received, k_out, v_out, received_out, position
// Defines    none
// Tiling     grid (ceil(num_keys / 256), num_kv_heads, 1); 256 threads, a warp 32 tokens; no dynamic shared memory
// Numerics   copies
// Edges      head_dim a multiple of 8; a head that marks fewer tokens leaves its last slots as they are, of more the
//            last ones are left out
#include "common/types.cuh"

struct SelectGatherParams {
  u64 num_keys, count, slots, head_dim;
  u64 k_offset, v_offset, k_token_stride, v_token_stride;  // elements
};

// A warp copies those of 32 tokens that stay, for one KV head: of each token all its lanes copy the key and the value.
extern "C" __global__ void __launch_bounds__(256)
    select_gather(const u32* kept, const bf16* k, const bf16* v, const float* received, bf16* k_out, bf16* v_out,
                  float* received_out, i32* position, const __grid_constant__ SelectGatherParams params) {
  __shared__ int before_block;
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, head = (int)blockIdx.y,
            num_keys = (int)params.num_keys, count = (int)params.count, slots = (int)params.slots,
            head_dim = (int)params.head_dim, first_word = (int)blockIdx.x * 8;
  kept += (u64)head * ceil_div(count, 32);
  // The tokens of a mask word that are kept.
  const auto word_of = [&](int word) {
    const int first = word * 32, marked = min(max(count - first, 0), 32), there = min(max(num_keys - first, 0), 32);
    const u32 competing = marked == 32 ? ~0u : (1u << marked) - 1, all = there == 32 ? ~0u : (1u << there) - 1;
    return ((marked > 0 ? kept[word] & competing : 0u) | ~competing) & all;
  };
  if (threadIdx.x == 0) before_block = 0;
  __syncthreads();  // the sum begins at 0
  int before = 0;
  for (int word = (int)threadIdx.x; word < first_word; word += 256) before += __popc(word_of(word));
  if (before > 0) atomicAdd(&before_block, before);
  __syncthreads();  // all threads have added their counts
  before = before_block;
  for (int word = first_word; word < first_word + warp; ++word) before += __popc(word_of(word));
  k += params.k_offset + (u64)head * head_dim;
  v += params.v_offset + (u64)head * head_dim;
  const int chunks = head_dim / 8;
  u32 left = word_of(first_word + warp);
  for (int slot = before; left && slot < slots; left &= left - 1, ++slot) {
    const int token = (first_word + warp) * 32 + __ffs((int)left) - 1;
    const u64 to = (u64)head * slots + slot;
#pragma unroll 1  // once for head_dim 128; four times as written spills on sm_80
    for (int chunk = lane; chunk < 2 * chunks; chunk += 32) {
      const bool is_key = chunk < chunks;
      const int at = is_key ? chunk : chunk - chunks;
      const bf16* from = is_key ? k + token * params.k_token_stride : v + token * params.v_token_stride;
      ((uint4*)((is_key ? k_out : v_out) + to * head_dim))[at] = ((const uint4*)from)[at];
    }
    if (lane == 0) {
      received_out[to] = received[(u64)head * num_keys + token];
      position[to] = token;
    }
  }
}
