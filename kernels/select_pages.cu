// select_pages: one new token per row joins its key-value cache and the bounds of its page of keys; upper bounds of the
// token's products with the keys of each page before its own (Quest, arXiv:2406.10774).
// Math       least, most[g, p, c] = least and largest k[t, g, c] of page p's tokens t; score[g, p] = sum over the query
//            heads of group g and c of max(q_c least_c, q_c most_c)
// Layout     q bf16 [batch, num_heads, head_dim], k_new, v_new bf16 [batch, num_kv_heads, head_dim], each with an
//            element offset and a batch stride; k_cache, v_cache bf16 [batch, num_kv_heads, capacity, head_dim]; bounds
//            f32 [batch, num_kv_heads, room, 2, head_dim]; length i32 [batch], tokens before this one; score f32
//            [batch, num_kv_heads, room]
// Buffers    q, k_new, v_new, k_cache, v_cache, bounds, length, score
// Defines    none
// Tiling     grid (splits, num_kv_heads, batch); 256 threads, a warp a page; block 0 of a head writes the token's row
//            of the caches; no dynamic shared memory
// Numerics   f32 sums in a fixed order
// Edges      head_dim a multiple of 32; the first token of a page overwrites its bounds; the token's own page gets no
//            score; length >= capacity writes nothing out of bounds: the wrapper refuses it
#include "common/attention_params.cuh"
#include "common/fixed_sum.cuh"
#include "common/programmatic_launch.cuh"

struct SelectPagesParams : TokenParams {
  u64 capacity, room, page, head_dim;
};

// A warp has one page of keys of one KV head at a time: it scores the page for the new token or, if it is the token's
// own page, widens the page's bounds. Block 0 also writes the token's key and value.
extern "C" __global__ void __launch_bounds__(256)
    select_pages(const bf16* q, const bf16* k_new, const bf16* v_new, bf16* k_cache, bf16* v_cache, float* bounds,
                 const i32* length, float* score, const __grid_constant__ SelectPagesParams params) {
  wait_for_previous();
  const int lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y, head_dim = (int)params.head_dim,
            group = (int)(params.num_heads / params.num_kv_heads);
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + kv_head;
  const i32 before = min(length[batch], (i32)params.capacity - 1), size = (i32)params.page,
            own = min(before / size, (i32)params.room - 1);
  k_new += params.k_offset + batch * params.k_batch_stride + (i64)kv_head * head_dim;
  v_new += params.v_offset + batch * params.v_batch_stride + (i64)kv_head * head_dim;
  q += params.q_offset + batch * params.q_batch_stride + (i64)kv_head * group * head_dim;
  // Store the token's key and value.
  if (blockIdx.x == 0) {
    const i64 row = (head * params.capacity + before) * head_dim;
    for (int c = (int)threadIdx.x; c < head_dim; c += 256) k_cache[row + c] = k_new[c], v_cache[row + c] = v_new[c];
  }
  for (i32 page = (i32)blockIdx.x * 8 + (i32)threadIdx.x / 32; page <= own; page += (i32)gridDim.x * 8) {
    float* page_bounds = bounds + (head * params.room + page) * 2 * head_dim;  // least of each column, then largest
    float sum = 0.0f;
    for (int c = lane; c < head_dim; c += 32) {
      float least = page_bounds[c], most = page_bounds[head_dim + c];
      if (page == own) {
        const float x = bf16_to_f32(k_new[c]);
        const bool is_first = before % size == 0;
        page_bounds[c] = is_first ? x : fminf(least, x);
        page_bounds[head_dim + c] = is_first ? x : fmaxf(most, x);
        continue;
      }
      // A key of the page gives no more than this, whatever the sign of the query's column.
      for (int query_head = 0; query_head < group; ++query_head) {
        const float x = bf16_to_f32(q[query_head * head_dim + c]);
        sum += fmaxf(x * least, x * most);
      }
    }
    sum = lanes_sum<32>(sum);
    if (lane == 0 && page < own) score[head * params.room + page] = sum;
  }
}
