// semaphores: order the adds to a sum where sums have a fixed order. They and the sums are read and written
// in the L2 cache; a block waits only for blocks with smaller indices, which are assumed to start before it.
#pragma once
#include "common/types.cuh"

// Reads a semaphore from the L2 cache, where other blocks write it.
DEVICE int read_semaphore(const i32* semaphore) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}
// Writes a semaphore to the L2 cache; fence_sums comes before it.
DEVICE void write_semaphore(i32* semaphore, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(semaphore), "r"(value) : "memory");
}
// Waits until every thread of the warp that waits has its turn. The loop ends by a vote, so that all lanes leave it
// together. Else the compiler keeps nothing of the next run in uniform registers, and computes the address of each
// GEMM's operand in every thread.
// kernels/notes/operand-addresses-in-uniform-registers.md
DEVICE void wait_for_turn(bool waits, const i32* semaphore, int own_turn) {
  while (__any_sync(~0u, waits && read_semaphore(semaphore) != own_turn)) {}
}
// This thread's earlier adds become visible before it writes a semaphore.
DEVICE void fence_sums() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
