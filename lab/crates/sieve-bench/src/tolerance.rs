//! Tolerances of results: a multiple of the error of a plain bf16 computation, a floor, and shares of magnitudes.
use crate::report::{Outcome, Wrong, wrong};

/// How far a result may be from the f32 reference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// Factor on the largest error of the plain bf16 computation; 0 for f32 paths.
    pub(crate) plain: f32,
    /// Absolute error that is tolerated in every case.
    pub(crate) floor: f32,
    /// Error that is always allowed, as a share of the largest expected value: among few numbers the plain computation
    /// may be exact by luck.
    pub(crate) share: f32,
    /// Whether the norm of all errors is compared too, with a far smaller floor.
    pub(crate) norm: bool,
}

impl Tolerance {
    /// A tolerance of the largest error alone, not of the norm.
    pub(crate) const fn new(plain: f32, floor: f32, share: f32) -> Self {
        Self { plain, floor, share, norm: false }
    }

    /// The largest ratio of error to tolerance; fails where it is over 1.
    ///
    /// A NaN is an infinite error; equal infinities are equal.
    pub(crate) fn judge(&self, name: &str, got: &[f32], plain: &[f32], exact: &[f32]) -> Outcome {
        require_len(name, got, exact)?;
        let (error, at) = largest_gap(got, exact);
        let largest = exact.iter().filter(|x| x.is_finite()).fold(0.0f32, |m, x| m.max(x.abs()));
        let plain_error = if self.plain > 0.0 { largest_gap(plain, exact).0 } else { 0.0 };
        let allowed = self.plain * plain_error + self.floor + self.share * largest;
        if exceeds(error.into(), allowed.into()) {
            return wrong(format!(
                "{name}: error {error:.3e}, allowed {allowed:.3e}; number {at} is {}, expected {}",
                got[at], exact[at]
            ));
        }
        let mut ratio = error / allowed;
        if self.norm {
            let (error, allowed) =
                (norm(got, exact), f64::from(self.plain) * norm(plain, exact) + self.norm_floor(exact));
            if exceeds(error, allowed) {
                return wrong(format!("{name}: norm of the error {error:.3e}, allowed {allowed:.3e}"));
            }
            ratio = ratio.max((error / allowed) as f32);
        }
        Ok(ratio)
    }

    /// Norm of the errors that is always allowed.
    fn norm_floor(&self, exact: &[f32]) -> f64 {
        let root = (exact.len() as f64).sqrt();
        // An f32 path has no tolerance from the plain computation, so its share is larger.
        let share = if self.plain > 0.0 { 1e-6 } else { 1e-4 };
        // A floor above the usual one is meant for sums that cancel: every number may be off by the difference.
        share * length(exact) + 1e-5 * root + f64::from(self.floor - Self::FLOOR).max(0.0) * root
    }

    /// The usual floor. A sum of bf16 products whose terms cancel has about this error where its exact value is near 0.
    pub(crate) const FLOOR: f32 = 2e-4;
}

/// Tolerance of attention results by row. Each row is compared with its own magnitude: a gradient row that few queries
/// reach is thousands of times smaller than the tensor's largest number.
///
/// A row may have twice the error of a plain bf16 computation of the same row, plus a share of the row's
/// [`Terms`](sieve_cpu::reference::Terms): with few terms the plain computation may be exact by luck. The norm of all
/// rows' errors may be twice the norm of the plain computation's errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTolerance {
    /// Whether the path computes in bf16. The tolerance of f32 paths does not depend on the plain bf16 error.
    pub(crate) is_bf16: bool,
    /// Share of the terms that is tolerated because f32 logits are large, see [`lost_digits`].
    pub(crate) lost_digits: f64,
    /// Bound on the plain error of a row, as a share of its terms. A plain computation that rounds large scores to bf16
    /// may be arbitrarily wrong, and would allow any result.
    pub(crate) most_of_plain: f64,
    /// A further share of the terms that a single row may lose, but not the norm of all rows: one number that rounds
    /// the other way may move all logits of a row.
    pub(crate) of_a_row: f64,
}

