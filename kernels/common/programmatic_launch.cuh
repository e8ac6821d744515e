// programmatic_launch: the first statement of a kernel that a CUDA graph may start before its predecessor has ended
// (programmatic dependent launch; PTX ISA, griddepcontrol). Outside a graph, and before sm_90, it does nothing.
#pragma once
#include "common/types.cuh"

// Waits until the preceding kernel has ended and its writes are visible. As that kernel waited too, all kernels before
// it have ended. A kernel calls it before it reads what others write and before it writes.
DEVICE void wait_for_results() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin, once a thread of every block of this kernel has called it.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// wait_for_results, then let_next_begin: of kernels that call this, at most two overlap.
DEVICE void wait_for_previous() {
  wait_for_results();
  let_next_begin();
}
