// hopper_chosen_gradients: what gradients of attention over chosen blocks share on Hopper: causal masks of transposed
// scores, dk and dq of a block's keys from dS^T, and adds of a run's dk and dv to global memory.
// Defines    as hopper_chosen.cuh, with GRADIENT 1
#pragma once
#include "common/hopper_chosen.cuh"
#include "common/reduce_add.cuh"
#include "common/semaphores.cuh"

// Computes 64 columns of dq = dS K: dS^T of 64 keys lies in shared memory at `ds`, rows are keys. Starts the GEMM and
// closes its group; all 128 threads of a consumer call it.
DEVICE void multiply_keys(float (&dq)[32], u32 ds, u32 keys) {
  wgmma_columns<64>(dq, ds, keys);
  wgmma_commit();
}

// Zeros the thread's values of a tile of 64 keys x 64 rows of queries, P^T or dS^T, where the row does not see the key.
// `places` is the shared address of the 64 rows' places, `first` the number of the first key in the run.
DEVICE void zero_hidden(float (&values)[32], u32 places, int first = 0) {
  const int thread = (int)opaque(threadIdx.x), key = first + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int2 two = load_shared_int2(places + (8 * n + thread % 4 * 2) * 4);  // of two columns
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (key + x / 2 * 8 >= place_seen(x % 2 ? two.y : two.x)) values[4 * n + x] = 0.0f;
  }
}

// dK += dS^T Q, and partial dQ = dS K, stored through the tile of q in shared memory, for consumer `warpgroup`, 0 or 1,
// all threads of which call it. `gradient` is dS^T of 64 keys and 64 rows, `parts` the first partial result of the
// launch. On return the warpgroup's earlier GEMMs are complete, too.
DEVICE void query_gradient(float (&dk)[HEAD_DIM / 2], const u32 (&gradient)[4][4], bf16* parts, u32 q, u32 places,
                           const RunInWork& run, u32 shared, int warpgroup) {
  const u32 ds = shared + DS_AT + warpgroup * DS_BYTES;
  barrier_sync(DS_FREE + warpgroup, 128);  // the warpgroup's last product with dS^T is done for all its warps
  store_warp_rows(ds, gradient);
  wgmma_fence();
  weigh_rows<ROWS>(dk, gradient, q, true);  // needs no other warp and covers the barrier
  fence_async_proxy();                      // for dS^T
  barrier_sync(DS_READY + warpgroup, 128);
  // dQ is computed 64 columns at a time: all of them would not fit the registers.
  float dq[32];
  u32 packed[4][4];
  wgmma_fence();
  multiply_keys(dq, ds, run.dq_keys());
  wgmma_wait<0>();  // dK too
  barrier_sync(ROWS_READ + warpgroup, 128);  // no warp of the warpgroup reads these rows of q any more
  pack_operand(packed, dq);
#pragma unroll
  for (int h = 1; h < HEAD_DIM / 64; ++h) {
    wgmma_fence();
    multiply_keys(dq, ds, run.dq_keys() + h * KEYS * 128);
    store_parts(parts + (h - 1) * 64, q + (h - 1) * ROWS * 128, places, packed);
    wgmma_wait<0>();
    pack_operand(packed, dq);
  }
  store_parts(parts + HEAD_DIM - 64, q + (HEAD_DIM / 64 - 1) * ROWS * 128, places, packed);
}

#if SPLIT_KEYS
// dK += dS^T Q of the warpgroup's 64 keys, and 64 columns of dQ = dS K over the keys of both, stored through shared
// memory: consumer `warpgroup`, 0 or 1, has columns 64 `warpgroup` on. Both consumers call it, all threads of each, with
// the dS^T of one tile of rows. Tiles of dS^T are used alternately, so at tile `tiles` no product reads the others any
// more once the consumers have met, and the warpgroup's other one takes its part of dQ.
DEVICE void shared_query_gradient(float (&dk)[HEAD_DIM / 2], const u32 (&gradient)[4][4], bf16* parts, u32 q, u32 places,
                                  const RunInWork& run, u32 shared, int warpgroup, u32 tiles) {
  const u32 ds = shared + DS_AT + tiles % 2 * (NUM_CONSUMERS * DS_BYTES),
            other = shared + DS_AT + (tiles + 1) % 2 * (NUM_CONSUMERS * DS_BYTES) + warpgroup * DS_BYTES;
  store_warp_rows(ds + warpgroup * DS_BYTES, gradient);
  wgmma_fence();
  weigh_rows<ROWS>(dk, gradient, q, true);  // needs no other warp and covers the barrier
  fence_async_proxy();                      // for dS^T
  barrier_sync(CONSUMERS_MEET, NUM_CONSUMERS * 128);
  float dq[32];
  u32 packed[4][4];
  wgmma_fence();
  wgmma_columns_of<2>(dq, ds, DS_BYTES, run.keys() + warpgroup * KEYS * 128, 64 * 128);
  wgmma_commit();
  wgmma_wait<0>();  // dK too
  pack_operand(packed, dq);
  store_parts(parts + warpgroup * 64, other, places, packed);
}
#endif

// Adds the thread's two keys, `first` and `first` + 8 of the run's `num_keys`, to the sums of their rows; `first_row`
// is that of the run's first key. A quad writes 64 contiguous bytes: columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16 side by
// side.
DEVICE void add_rows(float* sums, u64 first_row, int first, int num_keys, const float (&x)[HEAD_DIM / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= num_keys) continue;
    float* row = sums + (first_row + first + 8 * r) * HEAD_DIM + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n)
      reduce_add_f32x4(row + n * 16, x[8 * n + 2 * r], x[8 * n + 2 * r + 1], x[8 * n + 4 + 2 * r],
                       x[8 * n + 5 + 2 * r]);
  }
}
