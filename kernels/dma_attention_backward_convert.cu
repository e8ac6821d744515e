// dma_attention_backward_convert: dk or dv, summed in f32 in the column order of dma_attention_backward, to strided
// bf16 rows.
// Math       grad = scale * sum (softmax_scale for dk, 1 for dv); ONTO: added to what grad holds
// Layout     sums f32 [batch, num_kv_heads, seq_len, ROW_DIM] (JOINED: [batch, num_sums, seq_len, ROW_DIM], added up in
//            their order, for num_kv_heads 1), groups of 16 columns in the order {2t, 2t+1, 2t+8,
//            2t+9}, t = 0 .. 3;
//            grad bf16 [batch, seq_len, num_kv_heads, ROW_DIM], any strides that are multiples of 8
//            summed i32 [batch, num_kv_heads, seq_len]: rows of 0 are neither read nor written
// Buffers    sums, (SOME_ROWS: summed,) grad
// Defines    ROW_DIM (HEAD_DIM for dk, HEAD_DIM_V for dv); JOINED (0), SOME_ROWS (0), ONTO (0) 0|1
// Tiling     grid (ceil(batch * num_kv_heads * seq_len * (ROW_DIM / 16) / 256)); 256 threads; a warp turns 2 KiB of
//            sums into 32 groups of 16 columns
// Numerics   one rounding, ONTO a second of the sum; memory-bound; without SOME_ROWS writes every element of grad
// Edges      rows of never-active keys hold zeros and stay zeros
#include "common/bf16x8.cuh"
#include "common/mma.cuh"
#include "common/quad.cuh"

#ifndef JOINED
#define JOINED 0
#endif
#ifndef SOME_ROWS
#define SOME_ROWS 0
#endif
#ifndef ONTO
#define ONTO 0
#endif

#if ONTO
// What eight columns hold, and these eight numbers added.
DEVICE uint4 added(const uint4& held, const uint4& words) {
  float sum[8], more[8];
  unpack_bf16x8(held, sum);
  unpack_bf16x8(words, more);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += more[i];
  return pack_bf16x8(sum);
}
#endif

struct DmaAttentionBackwardConvertParams {
  u64 batch, seq_len, num_kv_heads;
  u64 grad_offset, grad_token_stride, grad_batch_stride;
  u64 scale;     // f32 bits
  u64 num_sums;  // read if JOINED
};

// A thread stores one group of 16 columns of a key's gradient; its quad loads four such groups together.
extern "C" __global__ void __launch_bounds__(256)
    dma_attention_backward_convert(const float* sums,
#if SOME_ROWS
                                   const i32* summed,
#endif
                                   bf16* grad,
                                   const __grid_constant__ DmaAttentionBackwardConvertParams params) {
  // A warp converts 32 groups of 16 columns, which lie in 2 KiB without gaps. In each of four rounds a quad loads one
  // group, a float4 a lane; after the transposes each of its lanes holds one whole group.
  constexpr u32 GROUPS = ROW_DIM / 16;
  const u32 lane = threadIdx.x % 32, seq_len = (u32)params.seq_len, num_heads = (u32)params.num_kv_heads;
  const u64 first = (u64)blockIdx.x * 256 + threadIdx.x / 32 * 32, end = params.batch * num_heads * seq_len * GROUPS;
  const float4* from = (const float4*)sums + first * 4 + lane;
  const float scale = f32_word(params.scale);
  const u64 at = first + lane % 4 * 8 + lane / 4;  // (batch, head, key, group)
  bool wanted = at < end;
#if SOME_ROWS
  wanted = wanted && summed[at / GROUPS] != 0;
#endif
  u32 low[4] = {}, high[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!__shfl_sync(~0u, wanted, (lane & ~3u) + i)) continue;  // the lane that stores what is loaded here
#if JOINED
    // The index counts (batch, key, group). The other sums of a batch row are stored after its first.
    const u32 batch = (u32)((first + i * 8 + lane / 4) / GROUPS) / seq_len;
    const u64 apart = (u64)seq_len * GROUPS * 4, before = batch * (params.num_sums - 1) * apart;
    float4 sum = from[before + i * 32];
    for (u64 n = 1; n < params.num_sums; ++n) {
      const float4 next = from[before + n * apart + i * 32];
      sum = make_float4(sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w);
    }
#else
    const float4 sum = from[i * 32];
#endif
    low[i] = pack_bf16(sum.x * scale, sum.y * scale);
    high[i] = pack_bf16(sum.z * scale, sum.w * scale);
  }
  quad_transpose(low);
  quad_transpose(high);
  if (!wanted) return;
  const u32 row = (u32)(at / GROUPS), head_row = row / seq_len, key = row - head_row * seq_len,
            batch = head_row / num_heads, head = head_row - batch * num_heads;
  uint4* to = (uint4*)(grad + params.grad_offset + batch * params.grad_batch_stride + key * params.grad_token_stride +
                       head * ROW_DIM + (u32)(at % GROUPS) * 16);
  uint4 words[2] = {make_uint4(low[0], low[1], low[2], low[3]), make_uint4(high[0], high[1], high[2], high[3])};
#if ONTO
#pragma unroll
  for (int i = 0; i < 2; ++i) words[i] = added(to[i], words[i]);
#endif
  to[0] = words[0];
  to[1] = words[1];
}
