//! Which share of a row's keys attention reads, and whether it hides any key of the row.

use super::flops::window_pairs;
use super::{Attention, AttentionForm};

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
        let seq_len = seq_len.max(1);
        let causal = window_pairs(seq_len, seq_len);
        let reads = |branch, pairs: f64, of_tokens: bool| BranchDensity {
            branch,
            density: pairs / causal,
            reads_every_key: of_tokens && pairs >= causal,
        };
        let (tokens, pooled) = (true, false);
        match self.form() {
            AttentionForm::Branches(nsa) => {
                let [compressed, selected, window] = nsa.pairs(seq_len);
                vec![
                    reads(Some("selected"), selected, tokens),
                    reads(Some("window"), window, tokens),
                    reads(Some("compressed"), compressed, pooled),
                ]
            }
            AttentionForm::Blocks(choice) if self.index_warmup() != Some(true) => {
                vec![reads(None, choice.blocks.selected_pairs(seq_len), tokens)]
            }
            form => vec![reads(None, window_pairs(form.num_kept().unwrap_or(usize::MAX), seq_len), tokens)],
        }
    }

    /// Whether this attention is meant to hide keys and hides none in rows of `seq_len` tokens: a window, the kept keys
    /// or the chosen blocks hold the whole row. `false` for dense kinds, and while MSA's indexer warms up.
    pub fn covers_rows(self, seq_len: usize) -> bool {
        let is_dense_by_kind = match self.form() {
            AttentionForm::Grouped { window } => window.is_none(),
            AttentionForm::Latent(_) => true,
            AttentionForm::Blocks(_) => self.index_warmup() == Some(true),
            AttentionForm::Branches(_) | AttentionForm::Ranked(_) => false,
        };
        !is_dense_by_kind && self.densities(seq_len).iter().any(|branch| branch.reads_every_key)
    }
}
