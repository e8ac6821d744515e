//! Blocks by the product of their means: MeanPool (arXiv:2510.21270, algorithm 2 on unpermuted keys; with `top_k`, the
//! baseline of MOMO).

use crate::keep::{keep_mass, softmax, top_k};
use crate::pool::{key_means, query_means, scores};
use crate::prelude::*;
use crate::vector::add;

settings! {
    /// Settings of the prefill method `meanpool`.
    pub struct MeanpoolConfig {
        /// Block size in tokens.
        pub block: usize = 128,
        /// Share of the estimated attention mass that the kept blocks hold.
        pub tau: f64 = 0.9,
        /// Number of blocks that a row keeps; replaces `tau`.
        pub top_k: Option<usize> = None,
    }
    small "meanpool:block=16,tau=0.5", "meanpool:block=16,top_k=2,gqa=mean,last_dense_rows=20";
    everything "meanpool:tau=1,block=16", "meanpool:top_k=1000,block=16";
}

impl PrefillMethod for MeanpoolConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("meanpool").positive("block", self.block)?;
        Rules("meanpool").share("tau", self.tau)
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let tiles = Tiles::new(call.shape, self.block, self.block);
        gqa::mask(call, tiles, gqa, |heads| {
            let scores = pooled_scores(call, tiles, heads);
            gqa::rows_or_nan(tiles, |query_tile| {
                // Key tiles that begin after the query tile are no candidates.
                let num_candidates = tiles.admissible(query_tile);
                let mut candidates = scores[query_tile * tiles.num_key_tiles()..][..num_candidates].to_vec();
                let mut kept = match self.top_k {
                    Some(_) if candidates.iter().any(|x| x.is_nan()) => return None,
                    Some(count) => top_k(&candidates, count),
                    None => softmax(&mut candidates).then(|| keep_mass(&candidates, self.tau))?,
                };
                // The first key tile holds the sink, and is always kept; `gqa::mask` adds the query's own tile.
                kept.push(0);
                Some(kept)
            })
        })
    }

    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let keep = self.top_k.map_or(KeepBlocks::Mass(self.tau), KeepBlocks::Top);
        let means = BlockScores::Means { variances: 0.0 };
        let mut selection = BlockSelection::new(call.shape, self.block, means, keep);
        selection.keep.first_tiles = 1;
        Some(selection)
    }

    fn reads(&self) -> Reads {
        Reads::BlockMeans(self.block)
    }

    fn knob(&self) -> Option<Knob> {
        Some(match self.top_k {
            Some(_) => ("top_k", &["2", "4", "8", "16"]),
            None => ("tau", SHARES),
        })
    }
}

/// Scaled products of block means, `[query tiles, key tiles]`, averaged over heads.
pub(crate) fn pooled_scores(call: &Call<'_>, tiles: Tiles, heads: &[usize]) -> Vec<f32> {
    let d = call.shape.head_dim;
    let kv_head = call.kv_head(heads[0]);
    // One head of the means `[blocks, num_heads, head_dim]` that came with the call.
    let of_head = |means: &[f32], num_heads: usize, head: usize| -> Vec<f32> {
        let blocks = means.chunks_exact(num_heads * d);
        let of_block = |block: &[f32]| block[head * d..(head + 1) * d].to_vec();
        blocks.flat_map(of_block).collect()
    };
    let k = match call.means {
        Some(means) => of_head(means.k, call.shape.num_kv_heads, kv_head),
        None => key_means(call, kv_head, tiles, |key| key),
    };
    let mut sum: Vec<f32> = Vec::new();
    for &head in heads {
        let q = match call.means {
            Some(means) => of_head(means.q, call.shape.num_heads, head),
            None => query_means(call, head, tiles, |row| row),
        };
        add(&mut sum, scores(&q, &k, d, call.shape.softmax_scale() / heads.len() as f32));
    }
    sum
}
