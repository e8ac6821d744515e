// dma_attention_backward_convert: the f32 row sums of dk or dv, in the column order of dma_attention_backward, to strided bf16 rows.
// Math       grad = scale * sum (softmax_scale for dk, 1 for dv)
// Layout     sums f32 [batch, num_kv_heads, seq_len, ROW_DIM], groups of 16 columns in the order {2t, 2t+1, 2t+8, 2t+9}, t = 0 .. 3;
//            grad bf16 [batch, seq_len, num_kv_heads, ROW_DIM], any strides that are multiples of 8
// Buffers    sums, grad
// Defines    ROW_DIM (HEAD_DIM for dk, HEAD_DIM_V for dv)
// Tiling     grid (ceil(batch * num_kv_heads * seq_len * (ROW_DIM / 16) / 256)); 256 threads; a thread turns 64 bytes of sums into 16 columns
// Numerics   one rounding; memory-bound; writes every element of grad
// Edges      rows of never-active keys hold zeros and stay zeros
#include "common/mma.cuh"

struct DmaAttentionBackwardConvertParams {
  u64 batch, seq_len, num_kv_heads;
  u64 grad_offset, grad_token_stride, grad_batch_stride;
  u64 scale;  // f32 bits
};

extern "C" __global__ void __launch_bounds__(256) dma_attention_backward_convert(const float* sums, bf16* grad,
                                                                                const __grid_constant__ DmaAttentionBackwardConvertParams params) {
  constexpr u32 GROUPS = ROW_DIM / 16;
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x, row = at / GROUPS;  // (batch, head, key, group)
  const u32 group = (u32)(at % GROUPS);
  if (row >= params.batch * params.num_kv_heads * params.seq_len) return;
  const u64 key = row % params.seq_len, head = row / params.seq_len % params.num_kv_heads, batch = row / params.seq_len / params.num_kv_heads;
  const float4* from = (const float4*)(sums + row * ROW_DIM + group * 16);
  const float scale = f32_word(params.scale);
  u32 low[4], high[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 sum = from[t];
    low[t] = pack_bf16(sum.x * scale, sum.y * scale);
    high[t] = pack_bf16(sum.z * scale, sum.w * scale);
  }
  uint4* to = (uint4*)(grad + params.grad_offset + batch * params.grad_batch_stride + key * params.grad_token_stride + head * ROW_DIM + group * 16);
  to[0] = make_uint4(low[0], low[1], low[2], low[3]);
  to[1] = make_uint4(high[0], high[1], high[2], high[3]);
}
