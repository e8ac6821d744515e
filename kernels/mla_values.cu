// mla_values: applies W_UV to the output of latent attention of one new token per row.
// Math       o_h = W_UV,h c_h (arXiv:2405.04434, section 2.1.2)
// Layout     c bf16 [batch, num_heads, rank]; up bf16 [num_heads, 2, head_dim, rank], W_UV second; o bf16
//            [batch, num_heads, head_dim]; contiguous
// Buffers    c, up, o
// Defines    none
// Tiling     grid (num_heads, ceil(head_dim / 16), batch); 256 threads; a warp takes two rows of W_UV, a lane words of
//            8 columns; each byte of W_UV is read once
// Numerics   f32 sums in a fixed order, one rounding at the store
// Edges      rank a multiple of 8
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 8, WARP_ROWS = 2;

struct MlaValuesParams { u64 num_heads, head_dim, rank; };

// A warp computes two of the columns of a head's output, each a product of a row of W_UV and the head's latent output.
extern "C" __global__ void __launch_bounds__(NUM_WARPS * 32)
    mla_values(const bf16* c, const bf16* up, bf16* o, const __grid_constant__ MlaValuesParams params) {
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head_dim = (int)params.head_dim, rank = (int)params.rank;
  const i64 head = blockIdx.x, row_of_batch = (i64)blockIdx.z * params.num_heads + head;
#pragma unroll
  for (int n = 0; n < WARP_ROWS; n++) {
    const int row = ((int)blockIdx.y * WARP_ROWS + n) * NUM_WARPS + warp;
    if (row >= head_dim) return;
    const bf16* weights = up + ((head * 2 + 1) * head_dim + row) * rank;
    float sum = 0.f;
    for (int at = lane; at < rank / 8; at += 32) {
      float w[8], x[8];
      unpack_bf16x8(load_16_bytes(weights + at * 8), w);
      unpack_bf16x8(load_16_bytes(c + row_of_batch * rank + at * 8), x);
#pragma unroll
      for (int i = 0; i < 8; i++) sum = fmaf(w[i], x[i], sum);
    }
    sum = lanes_sum<32>(sum);
    if (lane == 0) o[row_of_batch * head_dim + row].bits = (unsigned short)pack_bf16(sum, 0.f);
  }
}
