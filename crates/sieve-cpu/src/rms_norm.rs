//! RMSNorm over the last axis, forward and backward.

use rayon::prelude::*;

use crate::simd::{dot, vectorize};

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
        .for_each(|(y, x)| {
            vectorize(|| {
                for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                    let rstd = reciprocal_rms(x, eps);
                    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                        *y = w * (x * rstd);
                    }
                }
            });
        });
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
            vectorize(|| {
                for ((dx, x), dy) in dx
                    .chunks_exact_mut(d)
                    .zip(x.chunks_exact(d))
                    .zip(dy.chunks_exact(d))
                {
                    norm_row_backward(x, weight, eps, dy, dx, &mut dweight);
                }
            });
            dweight
        })
        .collect();
    add_partials(&partial, dweight);
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn reciprocal_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// One row of the backward pass: writes dx, adds to dweight.
#[inline(always)]
pub(crate) fn norm_row_backward(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let d = x.len();
    let rstd = reciprocal_rms(x, eps);
    // dx holds g = dy * weight for a moment: its dot product with x is needed before dx itself.
    for (((dx, &x), (&dy, &w)), dweight) in
        dx.iter_mut().zip(x).zip(dy.iter().zip(weight)).zip(dweight)
    {
        *dweight += dy * (x * rstd);
        *dx = dy * w;
    }
    let projection = dot(dx, x) / d as f32 * rstd * rstd;
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
