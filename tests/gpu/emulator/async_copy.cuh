#pragma once
#include "types.cuh"
DEVICE u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - shared_memory); }
inline void emu_copy(u32 s, const void* g, int size, u32 bytes) { if (s + size > (1u << 18) || s % size || (u64)g % size) { fprintf(stderr, "bad copy %u %p\n", s, g); abort(); } emu::fibers[emu::current].open.push_back({shared_memory + s, g, size, (int)bytes}); }
DEVICE void copy_async_16(u32 s, const void* g, u32 b) { emu_copy(s, g, 16, b); }
DEVICE void copy_async_8(u32 s, const void* g, u32 b) { emu_copy(s, g, 8, b); }
DEVICE void copy_async_4(u32 s, const void* g, u32 b) { emu_copy(s, g, 4, b); }
DEVICE void copy_async_commit() { auto& f = emu::fibers[emu::current]; f.groups.push_back(f.open); f.open.clear(); }
template <int PENDING> DEVICE void copy_async_wait() {
  auto& f = emu::fibers[emu::current];
  while ((int)f.groups.size() > PENDING) { for (auto& c : f.groups[0]) { memset(c.dst, 0, c.size); if (c.bytes) memcpy(c.dst, c.src, c.bytes); } f.groups.erase(f.groups.begin()); }
}
DEVICE const void* opaque(const void* p) { return p; }
DEVICE u32 opaque(u32 a) { return a; }
DEVICE void barrier_sync(int number, int threads) { emu::named_barrier(number, threads); }
