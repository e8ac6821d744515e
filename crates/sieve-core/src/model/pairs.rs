//! Pairs of a query and a key, and the share of a row that a branch of attention reads.

/// Number of (query, key) pairs in a document of `seq_len` tokens whose queries see the last `window` keys.
pub(crate) fn window_pairs(window: usize, seq_len: usize) -> f64 {
    let window = window.min(seq_len) as f64;
    window * (seq_len as f64 - (window - 1.0) / 2.0)
}

/// How much of a row one branch of attention reads. The row holds one document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BranchDensity {
    /// Name of the branch; `None` for kinds of one branch, which are all but NSA.
    pub branch: Option<&'static str>,
    /// Number of (query, key) pairs that are read, divided by the pairs of dense causal attention. A compressed block
    /// counts as one key.
    pub density: f64,
    /// Whether every query reads all keys up to its own; `false` for compressed blocks, which are means of keys.
    pub reads_every_key: bool,
}

impl BranchDensity {
    /// The density of a branch that reads `pairs` pairs of queries and keys in a row of `seq_len` tokens.
    pub(crate) fn of_keys(branch: Option<&'static str>, pairs: f64, seq_len: usize) -> Self {
        let causal = window_pairs(seq_len, seq_len);
        Self { branch, density: pairs / causal, reads_every_key: pairs >= causal }
    }
}
