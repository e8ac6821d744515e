// async_copy: cp.async from global to shared memory, in groups per thread (sm_80 and up).
#pragma once
#include "common/types.cuh"

// The address of a shared memory object as cp.async and ldmatrix take it.
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Copies 16 bytes past L1; the last 16 - `bytes` of them arrive as zeros (`bytes` = 0 reads nothing). Both addresses
// are multiples of 16.
DEVICE void copy_async_16(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// Like copy_async_16, with 8 bytes.
DEVICE void copy_async_8(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// Like copy_async_16, with 4 bytes.
DEVICE void copy_async_4(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// Closes this thread's group of copies; a group may be empty.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's newest groups are in flight. Other threads' copies need a barrier after
// it.
template <int PENDING>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Hides from the compiler how an address was computed. Otherwise it keeps all that it derives from one (the address of
// every row of a tile, every swizzled chunk) in registers across the main loop, and spills.
DEVICE const void* opaque(const void* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
DEVICE u32 opaque(u32 address) {
  asm volatile("" : "+r"(address));
  return address;
}

// A barrier among `threads` threads (whole warps) of the block, number 1 .. 15; it orders their shared memory accesses.
DEVICE void barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
