// select_pages: upper bounds of `q . k` of the last query with each page of keys (Quest, arXiv:2406.10774).
// Math       least, most[h, p, c] = least and largest k[t, h, c] of page p's tokens; score[h', p] = sum over the query
//            heads of the group and c of max(q_c least_c, q_c most_c), the same for each head h' of the group; minus
//            infinity for the last page
// Layout     q, k bf16, rows of head_dim side by side in a token; bounds f32 [num_kv_heads, room, 2, head_dim]: pages
//            before first_new are there, later ones are written; score f32 [num_heads, pages]
// Buffers    q, k, bounds, score
// Defines    none
// Tiling     grid (ceil(pages / 8), num_kv_heads, 1); 256 threads, a warp a page; no dynamic shared memory
// Numerics   f32 sums in a fixed order
// Edges      head_dim a multiple of 32, up to 256; a last page with fewer tokens
#include "common/types.cuh"

struct SelectPagesParams {
  u64 num_keys, page, room, first_new;
  u64 head_dim, group;
  u64 q_offset, k_offset, q_token_stride, k_token_stride;  // elements
};

extern "C" __global__ void __launch_bounds__(256)
    select_pages(const bf16* q, const bf16* k, float* bounds, float* score,
                 const __grid_constant__ SelectPagesParams params) {
  const int lane = (int)threadIdx.x % 32, page = (int)blockIdx.x * 8 + (int)threadIdx.x / 32, kv_head = (int)blockIdx.y,
            group = (int)params.group;
  const int num_keys = (int)params.num_keys, tokens = (int)params.page, pages = ceil_div(num_keys, tokens),
            head_dim = (int)params.head_dim;
  if (page >= pages) return;
  const bool is_new = page >= (int)params.first_new;
  k += params.k_offset + (u64)kv_head * head_dim;
  q += params.q_offset + (u64)(num_keys - 1) * params.q_token_stride + (u64)kv_head * group * head_dim;
  bounds += ((u64)kv_head * params.room + page) * 2 * head_dim;
  float sum = 0.0f;
  for (int c = lane; c < head_dim; c += 32) {
    float least = INFINITY_F32, most = -INFINITY_F32;
    if (is_new) {
      for (int token = page * tokens; token < min((page + 1) * tokens, num_keys); ++token) {
        const float x = bf16_to_f32(k[(u64)token * params.k_token_stride + c]);
        least = fminf(least, x);
        most = fmaxf(most, x);
      }
      bounds[c] = least;
      bounds[head_dim + c] = most;
    } else {
      least = bounds[c];
      most = bounds[head_dim + c];
    }
    for (int head = 0; head < group; ++head) {
      const float x = bf16_to_f32(q[head * head_dim + c]);
      sum += fmaxf(x * least, x * most);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  for (int head = lane; head < group; head += 32)
    score[(u64)(kv_head * group + head) * pages + page] = page + 1 == pages ? -INFINITY_F32 : sum;
}
