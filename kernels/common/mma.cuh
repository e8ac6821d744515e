// mma: warp-wide bf16 MMAs with f32 accumulators (m16n8k16), their fragments, and the swizzle of their tiles in shared
// memory.
// Fragments, lane = 4 * g + t:
//   A 16x16  a[0] rows g, a[1] rows g + 8 (columns 2t, 2t + 1); a[2], a[3] the same rows, columns 2t + 8, 2t + 9
//   B 16x8   b0 rows 2t, 2t + 1, b1 rows 2t + 8, 2t + 9; column g
//   C 16x8   c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3] row g + 8
#pragma once
#include "common/types.cuh"

// The GEMM d += a b of one mma instruction, bf16 with f32 sums.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b over ROWS x 16 rows and the 16 columns from column tile `n` on; b holds b0, b1 of both column tiles.
template <int ROWS, int N>
DEVICE void mma_columns(float (&d)[ROWS][N][4], const u32 (&a)[ROWS][4], int n, const u32 (&b)[4]) {
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    mma_bf16(d[m][n], a[m], b[0], b[1]);
    mma_bf16(d[m][n + 1], a[m], b[2], b[3]);
  }
}

// Rounds C fragments of two neighbouring column tiles to an A fragment.
DEVICE void pack_fragment(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

// Loads four 8x8 matrices: lanes 8m .. 8m + 7 pass the addresses of the rows of matrix m (16 bytes each), r[m] receives
// its fragment.
DEVICE void load_matrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
// Like load_matrix_x4, with each matrix transposed.
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

DEVICE void store_shared_32(u32 shared, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}
// Loads the 16 bytes at a shared address, which is a multiple of 16.
DEVICE uint4 load_shared_128(u32 shared) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(shared)
               : "memory");
  return r;
}

// 2^x on the special function unit; exp2(-inf) = 0.
// kernels/notes/exponentials-as-polynomials.md has what a polynomial in its place cost.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A tile of rows of ROW_ELEMENTS bf16 in shared memory, without padding. The 16-byte chunks of a row are permuted by
// the row's index: ldmatrix reads the same chunk of eight successive rows, which then lie in eight different groups of
// four banks.
template <int ROW_ELEMENTS>
struct SwizzledTile {
  static_assert(ROW_ELEMENTS % 16 == 0, "rows are whole pairs of 16-byte chunks");
  static constexpr int CHUNKS = ROW_ELEMENTS / 8;
  static constexpr int ROW_BYTES = ROW_ELEMENTS * 2;
  // MASK: the bits of the chunk index that are xored with the row index; 2^SHIFT rows share a 128-byte line.
  static constexpr int MASK = CHUNKS % 8 == 0 ? 7 : CHUNKS % 4 == 0 ? 3 : 1;
  static constexpr int SHIFT = CHUNKS % 8 == 0 ? 0 : CHUNKS % 4 == 0 ? 1 : 2;

  // Byte offset of a chunk of a row.
  static DEVICE u32 offset(int row, int chunk) {
    return (u32)(row * ROW_BYTES + ((chunk ^ ((row >> SHIFT) & MASK)) << 4));
  }
  // The address `row` rows (a multiple of 8) and `chunk` chunks further than `at`. `at` is a tile's address (a multiple
  // of 128) plus the `offset` of a chunk whose index has no bit in common with `chunk`. It takes one xor; the rest
  // folds into the load's immediate.
  static DEVICE u32 step(u32 at, int row, int chunk) {
    return (at ^ (u32)((chunk & MASK) << 4)) + (u32)(row * ROW_BYTES + ((chunk & ~MASK) << 4));
  }
};

// d += A B^T over the columns of two tiles; `a_at` and `b_at` are the lane's addresses in the first rows of A and B.
template <class Tile, int ROWS, int N>
DEVICE void multiply_rows(float (&d)[ROWS][N][4], u32 a_at, u32 b_at) {
#pragma unroll
  for (int step = 0; step < Tile::CHUNKS / 2; ++step) {
    u32 a[ROWS][4];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) load_matrix_x4(a[m], Tile::step(a_at, m * 16, step * 2));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 b[4];
      load_matrix_x4(b, Tile::step(b_at, n * 8, step * 2));
      mma_columns(d, a, n, b);
    }
  }
}
