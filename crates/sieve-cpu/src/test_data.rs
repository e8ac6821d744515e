//! Random inputs and comparisons for the tests.

/// A small generator (splitmix64); tests name their seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// About normal, mean 0, variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12)
            .map(|_| (self.bits() >> 11) as f64 / (1_u64 << 53) as f64)
            .sum();
        (sum - 6.0) as f32
    }

    pub(crate) fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Start and end of the document of each token, `[batch, seq_len]`, with documents of random length.
    pub(crate) fn documents(&mut self, batch: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>) {
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
}

/// One document per row.
pub(crate) fn whole_rows(batch: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>) {
    (
        vec![0; batch * seq_len],
        vec![seq_len as i32; batch * seq_len],
    )
}

/// Fails on a value that is not finite, then on the largest |difference| above `tolerance * (1 + |expected|)`.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    let mut worst = (0.0, 0);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        if expected == f64::NEG_INFINITY && got == f32::NEG_INFINITY {
            continue;
        }
        assert!(
            got.is_finite() && expected.is_finite(),
            "{what}[{i}]: {got}, expected {expected}"
        );
        let error = (f64::from(got) - expected).abs() / (1.0 + expected.abs());
        if error > worst.0 {
            worst = (error, i);
        }
    }
    let (error, i) = worst;
    assert!(
        error <= tolerance,
        "{what}[{i}]: {} instead of {}, error {error:e}",
        got[i],
        expected[i]
    );
}

/// A pool of so many threads.
pub(crate) fn threads(count: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build()
        .expect("a small thread pool can be made")
}

/// Gradient of `f` at `x` by central differences, all in f64.
pub(crate) fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
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

/// The same numbers in f64.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// `sum a_i b_i` in f64.
pub(crate) fn inner(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, &b)| a * f64::from(b)).sum()
}
