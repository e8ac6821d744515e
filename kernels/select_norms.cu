// select_norms: lengths of queries or keys, by which BA-Att (arXiv:2605.19726) sorts them.
// Math       score[h, t] = -sqrt(sum_c x[t, h, c]^2): the shortest first when sorted by falling score
// Layout     x bf16, rows of head_dim side by side in a token; score f32 [num_heads, num_tokens] of the tokens from
//            first_token on
// Buffers    x, score
// Defines    none
// Tiling     grid (ceil(num_tokens / 128), num_heads, 1); 128 threads, a token each; no dynamic shared memory
// Numerics   f32 sums by rising column, as on the CPU: squares of bf16 are exact, so equal lengths stay equal
// Edges      any head_dim that is a multiple of 8
#include "common/bf16x8.cuh"

struct SelectNormsParams {
  u64 x_offset, token_stride;  // elements
  u64 head_dim, first_token, num_tokens;
};

// A thread computes the length of one head of a token.
extern "C" __global__ void __launch_bounds__(128)
    select_norms(const bf16* x, float* score, const __grid_constant__ SelectNormsParams params) {
  const u64 token = (u64)blockIdx.x * 128 + threadIdx.x;
  if (token >= params.num_tokens) return;
  x += params.x_offset + (params.first_token + token) * params.token_stride + blockIdx.y * params.head_dim;
  float sum = 0.0f;
  for (int chunk = 0; chunk < (int)params.head_dim; chunk += 8) {
    float values[8];
    unpack_bf16x8(load_16_bytes(x + chunk), values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
  }
  score[blockIdx.y * params.num_tokens + token] = -sqrtf(sum);
}
