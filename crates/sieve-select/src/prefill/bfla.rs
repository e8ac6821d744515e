//! BFLA (Block-Filtered Long-Context Attention): coarse blocks by the largest product of flattened groups, kept by
//! mass, spread over small tiles, with a local band, a sink and a deterministic rescue of dropped tiles.

use sieve_core::{KeyMask, Rescue};

use crate::keep::{keep_mass, softmax};
use crate::pool::{mean_pool, scores};
use crate::prelude::*;
use crate::vector::{add, mix};

choices! {
    /// How a block becomes the vectors that are compared.
    pub enum Pooling {
        /// Groups of tokens read as one long vector each (the paper's).
        Flat,
        /// The mean of the block's tokens.
        Mean,
        /// The token in the middle of the block.
        Center,
        /// Per channel the value with the largest magnitude.
        Maxabs,
    }

    /// The unit in which dropped keys are rescued.
    pub enum RescueGrid {
        /// Tiles of the attention kernel.
        Tile,
        /// Coarse blocks of `block` tokens.
        Block,
    }

    /// Hash function that picks the randomly rescued tiles.
    pub enum RescueHash {
        /// splitmix64 over the coordinates, one after another.
        Mix,
        /// The published linear congruence, whose neighbours are strongly correlated.
        Linear,
    }
}

settings! {
    /// Settings of the prefill method `bfla`.
    pub struct BflaConfig {
        /// Size of a coarse block (b), in tokens.
        pub block: usize = 256,
        /// Tokens of a flattened group (g); divides `block`.
        pub group: usize = 64,
        /// How a block becomes the vectors that are compared.
        pub pooling: Pooling = Pooling::Flat,
        /// Share of the estimated mass that stays (gamma).
        pub keep_mass: f64 = 0.99,
        /// Tokens before a tile's first row that stay.
        pub local_tokens: usize = 256,
        /// Tiles at the start that stay (`block / tile` for the published code's whole block).
        pub sink_tiles: usize = 1,
        /// One dropped tile in this many is rescued (eta), 0 for none.
        pub stride: u64 = 0,
        /// Share of dropped tiles rescued at random (rho).
        pub prob: f64 = 0.0,
        /// Seed of the periodic and of the random rescue.
        pub seed: u64 = 1,
        /// The unit in which both rescues keep dropped keys.
        pub rescue_grid: RescueGrid = RescueGrid::Tile,
        /// Hash function of the random rescue.
        pub hash: RescueHash = RescueHash::Mix,
        /// Tokens of a tile (T); divides `block`.
        pub tile: usize = 64,
    }
    small
        "bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.7",
        "bfla:block=32,group=8,tile=8,local_tokens=0,keep_mass=0.3,stride=5,prob=0.1,gqa=per_query",
        "bfla:block=16,pooling=maxabs,group=8,tile=16,local_tokens=8,keep_mass=0.5,gqa=mean",
        "bfla:block=16,pooling=mean,group=8,tile=8,local_tokens=8,keep_mass=0.3,prob=0.1,hash=linear",
        "bfla:block=16,pooling=center,group=8,tile=8,local_tokens=8,keep_mass=0.3,stride=7,rescue_grid=block";
    everything
        "bfla:keep_mass=1,block=32,group=8,tile=8",
        "bfla:keep_mass=0,local_tokens=0,stride=1,block=32,group=8,tile=8",
        "bfla:block=1099511627776,group=64,tile=8",
        "bfla:block=1099511627776,group=549755813888,tile=8";
}

impl PrefillMethod for BflaConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("bfla");
        rules.divides("group", self.group, "block", self.block)?;
        rules.divides("tile", self.tile, "block", self.block)?;
        rules.share("keep_mass", self.keep_mass)?;
        rules.share("prob", self.prob)
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let blocks = Tiles::new(call.shape, self.block, self.block);
        let mut chosen = gqa::mask(call, blocks, gqa, |heads| self.kept_blocks(call, blocks, heads));
        let (coarse, tiles) = (&chosen.mask, Tiles::new(call.shape, self.tile, self.tile));
        let rows = (0..coarse.num_lists()).flat_map(|list| self.expand(coarse, list, tiles));
        chosen.mask = KeyMask::new(call.shape, tiles, coarse.heads_per_list, rows);
        chosen
    }

    /// Device steps exist only for two of the poolings; `None` for the others.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let scores = match self.pooling {
            Pooling::Flat => BlockScores::LargestOfGroups(self.group),
            Pooling::Mean => BlockScores::Means { variances: 0.0 },
            Pooling::Center | Pooling::Maxabs => return None,
        };
        let mut selection = BlockSelection::new(call.shape, self.block, scores, KeepBlocks::Mass(self.keep_mass));
        selection.keep.tile = self.tile;
        selection.keep.local_tokens = self.local_tokens;
        selection.keep.first_tiles = self.sink_tiles;
        selection.keep.rescue = self.rescue();
        Some(selection)
    }

    fn knob(&self) -> Option<Knob> {
        Some(("keep_mass", &["0.5", "0.8", "0.9", "0.99", "0.999"]))
    }
}

