//! Run-time choice of the instruction set, and the vector pieces that kernels share.

use pulp::{Arch, Simd};

/// Runs `f` compiled for the best instruction set of this CPU. What `f` calls must be `#[inline(always)]` to profit.
#[inline(always)]
pub(crate) fn vectorize<R>(f: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(f)
}

/// `sum a_i b_i` in 32 running sums, added in a fixed order at the end.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 32];
    let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<32>(), b.as_chunks::<32>());
    for (a_chunk, b_chunk) in a_chunks.iter().zip(b_chunks) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(a_chunk).zip(b_chunk) {
            *lane += x * y;
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane += x * y;
    }
    fold(lanes)
}

/// The sum of 32 lanes, as a tree.
#[inline(always)]
pub(crate) fn fold(mut lanes: [f32; 32]) -> f32 {
    let mut width = 16;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `e^x` within 2 ulp, in plain operations that vectorise. Below -87.33 the result is 0, above 88.37 infinity; NaN stays.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // x = n ln 2 + r; adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = EXP_POLY[0];
    p = p * r + EXP_POLY[1];
    p = p * r + EXP_POLY[2];
    p = p * r + EXP_POLY[3];
    p = p * r + EXP_POLY[4];
    p = p * r + EXP_POLY[5];
    let y = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let y = y * scale;
    let y = if x < EXP_UNDERFLOW { 0.0 } else { y };
    if x > EXP_OVERFLOW { f32::INFINITY } else { y }
}

const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts: the first has so few bits that its product with n is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, highest power first (Cephes, expf).
const EXP_POLY: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];
const EXP_UNDERFLOW: f32 = -87.33;
const EXP_OVERFLOW: f32 = 88.37;

/// [`exp`] on a vector, with fused multiply-adds where the CPU has them.
#[inline(always)]
pub(crate) fn exp_vector<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let splat = |value| simd.splat_f32s(value);
    let shifted = simd.mul_add_e_f32s(x, splat(std::f32::consts::LOG2_E), splat(ROUND));
    let n = simd.sub_f32s(shifted, splat(ROUND));
    let r = simd.mul_add_e_f32s(n, splat(-LN2_HIGH), x);
    let r = simd.mul_add_e_f32s(n, splat(-LN2_LOW), r);
    let mut p = splat(EXP_POLY[0]);
    for &coefficient in &EXP_POLY[1..] {
        p = simd.mul_add_e_f32s(p, r, splat(coefficient));
    }
    let y = simd.add_f32s(simd.mul_add_e_f32s(p, simd.mul_f32s(r, r), r), splat(1.0));
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scale = simd.transmute_f32s_u32s(simd.add_u32s(bits, simd.splat_u32s(0x3f80_0000)));
    let y = simd.mul_f32s(y, scale);
    let y = simd.select_f32s(simd.less_than_f32s(x, splat(EXP_UNDERFLOW)), splat(0.0), y);
    simd.select_f32s(
        simd.greater_than_f32s(x, splat(EXP_OVERFLOW)),
        splat(f32::INFINITY),
        y,
    )
}
