// The PTX wrappers of common/mma.cuh and common/reduce_add.cuh on the CPU.
inline float bf16_half(u32 pair, int half) { return half ? bf16_high(pair) : bf16_low(pair); }

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Operands { u32 a[4], b[2]; float c[4]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  emu::warp_op(&mine, d, [](emu::Warp& warp) {
    static float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& x = *(const Operands*)warp.in[lane];
      const int g = lane / 4, t = lane % 4;
      for (int h = 0; h < 2; ++h) {
        for (int part = 0; part < 4; ++part) left[g + part % 2 * 8][2 * t + part / 2 * 8 + h] = bf16_half(x.a[part], h);
        for (int part = 0; part < 2; ++part) right[2 * t + part * 8 + h][g] = bf16_half(x.b[part], h);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& x = *(const Operands*)warp.in[lane];
      for (int r = 0; r < 4; ++r) {
        const int row = lane / 4 + r / 2 * 8, column = 2 * (lane % 4) + r % 2;
        float sum = x.c[r];
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        ((float*)warp.out[lane])[r] = sum;
      }
    }
  });
}

inline void emulate_load_matrix(u32 (&r)[4], u32 shared, bool transposed) {
  if (shared % 16) {
    std::fprintf(stderr, "matrix row at shared %u\n", shared);
    std::abort();
  }
  emu::warp_op(&shared, r, [transposed](emu::Warp& warp) {
    for (int m = 0; m < 4; ++m) {
      unsigned short matrix[8][8];
      for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], shared_memory + *(const u32*)warp.in[m * 8 + row], 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const u32 low = transposed ? matrix[2 * t][g] : matrix[g][2 * t], high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
        ((u32*)warp.out[lane])[m] = low | high << 16;
      }
    }
  });
}
DEVICE void load_matrix_x4(u32 (&r)[4], u32 shared) { emulate_load_matrix(r, shared, false); }
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 shared) { emulate_load_matrix(r, shared, true); }
DEVICE void store_shared_32(u32 shared, u32 value) { std::memcpy(shared_memory + shared, &value, 4); }
DEVICE uint4 load_shared_128(u32 shared) { return *(const uint4*)(shared_memory + shared); }

inline u32 round_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
DEVICE float exp2_fast(float x) { return exp2f(x); }

DEVICE void reduce_add_f32x4(float* to, float a, float b, float c, float d) {
  if ((u64)to % 16) std::abort();
  to[0] += a;
  to[1] += b;
  to[2] += c;
  to[3] += d;
}
