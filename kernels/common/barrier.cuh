// barrier: mbarriers in shared memory, which count arrivals and bytes copied (sm_90).
#pragma once
#include "common/types.cuh"

// One thread sets a barrier up; `arrivals` complete a phase. barrier_ready() follows the last of them.
DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Ends a barrier that no thread waits for and no copy completes, so that it can be set up again.
DEVICE void barrier_end(u32 barrier) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }
// Makes initialised barriers known to the copy engine; a __syncthreads must follow.
DEVICE void barrier_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Sets up the full and the empty barriers of a ring of `slots`, which lie one after the other.
DEVICE void ring_init(u32 full, u32 empty, int slots, int full_arrivals, int empty_arrivals) {
  for (int i = 0; i < slots; ++i) {
    barrier_init(full + i * 8, full_arrivals);
    barrier_init(empty + i * 8, empty_arrivals);
  }
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and expects `bytes` more of bulk copies before the phase completes.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when this thread's cp.async so far are complete; counts as one of the barrier's arrivals.
DEVICE void barrier_arrive_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the phase of this parity to complete. A fresh barrier counts as having completed parity 1.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// Named barriers of the block, number 1 .. 15: arrive without waiting; barrier_sync (async_copy.cuh) is the other half.
DEVICE void barrier_pass(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The current slot of a ring of N slots that are used cyclically; `phase` is the parity of the number of completed
// cycles.
template <int N>
struct RingPlace {
  u32 slot = 0, phase = 0;
  DEVICE void advance() {
    if (++slot == N) {
      slot = 0;
      phase ^= 1;
    }
  }
};
