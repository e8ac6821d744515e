inline float emu_bf(u32 p, int h) { return h ? bf16_high(p) : bf16_low(p); }
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct In { u32 a[4], b[2]; float c[4]; } in; memcpy(in.a, a, 16); in.b[0] = b0; in.b[1] = b1; memcpy(in.c, d, 16);
  emu::warp_op(&in, d, [](emu::Warp& w) {
    static float A[16][16], B[16][8];
    for (int l = 0; l < 32; ++l) { const In* x = (const In*)w.in[l]; int g = l / 4, t = l % 4;
      for (int h = 0; h < 2; ++h) {
        A[g][2*t+h] = emu_bf(x->a[0], h); A[g+8][2*t+h] = emu_bf(x->a[1], h); A[g][2*t+8+h] = emu_bf(x->a[2], h); A[g+8][2*t+8+h] = emu_bf(x->a[3], h);
        B[2*t+h][g] = emu_bf(x->b[0], h); B[2*t+8+h][g] = emu_bf(x->b[1], h); } }
    for (int l = 0; l < 32; ++l) { const In* x = (const In*)w.in[l]; int g = l / 4, t = l % 4; float* o = (float*)w.out[l];
      for (int r = 0; r < 4; ++r) { int i = g + (r / 2) * 8, j = 2 * t + r % 2; float s = x->c[r]; for (int k = 0; k < 16; ++k) s += A[i][k] * B[k][j]; o[r] = s; } }
  });
}
inline void emu_ldm(u32 (&r)[4], u32 addr, bool trans) {
  if (addr % 16) { fprintf(stderr, "ldmatrix alignment\n"); abort(); }
  emu::warp_op(&addr, r, [trans](emu::Warp& w) {
    static unsigned short M[8][8];
    for (int m = 0; m < 4; ++m) {
      for (int i = 0; i < 8; ++i) memcpy(M[i], shared_memory + *(const u32*)w.in[m * 8 + i], 16);
      for (int l = 0; l < 32; ++l) { int g = l / 4, t = l % 4; u32 lo = trans ? M[2*t][g] : M[g][2*t], hi = trans ? M[2*t+1][g] : M[g][2*t+1]; ((u32*)w.out[l])[m] = lo | hi << 16; }
    }
  });
}
DEVICE void load_matrix_x4(u32 (&r)[4], u32 s) { emu_ldm(r, s, false); }
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 s) { emu_ldm(r, s, true); }
DEVICE void store_shared_32(u32 s, u32 v) { memcpy(shared_memory + s, &v, 4); }
DEVICE uint4 load_shared_128(u32 s) { uint4 r; memcpy(&r, shared_memory + s, 16); return r; }
inline u32 emu_round(float x) { u32 u = __float_as_uint(x); if (x != x) return 0x7fff; return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
DEVICE u32 pack_bf16(float low, float high) { return emu_round(low) | emu_round(high) << 16; }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE void reduce_add_f32x4(float* p, float a, float b, float c, float d) { if ((u64)p % 16) abort(); p[0] += a; p[1] += b; p[2] += c; p[3] += d; }
