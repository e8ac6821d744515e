// reduce_add: adding f32 vectors into global memory from many blocks.
#pragma once
#include "common/types.cuh"

// Adds four f32 at a 16-byte aligned address, each atomically. One instruction from sm_90 on.
DEVICE void reduce_add_f32x4(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
  atomicAdd(to + 2, c);
  atomicAdd(to + 3, d);
#endif
}
