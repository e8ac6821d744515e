// nsa_place: puts each compressed key and value at its block's last token, where an ordinary list of {position, expire}
// lets queries see it; or takes what stands there back.
// Math       TAKE 0: k[token] = compressed[0, slot that ends with the token], v likewise with compressed[1], zeros
//            where none does; TAKE 1: the inverse, zeros for empty slots, and zeros for the keys and values of dqkv
// Layout     compressed bf16 [2, batch * num_slots * num_kv_heads, width]; k, v bf16
//            [batch, seq_len, num_kv_heads, width]; dqkv bf16 [batch, seq_len, num_heads + 2 * num_kv_heads, width];
//            doc_start, doc_end i32 [batch, seq_len]; contiguous
// Buffers    TAKE 0: compressed, doc_start, doc_end, k, v; TAKE 1: k, v, doc_start, doc_end, compressed, dqkv
// Defines    TAKE 0|1
// Tiling     grid (seq_len, batch): a block takes a token, with TAKE the slot of its number too; 128 threads, 8 columns
//            each; no shared memory
// Numerics   copies; every element of the outputs written (of dqkv those of keys and values)
// Edges      width a multiple of 8
#include "common/bf16x8.cuh"
#include "common/nsa_blocks.cuh"

struct NsaPlaceParams {
  u64 seq_len, num_heads, num_kv_heads, width, size, stride, num_slots;
};

extern "C" __global__ void __launch_bounds__(128) nsa_place(
#if TAKE
    const bf16* k, const bf16* v, const i32* doc_start, const i32* doc_end, bf16* compressed, bf16* dqkv,
#else
    const bf16* compressed, const i32* doc_start, const i32* doc_end, bf16* k, bf16* v,
#endif
    const __grid_constant__ NsaPlaceParams params) {
  const int token = (int)blockIdx.x, batch = (int)blockIdx.y, words = (int)(params.num_kv_heads * params.width / 8);
  const CompressedBlocks blocks = {doc_start + (u64)batch * params.seq_len, doc_end + (u64)batch * params.seq_len,
                                   (int)params.size, (int)params.stride};
  const u64 half = (u64)gridDim.y * params.num_slots * words * 8;  // from keys to values
#if TAKE
  if (token < (int)params.num_slots) {
    const int start = blocks.start(token);
    const u64 from = ((u64)batch * params.seq_len + (start < 0 ? 0 : start + (int)params.size - 1)) * words,
              to = ((u64)batch * params.num_slots + token) * words;
    for (int at = (int)threadIdx.x; at < words; at += 128) {
      const uint4 zero = make_uint4(0, 0, 0, 0);
      store_16_bytes(compressed + (to + at) * 8, start < 0 ? zero : load_16_bytes(k + (from + at) * 8));
      store_16_bytes(compressed + half + (to + at) * 8, start < 0 ? zero : load_16_bytes(v + (from + at) * 8));
    }
  }
  const u64 q_words = params.num_heads * params.width / 8;
  bf16* row = dqkv + (((u64)batch * params.seq_len + token) * (q_words + 2 * words) + q_words) * 8;
  for (int at = (int)threadIdx.x; at < 2 * words; at += 128) store_16_bytes(row + (u64)at * 8, make_uint4(0, 0, 0, 0));
#else
  const int slot = blocks.slot_ending_at(token);
  const u64 from = ((u64)batch * params.num_slots + (slot < 0 ? 0 : slot)) * words,
            to = ((u64)batch * params.seq_len + token) * words;
  for (int at = (int)threadIdx.x; at < words; at += 128) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    store_16_bytes(k + (to + at) * 8, slot < 0 ? zero : load_16_bytes(compressed + (from + at) * 8));
    store_16_bytes(v + (to + at) * 8, slot < 0 ? zero : load_16_bytes(compressed + half + (from + at) * 8));
  }
#endif
}
