//! Softmax of attention in powers of two: the result does not depend on when a query meets its largest logit.
//!
//! An online softmax subtracts the largest logit so far, and rescales earlier sums when a larger one comes. With
//! `e^x = 2^n e^r`, where n and r depend on the logit x alone, it is enough to subtract the largest n so far: each
//! factor is then a power of two, by which a sum is multiplied without rounding. So sums are equal to the bit for any
//! division of the keys into blocks, as long as the keys come in the same order. (A term below 2^-126 of the largest is
//! 0, but it is added if it comes before the largest one. Where the largest terms have values of exactly 0, such an
//! output may depend on the blocks.)
//!
//! Powers are stored as n + [`ROUND`], a float whose low bits are n.

use pulp::Simd;

use crate::simd::{EXPONENT, ONE, ROUND, exp_parts, power_of};

/// Logits above this, 2^21, count as this one: their power would leave the bits in which it is stored.
const LARGEST_LOGIT: f32 = 2_097_152.0;

/// The power of a query that has seen no key. Logits below -2^21 have no larger one and count as not seen.
pub(crate) const NO_POWER: f32 = ROUND - 3_025_551.0;

/// Terms of smaller powers than the largest by more than this are 0.
const SMALLEST: f32 = -126.0;

/// The powers of some queries' largest logits.
#[derive(Clone, Copy)]
pub(crate) struct Powers<V, U> {
    /// n + [`ROUND`].
    pub(crate) power: V,
    /// Smallest power whose term is not 0.
    smallest: V,
    /// Added to the exponent's bits of a term.
    bits: U,
}

impl<V: Copy, U: Copy> Powers<V, U> {
    /// The powers of these logits, at least [`NO_POWER`].
    #[inline(always)]
    pub(crate) fn of<S: Simd<f32s = V, u32s = U>>(simd: S, logits: V) -> Self {
        Self::new(simd, power_of(simd, logits)).or_larger(simd, simd.splat_f32s(NO_POWER))
    }

    /// `power` is n + [`ROUND`]: what [`probability`] and [`rescaling`] need follows from its bits.
    #[inline(always)]
    fn new<S: Simd<f32s = V, u32s = U>>(simd: S, power: V) -> Self {
        let n = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(power), simd.splat_u32s(EXPONENT));
        Self {
            power,
            smallest: simd.add_f32s(power, simd.splat_f32s(SMALLEST)),
            bits: simd.sub_u32s(simd.splat_u32s(ONE), n),
        }
    }

    /// The larger of these and `power`.
    #[inline(always)]
    pub(crate) fn or_larger<S: Simd<f32s = V, u32s = U>>(self, simd: S, power: V) -> Self {
        Self::new(simd, simd.max_f32s(self.power, power))
    }
}

/// Logits up to [`LARGEST_LOGIT`], and whether one was larger. An infinite logit becomes NaN.
#[inline(always)]
pub(crate) fn within_range<S: Simd>(simd: S, logits: S::f32s) -> (S::f32s, bool) {
    let largest = simd.splat_f32s(LARGEST_LOGIT);
    let is_larger = simd.greater_than_f32s(logits, largest);
    let limited = simd.add_f32s(largest, simd.sub_f32s(logits, logits));
    (simd.select_f32s(is_larger, limited, logits), simd.first_true_m32s(is_larger) < S::F32_LANES)
}

/// `e^x / 2^n` with the largest power n; 0 for x = -inf.
#[inline(always)]
pub(crate) fn probability<S: Simd>(simd: S, x: S::f32s, largest: Powers<S::f32s, S::u32s>) -> S::f32s {
    let (y, power) = exp_parts(simd, x);
    let y = simd.mul_f32s(y, power_of_two(simd, power, largest));
    simd.select_f32s(simd.less_than_f32s(power, largest.smallest), simd.splat_f32s(0.0), y)
}

/// The factor on sums relative to the power `old` that makes them relative to `new`, and whether it is 1 in all lanes.
#[inline(always)]
pub(crate) fn rescaling<S: Simd>(simd: S, old: S::f32s, new: Powers<S::f32s, S::u32s>) -> (S::f32s, bool) {
    let is_zero = simd.less_than_f32s(old, new.smallest);
    let factor = simd.select_f32s(is_zero, simd.splat_f32s(0.0), power_of_two(simd, old, new));
    let same = simd.equal_f32s(old, new.power);
    (factor, simd.first_true_m32s(simd.not_m32s(same)) == S::F32_LANES)
}

/// 2 to the difference of two powers, which is between -126 and 0.
#[inline(always)]
fn power_of_two<S: Simd>(simd: S, power: S::f32s, largest: Powers<S::f32s, S::u32s>) -> S::f32s {
    let n = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(power), simd.splat_u32s(EXPONENT));
    simd.transmute_f32s_u32s(simd.add_u32s(n, largest.bits))
}

/// The log-sum-exp of a query's logits from its largest power and its sum; -inf without a key.
pub(crate) fn log_sum_exp(power: f32, sum: f32) -> f32 {
    let n = f64::from(power) - f64::from(ROUND);
    if sum == 0.0 { f32::NEG_INFINITY } else { (n * std::f64::consts::LN_2 + f64::from(sum).ln()) as f32 }
}