impl BflaConfig {
    /// Coarse blocks kept by mass; `None` on NaN.
    fn kept_blocks(&self, call: &Call<'_>, blocks: Tiles, heads: &[usize]) -> Option<KeptRows> {
        // A block or group longer than the call is cut to the call's tokens: the rest would be padding with zeros,
        // which takes memory and adds nothing to a product.
        let (tokens, group) = (call.shape.num_keys.max(1), self.group.min(call.shape.num_keys.max(1)));
        let this = Self { group, block: self.block.min(tokens.next_multiple_of(group)), ..self.clone() };
        let (d, kv_head) = (call.shape.head_dim, call.kv_head(heads[0]));
        let key = |key| call.key(kv_head, key);
        let (k, width) = this.pool(d, blocks.num_key_tiles(), |j| blocks.keys(j), key);
        let queries = heads.iter().map(|&head| {
            let query = |row| call.query(head, row);
            this.pool(d, blocks.num_query_tiles(), |i| blocks.rows(i), query).0
        });
        let queries: Vec<Vec<f32>> = queries.collect();
        // Elements of all vectors of a block.
        let block_len = k.len() / blocks.num_key_tiles().max(1);
        gqa::rows_or_nan(blocks, |i| {
            let k = &k[..blocks.admissible(i) * block_len];
            let mut mass: Vec<f32> = Vec::new();
            for q in &queries {
                let products = scores(&q[i * block_len..][..block_len], k, width, call.shape.softmax_scale());
                let mut p = largest(&products, block_len / width, blocks.admissible(i));
                softmax(&mut p).then(|| add(&mut mass, p))?;
            }
            Some(keep_mass(&mass, self.keep_mass))
        })
    }

