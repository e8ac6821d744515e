// nsa_place: puts each compressed key and value at its block's last token, where an ordinary list of {position, expire}
// lets queries see it; or takes the sums of their gradients from there.
// Math       TAKE 0: k[token] = compressed[0, slot that ends with the token], v likewise with compressed[1]; zeros at
//            the first token of each super-block where none does, because padded lists name it; SUMS 1: zeros of dk_sum
//            and dv_sum where a slot ends. TAKE 1: the inverse, compressed[0] = scale * dk_sum and compressed[1] =
//            dv_sum, zeros for empty slots, and zeros for the keys and values of dqkv
// Layout     compressed bf16 [2, batch * num_slots * num_kv_heads, width]; k, v bf16
//            [batch, seq_len, num_kv_heads, width]; dk_sum, dv_sum f32 [batch, num_kv_heads, seq_len, width], columns
//            as in dma_attention_backward_convert; dqkv bf16 [batch, seq_len, num_heads + 2 * num_kv_heads, width];
//            doc_start, doc_end i32 [batch, seq_len]; contiguous
// Buffers    TAKE 0: compressed, doc_start, doc_end, k, v, (SUMS 1: dk_sum, dv_sum); TAKE 1: dk_sum, dv_sum, doc_start,
//            doc_end, compressed, dqkv
// Defines    TAKE 0|1, SUMS 0|1
// Tiling     TAKE 0: grid (num_slots + ceil(seq_len / 1024), batch), a block takes a slot or the first token of a
//            super-block; TAKE 1: grid (seq_len, batch), a block takes a token and the slot of its number; 128 threads,
//            16 columns each; no shared memory
// Numerics   copies and zeros; one rounding of the sums; other rows of k, v and the sums are not written: no kernel
//            reads them
// Edges      width a multiple of 16
#include "common/bf16x8.cuh"
#include "common/nsa_blocks.cuh"

struct NsaPlaceParams {
  u64 seq_len, num_heads, num_kv_heads, width, size, stride, num_slots;
  u64 scale;  // f32 bits
};

#if TAKE
// Sixteen sums, in the order {2t, 2t+1, 2t+8, 2t+9}.
DEVICE void take_group(bf16* to, const float* from, bool exists, float scale) {
  float low[8] = {}, high[8] = {};
  if (exists) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 sum = ((const float4*)from)[t];
      low[2 * t] = sum.x * scale;
      low[2 * t + 1] = sum.y * scale;
      high[2 * t] = sum.z * scale;
      high[2 * t + 1] = sum.w * scale;
    }
  }
  store_16_bytes(to, pack_bf16x8(low));
  store_16_bytes(to + 8, pack_bf16x8(high));
}
#else
constexpr int SUPER_BLOCK = 1024;

// Copies sixteen columns, two words of 16 bytes; zeros where the token does not exist.
DEVICE void copy_group(bf16* to, const bf16* from, bool exists) {
#pragma unroll
  for (int i = 0; i < 2; ++i) store_16_bytes(to + i * 8, exists ? load_16_bytes(from + i * 8) : make_uint4(0, 0, 0, 0));
}
#endif

// A block has one token of a row, for all KV heads; a thread has groups of 16 columns.
extern "C" __global__ void __launch_bounds__(128) nsa_place(
#if TAKE
    const float* dk_sum, const float* dv_sum, const i32* doc_start, const i32* doc_end, bf16* compressed, bf16* dqkv,
#else
    const bf16* compressed, const i32* doc_start, const i32* doc_end, bf16* k, bf16* v,
#if SUMS
    float* dk_sum, float* dv_sum,
#endif
#endif
    const __grid_constant__ NsaPlaceParams params) {
  const int heads = (int)params.num_kv_heads, width = (int)params.width, num_slots = (int)params.num_slots;
  const int head_groups = width / 16, groups = heads * head_groups;
  const u64 batch = blockIdx.y, row = batch * params.seq_len, half = (u64)gridDim.y * num_slots * groups * 16;
  const CompressedBlocks blocks = {doc_start + row, doc_end + row, (int)params.size, (int)params.stride};
#if TAKE
  // Take the sums of the slot of the block's number, if there is one, and clear the token's keys and values in dqkv.
  const int token = (int)blockIdx.x;
  if (token < num_slots) {
    const int start = blocks.start(token), last = start + (int)params.size - 1;
    bf16* to = compressed + (batch * num_slots + token) * groups * 16;
    for (int at = (int)threadIdx.x; at < groups; at += 128) {
      const u64 from = ((batch * heads + at / head_groups) * params.seq_len + last) * width + at % head_groups * 16;
      take_group(to + at * 16, dk_sum + from, start >= 0, f32_word(params.scale));
      take_group(to + half + at * 16, dv_sum + from, start >= 0, 1.0f);
    }
  }
  const u64 q_columns = params.num_heads * width;
  bf16* zeros = dqkv + (row + token) * (q_columns + 2 * groups * 16) + q_columns;
  for (int at = (int)threadIdx.x; at < 4 * groups; at += 128) store_16_bytes(zeros + at * 8, make_uint4(0, 0, 0, 0));
#else
  // A slot goes to its last token; the first token of a super-block at which no slot ends is cleared.
  const bool is_slot = (int)blockIdx.x < num_slots;
  int token = ((int)blockIdx.x - num_slots) * SUPER_BLOCK;
  if (is_slot) {
    const int start = blocks.start((int)blockIdx.x);
    if (start < 0) return;
    token = start + (int)params.size - 1;
  } else if (blocks.slot_ending_at(token) >= 0) {
    return;
  }
  const u64 from = (batch * num_slots + (is_slot ? blockIdx.x : 0)) * groups * 16, to = (row + token) * groups * 16;
  for (int at = (int)threadIdx.x; at < groups; at += 128) {
    copy_group(k + to + at * 16, compressed + from + at * 16, is_slot);
    copy_group(v + to + at * 16, compressed + half + from + at * 16, is_slot);
#if SUMS
    const u64 sums = ((batch * heads + at / head_groups) * params.seq_len + token) * width + at % head_groups * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ((float4*)(dk_sum + sums))[i] = make_float4(0, 0, 0, 0);
      ((float4*)(dv_sum + sums))[i] = make_float4(0, 0, 0, 0);
    }
#endif
  }
#endif
}
