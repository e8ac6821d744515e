// backward_prepare: computes what the backward kernels read for each query row, {lse * log2(e), sum_c o_c do_c}.
// Used by attention_backward_prepare.cu and hopper_attention_backward_prepare.cu, which document the interface.
// Defines    HEAD_DIM_V, a multiple of 8, at most 256
#pragma once
#include "common/bf16_rest.cuh"
#include "common/fixed_sum.cuh"

constexpr u32 ROW_LANES = max_int(power_of_two(HEAD_DIM_V / 8), 2);
static_assert(ROW_LANES <= 32, "a row is summed inside one warp");

// Computes `row_stats` of the rows of one thread block. With HAS_LOW the output in f32 has the bits
// (o << 16) + o_low, o_low signed; otherwise it is o.
template <bool HAS_LOW>
DEVICE void prepare_rows(const bf16* o, const short* o_low, const bf16* d_out, const float* lse, float2* row_stats,
                         const AttentionBackwardPrepareParams& params) {
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
    if (HAS_LOW) {
      const uint4 c = *(const uint4*)(o_low + at);
      const u32 z[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum += join_low(x[i], z[i]) * bf16_low(y[i]) + join_high(x[i], z[i]) * bf16_high(y[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += bf16_low(x[i]) * bf16_low(y[i]) + bf16_high(x[i]) * bf16_high(y[i]);
    }
  }
  sum = lanes_sum<ROW_LANES>(sum);
  if (!inside || lane != 0) return;
  // A NaN of lse stays, so that P of every key that the row sees is NaN. The sum is 0 then, because dS = P (dP - D) of
  // the other keys is 0 only where D is a number.
  const bool sees_nothing = row_lse == -INFINITY_F32, is_nan = row_lse != row_lse;
  row_stats[head_row * padded_len + query] =
      make_float2(sees_nothing ? INFINITY_F32 : row_lse * LOG2_E, sees_nothing || is_nan ? 0.0f : sum);
}
