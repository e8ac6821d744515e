// slot_logits: the logits of one query a head over the slots of a cache.
// Math       logit[h, s] = softmax_scale * q[h] . k[h / group, s]
// Layout     q bf16 [num_heads, head_dim] from q_offset on; k bf16 [num_kv_heads, slots, head_dim];
//            logit f32 [num_heads, slots]
// Buffers    q, k, logit
// Defines    none
// Tiling     grid (ceil(count / 32), num_kv_heads, 1); 256 threads, a warp four slots; no dynamic shared memory
// Numerics   f32 sums in a fixed order
// Edges      head_dim a multiple of 32; slots from count on are left as they are
#include "common/fixed_sum.cuh"

struct SlotLogitsParams {
  u64 slots, count, head_dim, group, q_offset;
  u64 softmax_scale;  // f32 bits
};

// A warp has four slots of one KV head, and goes through the query heads of its group.
extern "C" __global__ void __launch_bounds__(256)
    slot_logits(const bf16* q, const bf16* k, float* logit, const __grid_constant__ SlotLogitsParams params) {
  const int lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y, head_dim = (int)params.head_dim,
            group = (int)params.group, first = ((int)blockIdx.x * 8 + (int)threadIdx.x / 32) * 4,
            end = min(first + 4, (int)params.count);
  q += params.q_offset + (u64)kv_head * group * head_dim;
  k += ((u64)kv_head * params.slots + first) * head_dim;
  for (int member = 0; member < group; ++member) {
    float sum[4] = {};
    for (int c = lane; c < head_dim; c += 32) {
      const float x = bf16_to_f32(q[member * head_dim + c]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + i < end) sum[i] += x * bf16_to_f32(k[(u64)i * head_dim + c]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = lanes_sum<32>(sum[i]);
      if (lane == 0 && first + i < end)
        logit[((u64)kv_head * group + member) * params.slots + first + i] = sum[i] * f32_word(params.softmax_scale);
    }
  }
}
