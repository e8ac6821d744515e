//! Launches of `kernels/select_*.cu`: a prefill selector on the GPU, from queries and keys to the lists of key tiles
//! that attention reads.
//!
//! A method describes its choice in steps, as a `BlockSelection` of sieve-core:
//!
//! | step | possible values |
//! |---|---|
//! | how tokens are moved first | within a segment: keys by attention or length, queries by length |
//! | how blocks are compared | means, variances, groups, cells, last queries' columns and diagonals, probe rows |
//! | how much is kept | a share of the probability, a number of blocks, or a share of the blocks |
//! | what is always kept | the first block, and the blocks with the row's own positions |
//!
//! One set of `select_*` kernels runs all methods of this form, and writes the mask where attention reads it. A
//! method that cannot be described so chooses on the host. Attention reads key tiles by the copy engine where a
//! mask consists only of tiles of 64 keys or a multiple of 64, and key by key otherwise.
mod call;
mod choose;
mod heavy;
mod lines;
mod lists;
mod order;
mod probes;
mod scores;
mod step;

pub use choose::{Amount, LongChoice};
pub use heavy::KeptKeys;
pub use step::SelectorStep;

use crate::KernelError;
use crate::attention::Qkv;
use crate::runtime::{CudaTensor, DType, require};
use call::{Call, NAME};
use choose::{Choice, KeptBits};
use order::Orders;
use sieve_core::{BlockScores, BlockSelection, ChosenKeys, HeadRule};

impl Qkv {
    /// Chooses the blocks of keys that each block of queries keeps. The host does not wait for the result.
    ///
    /// # Shapes
    /// - q, k, v: bf16 `[1, num_keys, heads, head_dim]`; v is read for dense probe rows alone
    ///
    /// # Errors
    /// Sizes that do not fit the selection; blocks that are not 1, 2, 4, .. cells (runs of tokens scored as one); cells
    /// with a head width that is not a multiple of 64.
    pub fn select_blocks(&self, selection: &BlockSelection) -> Result<ChosenKeys<CudaTensor>, KernelError> {
        let call = Call::new(self, selection)?;
        let layout = selection.layout();
        let most = layout.places.tile_idx.len().max(layout.places.col_idx.len());
        require!(i32::try_from(most).is_ok(), NAME, "mask": format!("of up to {most} entries"),
            "fewer than 2^31 tiles or keys that could be kept; larger tiles have fewer");
        let [block_rows, columns] = selection.blocks();
        let like = call.qkv.q.tensor();
        let heads = selection.shape.num_heads;
        let kept = like.empty_contiguous(&[heads, block_rows, columns.div_ceil(u32::BITS as usize)], DType::I32);
        let nan_rows = like.zeros_contiguous(&[heads], DType::I32);
        let words = like.empty_contiguous(&[layout.places.num_words()], DType::I32);
        let mask = layout.map(|()| words.clone());
        let orders = call.orders(&mask, &nan_rows)?;
        let bits = [&kept, &nan_rows];
        let rules = selection.rules();
        let (lines, others): (Vec<_>, Vec<_>) =
            rules.into_iter().partition(|rule| matches!(rule.scores, BlockScores::Lines { .. }));
        let (mut single_columns, mut probe_o) = (None, None);
        if !lines.is_empty() {
            // This writes the bits of every head; the other heads' bits are overwritten below.
            single_columns = Some(call.lines(bits, &lines)?);
        }
        match selection.scores.by {
            _ if others.is_empty() => {}
            BlockScores::Patterns { .. } => call.patterns(bits)?,
            BlockScores::Probes { .. } => probe_o = Some(call.probes(bits)?),
            BlockScores::Logits => {
                let supported = "scores of blocks; keep_heavy_keys takes these";
                return Err(KernelError::unsupported(NAME, "scores", "logits", supported));
            }
            _ => call.compare(bits, &orders, &others)?,
        }
        let mask = call.lists(bits, mask, &orders, single_columns.as_ref())?;
        Ok(ChosenKeys { mask, probe_o })
    }
}

impl Call<'_> {
    /// Scores all blocks and chooses the blocks that the rules' heads keep.
    fn compare(&self, bits: KeptBits<'_>, orders: &Orders, rules: &[HeadRule]) -> Result<(), KernelError> {
        let s = self.selection;
        let means = match s.scores.by {
            BlockScores::Means { .. } => Some(self.means(orders)?),
            _ => None,
        };
        let row_bytes = self.score_rows() * s.blocks()[1] * DType::F32.size();
        for rule in rules {
            for heads in self.slabs(rule.heads.clone(), row_bytes) {
                let scores = match &means {
                    Some(means) => self.scores_by_means(means, heads.clone())?,
                    None => self.scores_by_cells(orders, heads.clone())?,
                };
                self.choose(&Choice {
                    scores: &scores,
                    bits,
                    heads,
                    keep: rule.keep,
                    is_mass: self.is_lse(),
                    forced: s.keep.counts_own,
                    drops_absent: false,
                })?;
            }
        }
        Ok(())
    }
}
