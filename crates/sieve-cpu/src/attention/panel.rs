//! Small GEMMs of panels, the arithmetic of the attention tiles.
//!
//! A panel is a slice of rows `[f32; W]`, W a multiple of 16, so a row is a whole number of vectors and needs no bounds
//! checks. Only q and d_o are transposed, once a tile. The right operand is read as vectors, the left one element by
//! element (a broadcast).

use std::ops::{Deref, DerefMut};

use pulp::Simd;

/// Keys that are gathered into one block.
pub(crate) const BLOCK_KEYS: usize = 96;
/// Query rows (lanes) of one panel.
pub(crate) const LANES: usize = 64;

/// SIMD vectors that one iteration of a loop processes, so that their chains of dependent operations overlap.
pub(crate) const SIDE: usize = 4;

/// GEMMs run on ranges of keys that begin and end at multiples of this, so no remainder loops are needed.
pub(crate) const KEY_STEP: usize = 8;

/// A value aligned to a cache line, so that none of its vectors is split over two lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

impl<T> Deref for Aligned<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// `c = a b`, or `c += a b` with `accumulate`.
///
/// # Shapes
/// - a: `[m, K]` with m a multiple of [`KEY_STEP`], b: `[K, W]`, c: `[m, W]`
#[inline(always)]
pub(crate) fn multiply<S: Simd, const K: usize, const W: usize>(
    simd: S,
    a: &[[f32; K]],
    b: &[[f32; W]; K],
    c: &mut [[f32; W]],
    accumulate: bool,
) {
    // MR rows times NV vectors are accumulated in registers. AVX-512 (16 lanes) has 32 registers: 16 are used, or 8
    // where W is one vector wide. AVX2 (8 lanes) has 16: 8 are used. Four lanes stand for scalar code.
    match (S::F32_LANES, W) {
        (16, 64) => multiply_rows::<S, 4, 4, K, W>(simd, a, b, c, accumulate),
        (16, 32) => multiply_rows::<S, 8, 2, K, W>(simd, a, b, c, accumulate),
        (16, _) => multiply_rows::<S, 8, 1, K, W>(simd, a, b, c, accumulate),
        (4, _) => multiply_rows::<S, 4, 4, K, W>(simd, a, b, c, accumulate),
        (_, _) => multiply_rows::<S, 4, 2, K, W>(simd, a, b, c, accumulate),
    }
}

/// [`multiply`] in blocks of MR rows and NV vectors of `S::F32_LANES` columns.
#[inline(always)]
fn multiply_rows<S: Simd, const MR: usize, const NV: usize, const K: usize, const W: usize>(
    simd: S,
    a: &[[f32; K]],
    b: &[[f32; W]; K],
    c: &mut [[f32; W]],
    accumulate: bool,
) {
    let (a, _) = a.as_chunks::<MR>();
    let (c, _) = c.as_chunks_mut::<MR>();
    for (a, c) in a.iter().zip(c) {
        let mut col = 0;
        while col < W / S::F32_LANES {
            let mut sum = start::<S, MR, NV, W>(simd, c, col, accumulate);
            for k in 0..K {
                let (b, _) = S::as_simd_f32s(&b[k]);
                for m in 0..MR {
                    let x = simd.splat_f32s(a[m][k]);
                    for v in 0..NV {
                        sum[m][v] = simd.mul_add_e_f32s(x, b[col + v], sum[m][v]);
                    }
                }
            }
            finish::<S, MR, NV, W>(sum, c, col);
            col += NV;
        }
    }
}

/// `c += a^T b`.
///
/// # Shapes
/// - a: `[k, LANES]`, b: `[k, W]`, c: `[LANES, W]`
#[inline(always)]
pub(crate) fn multiply_transposed<S: Simd, const W: usize>(
    simd: S,
    a: &[[f32; LANES]],
    b: &[[f32; W]],
    c: &mut [[f32; W]; LANES],
) {
    // Sizes of the register blocks as in `multiply`.
    match (S::F32_LANES, W) {
        (16, 64) => transposed_rows::<S, 4, 4, W>(simd, a, b, c),
        (16, 32) => transposed_rows::<S, 8, 2, W>(simd, a, b, c),
        (16, _) => transposed_rows::<S, 8, 1, W>(simd, a, b, c),
        (4, _) => transposed_rows::<S, 4, 4, W>(simd, a, b, c),
        (_, _) => transposed_rows::<S, 4, 2, W>(simd, a, b, c),
    }
}

/// [`multiply_transposed`] in blocks of MR rows and NV vectors of `S::F32_LANES` columns.
#[inline(always)]
fn transposed_rows<S: Simd, const MR: usize, const NV: usize, const W: usize>(
    simd: S,
    a: &[[f32; LANES]],
    b: &[[f32; W]],
    c: &mut [[f32; W]; LANES],
) {
    let (c, _) = c.as_chunks_mut::<MR>();
    for (row, c) in c.iter_mut().enumerate() {
        let mut col = 0;
        while col < W / S::F32_LANES {
            let accumulate = true;
            let mut sum = start::<S, MR, NV, W>(simd, c, col, accumulate);
            for (a, b) in a.iter().zip(b) {
                let a = &a.as_chunks::<MR>().0[row];
                let (b, _) = S::as_simd_f32s(b);
                for m in 0..MR {
                    let x = simd.splat_f32s(a[m]);
                    for v in 0..NV {
                        sum[m][v] = simd.mul_add_e_f32s(x, b[col + v], sum[m][v]);
                    }
                }
            }
            finish::<S, MR, NV, W>(sum, c, col);
            col += NV;
        }
    }
}

/// Accumulators of MR rows from vector `col` on: the values of c, or 0 without `accumulate`.
#[inline(always)]
fn start<S: Simd, const MR: usize, const NV: usize, const W: usize>(
    simd: S,
    c: &[[f32; W]; MR],
    col: usize,
    accumulate: bool,
) -> [[S::f32s; NV]; MR] {
    let mut sum = [[simd.splat_f32s(0.0); NV]; MR];
    if accumulate {
        for m in 0..MR {
            let (c, _) = S::as_simd_f32s(&c[m]);
            sum[m].copy_from_slice(&c[col..col + NV]);
        }
    }
    sum
}

/// Stores the accumulators in c.
#[inline(always)]
fn finish<S: Simd, const MR: usize, const NV: usize, const W: usize>(
    sum: [[S::f32s; NV]; MR],
    c: &mut [[f32; W]; MR],
    col: usize,
) {
    for m in 0..MR {
        let (c, _) = S::as_mut_simd_f32s(&mut c[m]);
        c[col..col + NV].copy_from_slice(&sum[m]);
    }
}

/// Elementwise `row *= factor` for each row of a panel.
#[inline(always)]
pub(crate) fn scale_rows<S: Simd, const W: usize>(simd: S, c: &mut [[f32; W]; LANES], factor: &[f32; LANES]) {
    for (row, &factor) in c.iter_mut().zip(factor) {
        let factor = simd.splat_f32s(factor);
        for x in S::as_mut_simd_f32s(row).0 {
            *x = simd.mul_f32s(*x, factor);
        }
    }
}
