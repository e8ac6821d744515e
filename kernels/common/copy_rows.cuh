// copy_rows: asynchronous copies of bf16 rows, contiguous or named by list entries, into swizzled tiles; shared by the
// attention kernels.
// Defines    NUM_WARPS of the block; every thread takes part
#pragma once
#include "common/async_copy.cuh"
#include "common/mma.cuh"

constexpr int THREADS = NUM_WARPS * 32;

// The chunks of 16 bytes that a thread copies. EVEN: always the same chunk of a row, in PASSES rows PASS_ROWS apart.
// Else every THREADS-th chunk of the tile.
template <int ROW, int ROWS>
struct CopyPlan {
  static constexpr int CHUNKS = ROW / 8, TOTAL = ROWS * CHUNKS;
  static constexpr bool EVEN = THREADS % CHUNKS == 0 && TOTAL % THREADS == 0 && THREADS / CHUNKS % 8 == 0;
  static constexpr int PASSES = ceil_div(TOTAL, THREADS), PASS_ROWS = THREADS / CHUNKS;
};

// Starts copies of ROWS rows of ROW elements; row r comes from base + (first + r) * stride, rows at or past `limit`
// arrive as zeros.
template <int ROW, int ROWS>
DEVICE void copy_rows(u32 shared, const bf16* base, u32 stride, int first, int limit) {
  using Plan = CopyPlan<ROW, ROWS>;
  if constexpr (Plan::EVEN) {
    const int thread = (int)opaque(threadIdx.x), row = thread / Plan::CHUNKS, chunk = thread % Plan::CHUNKS;
    const void* from = base + (u64)(u32)(first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < Plan::PASSES; ++i) {
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk) + i * Plan::PASS_ROWS * ROW * 2, from,
                    first + row + i * Plan::PASS_ROWS < limit ? 16 : 0);
      from = opaque((const bf16*)from + Plan::PASS_ROWS * stride);
    }
  } else {
#pragma unroll 4
    for (int at = (int)threadIdx.x; at < Plan::TOTAL; at += THREADS) {
      const int row = at / Plan::CHUNKS, chunk = at % Plan::CHUNKS;
      const bf16* from = base + (u64)(u32)(first + row) * stride + chunk * 8;
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk), from, first + row < limit ? 16 : 0);
    }
  }
}

// As copy_rows, with the row numbers taken from list entries in shared memory; an entry with expire 0 is padding and
// gives zeros.
template <int ROW, int ROWS>
DEVICE void gather_rows(u32 shared, const bf16* base, u32 stride, const int2* entries) {
  using Plan = CopyPlan<ROW, ROWS>;
  if constexpr (Plan::EVEN) {
    const int thread = (int)opaque(threadIdx.x), row = thread / Plan::CHUNKS, chunk = thread % Plan::CHUNKS;
#pragma unroll
    for (int i = 0; i < Plan::PASSES; ++i) {
      const int2 entry = entries[row + i * Plan::PASS_ROWS];
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk) + i * Plan::PASS_ROWS * ROW * 2,
                    base + (u64)(u32)entry.x * stride + chunk * 8, entry.y > 0 ? 16 : 0);
    }
  } else {
#pragma unroll 4
    for (int at = (int)threadIdx.x; at < Plan::TOTAL; at += THREADS) {
      const int row = at / Plan::CHUNKS, chunk = at % Plan::CHUNKS;
      const int2 entry = entries[row];
      copy_async_16(shared + SwizzledTile<ROW>::offset(row, chunk), base + (u64)(u32)entry.x * stride + chunk * 8,
                    entry.y > 0 ? 16 : 0);
    }
  }
}
