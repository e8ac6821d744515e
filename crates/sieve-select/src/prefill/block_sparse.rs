//! The block-sparse pattern of MInference (arXiv:2407.02490): the best blocks by the product of their means.

use crate::keep::top_k;
use crate::prefill::meanpool::pooled_scores;
use crate::prelude::*;

settings! {
    /// Settings of the prefill method `block_sparse`.
    pub struct BlockSparseConfig {
        /// Block size in tokens.
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

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let tiles = Tiles::new(call.shape, self.block, self.block);
        gqa::mask(call, tiles, gqa, |heads| best_blocks(call, tiles, heads, |_| self.topk))
    }

    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let means = BlockScores::Means { variances: 0.0 };
        Some(BlockSelection::new(call.shape, self.block, means, KeepBlocks::Top(self.topk)))
    }

    fn reads(&self) -> Reads {
        Reads::BlockMeans(self.block)
    }

    fn knob(&self) -> Option<Knob> {
        Some(("topk", &["2", "4", "8", "16"]))
    }
}

/// The best key blocks of each query block; `num_kept` gives their number from the number of blocks it may see. `None`
/// on NaN.
pub(crate) fn best_blocks(
    call: &Call<'_>,
    tiles: Tiles,
    heads: &[usize],
    num_kept: impl Fn(usize) -> usize + Sync,
) -> Option<KeptRows> {
    let scores = pooled_scores(call, tiles, heads);
    gqa::rows_or_nan(tiles, |i| {
        let row = &scores[i * tiles.num_key_tiles()..][..tiles.admissible(i)];
        let has_nan = row.iter().any(|x| x.is_nan());
        (!has_nan).then(|| top_k(row, num_kept(row.len())))
    })
}
