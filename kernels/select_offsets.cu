// select_offsets: where each row's tiles begin in a mask.
// Math       row_ptr[i] = sum of counts[.. i]
// Layout     counts i32 [rows]; mask i32: row_ptr [rows + 1] from word row_ptr_at on
// Buffers    counts, mask
// Defines    none
// Tiling     grid (1, 1, 1); 1024 threads, consecutive rows each; no dynamic shared memory
// Numerics   integers
// Edges      any number of rows; the sum stays below 2^31, as the mask has room for no more
#include "common/block_scan.cuh"

struct SelectOffsetsParams {
  u64 rows, row_ptr_at;
};

// One block adds up the counts of all rows; a thread has consecutive rows.
extern "C" __global__ void __launch_bounds__(1024)
    select_offsets(const i32* counts, i32* mask, const __grid_constant__ SelectOffsetsParams params) {
  __shared__ u32 warp_sums[32];
  const int rows = (int)params.rows, each = ceil_div(rows, 1024), first = min((int)threadIdx.x * each, rows),
            end = min(first + each, rows);
  i32* row_ptr = mask + params.row_ptr_at;
  u32 sum = 0, total;
  for (int row = first; row < end; ++row) sum += (u32)counts[row];
  u32 at = block_exclusive_sum<1024>(sum, warp_sums, total);
  for (int row = first; row < end; ++row) {
    row_ptr[row] = (i32)at;
    at += (u32)counts[row];
  }
  if (threadIdx.x == 0) row_ptr[rows] = (i32)total;
}
