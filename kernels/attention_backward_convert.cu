// attention_backward_convert: the f32 sums of dq, in tensor core order, to strided bf16 rows; leaves the sums zero for the next launch.
// Math       dq = softmax_scale * dq_sum
// Layout     dq_sum f32 [batch, num_heads, sum_len / 16, HEAD_DIM / 8, 32, 4]: lane 4g + t of a 16 x 8 tile holds row g, columns 2t, 2t + 1, then row g + 8;
//            it stands for the queries first_query .. first_query + sum_len; dq bf16 [batch, seq_len, num_heads, HEAD_DIM], any strides that are multiples of 8
// Buffers    dq_sum, dq
// Defines    HEAD_DIM
// Tiling     grid (ceil(batch * num_heads * sum_len / 2 * (HEAD_DIM / 8) / 256)); 256 threads; a thread turns 64 bytes of sums into 8 columns of two rows
// Numerics   one rounding; memory-bound
// Edges      queries at or past seq_len are skipped, their sums still cleared
#include "common/mma.cuh"

struct AttentionBackwardConvertParams {
  u64 batch, seq_len, num_heads;
  u64 sum_len;      // queries a head in dq_sum, a multiple of 16
  u64 first_query;  // the first of them
  u64 dq_offset, dq_token_stride, dq_batch_stride;
  u64 softmax_scale;  // f32 bits
};

extern "C" __global__ void __launch_bounds__(256) attention_backward_convert(float* dq_sum, bf16* dq, const __grid_constant__ AttentionBackwardConvertParams params) {
  constexpr u32 COLUMN_TILES = HEAD_DIM / 8;
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;  // (batch, head, row tile, g, column tile)
  const u32 column = (u32)(at % COLUMN_TILES), g = (u32)(at / COLUMN_TILES % 8);
  const u64 row_tile = at / (COLUMN_TILES * 8), tiles = params.sum_len / 16;
  if (row_tile >= params.batch * params.num_heads * tiles) return;
  const u64 query = params.first_query + row_tile % tiles * 16 + g;
  const u64 head = row_tile / tiles % params.num_heads, batch = row_tile / tiles / params.num_heads;
  float4* sums = (float4*)(dq_sum + (row_tile * COLUMN_TILES + column) * 128 + g * 16);
  const float scale = f32_word(params.softmax_scale);
  u32 low[4], high[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 sum = sums[t];
    low[t] = pack_bf16(sum.x * scale, sum.y * scale);
    high[t] = pack_bf16(sum.z * scale, sum.w * scale);
    sums[t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  bf16* to = dq + params.dq_offset + batch * params.dq_batch_stride + query * params.dq_token_stride + head * HEAD_DIM + column * 8;
  if (query < params.seq_len) *(uint4*)to = make_uint4(low[0], low[1], low[2], low[3]);
  if (query + 8 < params.seq_len) *(uint4*)(to + 8 * params.dq_token_stride) = make_uint4(high[0], high[1], high[2], high[3]);
}
