//! A unigram model, the baseline that validation reports beside the model's loss.

/// Token probabilities counted on training documents, add-one smoothed.
#[derive(Clone, Debug)]
pub(crate) struct Unigram {
    nats: Vec<f64>,
}

impl Unigram {
    /// A model of the frequencies with which tokens occur.
    pub(crate) fn new(counts: &[u64]) -> Self {
        let total: u64 = counts.iter().sum::<u64>() + counts.len() as u64;
        let nats = counts.iter().map(|&count| (total as f64 / (count + 1) as f64).ln()).collect();
        Self { nats }
    }

    /// Cross-entropy of one token in nats.
    pub(crate) fn nats(&self, token: usize) -> f64 {
        self.nats[token]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one() {
        let unigram = Unigram::new(&[5, 0, 2]);
        let total: f64 = (0..3).map(|token| (-unigram.nats(token)).exp()).sum();
        assert!((total - 1.0).abs() < 1e-12);
        assert!((unigram.nats(1) - 10f64.ln()).abs() < 1e-12);
    }
}