    /// The pooled vectors of all blocks, one block after the other, and the width of a vector. Flat: a block has a
    /// vector for each `group` tokens, their numbers side by side; else a block is one vector of width d. Block i has
    /// the tokens `range(i)`, of which `token` gives the d numbers; tokens that a flat block lacks are zero.
    fn pool<'x>(
        &self,
        d: usize,
        num_blocks: usize,
        range: impl Fn(usize) -> std::ops::Range<usize>,
        token: impl Fn(usize) -> &'x [f32],
    ) -> (Vec<f32>, usize) {
        match self.pooling {
            Pooling::Flat => {
                let mut out = vec![0.0; num_blocks * self.block * d];
                for (i, out) in out.chunks_exact_mut(self.block * d).enumerate() {
                    for (t, out) in range(i).zip(out.chunks_exact_mut(d)) {
                        out.copy_from_slice(token(t));
                    }
                }
                (out, self.group * d)
            }
            Pooling::Mean => {
                let token = &token;
                (mean_pool((0..num_blocks).map(|i| range(i).map(token)), d), d)
            }
            Pooling::Center => {
                let middle = |i: usize| (range(i).start + range(i).end) / 2;
                ((0..num_blocks).flat_map(|i| token(middle(i)).iter().copied()).collect(), d)
            }
            Pooling::Maxabs => {
                let mut out = vec![0.0_f32; num_blocks * d];
                for (i, out) in out.chunks_exact_mut(d).enumerate() {
                    for t in range(i) {
                        for (out, &x) in out.iter_mut().zip(token(t)) {
                            if x.abs() > out.abs() || x.is_nan() {
                                *out = x;
                            }
                        }
                    }
                }
                (out, d)
            }
        }
    }

    /// Tiles of the coarse blocks that a list keeps, with the local band, the sink and rescued tiles. The hashes take
    /// the list's index as the head.
    fn expand(&self, coarse: &KeyMask, list: usize, tiles: Tiles) -> KeptRows {
        let (per_block, blocks) = (self.block / self.tile, coarse.tiles);
        gqa::rows(tiles, |i| {
            let admissible = tiles.admissible(i);
            let mut kept = vec![false; admissible];
            for &block in coarse.row(list, i / per_block) {
                let first = block as usize * per_block;
                kept[first.min(admissible)..(first + per_block).min(admissible)].fill(true);
            }
            let band = tiles.first(i).saturating_sub(self.local_tokens) / self.tile;
            kept[band..].fill(true);
            kept[..self.sink_tiles.min(admissible)].fill(true);
            // Rows are counted from position 0, so that a prompt in chunks rescues the same tiles.
            let row = (tiles.first(i) / self.tile) as u64;
            let block_row = (blocks.context() + i / per_block * self.block) as u64 / self.block as u64;
            let rescue = self.rescue();
            for (j, kept) in kept.iter_mut().enumerate().filter(|(_, kept)| !**kept) {
                let (row, column) = if rescue.by_block { (block_row, j / per_block) } else { (row, j) };
                *kept = is_rescued(rescue, list as u64, row, column as u64);
            }
            (0..admissible).filter(|&j| kept[j]).collect()
        })
    }

    /// The rescue of dropped tiles: a hash below `limit` is a share below `prob`.
    fn rescue(&self) -> Rescue {
        let is_linear = self.hash == RescueHash::Linear;
        let limit = if is_linear {
            // The least whole number that, divided by a million and rounded, is not below the share.
            let below = (self.prob * 1e6).floor();
            below as u64 + u64::from(below / 1e6 < self.prob)
        } else {
            (self.prob * f64::from(1 << 24)).ceil() as u64
        };
        Rescue {
            stride: self.stride,
            limit,
            seed: self.seed,
            is_linear,
            by_block: self.rescue_grid == RescueGrid::Block,
        }
    }
}

/// Whether a dropped tile or block is kept after all: by the stride, or by its hash, a number that depends on the
/// coordinates and the seed alone.
fn is_rescued(rescue: Rescue, list: u64, row: u64, column: u64) -> bool {
    let Rescue { stride, limit, seed, .. } = rescue;
    let strided =
        stride > 0 && (131_u64.wrapping_mul(row).wrapping_add(17 * column)).wrapping_add(seed).is_multiple_of(stride);
    let hash = || {
        if !rescue.is_linear {
            return mix(mix(mix(mix(list).wrapping_add(row)).wrapping_add(column)).wrapping_add(seed)) >> 40;
        }
        let sum = (row + 1)
            .wrapping_mul(1_103_515_245)
            .wrapping_add((column + 1).wrapping_mul(12_345))
            .wrapping_add((list + 1).wrapping_mul(2_654_435_761))
            .wrapping_add(seed);
        (sum & 0x7fff_ffff) % 1_000_000
    };
    strided || (limit > 0 && hash() < limit)
}

/// The largest product of a block of queries with each of `blocks` key blocks. `products` is `[per_block, blocks *
/// per_block]`: the vectors of the query block by the vectors of all key blocks.
fn largest(products: &[f32], per_block: usize, blocks: usize) -> Vec<f32> {
    let mut best = vec![f32::NEG_INFINITY; blocks];
    for (at, &x) in products.iter().enumerate() {
        let best = &mut best[at / per_block % blocks];
        // A NaN stays, because it makes the head dense.
        if x > *best || x.is_nan() {
            *best = x;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_below_the_limit_is_a_share_below_the_probability() {
        for (prob, hash) in [0.0, 1e-9, 3e-6, 0.1, 0.3, 0.999_999, 1.0]
            .into_iter()
            .flat_map(|prob| [(prob, RescueHash::Mix), (prob, RescueHash::Linear)])
        {
            let of = if hash == RescueHash::Mix { 1 << 24 } else { 1_000_000 };
            let limit = BflaConfig { prob, hash, ..BflaConfig::default() }.rescue().limit;
            let near = limit.saturating_sub(2)..(limit + 2).min(of);
            assert!(near.clone().all(|x| (x < limit) == (x as f64 / (of as f64) < prob)), "{prob}: {limit}");
        }
    }
}
