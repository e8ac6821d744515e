//! RMSNorm over the last axis, forward and backward.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::{dot, on_arch};

/// Rows of a parallel task. Each task sums its own weight gradient, so this also fixes the order of additions.
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
    assert!(d > 0 && x.len().is_multiple_of(d), "rms_norm_forward: x is not [rows, {d}]");
    assert_eq!(x.len(), y.len(), "rms_norm_forward: y is not as long as x");
    y.par_chunks_mut(ROWS * d).zip(x.par_chunks(ROWS * d)).for_each(|(y, x)| forward_rows(x, weight, eps, y));
}

/// Gradients of [`rms_norm_forward`]; the row statistics are recomputed.
///
/// # Shapes
/// - x, dy, dx: `[rows, d]`; weight, dweight: `[d]`; dx and dweight are written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm_backward(x: &[f32], weight: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dweight: &mut [f32]) {
    let d = weight.len();
    assert!(d > 0 && x.len().is_multiple_of(d), "rms_norm_backward: x is not [rows, {d}]");
    assert_eq!((dy.len(), dx.len()), (x.len(), x.len()), "rms_norm_backward: dy and dx must be as long as x");
    assert_eq!(dweight.len(), d, "rms_norm_backward: dweight is not [{d}]");
    let partial: Vec<Vec<f32>> = dx
        .par_chunks_mut(ROWS * d)
        .zip(x.par_chunks(ROWS * d))
        .zip(dy.par_chunks(ROWS * d))
        .map(|((dx, x), dy)| {
            let mut dweight = vec![0.0; d];
            backward_rows(x, weight, eps, dy, dx, &mut dweight);
            dweight
        })
        .collect();
    add_partials(&partial, dweight);
}

on_arch! {
    fn forward_rows<'a>(
        x: &'a [f32], weight: &'a [f32], eps: f32, y: &'a mut [f32],
    ) -> () = forward_rows_simd;
}

/// The forward pass of the rows of one task.
#[inline(always)]
fn forward_rows_simd<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let d = weight.len();
    for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
        let rstd = reciprocal_rms(simd, x, eps);
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
            *y = w * (x * rstd);
        }
    }
}

on_arch! {
    fn backward_rows<'a>(
        x: &'a [f32], weight: &'a [f32], eps: f32, dy: &'a [f32], dx: &'a mut [f32], dweight: &'a mut [f32],
    ) -> () = backward_rows_simd;
}

/// The backward pass of the rows of one task: writes dx and adds to dweight.
#[inline(always)]
fn backward_rows_simd<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let d = weight.len();
    let rows = dx.chunks_exact_mut(d).zip(x.chunks_exact(d)).zip(dy.chunks_exact(d));
    for ((dx, x), dy) in rows {
        norm_row_backward(simd, x, weight, eps, dy, dx, dweight);
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn reciprocal_rms<S: Simd>(simd: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(simd, x, x) / x.len() as f32 + eps).sqrt()
}

/// Backward pass of one row: writes dx and adds to dweight.
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
    let d = x.len();
    let (weight, dy, dx, dweight) = (&weight[..d], &dy[..d], &mut dx[..d], &mut dweight[..d]);
    let rstd = reciprocal_rms(simd, x, eps);
    // dx holds dy * weight until its dot product with x is known.
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

/// Writes the sum of the partial sums to `total`, added in their order.
pub(crate) fn add_partials(partial: &[Vec<f32>], total: &mut [f32]) {
    total.fill(0.0);
    for part in partial {
        for (total, &value) in total.iter_mut().zip(part) {
            *total += value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, threads, wide};

    const EPS: f32 = 1e-5;

    fn reference(x: &[f64], weight: &[f64]) -> Vec<f64> {
        let d = weight.len();
        x.chunks(d)
            .flat_map(|x| {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
                x.iter().zip(weight).map(move |(x, w)| w * x / (mean + f64::from(EPS)).sqrt())
            })
            .collect()
    }

    #[test]
    fn results_equal_the_definition_and_gradients_its_finite_differences() {
        on_every_arch(|| {
            let mut random = Random(1);
            for (rows, d) in [(1, 1), (3, 7), (2, 33), (5, 64), (67, 5)] {
                let (x, weight, dy) = (random.vector(rows * d), random.vector(d), random.vector(rows * d));
                let mut y = vec![f32::NAN; rows * d];
                rms_norm_forward(&x, &weight, EPS, &mut y);
                assert_close_relative("y", &y, &reference(&wide(&x), &wide(&weight)), 1e-6);

                let (mut dx, mut dweight) = (vec![f32::NAN; rows * d], vec![f32::NAN; d]);
                rms_norm_backward(&x, &weight, EPS, &dy, &mut dx, &mut dweight);
                let expected = finite_differences(&wide(&x), |x| inner(&reference(x, &wide(&weight)), &dy));
                assert_close_relative("dx", &dx, &expected, 2e-5);
                let expected = finite_differences(&wide(&weight), |weight| inner(&reference(&wide(&x), weight), &dy));
                assert_close_relative("dweight", &dweight, &expected, 2e-5);
            }
        });
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let mut random = Random(2);
        let (x, weight, dy) = (random.vector(500 * 24), random.vector(24), random.vector(500 * 24));
        let run = |count| {
            let (mut dx, mut dweight) = (vec![f32::NAN; x.len()], vec![f32::NAN; 24]);
            threads(count).install(|| rms_norm_backward(&x, &weight, EPS, &dy, &mut dx, &mut dweight));
            (dx, dweight)
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_row_of_zeros_stays_finite() {
        let (mut y, mut dx, mut dweight) = ([f32::NAN; 3], [f32::NAN; 3], [f32::NAN; 3]);
        rms_norm_forward(&[0.0; 3], &[1.0; 3], 1e-6, &mut y);
        rms_norm_backward(&[0.0; 3], &[1.0; 3], 1e-6, &[1.0; 3], &mut dx, &mut dweight);
        assert_eq!(y, [0.0; 3]);
        // For x = 0 the gradient is dy * weight / sqrt(eps).
        assert!(dx.iter().all(|x| (x - 1000.0).abs() < 1.0));
        assert_eq!(dweight, [0.0; 3]);
    }
}
