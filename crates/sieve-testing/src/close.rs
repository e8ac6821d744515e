//! Comparisons with a reference, which fail on NaN and infinity first.

use std::fmt::Display;

/// Fails on a value that is not finite, then where the largest |difference| exceeds `tolerance`.
#[track_caller]
pub fn assert_close<T>(what: &str, got: &[T], expected: &[f64], tolerance: f64)
where
    T: Copy + Display + Into<f64>,
{
    compare(what, got, expected, tolerance, |_| 1.0);
}

/// [`assert_close`] with each difference divided by `1 + |expected|`.
#[track_caller]
pub fn assert_close_relative<T>(what: &str, got: &[T], expected: &[f64], tolerance: f64)
where
    T: Copy + Display + Into<f64>,
{
    compare(what, got, expected, tolerance, |expected| 1.0 + expected.abs());
}

/// [`assert_close_relative`] for log-sum-exps, where -inf equals -inf: the value of a query without keys.
#[track_caller]
pub fn assert_lse_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    let pairs = got.iter().zip(expected).map(|(&got, &expected)| {
        let is_empty = got == f32::NEG_INFINITY && expected == f64::NEG_INFINITY;
        if is_empty { (0.0, 0.0) } else { (got, expected) }
    });
    let (got, expected): (Vec<f32>, Vec<f64>) = pairs.unzip();
    assert_close_relative(what, &got, &expected, tolerance);
}

/// [`assert_close`] with each difference divided by `unit(expected)`.
#[track_caller]
fn compare<T>(what: &str, got: &[T], expected: &[f64], tolerance: f64, unit: impl Fn(f64) -> f64)
where
    T: Copy + Display + Into<f64>,
{
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    let mut worst = (0.0, 0);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let value: f64 = got.into();
        assert!(value.is_finite() && expected.is_finite(), "{what}[{i}]: {got}, expected {expected}");
        let error = (value - expected).abs() / unit(expected);
        if error > worst.0 {
            worst = (error, i);
        }
    }
    let (error, i) = worst;
    assert!(
        error <= tolerance,
        "{what}[{i}]: {} instead of {}, error {error:e}, allowed {tolerance:e}",
        got[i],
        expected[i]
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_at_the_tolerance_passes() {
        assert_close("equal", &[1.0_f32, -2.5], &[1.0, -2.0], 0.5);
        assert_close_relative("in units of 3", &[3.5_f32], &[2.0], 0.5);
        assert_close::<f64>("nothing", &[], &[], 0.0);
    }

    #[test]
    fn queries_without_keys_have_no_lse() {
        let none = f32::NEG_INFINITY;
        assert_lse_close("lse", &[none, 1.0], &[f64::NEG_INFINITY, 1.0], 0.0);
        let wrong = || assert_lse_close("lse", &[none], &[1.0], 1.0);
        std::panic::catch_unwind(wrong).expect_err("one of them has keys");
    }

    #[test]
    #[should_panic(expected = "x[1]: 4 instead of 2, error 2e0, allowed 1e0")]
    fn the_worst_value_is_named() {
        assert_close("x", &[1.5_f64, 4.0, 0.0], &[0.0, 2.0, 1.0], 1.0);
    }

    #[test]
    #[should_panic(expected = "x[0]: NaN, expected 1")]
    fn nan_is_never_close() {
        assert_close("x", &[f32::NAN], &[1.0], f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "x[0]: inf, expected inf")]
    fn infinity_is_never_close() {
        assert_close_relative("x", &[f64::INFINITY], &[f64::INFINITY], 1.0);
    }
}
