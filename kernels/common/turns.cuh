// turns: semaphores that order the adds to a sum where sums have a fixed order. They and the sums are read and written
// in the L2 cache; a block waits only for blocks with smaller indices, which are assumed to start before it.
#pragma once
#include "common/types.cuh"

DEVICE int read_turn(const i32* turn) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
  return value;
}
DEVICE void write_turn(i32* turn, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
// This thread's earlier adds become visible before it writes a turn.
DEVICE void fence_sums() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
