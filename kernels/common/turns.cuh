// turns: numbers in global memory that say whose turn it is to add, where sums have a fixed order. Turns and sums are
// read and written in the L2 cache; who waits, waits for blocks that have started before it.
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
// What this thread added before is there before it writes a turn.
DEVICE void fence_sums() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
