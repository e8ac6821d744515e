//! The best blocks by their dense attention mass: what no estimate can beat at equal density (MOMO, fig. 2).

use crate::keep::{keep_mass, top_k};
use crate::pool::{block_sums, causal_probabilities};
use crate::prelude::*;
use crate::vector::add;

settings! {
    /// Settings of the prefill method `oracle_topk`.
    pub struct OracleTopkConfig {
        /// Block size in tokens.
        pub block: usize = 32,
        /// Blocks that a row keeps.
        pub k: usize = 128,
        /// Share of the mass that is kept; replaces `k`.
        pub tau: Option<f64> = None,
    }
    small "oracle_topk:block=8,k=3";
    everything "oracle_topk:k=1000,block=8", "oracle_topk:tau=1,block=8";
}

impl PrefillMethod for OracleTopkConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("oracle_topk").positive("block", self.block)?;
        Rules("oracle_topk").share("tau", self.tau.unwrap_or(0.0))
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let tiles = Tiles::new(call.shape, self.block, self.block);
        gqa::mask(call, tiles, gqa, |heads| {
            gqa::rows_or_nan(tiles, |i| {
                let mass = block_mass(call, tiles, heads, i)?;
                Some(match self.tau {
                    Some(tau) => keep_mass(&mass, tau),
                    None => top_k(&mass, self.k),
                })
            })
        })
    }

    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let tokens = BlockScores::Cells { stride: 1, reversed: false, norm: 1.0 };
        let keep = self.tau.map_or(KeepBlocks::Top(self.k), KeepBlocks::Mass);
        Some(BlockSelection::new(call.shape, self.block, tokens, keep))
    }

    fn knob(&self) -> Option<Knob> {
        Some(match self.tau {
            Some(_) => ("tau", SHARES),
            None => ("k", &["4", "8", "16", "32", "64"]),
        })
    }
}

/// Dense probability mass of a query tile on each admissible block, `[admissible]`, summed over its rows and over
/// heads; `None` on NaN.
pub(crate) fn block_mass(call: &Call<'_>, tiles: Tiles, heads: &[usize], i: usize) -> Option<Vec<f32>> {
    let mut mass = Vec::new();
    for &head in heads {
        let p = causal_probabilities(call, head, tiles.rows(i))?;
        for row in p.chunks_exact(tiles.last(i) + 1) {
            add(&mut mass, block_sums(row, tiles.key_tile));
        }
    }
    Some(mass)
}
