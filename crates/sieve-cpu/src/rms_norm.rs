//! RMSNorm over the last axis, forward and backward.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::simd::dot;

/// Rows one task handles; also the rows one partial weight gradient covers, so it fixes the order of that sum.
const ROWS: usize = 64;

/// `y = weight * x / sqrt(mean(x^2) + eps)` per row.
///
/// # Shapes
/// - x, y: `[rows, d]` with `d = weight.len()`; y is written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_forward(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let d = weight.len();
    assert!(
        d > 0 && x.len().is_multiple_of(d),
        "rms_norm_forward: x is not [rows, {d}]"
    );
    assert_eq!(x.len(), y.len(), "rms_norm_forward: y is not as long as x");
    y.par_chunks_mut(ROWS * d)
        .zip(x.par_chunks(ROWS * d))
        .for_each(|(y, x)| Arch::new().dispatch(Forward { x, weight, eps, y }));
}

/// Gradients of [`rms_norm_forward`]; the row statistics are computed again.
///
/// # Shapes
/// - x, dy, dx: `[rows, d]`; weight, dweight: `[d]`; dx and dweight are written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let d = weight.len();
    assert!(
        d > 0 && x.len().is_multiple_of(d),
        "rms_norm_backward: x is not [rows, {d}]"
    );
    assert_eq!(
        (dy.len(), dx.len()),
        (x.len(), x.len()),
        "rms_norm_backward: dy and dx must be as long as x"
    );
    assert_eq!(dweight.len(), d, "rms_norm_backward: dweight is not [{d}]");
    let partial: Vec<Vec<f32>> = dx
        .par_chunks_mut(ROWS * d)
        .zip(x.par_chunks(ROWS * d))
        .zip(dy.par_chunks(ROWS * d))
        .map(|((dx, x), dy)| {
            let mut dweight = vec![0.0; d];
            Arch::new().dispatch(Backward {
                x,
                weight,
                eps,
                dy,
                dx,
                dweight: &mut dweight,
            });
            dweight
        })
        .collect();
    add_partials(&partial, dweight);
}

struct Forward<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    y: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let d = self.weight.len();
        for (y, x) in self.y.chunks_exact_mut(d).zip(self.x.chunks_exact(d)) {
            let rstd = reciprocal_rms(simd, x, self.eps);
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(self.weight) {
                *y = w * (x * rstd);
            }
        }
    }
}

struct Backward<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    dy: &'a [f32],
    dx: &'a mut [f32],
    dweight: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let d = self.weight.len();
        let rows = self
            .dx
            .chunks_exact_mut(d)
            .zip(self.x.chunks_exact(d))
            .zip(self.dy.chunks_exact(d));
        for ((dx, x), dy) in rows {
            norm_row_backward(simd, x, self.weight, self.eps, dy, dx, self.dweight);
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn reciprocal_rms<S: Simd>(simd: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(simd, x, x) / x.len() as f32 + eps).sqrt()
}

/// One row of the backward pass: writes dx, adds to dweight.
#[inline(always)]
pub(crate) fn norm_row_backward<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let rstd = reciprocal_rms(simd, x, eps);
    // dx holds dy * weight for a moment: its dot product with x is needed before dx itself.
    for ((dx, &dy), &w) in dx.iter_mut().zip(dy).zip(weight) {
        *dx = dy * w;
    }
    for ((dweight, &dy), &x) in dweight.iter_mut().zip(dy).zip(x) {
        *dweight += dy * (x * rstd);
    }
    let projection = dot(simd, dx, x) / x.len() as f32 * rstd * rstd;
    for (dx, &x) in dx.iter_mut().zip(x) {
        *dx = rstd * (*dx - x * projection);
    }
}

/// Adds partial sums in their order; writes the whole of `total`.
pub(crate) fn add_partials(partial: &[Vec<f32>], total: &mut [f32]) {
    total.fill(0.0);
    for part in partial {
        for (total, &value) in total.iter_mut().zip(part) {
            *total += value;
        }
    }
}
