//! Random numbers that are the same on every machine for one seed.

/// A small generator (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    /// A generator for a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A whole number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// A number from `first` up to, not including, `end`.
    pub(crate) fn between(&mut self, first: usize, end: usize) -> usize {
        first + self.below(end.saturating_sub(first).max(1))
    }

    /// Any of some values.
    pub(crate) fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// True with this probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Uniform in (0, 1].
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Normal, mean 0, variance 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.unit()).cos()) as f32
    }

    /// Normal numbers rounded to bf16, so that kernels and references read the same.
    pub(crate) fn bf16_normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| round_bf16(self.normal())).collect()
    }
}

/// The nearest bf16, ties to even; NaN stays NaN.
pub(crate) fn round_bf16(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    f32::from_bits(rounded & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_the_nearest_even_bf16() {
        for (x, expected) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 512.0, 1.0),
            (1.0 + 3.0 / 512.0, 1.0 + 1.0 / 128.0),
            // Halfway between two: to the even one, down and up.
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.0 + 1.0 / 64.0),
            (-1.004, -1.007_812_5),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(round_bf16(x), expected, "{x}");
        }
        assert!(round_bf16(f32::NAN).is_nan());
    }

    #[test]
    fn normals_have_mean_0_and_variance_1() {
        let mut random = Random::new(3);
        let values: Vec<f64> = (0..20000).map(|_| f64::from(random.normal())).collect();
        let mean = values.iter().sum::<f64>() / 2e4;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / 2e4;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
    }
}
