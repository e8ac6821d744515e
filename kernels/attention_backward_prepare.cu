// attention_backward_prepare: what the backward kernels need of each query row.
// Math       row_stats_i = {lse_i * log2(e), sum_c o_ic do_ic}; a row that sees nothing (lse -inf) and the padding get
//            {+inf, 0}, so that 2^(S - lse) is 0
// Layout     o, do bf16 [batch, seq_len, num_heads, HEAD_DIM_V]; lse f32 [batch, num_heads, seq_len]; row_stats f32
//            pairs [batch, num_heads, padded_len, 2];
//            all contiguous
// Buffers    o, do, lse, row_stats
// Defines    HEAD_DIM_V, a multiple of 8, at most 256
// Tiling     grid (ceil(batch * padded_len * num_heads / ROWS)), ROWS = 256 / (HEAD_DIM_V / 8 rounded up to a power of
//            two); 256 threads, a lane takes 8 columns of a row; no shared memory
// Numerics   f32 sums of bf16 products; writes every element; memory-bound, o and do are read once
// Edges      padded_len = seq_len rounded up to 64
#include "common/attention_params.cuh"
#include "common/types.cuh"

__host__ __device__ constexpr int power_of_two(int least) { return least <= 2 ? 2 : 2 * power_of_two((least + 1) / 2); }
constexpr u32 ROW_LANES = power_of_two(HEAD_DIM_V / 8);
static_assert(ROW_LANES <= 32, "a row is summed inside one warp");

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_prepare(const bf16* o, const bf16* d_out, const float* lse, float2* row_stats,
                               const __grid_constant__ AttentionBackwardPrepareParams params) {
  // 32 bits number the rows of everything that fits a GPU; 64-bit divisions would cost more than the loads.
  const u32 num_heads = (u32)params.num_heads, padded_len = (u32)params.padded_len, seq_len = (u32)params.seq_len,
            lane = threadIdx.x % ROW_LANES;
  // (batch, query, head), the heads of a token side by side
  const u32 row = blockIdx.x * (256 / ROW_LANES) + threadIdx.x / ROW_LANES;
  const u32 token = row / num_heads, head = row - token * num_heads, batch = token / padded_len,
            query = token - batch * padded_len;
  const bool inside = batch < params.batch, read = inside && query < seq_len;
  const u64 head_row = (u64)batch * num_heads + head;
  float sum = 0.0f, row_lse = -INFINITY_F32;
  if (read && lane == 0) row_lse = lse[head_row * seq_len + query];
  if (read && lane * 8 < HEAD_DIM_V) {
    const u64 at = (((u64)batch * seq_len + query) * num_heads + head) * HEAD_DIM_V + lane * 8;
    const uint4 a = *(const uint4*)(o + at), b = *(const uint4*)(d_out + at);
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += bf16_low(x[i]) * bf16_low(y[i]) + bf16_high(x[i]) * bf16_high(y[i]);
  }
#pragma unroll
  for (int distance = ROW_LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (!inside || lane != 0) return;
  row_stats[head_row * padded_len + query] =
      row_lse > -INFINITY_F32 ? make_float2(row_lse * LOG2_E, sum) : make_float2(INFINITY_F32, 0.0f);
}
