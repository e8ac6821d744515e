// adamw: one update of a parameter's f32 master and its moments, and of the bf16 leaf that the model computes with.
// Math       g = grad grad_scale; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
//            p = p (1 - lr weight_decay) - lr / c1 m / (sqrt(v / c2) + eps), c1 and c2 the bias corrections
//            (arXiv:1711.05101, algorithm 2)
// Layout     param, exp_avg, exp_avg_sq, grad f32 [num_elements]; leaf bf16 [num_elements]; all contiguous, 16-byte
//            aligned; grad_scale f32 [1]
// Buffers    param, exp_avg, exp_avg_sq, grad, grad_scale, leaf (HAS_LEAF); the first three are read and written.
//            SPLIT_MASTER: param is the low 16 bits of the master (common/split_master.cuh), and the leaf is read too
// Defines    HAS_LEAF 0|1, SPLIT_MASTER (0)
// Tiling     grid (ceil(num_elements / 1024)); 256 threads, four elements each
// Numerics   f32; 30 bytes an element, 28 with SPLIT_MASTER, memory-bound. The gate: where grad_scale is 0 or not
//            finite nothing changes, leaf included
// Edges      num_elements of any size
#include "common/bf16x8.cuh"
#include "common/split_master.cuh"

#ifndef SPLIT_MASTER
#define SPLIT_MASTER 0
#endif
#if SPLIT_MASTER
static_assert(HAS_LEAF, "the leaf is half of a split master");
typedef bf16 param_element;
#else
typedef float param_element;
#endif

// Floats in the low half of each word but the first: decay = 1 - lr weight_decay, step_size = lr / c1.
struct AdamwParams { u64 num_elements, beta1, beta2, eps, decay, step_size, inverse_c2; };

struct Update {
  float beta1, beta2, eps, decay, step_size, inverse_c2, scale;
  DEVICE void operator()(float& p, float& m, float& v, float grad) const {
    const float g = grad * scale;
    m = m * beta1 + g * (1.f - beta1);
    v = v * beta2 + g * g * (1.f - beta2);
    p = p * decay - step_size * (m / (sqrtf(v * inverse_c2) + eps));
  }
};

// A thread updates four consecutive parameters; the last thread takes the one to three that may be left, one by one.
extern "C" __global__ void __launch_bounds__(256)
adamw(param_element* param, float* exp_avg, float* exp_avg_sq, const float* grad, const float* grad_scale,
#if HAS_LEAF
      bf16* leaf,
#endif
      const __grid_constant__ AdamwParams params) {
  const float scale = *grad_scale;
  if (!(fabsf(scale) < INFINITY_F32) || scale == 0.f) return;  // the gate, which is closed for a NaN too
  const Update update = {f32_word(params.beta1), f32_word(params.beta2),     f32_word(params.eps),
                         f32_word(params.decay), f32_word(params.step_size), f32_word(params.inverse_c2), scale};
  const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
  if (at + 4 <= params.num_elements) {
    // Load four elements: parameters, both moments and gradients.
#if SPLIT_MASTER
    uint2 leaves = *(const uint2*)(leaf + at), rests = *(const uint2*)(param + at);
    float4 p;
    join_pair(leaves.x, rests.x, p.x, p.y);
    join_pair(leaves.y, rests.y, p.z, p.w);
#else
    float4 p = *(const float4*)(param + at);
#endif
    float4 m = *(const float4*)(exp_avg + at), v = *(const float4*)(exp_avg_sq + at);
    const float4 g = *(const float4*)(grad + at);
    update(p.x, m.x, v.x, g.x);
    update(p.y, m.y, v.y, g.y);
    update(p.z, m.z, v.z, g.z);
    update(p.w, m.w, v.w, g.w);
    // Store the moments, then the parameters (with a split master: bf16 leaf and its lower 16 bits).
    *(float4*)(exp_avg + at) = m;
    *(float4*)(exp_avg_sq + at) = v;
#if SPLIT_MASTER
    split_pair(p.x, p.y, leaves.x, rests.x);
    split_pair(p.z, p.w, leaves.y, rests.y);
    *(uint2*)(param + at) = rests;
    *(uint2*)(leaf + at) = leaves;
#else
    *(float4*)(param + at) = p;
#if HAS_LEAF
    *(uint2*)(leaf + at) = make_uint2(pack_bf16(p.x, p.y), pack_bf16(p.z, p.w));
#endif
#endif
  } else {
    for (u64 i = at; i < params.num_elements; i++) {
#if SPLIT_MASTER
      float p = join_master(leaf[i].bits, param[i].bits);
      update(p, exp_avg[i], exp_avg_sq[i], grad[i]);
      u32 leaf_bits, rest_bits;
      split_master(p, leaf_bits, rest_bits);
      param[i].bits = (unsigned short)rest_bits, leaf[i].bits = (unsigned short)leaf_bits;
#else
      update(param[i], exp_avg[i], exp_avg_sq[i], grad[i]);
#if HAS_LEAF
      leaf[i].bits = (unsigned short)pack_bf16(param[i], 0.f);
#endif
#endif
    }
  }
}
