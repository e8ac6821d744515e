//! Random numbers that are the same on every machine for one seed.

/// The generator splitmix64; its field is the seed.
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// An integer in `0..limit`; `limit` must not be 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// An integer in `first..end`, or `first` where the range is empty.
    pub fn between(&mut self, first: usize, end: usize) -> usize {
        first + self.below(end.saturating_sub(first).max(1))
    }

    /// One of `values`, each with equal probability.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Uniform in (0, 1].
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Approximately normal, mean 0, variance 1: a sum of twelve uniform numbers, so never beyond 6 in magnitude.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| (self.bits() >> 11) as f64 / (1_u64 << 53) as f64).sum();
        (sum - 6.0) as f32
    }

    /// Normal, mean 0, variance 1, with the tails of the true distribution (Box and Muller).
    pub fn normal_with_tails(&mut self) -> f32 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.unit()).cos()) as f32
    }

    /// `len` numbers of [`normal`](Self::normal).
    pub fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// First token and end of each token's document, both `[batch, seq_len]`; documents have random lengths.
    pub fn documents(&mut self, batch: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>) {
        let (mut start, mut end) = (Vec::new(), Vec::new());
        for _ in 0..batch {
            let mut first = 0;
            while first < seq_len {
                let len = 1 + self.below(seq_len - first).min(self.below(seq_len));
                for _ in 0..len {
                    start.push(first as i32);
                    end.push((first + len) as i32);
                }
                first += len;
            }
        }
        (start, end)
    }

    /// `count` numbers of [`normal_with_tails`](Self::normal_with_tails), rounded to bf16 so that bf16 kernels and f32
    /// references read the same values.
    pub fn bf16_normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| round_bf16(self.normal_with_tails())).collect()
    }
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
pub fn round_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}
