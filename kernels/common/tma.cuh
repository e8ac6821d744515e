// tma: bulk copies between global and shared memory by the copy engine (sm_90).
#pragma once
#include "common/types.cuh"

// A CUtensorMap, passed by value as a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Copies one box; its bytes count on `barrier` (barrier_expect). x: column, y: row, z: matrix of the map's tensor.
DEVICE void tensor_load_3d(u32 shared, const TensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Copies `bytes` (a multiple of 16) to shared memory; completion is counted on `barrier`.
DEVICE void bulk_load(u32 shared, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Adds `bytes` (a multiple of 16) of f32 in shared memory to as many in global memory, each atomically. An L2
// evict-last hint keeps the destination in the cache for the next adds.
DEVICE void bulk_add_f32(float* to, u32 shared, u32 bytes) {
  constexpr u64 EVICT_LAST = 0x14f0000000000000;  // the encoding that createpolicy.fractional returns
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(to),
      "r"(shared), "r"(bytes), "l"(EVICT_LAST)
      : "memory");
}
// Copies `bytes` (a multiple of 16) from shared to global memory, with the same L2 evict-last hint.
DEVICE void bulk_store(float* to, u32 shared, u32 bytes) {
  constexpr u64 EVICT_LAST = 0x14f0000000000000;
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(shared),
               "r"(bytes), "l"(EVICT_LAST)
               : "memory");
}
// Waits until all bulk adds and stores of this thread are done, and others may see them.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Closes this thread's group of bulk adds; waits until shared memory of all of them may be written again.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
