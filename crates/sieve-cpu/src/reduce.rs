//! Sums whose order does not depend on the number of threads.

use rayon::prelude::*;

use crate::simd::vectorize;

/// Elements one partial sum covers.
const BLOCK: usize = 1 << 15;

/// `sum x_i^2` in f64, in a fixed order whatever the number of threads.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let partial: Vec<f64> = x
        .par_chunks(BLOCK)
        .map(|block| vectorize(|| squares(block)))
        .collect();
    partial.iter().sum()
}

#[inline(always)]
fn squares(x: &[f32]) -> f64 {
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
