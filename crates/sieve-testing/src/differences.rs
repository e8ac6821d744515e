//! Gradients by finite differences, and dot products in f64.

/// Gradient of `f` at `x` by central differences, all in f64.
pub fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut at = x.to_vec();
    (0..x.len())
        .map(|i| {
            let step = 1e-5 * (1.0 + x[i].abs());
            at[i] = x[i] + step;
            let above = f(&at);
            at[i] = x[i] - step;
            let below = f(&at);
            at[i] = x[i];
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// Converts numbers to f64.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The dot product `sum a_i b_i` in f64.
pub fn inner(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, &b)| a * f64::from(b)).sum()
}
