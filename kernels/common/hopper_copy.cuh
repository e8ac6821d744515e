// hopper_copy: device functions of producers and consumers in all Hopper attention kernels: copies of key tiles,
// release of a slot, accesses to shared memory.
// A tile of R rows of HEAD_DIM bf16 is HEAD_DIM / 64 blocks of R rows of 128 bytes, swizzled as wgmma.cuh says.
// Defines    HEAD_DIM of q and k, HEAD_DIM_V (HEAD_DIM) of v
#pragma once
#include "common/async_copy.cuh"
#include "common/barrier.cuh"
#include "common/tma.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
// One lane arrives for a warp that has read or written a slot. compute-sanitizer's racecheck credits the arrival to
// that lane alone and reports false races; with EVERY_LANE_ARRIVES every lane arrives: what it reports then is a race.
// kernels/notes/arrivals-that-racecheck-misses.md
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
[[maybe_unused]] constexpr int WARP_ARRIVALS = EVERY_LANE_ARRIVES ? 32 : 1;
constexpr int DIM_BLOCKS = HEAD_DIM / 64, DIM_BLOCKS_V = HEAD_DIM_V / 64;  // 64-column blocks of a tile

// Warp `warp` copies its 32 rows of a tile of TILE_ROWS rows and BLOCKS blocks of 64 columns: rows 32 `warp` on of the
// tile at shared address `tile`. All 32 lanes call it; lane l passes in `key` the row of global memory for row 32
// `warp` + l, counted in strides of `stride_bytes` from `rows`. Eight lanes copy 128 bytes of a row, so an instruction
// copies four rows. `row_bytes`: 16, or 0 for zeros in place of all rows. With SOME_ABSENT a `key` below 0 gives a row
// of zeros.
template <int BLOCKS = DIM_BLOCKS, bool SOME_ABSENT = false, int TILE_ROWS = 128>
DEVICE void copy_key_rows(u32 tile, const bf16* rows, u32 stride_bytes, int key, int warp, u32 row_bytes = 16) {
  // from an opaque thread index, so that these are recomputed: held in registers, they would spill
  const int lane = (int)opaque(threadIdx.x) % 32, row = lane / 8, chunk = lane % 8;
  const char* from = (const char*)rows + chunk * 16;
  // Four rows further, bit 2 of the swizzled chunk flips, which is bit 6 of the address.
  const u32 even = tile + (warp * 32 + row) * 128 + ((chunk ^ row) << 4), odd = even ^ 64;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int at = __shfl_sync(~0u, key, 4 * i + row);
    if (SOME_ABSENT) {
      row_bytes = at < 0 ? 0 : 16;
      at = max(at, 0);
    }
    const char* line = from + (u64)(u32)at * stride_bytes;
#pragma unroll
    for (int h = 0; h < BLOCKS; ++h)
      copy_async_16((i % 2 ? odd : even) + i * 512 + h * TILE_ROWS * 128, line + h * 128, row_bytes);
  }
}

// Starts the copy of BLOCKS boxes of 64 columns each, from `column` of `row` of batch row `batch` on, to a tile of
// TILE_ROWS rows at shared address `tile`; their bytes count on the barrier `full`. One thread calls it, after
// barrier_expect.
template <int BLOCKS, int TILE_ROWS>
DEVICE void load_tile(u32 tile, const TensorMap* map, u32 full, int column, int row, int batch) {
#pragma unroll
  for (int h = 0; h < BLOCKS; ++h)
    tensor_load_3d(tile + h * TILE_ROWS * 128, map, full, column + h * 64, row, batch);
}

// Arrives once for the calling warp at `barrier`, the empty barrier of a slot that all its lanes have read. All 32
// lanes call it.
DEVICE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Arrives at a barrier that counts WARP_ARRIVALS arrivals of a warp: one, or with EVERY_LANE_ARRIVES that of every
// lane. All 32 lanes call it after the warp has read or written a slot.
DEVICE void release_slot(u32 barrier) {
  if (EVERY_LANE_ARRIVES) barrier_arrive(barrier);
  else release(barrier);
}

// Forces the compiler to have computed all of `x`, registers of the calling thread, at this point of the program.
template <int N>
DEVICE void keep_here(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Each of these five reads or writes one value of the calling thread at a byte address of shared memory that is a
// multiple of the value's size: here an i32.
DEVICE int load_shared_int(u32 shared) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
DEVICE void store_shared_int(u32 shared, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}
// Reads two i32, such as a key's {position, expire}.
DEVICE int2 load_shared_int2(u32 shared) {
  int2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(shared) : "memory");
  return x;
}
// Stores two i32, `a` at the lower address.
DEVICE void store_shared_int2(u32 shared, int a, int b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(a), "r"(b) : "memory");
}
// Reads two f32, such as the log-sum-exps of two neighbouring queries.
DEVICE float2 load_shared_float2(u32 shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}
