// fp8_quantise: a bf16 matrix in fp8, as it is and transposed, with one scale for all of it.
// Math       s = max(amax, 2^-100) / largest, rows[r,c] = columns[c,r] = round(x[r,c] * (largest / max(amax, 2^-100)));
//            the product of two such matrices times both s is the product of the original ones. largest: 448 of e4m3,
//            57344 of e5m2
// Layout     x bf16 [num_rows, width] contiguous; amax [num_partials], bits of f32s, as fp8_amax writes them; rows
//            [num_rows, width] and columns [width, num_rows] bytes, contiguous; scale f32 [1]
// Buffers    x, amax, rows, columns, scale
// Defines    E5M2 (1: e5m2, 0: e4m3)
// Tiling     grid (ceil(width / 128), ceil(num_rows / 128)), the last rows first: the L2 still holds them from
//            fp8_amax; 256 threads; a thread transposes 8 x 8 elements in registers, and the tile in shared memory, so
//            that both copies are written in whole lines
// Numerics   one multiplication in f32, then one rounding to nearest even that saturates; a NaN in x makes all NaN;
//            memory-bound: 2 bytes read, 2 written
// Edges      num_rows and width multiples of 8
#include "common/bf16x8.cuh"

constexpr int NUM_THREADS = 256, NUM_WARPS = NUM_THREADS / 32, TILE = 128, SIDE = 8, UNITS = TILE / SIDE;
constexpr float LARGEST = E5M2 ? 57344.f : 448.f;

struct Fp8QuantiseParams { u64 num_rows, width, num_partials; };

// Two numbers rounded to fp8, the first in the lower byte.
DEVICE u32 round_fp8x2(float first, float second) {
  unsigned short pair;
#if E5M2
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
#else
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}
DEVICE u32 round_fp8x4(const float* x, float factor) {
  return round_fp8x2(__fmul_rn(x[0], factor), __fmul_rn(x[1], factor)) |
         round_fp8x2(__fmul_rn(x[2], factor), __fmul_rn(x[3], factor)) << 16;
}
// Transposes four words of four bytes: byte i of word j becomes byte j of word i.
DEVICE void turn(u32& a, u32& b, u32& c, u32& d) {
  const u32 ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const u32 cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410), b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

// A block converts a tile of 128 x 128 numbers; a thread has 8 x 8 of them, and then stores parts of eight of its
// transposed columns.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
fp8_quantise(const bf16* x, const u32* amax, unsigned char* rows, unsigned char* columns, float* scale,
             const __grid_constant__ Fp8QuantiseParams params) {
  __shared__ uint2 tile[TILE][UNITS];  // [column][unit of eight rows]; units are permuted by the column
  __shared__ u32 of_warps[NUM_WARPS];
  const int column_unit = threadIdx.x % UNITS, row_unit = threadIdx.x / UNITS;
  const u64 first_row = (u64)(gridDim.y - 1 - blockIdx.y) * TILE, first_column = (u64)blockIdx.x * TILE;
  const u64 row = first_row + row_unit * SIDE, column = first_column + column_unit * SIDE;
  const bool is_inside = row < params.num_rows && column < params.width;

  // Load; the maxima are loaded at the same time.
  uint4 words[SIDE];
  if (is_inside) {
#pragma unroll
    for (int i = 0; i < SIDE; i++) words[i] = load_16_bytes(x + (row + i) * params.width + column);
  }
  u32 largest = __float_as_uint(7.888609e-31f);
  for (u64 at = threadIdx.x; at < params.num_partials; at += NUM_THREADS) largest = max(amax[at], largest);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();  // every warp's maximum is stored
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; warp++) largest = max(of_warps[warp], largest);
  const float bound = __uint_as_float(largest), factor = LARGEST / bound;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale[0] = bound / LARGEST;

  // Round. Rows are stored to global memory, and transposed in shared memory, where they wait for the tile's other
  // rows.
  if (is_inside) {
    u32 low[SIDE], high[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
      float values[8];
      unpack_bf16x8(words[i], values);
      low[i] = round_fp8x4(values, factor), high[i] = round_fp8x4(values + 4, factor);
      *reinterpret_cast<uint2*>(rows + (row + i) * params.width + column) = make_uint2(low[i], high[i]);
    }
    turn(low[0], low[1], low[2], low[3]), turn(low[4], low[5], low[6], low[7]);
    turn(high[0], high[1], high[2], high[3]), turn(high[4], high[5], high[6], high[7]);
#pragma unroll
    for (int j = 0; j < SIDE; j++)
      tile[column_unit * SIDE + j][row_unit ^ column_unit] =
          j < 4 ? make_uint2(low[j], low[j + 4]) : make_uint2(high[j - 4], high[j]);
  }
  __syncthreads();  // all units of eight rows are stored

#pragma unroll
  for (int i = 0; i < TILE * UNITS / NUM_THREADS; i++) {
    const int place = i * NUM_THREADS + threadIdx.x, j = place / UNITS, unit = place % UNITS;
    const u64 to_column = first_column + j, to_row = first_row + unit * SIDE;
    if (to_column < params.width && to_row < params.num_rows)
      *reinterpret_cast<uint2*>(columns + to_column * params.num_rows + to_row) = tile[j][unit ^ (j / SIDE)];
  }
}
