// programmatic_launch: the start of a kernel that a captured step may begin before the one before it has ended
// (programmatic dependent launch; PTX ISA, griddepcontrol). Elsewhere, and before sm_90, it does nothing.
#pragma once
#include "common/types.cuh"

// Waits until the kernel before has ended and its writes are visible, then lets the next one begin: so no more than two
// kernels overlap. A kernel calls it before it reads what others write and before it writes.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
