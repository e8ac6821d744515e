//! Sums whose order does not depend on the number of threads.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::on_arch;

/// Elements that one partial sum adds up.
const BLOCK: usize = 1 << 15;

/// `sum x_i^2` in f64, in a fixed order whatever the number of threads.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let partial: Vec<f64> = x.par_chunks(BLOCK).map(squares).collect();
    partial.iter().sum()
}

on_arch! {
    fn squares<'x>(x: &'x [f32]) -> f64 = squares_simd;
}

/// The sum of squares of one block, in f64 by sixteen partial sums.
#[inline(always)]
fn squares_simd<S: Simd>(_simd: S, x: &[f32]) -> f64 {
    // Independent sums: the compiler may not reorder one f64 sum, and so could not vectorise it.
    let mut lanes = [0.0_f64; 16];
    let (chunks, tail) = x.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(tail) {
        *lane += f64::from(value) * f64::from(value);
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{Random, threads};

    #[test]
    fn adds_all_squares_in_the_same_order_on_any_number_of_threads() {
        for len in [0, 1, 17, BLOCK - 1, BLOCK, 3 * BLOCK + 7] {
            let x = Random(len as u64).vector(len);
            let exact: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let sum = sum_of_squares(&x);
            assert!((sum - exact).abs() <= 1e-12 * (1.0 + exact), "{len}: {sum} instead of {exact}");
            let pool = threads(3);
            assert_eq!(pool.install(|| sum_of_squares(&x)), sum);
        }
        assert!(sum_of_squares(&[1.0, f32::NAN]).is_nan());
    }
}
