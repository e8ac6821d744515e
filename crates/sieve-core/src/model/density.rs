//! Which share of a row's keys attention reads, and whether it hides any key of the row.

use super::Attention;
use super::flops::window_pairs;

/// How much of a row one branch of attention reads. The row holds one document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BranchDensity {
    /// Name of the branch; `None` for kinds of one branch, which are all but NSA.
    pub branch: Option<&'static str>,
    /// Number of (query, key) pairs that are read, divided by the pairs of dense causal attention. A compressed block
    /// counts as one key.
    pub density: f64,
    /// Whether every query reads all keys up to its own. Never so for compressed blocks, which are means of keys.
    pub reads_every_key: bool,
}

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
        self.as_kind().hides_keys() && self.densities(seq_len).iter().any(|branch| branch.reads_every_key)
    }
}

impl BranchDensity {
    /// The density of a branch that reads `pairs` pairs of queries and keys in a row of `seq_len` tokens.
    pub(crate) fn of_keys(branch: Option<&'static str>, pairs: f64, seq_len: usize) -> Self {
        let causal = window_pairs(seq_len, seq_len);
        Self { branch, density: pairs / causal, reads_every_key: pairs >= causal }
    }
}
