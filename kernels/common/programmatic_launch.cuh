// programmatic_launch: the first statement of a kernel that a CUDA graph may start before its predecessor has ended
// (programmatic dependent launch; PTX ISA, griddepcontrol). Outside a graph, and before sm_90, it does nothing.
#pragma once
#include "common/types.cuh"

// Waits until the preceding kernel has ended and its writes are visible, then lets the next one begin, so that at most
// two kernels overlap. A kernel calls it before it reads what others write and before it writes.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
