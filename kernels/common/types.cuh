// types: number types, constants and bf16 conversions of all kernels. It includes no header, so that NVRTC needs none.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// A bfloat16 in memory: the upper half of an f32. Arithmetic is done in f32 or on packed pairs in tensor cores.
struct bf16 { unsigned short bits; };

#define DEVICE __device__ __forceinline__
// Threads that a multiprocessor holds at once.
#define THREADS_PER_MULTIPROCESSOR \
  (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 ? 1536 : 2048)

DEVICE float bf16_to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
// A bias in the units of q . k. Rounded by itself: fused into a multiply-add with another bias, equal biases would not
// cancel.
DEVICE float in_scores(float bias, float inverse_scale) { return __fmul_rn(bias, inverse_scale); }
// The bf16 at the lower and at the higher address of a word of two.
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// Rounds two f32 to bf16 (to nearest even); `low` is at the lower address.
DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The f32 whose bits are the lower half of a 64-bit params word.
DEVICE float f32_word(u64 word) { return __uint_as_float((u32)word); }

[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f;
[[maybe_unused]] constexpr float LN_2 = 0.6931471805599453f;
#define INFINITY_F32 __uint_as_float(0x7f800000u)

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int min_int(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_int(int a, int b) { return a > b ? a : b; }
// The smallest power of two that is `least` or more.
__host__ __device__ constexpr int power_of_two(int least) { return least <= 1 ? 1 : 2 * power_of_two((least + 1) / 2); }
