// CPU emulation of the CUDA subset used by the attention kernels: one fiber per thread, warp collectives and barriers as rendezvous.
#pragma once
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <functional>
#include <random>
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4_ { unsigned x, y, z, w; }; struct alignas(8) uint2 { unsigned x, y; };
typedef uint4_ uint4;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float a,float b,float c,float d){return {a,b,c,d};}
inline float2 make_float2(float a,float b){return {a,b};}
inline uint4 make_uint4(unsigned a,unsigned b,unsigned c,unsigned d){return {a,b,c,d};}
inline int2 make_int2(int a,int b){return {a,b};}
struct Dim3 { unsigned x, y, z; };
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
using std::min; using std::max;
extern Dim3 gridDim, blockDim, blockIdx;
namespace emu {
struct Copy { void* dst; const void* src; int size, bytes; };
struct Fiber {
  ucontext_t ctx; Dim3 tid; bool done = false; int wait = 0; unsigned long long gen = 0;  // wait: 0 ready, 1 warp, 2 block
  std::vector<std::vector<Copy>> groups; std::vector<Copy> open;
  std::vector<char> stack;
};
struct Warp { int arrived = 0; unsigned long long gen = 0; const void* in[32]; void* out[32]; };
extern std::vector<Fiber> fibers; extern std::vector<Warp> warps; extern int current; extern ucontext_t scheduler;
extern int block_arrived; extern unsigned long long block_gen;
inline void yield() { swapcontext(&fibers[current].ctx, &scheduler); }
inline int lane() { return current % 32; }
// Rendezvous of a warp: every lane deposits in/out; the last one runs f over all lanes.
template <class F> void warp_op(const void* in, void* out, F f) {
  Warp& w = warps[current / 32]; int l = lane(); w.in[l] = in; w.out[l] = out;
  unsigned long long gen = w.gen; int size = min<int>(32, (int)fibers.size() - current / 32 * 32);
  if (++w.arrived == size) { f(w); w.arrived = 0; ++w.gen; } else { while (w.gen == gen) { fibers[current].wait = 1; fibers[current].gen = gen; yield(); } }
  fibers[current].wait = 0;
}
}
namespace emu {
extern int named_arrived[16]; extern unsigned long long named_gen[16];
inline void named_barrier(int number, int threads) {
  unsigned long long gen = named_gen[number];
  if (++named_arrived[number] == threads) { named_arrived[number] = 0; ++named_gen[number]; }
  else while (named_gen[number] == gen) { fibers[current].wait = 3; yield(); }
  fibers[current].wait = 0;
}
}
#define threadIdx (emu::fibers[emu::current].tid)
extern __attribute__((aligned(1024))) unsigned char shared_memory[1 << 18];
inline void __syncthreads() {
  using namespace emu; unsigned long long gen = block_gen; int alive = 0; for (auto& f : fibers) alive += !f.done;
  if (++block_arrived == alive) { block_arrived = 0; ++block_gen; } else while (block_gen == gen) { fibers[current].wait = 2; fibers[current].gen = gen; yield(); }
  fibers[current].wait = 0;
}
inline void __syncwarp(unsigned = ~0u) { emu::warp_op(nullptr, nullptr, [](emu::Warp&) {}); }
template <class T> T __shfl_xor_sync(unsigned, T v, int m, int = 32) {
  T r; emu::warp_op(&v, &r, [m](emu::Warp& w) { for (int l = 0; l < 32; ++l) *(T*)w.out[l] = *(const T*)w.in[l ^ m]; }); return r; }
template <class T> T __shfl_sync(unsigned, T v, int s, int = 32) {
  struct P { T v; int s; } p{v, s}; T r;
  emu::warp_op(&p, &r, [](emu::Warp& w) { for (int l = 0; l < 32; ++l) *(T*)w.out[l] = ((const P*)w.in[((const P*)w.in[l])->s & 31])->v; }); return r; }
template <class T> T __shfl_down_sync(unsigned, T v, int d, int = 32) {
  T r; emu::warp_op(&v, &r, [d](emu::Warp& w) { for (int l = 0; l < 32; ++l) *(T*)w.out[l] = *(const T*)w.in[l + d < 32 ? l + d : l]; }); return r; }
inline unsigned __ballot_sync(unsigned, bool v) { unsigned r; emu::warp_op(&v, &r, [](emu::Warp& w) { unsigned b = 0; for (int l = 0; l < 32; ++l) b |= (unsigned)*(const bool*)w.in[l] << l; for (int l = 0; l < 32; ++l) *(unsigned*)w.out[l] = b; }); return r; }
inline int __any_sync(unsigned, bool v) { return __ballot_sync(~0u, v) != 0; }
inline int __all_sync(unsigned, bool v) { return __ballot_sync(~0u, v) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned v) { unsigned r; emu::warp_op(&v, &r, [](emu::Warp& w) { unsigned b = 0; for (int l = 0; l < 32; ++l) b = max(b, *(const unsigned*)w.in[l]); for (int l = 0; l < 32; ++l) *(unsigned*)w.out[l] = b; }); return r; }
inline int __reduce_max_sync(unsigned, int v) { int r; emu::warp_op(&v, &r, [](emu::Warp& w) { int b = *(const int*)w.in[0]; for (int l = 0; l < 32; ++l) b = max(b, *(const int*)w.in[l]); for (int l = 0; l < 32; ++l) *(int*)w.out[l] = b; }); return r; }
inline int __reduce_min_sync(unsigned, int v) { int r; emu::warp_op(&v, &r, [](emu::Warp& w) { int b = *(const int*)w.in[0]; for (int l = 0; l < 32; ++l) b = min(b, *(const int*)w.in[l]); for (int l = 0; l < 32; ++l) *(int*)w.out[l] = b; }); return r; }
inline float atomicAdd(float* p, float v) { float o = *p; *p += v; return o; }