/// Relative error of a probability because its logit is rounded to f32. Logits of keys that matter are as large as the
/// log-sum-exp, and the probability is the exponential of their difference. 8 such roundings are tolerated.
pub(crate) fn lost_digits(exact_lse: &[f32]) -> f64 {
    let finite = exact_lse.iter().filter(|x| x.is_finite());
    8.0 * f64::from(f32::EPSILON * finite.fold(0.0, |most: f32, x| most.max(x.abs())))
}

/// Root of the sum of squares.
pub(crate) fn length(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// The [`length`] of each row.
pub(crate) fn row_norms(values: &[f32], width: usize) -> Vec<f64> {
    values.chunks_exact(width).map(length).collect()
}

impl RowTolerance {
    /// [`new`](Self::new) for a path that computes in bf16.
    pub(crate) const fn of_bf16(lost_digits: f64) -> Self {
        let is_bf16 = true;
        Self::new(is_bf16, lost_digits)
    }

    /// The tolerance beside a plain computation that rounds its scores to bf16.
    pub(crate) const fn new(is_bf16: bool, lost_digits: f64) -> Self {
        Self { is_bf16, lost_digits, most_of_plain: 1.0 / 128.0, of_a_row: 0.0 }
    }

    /// Smallest number of rows whose errors' norm is compared: the plain computation of fewer rows may be exact by
    /// luck.
    const ROWS_OF_A_NORM: usize = 64;

    /// The largest ratio of error to tolerance, over all rows and the norm of all rows; fails where it is over 1.
    /// `terms` has one number for each row; rows have equal widths.
    pub(crate) fn judge(&self, name: &str, got: &[f32], plain: &[f32], exact: &[f32], terms: &[f64]) -> Outcome {
        require_len(name, got, exact)?;
        let Some(width) = exact.len().checked_div(terms.len()) else {
            // There is no row.
            return Ok(0.0);
        };
        let all_terms = terms.iter().map(|x| x * x).sum::<f64>().sqrt();
        // Root mean square of the rows' terms: a row of far smaller terms may have a small share of it as error.
        let typical = all_terms / (terms.len() as f64).sqrt();
        let twice_plain = |plain: f64, terms: f64| 2.0 * plain.min(terms * self.most_of_plain);
        let (mut worst, mut squares, mut plain_squares) = (0.0f64, 0.0, 0.0);
        let rows = got.chunks_exact(width).zip(plain.chunks_exact(width));
        let rows = rows.zip(exact.chunks_exact(width)).zip(terms);
        for (at, (((got, plain), exact), &terms)) in rows.enumerate() {
            let (error, plain) = (norm(got, exact), norm(plain, exact));
            // 1 / 128: the relative distance between neighbouring bf16 numbers.
            let own = if self.is_bf16 { twice_plain(plain, terms) + terms / 128.0 } else { 1e-4 * terms };
            let allowed = own + (self.lost_digits + self.of_a_row) * terms + typical / 16384.0;
            if exceeds(error, allowed) {
                let size = length(exact);
                return wrong(format!(
                    "{name}: norm of the error of row {at} {error:.3e}, allowed {allowed:.3e}; the row's is {size:.3e}"
                ));
            }
            worst = worst.max(if error > 0.0 { error / allowed } else { 0.0 });
            squares += error * error;
            plain_squares += plain * plain;
        }
        if terms.len() >= Self::ROWS_OF_A_NORM && all_terms > 0.0 {
            let own = if self.is_bf16 {
                twice_plain(plain_squares.sqrt(), all_terms) + all_terms / 4096.0
            } else {
                2e-5 * all_terms
            };
            let (error, allowed) = (squares.sqrt(), own + self.lost_digits * all_terms);
            if exceeds(error, allowed) {
                return wrong(format!("{name}: norm of the error {error:.3e}, allowed {allowed:.3e}"));
            }
            worst = worst.max(error / allowed);
        }
        Ok(worst as f32)
    }
}

/// Names and values of the results of a call.
pub(crate) type Results = Vec<(&'static str, Vec<f32>)>;

fn require_len(name: &str, got: &[f32], exact: &[f32]) -> Result<(), Wrong> {
    if got.len() == exact.len() {
        Ok(())
    } else {
        wrong(format!("{name}: {} numbers, expected {}", got.len(), exact.len()))
    }
}

/// Whether an error exceeds its tolerance; a NaN on either side does.
fn exceeds(error: f64, allowed: f64) -> bool {
    error.is_nan() || allowed.is_nan() || error > allowed
}

/// The largest absolute difference and its index. A NaN is an infinite difference; equal infinities do not differ.
fn largest_gap(a: &[f32], b: &[f32]) -> (f32, usize) {
    let mut worst = (0.0, 0);
    for (at, (&a, &b)) in a.iter().zip(b).enumerate() {
        if a == b {
            continue;
        }
        let gap = (a - b).abs();
        if gap.is_nan() {
            return (f32::INFINITY, at);
        }
        if gap > worst.0 {
            worst = (gap, at);
        }
    }
    worst
}

/// Norm of the difference over the numbers that are finite in `b`.
fn norm(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).filter(|(_, b)| b.is_finite());
    squares.map(|(&a, &b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    const TOLERANCE: Tolerance = Tolerance { plain: 2.0, floor: 1e-4, share: 0.0, norm: true };

    #[test]
    fn twice_the_plain_error_passes_and_thrice_fails() {
        let exact = vec![1.0; 100];
        let off = |by: f32| vec![1.0 + by; 100];
        assert!(TOLERANCE.judge("x", &off(0.019), &off(0.01), &exact).is_ok());
        let error = TOLERANCE.judge("x", &off(0.03), &off(0.01), &exact);
        refusal(error, "allowed");
    }

    #[test]
    fn the_norm_sees_what_the_largest_error_hides() {
        let exact = vec![0.0; 100];
        let mut plain = vec![0.0; 100];
        plain[7] = 0.01;
        let error = TOLERANCE.judge("x", &[0.015; 100], &plain, &exact);
        refusal(error, "norm");
    }

    #[test]
    fn a_small_row_beside_a_large_one_is_held_against_its_own_terms() {
        // The first row is a thousand times as large as the others.
        let exact: Vec<f32> = (0..400).map(|at| if at < 4 { 1000.0 } else { 1.0 }).collect();
        let terms = row_norms(&exact, 4);
        let mut late = exact.clone();
        late[396..].iter_mut().for_each(|x| *x *= 0.95);
        assert!(Tolerance::new(0.0, Tolerance::FLOOR, 1.0 / 64.0).judge("x", &late, &exact, &exact).is_ok());
        let row = |lost_digits| RowTolerance::new(true, lost_digits).judge("x", &late, &exact, &exact, &terms);
        refusal(row(0.0), "row 99");
        assert!(row(0.1).is_ok());
        // Twice the plain error is allowed up to a share of the terms.
        let plain = |by: f32| exact.iter().map(|x| x * by).collect::<Vec<f32>>();
        let judge = |by: f32, tolerance: RowTolerance| {
            tolerance.judge("x", &plain(1.0 + 2.0 * by), &plain(1.0 + by), &exact, &terms)
        };
        assert!(judge(0.001, RowTolerance::new(true, 0.0)).is_ok_and(|ratio| ratio > 0.8));
        refusal(judge(0.1, RowTolerance::new(true, 0.0)), "row");
        let mut nan = exact.clone();
        nan[7] = f32::NAN;
        refusal(RowTolerance::new(true, 1.0).judge("x", &nan, &exact, &exact, &terms), "row 1");
    }

    #[test]
    fn nan_and_missing_numbers_fail() {
        let exact = [1.0, f32::NEG_INFINITY];
        assert!(TOLERANCE.judge("x", &[1.0, f32::NEG_INFINITY], &exact, &exact).is_ok());
        assert!(TOLERANCE.judge("x", &[f32::NAN, f32::NEG_INFINITY], &exact, &exact).is_err());
        assert!(TOLERANCE.judge("x", &[1.0, 3.0], &exact, &exact).is_err());
        assert!(TOLERANCE.judge("x", &[1.0], &exact, &exact).is_err());
    }
}
