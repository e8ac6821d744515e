//! The block-sparse pattern of MInference (arXiv:2407.02490): the best blocks by the product of their means.

use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa::{self, GqaPolicy};
use crate::keep::{sorted, top_k};
use crate::mask::{ListRows, SparseMask};
use crate::prefill::meanpool::pooled_scores;
use crate::prefill::{Knob, PrefillMethod};
use crate::range::Rules;
use crate::selector::Reads;
use crate::settings::settings;

settings! {
    /// Settings of `block_sparse`.
    pub struct BlockSparseConfig {
        /// Tokens of a block.
        pub block: usize = 64,
        /// Blocks per row; the diagonal is added.
        pub topk: usize = 100,
    }
    small "block_sparse:block=16,topk=2";
    everything "block_sparse:block=16,topk=1000";
}

impl PrefillMethod for BlockSparseConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("block_sparse").positive("block", self.block)
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        let tiles = Tiles::new(call.shape, self.block, self.block);
        gqa::mask(call, tiles, gqa, |heads| best_blocks(call, tiles, heads, |_| self.topk))
    }

    fn reads(&self) -> Reads {
        Reads::BlockMeans(self.block)
    }

    fn knob(&self) -> Option<Knob> {
        Some(("topk", &["2", "4", "8", "16"]))
    }
}

/// The `num_kept(blocks of the row)` best blocks of each row; `None` on NaN.
pub(crate) fn best_blocks(
    call: &Call<'_>,
    tiles: Tiles,
    heads: &[usize],
    num_kept: impl Fn(usize) -> usize,
) -> Option<ListRows> {
    let scores = pooled_scores(call, tiles, heads);
    let mut rows = Vec::new();
    for (i, row) in scores.chunks_exact(tiles.num_key_tiles()).enumerate() {
        let row = &row[..tiles.admissible(i)];
        if row.iter().any(|x| x.is_nan()) {
            return None;
        }
        rows.push(sorted(top_k(row, num_kept(row.len()))));
    }
    Some(ListRows::of_tiles(rows))
}
