// wgmma: warpgroup-wide bf16 matrix products with f32 accumulators (sm_90a), m64nNk16, operands in 128-byte swizzled
// shared memory.
// Accumulator d[N / 2] of thread 32 w + 4 g + t: d[4 n], d[4 n + 1] row 16 w + g, columns 8 n + 2 t, 8 n + 2 t + 1;
// d[4 n + 2], d[4 n + 3] row + 8.
// A in registers: a[0], a[1] rows g, g + 8, columns 2 t, 2 t + 1; a[2], a[3] the same rows, columns + 8 (so
// accumulators, packed, are an operand).
// A tile in shared memory is made of blocks of 64 columns: rows of 128 bytes, 16-byte chunk c of row r at place c ^
// (r % 8), address a multiple of 1024.
// The operand lists below are written out because inline assembly has no loops; N follows from the accumulator's size.
#pragma once
#include "common/types.cuh"

// Descriptor of a tile whose 64-column blocks run along the summed dimension. The next 16 columns begin 32 bytes later.
DEVICE u64 wgmma_along(u32 shared) { return (u64)0x40000040u << 32 | (shared >> 4 | 1u << 16); }
// Descriptor of a tile whose rows are the summed dimension (TRANSPOSE 1); the next 64 columns lie `block_bytes`
// further, the next 16 rows 2048 bytes.
DEVICE u64 wgmma_across(u32 shared, u32 block_bytes) {
  return (u64)0x40000040u << 32 | (shared >> 4 | block_bytes >> 4 << 16);
}
// Descriptor of an operand (A or B) of 8 columns along K, without a swizzle, rows of 16 bytes side by side. A step sums
// K = 16: columns 8 to 15 read the same 8 again, so every product is counted twice (split_step.cuh halves its numbers).
DEVICE u64 wgmma_unswizzled(u32 shared) { return (u64)8 << 32 | shared >> 4; }
// Moves a descriptor `bytes` further; the sum never carries from the address into the other fields.
DEVICE u64 wgmma_step(u64 descriptor, u32 bytes) { return descriptor >> 32 << 32 | ((u32)descriptor + (bytes >> 4)); }
// The calling thread's warpgroup, in a form that the compiler sees is the same for a whole warp.
DEVICE int warpgroup_index() { return __shfl_sync(~0u, (int)threadIdx.x / 128, 0); }

// Orders writes of registers before the GEMMs that read them; needed before the first GEMM too.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of asynchronous GEMMs, which wgmma_wait counts.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the newest groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Makes shared memory written by ordinary stores and cp.async visible to this thread's wgmma and bulk copies.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sets the registers of each thread of the calling warpgroup.
template <int REGISTERS>
DEVICE void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// d = a b, or with `accumulate` d += a b, where d is 64 x N: a and b are read from shared memory, or a from registers.
// TRANSPOSE 1: the operand's descriptor comes from wgmma_across. All 128 threads of a warpgroup call it; the GEMM runs
// on, and wgmma_wait waits for it.

// d has 32 columns; a and b are read from shared memory.
template <int TRANSPOSE_A, int TRANSPOSE_B>
DEVICE void wgmma(float (&d)[16], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, %19, %20;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
// d has 64 columns; a and b are read from shared memory.
template <int TRANSPOSE_A, int TRANSPOSE_B>
DEVICE void wgmma(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, %35, %36;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
// d has 64 columns; a is read from registers, b from shared memory.
template <int TRANSPOSE_B>
DEVICE void wgmma(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));
}
// d has 128 columns; a and b are read from shared memory.
template <int TRANSPOSE_A, int TRANSPOSE_B>
DEVICE void wgmma(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
// d has 128 columns; a is read from registers, b from shared memory.
template <int TRANSPOSE_B>
DEVICE void wgmma(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));
}

// Rounds 16 STEPS columns of an accumulator, from element FIRST on, to bf16: the A operands of STEPS steps of a wgmma,
// each in the order of stmatrix.
template <int FIRST = 0, int STEPS, int N>
DEVICE void pack_operand(u32 (&packed)[STEPS][4], const float (&x)[N]) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[step][i] = pack_bf16(x[FIRST + 8 * step + 2 * i], x[FIRST + 8 * step + 2 * i + 1]);
}

// Stores four 8x8 matrices: lanes 8m .. 8m + 7 pass the addresses of the rows of matrix m (16 bytes each).
DEVICE void store_matrix_x4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// GEMMs of a warpgroup on tiles of 64-column blocks; the caller closes the group.

// d = a b^T, or with `accumulate` d += a b^T, over COLUMNS columns: 64 rows of a tile of A_ROWS rows against 2 N rows
// of a tile of B_ROWS; a and b come from wgmma_along.
template <int COLUMNS, int A_ROWS, int B_ROWS, int N>
DEVICE void wgmma_rows(float (&d)[N], u64 a, u64 b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step)
    wgmma<0, 0>(d, wgmma_step(a, step / 4 * A_ROWS * 128 + step % 4 * 32),
                wgmma_step(b, step / 4 * B_ROWS * 128 + step % 4 * 32), accumulate || step > 0);
}

// d = weights b, or with `accumulate` d += weights b: 64 x 16 STEPS weights in registers, 16 STEPS rows of a tile of
// ROWS.
template <int ROWS, int STEPS, int N>
DEVICE void wgmma_weigh(float (&d)[N], const u32 (&weights)[STEPS][4], u32 tile, bool accumulate) {
  const u64 b = wgmma_across(tile, ROWS * 128);
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma<1>(d, weights[step], wgmma_step(b, step * 2048), accumulate || step > 0);
}

// d = a^T b over 64 PARTS rows: 64 columns of a, 2 N of b, each in blocks of 64 rows, `a_bytes` and `b_bytes` apart.
template <int PARTS, int N>
DEVICE void wgmma_columns_of(float (&d)[N], u32 a_block, u32 a_bytes, u32 b_block, u32 b_bytes) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const u64 a = wgmma_across(a_block + part * a_bytes, 0), b = wgmma_across(b_block + part * b_bytes, 0);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<1, 1>(d, wgmma_step(a, step * 2048), wgmma_step(b, step * 2048), part + step > 0);
  }
}

// d = a^T b over ROWS rows: 64 columns of a, 2 N of b, each in one block.
template <int ROWS, int N>
DEVICE void wgmma_columns(float (&d)[N], u32 a_block, u32 b_block) {
  const u64 a = wgmma_across(a_block, 0), b = wgmma_across(b_block, 0);
#pragma unroll
  for (int step = 0; step < ROWS / 16; ++step)
    wgmma<1, 1>(d, wgmma_step(a, step * 2048), wgmma_step(b, step * 2048), step > 0);
}
