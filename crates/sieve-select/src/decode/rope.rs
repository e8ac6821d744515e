//! Rotary positions (rotate-half): moving a rotated vector to another position.

/// Rotates by `shift` positions: a vector rotated for position p becomes the one for `p + shift`.
///
/// `x` is `[head_dim]`; channel c and `c + head_dim / 2` form a pair with frequency `theta^(-2c / head_dim)`.
pub fn rotate(x: &[f32], shift: f64, theta: f64) -> Vec<f32> {
    let half = x.len() / 2;
    let mut y = x.to_vec();
    for c in 0..half {
        let angle = shift * theta.powf(-2.0 * c as f64 / (2 * half) as f64);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = (f64::from(x[c]), f64::from(x[c + half]));
        y[c] = (a * cos - b * sin) as f32;
        y[c + half] = (a * sin + b * cos) as f32;
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vector::dot;
    use sieve_testing::Random;

    #[test]
    fn products_depend_on_the_distance_alone() {
        let mut random = Random(2);
        let (q, k) = (random.vector(16), random.vector(16));
        let at = |p: f64, s: f64| dot(&rotate(&q, p, 1e4), &rotate(&k, s, 1e4));
        assert!((at(7.0, 3.0) - at(104.0, 100.0)).abs() < 1e-4);
        let back = rotate(&rotate(&q, 55.0, 1e4), -55.0, 1e4);
        assert!(back.iter().zip(&q).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
