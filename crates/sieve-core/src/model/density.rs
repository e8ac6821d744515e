//! Which share of a row's keys attention reads, how many keys its last token reads, and whether it hides any key.

use super::{Attention, BranchDensity, ModelShape, window_pairs};

impl Attention {
    /// The densities of the branches in a row of `seq_len` tokens: one, or NSA's selected, window and compressed.
    ///
    /// Keys that have a score and no value (pooled keys by which blocks are chosen, an indexer's keys) are not counted.
    pub fn densities(self, seq_len: usize) -> Vec<BranchDensity> {
        self.as_kind().densities(seq_len.max(1))
    }

    /// Whether this attention is meant to hide keys and hides none in rows of `seq_len` tokens: a window, the kept keys
    /// or the chosen blocks hold the whole row. `false` for dense kinds, and while MSA's indexer warms up.
    pub fn covers_rows(self, seq_len: usize) -> bool {
        let hides_keys = self.as_kind().reads_words().is_some() && self.index_warmup() != Some(true);
        hides_keys && self.densities(seq_len).iter().any(|branch| branch.reads_every_key)
    }

    /// Number of keys that the last token of a sequence of `seq_len` tokens reads, its own among them: the pairs of the
    /// sequence without those of the sequence before it. NSA's branches are added, up to the number of keys.
    fn keys_of_last_token(self, seq_len: usize) -> f64 {
        let pairs = |seq_len: usize| match seq_len {
            0 => 0.0,
            _ => {
                let density: f64 = self.densities(seq_len).iter().map(|branch| branch.density).sum();
                density * window_pairs(seq_len, seq_len)
            }
        };
        (pairs(seq_len) - pairs(seq_len.saturating_sub(1))).min(seq_len as f64)
    }
}

impl ModelShape {
    /// Number of keys that the last token of a sequence of `seq_len` tokens reads, as a mean over the layers. What is
    /// counted as read is what [`Attention::densities`] counts.
    pub fn keys_of_last_token(&self, seq_len: usize) -> f64 {
        self.mean_over_layers(|attention| attention.keys_of_last_token(seq_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_shapes::{tiny_dma, tiny_nsa};
    use crate::model::{LayerPattern, LayerType};

    #[test]
    fn the_last_token_reads_the_kept_keys_and_in_a_dense_layer_all() {
        let mut shape = tiny_dma();
        let reads = |shape: &ModelShape, seq_len| (shape.keys_of_last_token(seq_len) * 1e6).round() / 1e6;
        assert_eq!([0, 1, 3, 4, 5, 60].map(|seq_len| reads(&shape, seq_len)), [0.0, 1.0, 3.0, 4.0, 4.0, 4.0]);
        shape.layers =
            LayerPattern::new(shape.attention, [LayerType::OWN, LayerType::OWN, LayerType::of(Attention::DENSE)]);
        assert_eq!([3, 10, 64].map(|seq_len| reads(&shape, seq_len)), [3.0, 6.0, 24.0]);
    }

    #[test]
    fn branches_that_overlap_read_no_more_than_all_keys() {
        let shape = tiny_nsa();
        for seq_len in 1..200 {
            let read = shape.keys_of_last_token(seq_len);
            assert!((1.0 - 1e-6..=seq_len as f64).contains(&read), "{read} of {seq_len}");
        }
    }
}
