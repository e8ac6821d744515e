// attention_backward_convert: the f32 sums of dq, in tensor core order, to strided bf16 rows; also dk and dv where
// blocks share key tiles, from their partial sums (SUM_PARTS).
// Math       dq = scale * dq_sum; SUM_PARTS: dk = scale * sum over p of dk_sum[p], in the order of p
// Layout     dq_sum f32 [batch, num_heads, (SUM_PARTS: num_parts,) sum_len / 16, HEAD_DIM / 8, 32, 4]: lane 4g + t of a
//            16 x 8 tile holds row g, columns 2t, 2t + 1, then row g + 8;
//            it holds the queries first_query .. first_query + sum_len; dq bf16
//            [batch, seq_len, num_heads, HEAD_DIM], any strides that are multiples of 8
// Buffers    dq_sum, (SEMAPHORES: dq_semaphores,) dq
// Defines    HEAD_DIM; SUM_PARTS (0); SEMAPHORES (0; 1: dq is 0 where the semaphore of a tile of 64 queries is, i32
//            [batch, num_heads, sum_len / 64]: nothing was added, and dq_sum holds anything)
// Tiling     grid (ceil(batch * num_heads * sum_len / 16 * ceil(HEAD_DIM / 32) / 8)); 256 threads; a warp converts 16
//            rows of 32 columns; no shared memory
// Numerics   one rounding; memory-bound
// Edges      queries at or past seq_len are skipped
#include "common/mma.cuh"
#include "common/quad.cuh"

#ifndef SUM_PARTS
#define SUM_PARTS 0
#endif
#ifndef SEMAPHORES
#define SEMAPHORES 0
#endif

struct AttentionBackwardConvertParams {
  u64 batch, seq_len, num_heads;
  u64 sum_len;      // queries a head in dq_sum, a multiple of 16
  u64 first_query;  // the first of these queries
  u64 dq_offset, dq_token_stride, dq_batch_stride;
  u64 scale;          // f32 bits
  u64 num_parts;      // parts that each sum is stored in; 1 without SUM_PARTS
};

// A warp converts 16 queries of 32 columns of a head, four fragments of 16 x 8 f32: a lane loads a float4 of each and,
// after the transposes, stores eight columns of two rows.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_convert(const float* dq_sum,
#if SEMAPHORES
                               const i32* dq_semaphores,
#endif
                               bf16* dq,
                               const __grid_constant__ AttentionBackwardConvertParams params) {
  constexpr u32 COLUMN_TILES = HEAD_DIM / 8, PARTS = (COLUMN_TILES + 3) / 4;
  // 32-bit tile numbers: enough for any tensor that fits a GPU, and 64-bit divisions would cost more than the loads.
  // (batch, head, row tile, part)
  const u32 at = blockIdx.x * 8 + threadIdx.x / 32, row_tile = at / PARTS, tiles = (u32)params.sum_len / 16,
            num_heads = (u32)params.num_heads;
  const u32 head_row = row_tile / tiles, batch = head_row / num_heads, head = head_row - batch * num_heads;
  if (batch >= params.batch) return;
  // the column tile that this lane stores
  const u32 part = at % PARTS, lane = threadIdx.x % 32, g = lane / 4, column = part * 4 + lane % 4;
  const u64 query = params.first_query + (row_tile - head_row * tiles) * 16 + g;
  const float scale = f32_word(params.scale);

  // Load: four column tiles, 512 contiguous bytes each.
  u32 low[4] = {}, high[4] = {};
#if SUM_PARTS
  const u64 first_tile = (u64)head_row * params.num_parts * tiles + (row_tile - head_row * tiles),
            part_stride = (u64)tiles * COLUMN_TILES * 32;
#else
  const u64 first_tile = row_tile;
#endif
#if SEMAPHORES
  const bool has_sums = dq_semaphores[row_tile / 4] != 0;
#elif !SUM_PARTS
  constexpr bool has_sums = true;
#endif
  const float4* sums = (const float4*)(dq_sum + (first_tile * COLUMN_TILES + part * 4) * 128) + lane;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (COLUMN_TILES % 4 != 0 && part * 4 + n >= COLUMN_TILES) break;
#if SUM_PARTS
    float4 sum = {};
#pragma unroll 4
    for (u32 p = 0; p < (u32)params.num_parts; ++p) {
      const float4 more = sums[p * part_stride + n * 32];
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
#else
    const float4 sum = has_sums ? sums[n * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    low[n] = pack_bf16(sum.x * scale, sum.y * scale);
    high[n] = pack_bf16(sum.z * scale, sum.w * scale);
  }
  // Store: a lane gathers eight columns of a row from its quad.
  quad_transpose(low);
  quad_transpose(high);
  if (COLUMN_TILES % 4 != 0 && column >= COLUMN_TILES) return;
  bf16* to = dq + params.dq_offset + batch * params.dq_batch_stride + query * params.dq_token_stride + head * HEAD_DIM +
             column * 8;
  if (query < params.seq_len) *(uint4*)to = make_uint4(low[0], low[1], low[2], low[3]);
  if (query + 8 < params.seq_len)
    *(uint4*)(to + 8 * params.dq_token_stride) = make_uint4(high[0], high[1], high[2], high[3]);
}
