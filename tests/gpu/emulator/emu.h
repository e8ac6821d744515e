// CUDA's vocabulary for the CPU emulator: qualifiers, vector types, thread indices, warp collectives, barriers. See README.md.
#pragma once
#include <fcntl.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#define __CUDA_ARCH__ 800
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static  // blocks run one after the other, all threads in one OS thread
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

struct Dim3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
inline float __fmul_rn(float a, float b) {
  float product = a * b;
  asm("" : "+x"(product));  // never part of a multiply-add
  return product;
}
inline float __fadd_rn(float a, float b) {
  float sum = a + b;
  asm("" : "+x"(sum));  // never part of a multiply-add
  return sum;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double __longlong_as_double(long long i) { double d; std::memcpy(&d, &i, 8); return d; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (unsigned)(both >> (select >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return bytes;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
template <class T> T __ldcg(const T* from) { return *from; }
// Blocks run one after the other, so what one wrote is seen by the next.
inline void __threadfence() {}
template <class T> T atomicAdd(T* to, T x) { T old = *to; *to += x; return old; }
inline unsigned atomicMax(unsigned* to, unsigned x) { unsigned old = *to; *to = std::max(old, x); return old; }
inline unsigned atomicOr(unsigned* to, unsigned x) { unsigned old = *to; *to |= x; return old; }
inline unsigned atomicInc(unsigned* to, unsigned limit) { unsigned old = *to; *to = old >= limit ? 0 : old + 1; return old; }
using std::max;
using std::min;

namespace emu {
constexpr int SHARED_BYTES = 1 << 18, NAMED_BARRIERS = 16;

// An asynchronous copy under way; `bytes` of `size` are read, the rest is zeros.
struct Copy { void* to; const void* from; int size, bytes; };

// Threads wait until a given number of them has arrived; then the next generation begins.
struct Rendezvous { int arrived = 0; unsigned long long generation = 0; };
struct Warp : Rendezvous { const void* in[32]; void* out[32]; };

// The first switch to a fiber takes its context, the others jump: a context would ask the system for the signal mask each time.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  Dim3 tid;
  bool done = false;
  const Rendezvous* waits_for = nullptr;
  unsigned long long generation = 0;  // of what it waits for
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern Rendezvous block, named[NAMED_BARRIERS];
extern int current;
extern jmp_buf scheduler;

// Arrives; the last of `count` runs `finish` and lets the others go on.
template <class Finish>
void arrive(Rendezvous& at, int count, Finish finish) {
  const unsigned long long generation = at.generation;
  if (++at.arrived == count) {
    finish();
    at.arrived = 0;
    ++at.generation;
    return;
  }
  while (at.generation == generation) {
    fibers[current].waits_for = &at;
    fibers[current].generation = generation;
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
  }
}
// Every lane leaves `in` and `out`; the last one runs `collective` for all.
template <class Collective>
void warp_op(const void* in, void* out, Collective collective) {
  Warp& warp = warps[current / 32];
  warp.in[current % 32] = in;
  warp.out[current % 32] = out;
  arrive(warp, std::min(32, (int)fibers.size() - current / 32 * 32), [&] { collective(warp); });
}
inline void named_barrier(int number, int threads) { arrive(named[number], threads, [] {}); }
}  // namespace emu

#define threadIdx (emu::fibers[emu::current].tid)
extern Dim3 gridDim, blockDim, blockIdx;
namespace emu {
// The dynamic shared memory of the block.
extern __attribute__((aligned(1024))) unsigned char dynamic_shared[SHARED_BYTES];
// A shared address is the lower half of a pointer: static shared memory lies near `dynamic_shared`, in the same program.
inline unsigned shared_address(const void* pointer) { return (unsigned)(unsigned long long)pointer; }
inline unsigned char* shared_pointer(unsigned address) { return dynamic_shared + (int)(address - shared_address(dynamic_shared)); }
}  // namespace emu
inline unsigned long long __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
inline void* __cvta_shared_to_generic(unsigned long long address) { return emu::shared_pointer((unsigned)address); }

inline void __syncthreads() {
  int alive = 0;
  for (const emu::Fiber& fiber : emu::fibers) alive += !fiber.done;
  emu::arrive(emu::block, alive, [] {});
}
inline int __syncthreads_or(int value) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  if (value) any = 1;
  __syncthreads();
  return any;
}
inline void __syncwarp(unsigned = ~0u) { emu::warp_op(nullptr, nullptr, [](emu::Warp&) {}); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  T result;
  emu::warp_op(&value, &result, [mask](emu::Warp& w) { for (int l = 0; l < 32; ++l) *(T*)w.out[l] = *(const T*)w.in[l ^ mask]; });
  return result;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  struct In { T value; int lane; } in = {value, lane};
  T result;
  emu::warp_op(&in, &result, [](emu::Warp& w) {
    for (int l = 0; l < 32; ++l) *(T*)w.out[l] = ((const In*)w.in[((const In*)w.in[l])->lane & 31])->value;
  });
  return result;
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  T result;
  emu::warp_op(&value, &result, [delta](emu::Warp& w) { for (int l = 0; l < 32; ++l) *(T*)w.out[l] = *(const T*)w.in[l < (int)delta ? l : l - (int)delta]; });
  return result;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned result;
  emu::warp_op(&value, &result, [](emu::Warp& w) {
    unsigned bits = 0;
    for (int l = 0; l < 32; ++l) bits |= (unsigned)*(const bool*)w.in[l] << l;
    for (int l = 0; l < 32; ++l) *(unsigned*)w.out[l] = bits;
  });
  return result;
}
inline int __any_sync(unsigned, bool value) { return __ballot_sync(~0u, value) != 0; }
inline int __all_sync(unsigned, bool value) { return __ballot_sync(~0u, value) == ~0u; }
template <class T, class Pick>
T reduce_warp(T value, Pick pick) {
  T result;
  emu::warp_op(&value, &result, [&](emu::Warp& w) {
    T all = *(const T*)w.in[0];
    for (int l = 1; l < 32; ++l) all = pick(all, *(const T*)w.in[l]);
    for (int l = 0; l < 32; ++l) *(T*)w.out[l] = all;
  });
  return result;
}
template <class T> T __reduce_min_sync(unsigned, T value) { return reduce_warp(value, [](T a, T b) { return std::min(a, b); }); }
template <class T> T __reduce_max_sync(unsigned, T value) { return reduce_warp(value, [](T a, T b) { return std::max(a, b); }); }
template <class T> T __reduce_add_sync(unsigned, T value) { return reduce_warp(value, [](T a, T b) { return a + b; }); }
