// cluster: thread blocks that run beside each other and read and write each other's shared memory (sm_90; PTX ISA,
// thread block clusters).
#pragma once
#include "common/types.cuh"

// The address, among the cluster's, of shared memory of block `rank` that lies where this block has `shared`.
DEVICE u32 of_block(u32 shared, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
DEVICE void store_cluster_32(u32 address, u32 word) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
DEVICE void store_cluster_128(u32 address, const uint4& words) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
// Waits for all threads of the cluster; what each has written before, also to other blocks, is visible after it.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
