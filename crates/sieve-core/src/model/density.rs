//! Which share of a row's keys attention reads, and whether it hides any key of the row.

use super::{Attention, BranchDensity};

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
}
