//! When a result is good enough: its error beside the error of a plain bf16 computation.
use crate::report::{Outcome, wrong};

/// How far a result may be from the f32 reference.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bar {
    /// Times the largest error of the plain computation; 0 for f32 paths, which have no business with bf16's error.
    pub(crate) plain: f32,
    /// Always allowed.
    pub(crate) floor: f32,
    /// Share of the largest expected value, always allowed: among few numbers the plain computation may round to the
    /// exact result by luck.
    pub(crate) share: f32,
    /// Whether the norm of all errors must pass too, with hardly any floor.
    pub(crate) norm: bool,
}

impl Bar {
    /// Without the norm.
    pub(crate) const fn new(plain: f32, floor: f32, share: f32) -> Self {
        Self {
            plain,
            floor,
            share,
            norm: false,
        }
    }

    /// That of results of a type: in bf16 twice the error of the plain computation and a share, in f32 its own share.
    pub(crate) const fn of(is_bf16: bool, floor: f32, [bf16_share, f32_share]: [f32; 2]) -> Self {
        match is_bf16 {
            true => Self::new(2.0, floor, bf16_share),
            false => Self::new(0.0, floor, f32_share),
        }
    }

    /// The largest ratio of error to what is allowed; an error when that is over 1.
    ///
    /// A NaN is an infinite error; equal infinities are equal.
    pub(crate) fn judge(&self, name: &str, got: &[f32], plain: &[f32], exact: &[f32]) -> Outcome {
        if got.len() != exact.len() {
            let (got, expected) = (got.len(), exact.len());
            return wrong(format!("{name}: {got} numbers, expected {expected}"));
        }
        let (error, at) = largest_gap(got, exact);
        let largest = exact
            .iter()
            .filter(|x| x.is_finite())
            .fold(0.0f32, |m, x| m.max(x.abs()));
        let plain_error = match self.plain > 0.0 {
            true => largest_gap(plain, exact).0,
            false => 0.0,
        };
        let allowed = self.plain * plain_error + self.floor + self.share * largest;
        if exceeds(error.into(), allowed.into()) {
            return wrong(format!(
                "{name}: error {error:.3e}, allowed {allowed:.3e}; number {at} is {}, expected {}",
                got[at], exact[at]
            ));
        }
        let mut ratio = error / allowed;
        if self.norm {
            let (error, allowed) = (
                norm(got, exact),
                f64::from(self.plain) * norm(plain, exact) + self.norm_floor(exact),
            );
            if exceeds(error, allowed) {
                return wrong(format!("{name}: norm of the error {error:.3e}, allowed {allowed:.3e}"));
            }
            ratio = ratio.max((error / allowed) as f32);
        }
        Ok(ratio)
    }

    fn norm_floor(&self, exact: &[f32]) -> f64 {
        let size = norm(exact, &vec![0.0; exact.len()]);
        let root = (exact.len() as f64).sqrt();
        // An f32 path has no plain error to lean on.
        let own = if self.plain > 0.0 {
            1e-6 * size + 1e-5 * root
        } else {
            1e-4 * size + 1e-5 * root
        };
        // Of the floor that is meant for cancelling sums, what a typical number needs is far below the largest's.
        own + f64::from(self.floor - Self::FLOOR).max(0.0) * root
    }

    /// The usual floor: a few units in the last place of numbers near 1 after bf16 products.
    pub(crate) const FLOOR: f32 = 2e-4;
}

/// Names and values of what a call computes.
pub(crate) type Results = Vec<(&'static str, Vec<f32>)>;

/// The largest ratio over all results, each by the bar of its name.
pub(crate) fn judge_all([own, plain, exact]: [&Results; 3], bar: impl Fn(&str) -> Bar) -> Outcome {
    let mut worst = 0.0f32;
    for (((name, own), (_, plain)), (_, exact)) in own.iter().zip(plain).zip(exact) {
        worst = worst.max(bar(name).judge(name, own, plain, exact)?);
    }
    Ok(worst)
}

/// Whether an error is over what is allowed; a NaN on either side is.
fn exceeds(error: f64, allowed: f64) -> bool {
    error.is_nan() || allowed.is_nan() || error > allowed
}

/// The largest difference, and where it is.
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

    const BAR: Bar = Bar {
        plain: 2.0,
        floor: 1e-4,
        share: 0.0,
        norm: true,
    };

    #[test]
    fn twice_the_plain_error_passes_and_thrice_fails() {
        let exact = vec![1.0; 100];
        let off = |by: f32| vec![1.0 + by; 100];
        assert!(BAR.judge("x", &off(0.019), &off(0.01), &exact).is_ok());
        let error = BAR.judge("x", &off(0.03), &off(0.01), &exact);
        refusal(error, "allowed");
    }

    #[test]
    fn the_norm_sees_what_the_largest_error_hides() {
        let exact = vec![0.0; 100];
        let mut plain = vec![0.0; 100];
        plain[7] = 0.01;
        let error = BAR.judge("x", &[0.015; 100], &plain, &exact);
        refusal(error, "norm");
    }

    #[test]
    fn nan_and_missing_numbers_fail() {
        let exact = [1.0, f32::NEG_INFINITY];
        assert!(BAR.judge("x", &[1.0, f32::NEG_INFINITY], &exact, &exact).is_ok());
        assert!(BAR.judge("x", &[f32::NAN, f32::NEG_INFINITY], &exact, &exact).is_err());
        assert!(BAR.judge("x", &[1.0, 3.0], &exact, &exact).is_err());
        assert!(BAR.judge("x", &[1.0], &exact, &exact).is_err());
    }
}
