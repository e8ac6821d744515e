// split_master: splits f32 masters into the bf16 weights that a model computes with (leaf) and their low 16 bits
// (rest), or joins them.
// Math       see common/split_master.cuh; exact both ways
// Layout     master f32, leaf bf16, rest 16 bits, all [num_elements], contiguous and 16-byte aligned
// Buffers    JOIN 0: master, leaf, rest; JOIN 1: leaf, rest, master; the last is written, with JOIN 0 the last two
// Defines    JOIN 0|1
// Tiling     grid (ceil(num_elements / 1024)); 256 threads, four elements each
// Numerics   bits; 8 bytes an element, memory-bound
// Edges      num_elements of any size
#include "common/split_master.cuh"

struct SplitMasterParams { u64 num_elements; };

// A thread has four consecutive elements; the last thread takes the one to three that may be left, one by one.
extern "C" __global__ void __launch_bounds__(256)
#if JOIN
split_master(const bf16* leaf, const bf16* rest, float* master, const __grid_constant__ SplitMasterParams params) {
#else
split_master(const float* master, bf16* leaf, bf16* rest, const __grid_constant__ SplitMasterParams params) {
#endif
  const u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
  if (at + 4 <= params.num_elements) {
#if JOIN
    const uint2 leaves = *(const uint2*)(leaf + at), rests = *(const uint2*)(rest + at);
    float4 p;
    join_pair(leaves.x, rests.x, p.x, p.y);
    join_pair(leaves.y, rests.y, p.z, p.w);
    *(float4*)(master + at) = p;
#else
    const float4 p = *(const float4*)(master + at);
    uint2 leaves, rests;
    split_pair(p.x, p.y, leaves.x, rests.x);
    split_pair(p.z, p.w, leaves.y, rests.y);
    *(uint2*)(leaf + at) = leaves;
    *(uint2*)(rest + at) = rests;
#endif
  } else {
    for (u64 i = at; i < params.num_elements; i++) {
#if JOIN
      master[i] = join_master(leaf[i].bits, rest[i].bits);
#else
      u32 leaf_bits, rest_bits;
      split_master(master[i], leaf_bits, rest_bits);
      leaf[i].bits = (unsigned short)leaf_bits, rest[i].bits = (unsigned short)rest_bits;
#endif
    }
  }
}
