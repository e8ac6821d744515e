// The PTX instructions of the portable kernels in plain C++. The emulator turns each asm statement into a call: the name is the opcode with _
// for . and ::, the arguments are the operands in the order of the instruction, numbers among them.
inline unsigned ptx_round_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void ptx_cvt_rn_bf16x2_f32(unsigned& word, float high, float low) { word = ptx_round_bf16(low) | ptx_round_bf16(high) << 16; }
inline void ptx_cvt_rn_bf16_f32(unsigned short& bits, float x) { bits = (unsigned short)ptx_round_bf16(x); }
// The nearest of the eight-bit floats, of two the even one; magnitudes grow with their codes up to `largest`.
inline unsigned ptx_round_fp8(float x, int mantissa_bits, int bias, unsigned largest) {
  if (x != x) return 0x7f;
  unsigned nearest = 0;
  double off = std::fabs((double)x);
  for (unsigned code = 1; code <= largest; ++code) {
    const int exponent = code >> mantissa_bits;
    const double fraction = (double)(code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits);
    const double value = std::ldexp(fraction + (exponent > 0), (exponent > 0 ? exponent : 1) - bias);
    const double distance = std::fabs(std::fabs((double)x) - value);
    if (distance < off || (distance == off && code % 2 == 0)) nearest = code, off = distance;
  }
  return nearest | (std::signbit(x) ? 0x80 : 0);
}
inline void ptx_cvt_rn_satfinite_e4m3x2_f32(unsigned short& pair, float high, float low) {
  pair = (unsigned short)(ptx_round_fp8(low, 3, 7, 0x7e) | ptx_round_fp8(high, 3, 7, 0x7e) << 8);
}
inline void ptx_cvt_rn_satfinite_e5m2x2_f32(unsigned short& pair, float high, float low) {
  pair = (unsigned short)(ptx_round_fp8(low, 2, 15, 0x7b) | ptx_round_fp8(high, 2, 15, 0x7b) << 8);
}
inline void ptx_ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }

inline void ptx_st_global_v4_b32(void* to, unsigned x, unsigned y, unsigned z, unsigned w) {
  if ((unsigned long long)to % 16) std::abort();
  *(uint4*)to = {x, y, z, w};
}
inline void ptx_st_shared_b32(unsigned to, unsigned x) { std::memcpy(emu::shared_pointer(to), &x, 4); }
inline void ptx_ld_shared_v4_b32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned from) {
  const uint4 words = *(const uint4*)emu::shared_pointer(from);
  x = words.x, y = words.y, z = words.z, w = words.w;
}
// Adds 1 where `difference` is 0.
inline void ptx_block_red_shared_add_u32(unsigned address, unsigned difference) {
  if (difference == 0) ++*(unsigned*)emu::shared_pointer(address);
}

// cp.async: a copy lands when its group is waited for, not before.
inline void emulate_copy(unsigned shared, const void* global, int size, unsigned bytes) {
  if (shared % size || (unsigned long long)global % size) {
    std::fprintf(stderr, "copy of %d bytes from %p to shared %x\n", size, global, shared);
    std::abort();
  }
  emu::fibers[emu::current].open.push_back({emu::shared_pointer(shared), global, size, (int)bytes});
}
inline void ptx_cp_async_cg_shared_global(unsigned shared, const void* global, int size, unsigned bytes) { emulate_copy(shared, global, size, bytes); }
inline void ptx_cp_async_ca_shared_global(unsigned shared, const void* global, int size, unsigned bytes) { emulate_copy(shared, global, size, bytes); }
inline void ptx_cp_async_commit_group() {
  emu::Fiber& fiber = emu::fibers[emu::current];
  fiber.groups.push_back(fiber.open);
  fiber.open.clear();
}
inline void ptx_cp_async_wait_group(int pending) {
  std::vector<std::vector<emu::Copy>>& groups = emu::fibers[emu::current].groups;
  for (; (int)groups.size() > pending; groups.erase(groups.begin()))
    for (const emu::Copy& copy : groups[0]) {
      std::memset(copy.to, 0, copy.size);
      if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
    }
}
inline void ptx_bar_sync(int number, int threads) { emu::named_barrier(number, threads); }

// m16n8k16 of bf16 with f32 sums; d and c are the same registers here.
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                                  unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
  struct Operands { unsigned a[4], b[2]; float c[4]; } mine = {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
  float d[4];
  emu::warp_op(&mine, d, [](emu::Warp& warp) {
    const auto half = [](unsigned pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); };
    static float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& x = *(const Operands*)warp.in[lane];
      const int g = lane / 4, t = lane % 4;
      for (int h = 0; h < 2; ++h) {
        for (int part = 0; part < 4; ++part) left[g + part % 2 * 8][2 * t + part / 2 * 8 + h] = half(x.a[part], h);
        for (int part = 0; part < 2; ++part) right[2 * t + part * 8 + h][g] = half(x.b[part], h);
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
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

inline void emulate_load_matrix(unsigned* r, unsigned shared, bool transposed) {
  if (shared % 16) {
    std::fprintf(stderr, "matrix row at shared %x\n", shared);
    std::abort();
  }
  emu::warp_op(&shared, r, [transposed](emu::Warp& warp) {
    for (int m = 0; m < 4; ++m) {
      unsigned short matrix[8][8];
      for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], emu::shared_pointer(*(const unsigned*)warp.in[m * 8 + row]), 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const unsigned low = transposed ? matrix[2 * t][g] : matrix[g][2 * t], high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
        ((unsigned*)warp.out[lane])[m] = low | high << 16;
      }
    }
  });
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned shared) {
  unsigned r[4];
  emulate_load_matrix(r, shared, false);
  a = r[0], b = r[1], c = r[2], d = r[3];
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned shared) {
  unsigned r[4];
  emulate_load_matrix(r, shared, true);
  a = r[0], b = r[1], c = r[2], d = r[3];
}
