//! BA-Att (arXiv:2605.19726): blocks of tokens sorted by norm, scored by the product of their means and a second-order
//! term.

mod agreement;

pub use agreement::HeadAgreement;

use std::ops::Range;

use rayon::prelude::*;
use sieve_core::{KeyScores, SlotOrder};

use crate::keep::top_k;
use crate::permute::{self, Orders, Segments, sort_ranges};
use crate::pool::{Pooled, mean_and_variance, scores};
use crate::prelude::*;
use crate::vector::{add, norm};

choices! {
    /// Whether queries, keys or both are sorted by their norm.
    pub enum NormSort {
        /// Queries, within a row of the call.
        Q,
        /// Keys, within a row of the call.
        K,
        /// Queries and keys, both within a row of the call.
        Qk,
        /// No sequence: queries and keys keep their order.
        None,
    }

    /// The term that is added to the product of two blocks' means.
    pub enum Compensation {
        /// `tr(Sigma_Q Sigma_K) / d` of diagonal covariances of queries and keys.
        Covariance,
        /// Half the variance of the block's logits, diagonal: what lifts their log-mean-exp.
        Variance,
    }

    /// Layers whose block scores get the compensation.
    pub enum CompensateLayers {
        /// The first and the last (the last only where the depth is known).
        FirstLast,
        /// Every layer.
        All,
        /// No layer: blocks are scored by their means alone.
        None,
    }
}

settings! {
    /// Settings of the prefill method `ba_att`.
    pub struct BaAttConfig {
        /// Block size in tokens; divides `segment`.
        pub block: usize = 128,
        /// Share of the competing blocks that are dropped.
        pub sparsity: f64 = 0.5,
        /// Whether queries, keys or both are sorted by their norm.
        pub sort: NormSort = NormSort::Qk,
        /// Factor on the compensation of the block scores.
        pub beta: f64 = 1.0,
        /// What the estimate of a block adds to the product of its means.
        pub compensation: Compensation = Compensation::Covariance,
        /// Layers whose block scores get the compensation.
        pub compensate_layers: CompensateLayers = CompensateLayers::FirstLast,
        /// Tokens of a segment, inside which tokens move in the causal form.
        pub segment: usize = 512,
        /// Causal form; false is the paper's, for bidirectional models.
        pub causal: bool = true,
    }
    small
        "ba_att:block=16,segment=32",
        "ba_att:block=16,segment=32,sort=k,compensation=variance,compensate_layers=all,gqa=mean,sparsity=0.7";
    everything "ba_att:sparsity=0,block=16,segment=32";
}

impl PrefillMethod for BaAttConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("ba_att");
        rules.divides("block", self.block, "segment", self.segment)?;
        rules.share("sparsity", self.sparsity)?;
        if gqa == GqaPolicy::Mean && matches!(self.sort, NormSort::Q | NormSort::Qk) {
            return rules.fail(
                "gqa=mean averages blocks of queries, which sorting moves differently for each head",
                "use sort=k or gqa=per_query",
            );
        }
        Ok(())
    }

    fn check_call(&self, call: &Call<'_>) -> Result<(), SelectError> {
        let (rows, n) = (call.shape.num_queries, call.shape.num_keys);
        if self.causal || rows == n {
            return Ok(());
        }
        Rules("ba_att").fail(
            format!("causal=false needs all tokens at once, got {rows} queries and {n} keys"),
            "give the whole sequence in one call",
        )
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let n = call.shape.num_keys;
        // Only blocks of earlier segments compete; a call within one segment has none.
        if self.causal && n <= self.segment {
            return Selected::dense(call.shape);
        }
        let segments = Segments::new(call, self.segment, self.block);
        let orders = || Orders { keys: self.key_orders(call, segments), queries: self.query_orders(call, segments) };
        let kept_tiles = |heads: &[usize], orders: &Orders| self.kept_tiles(call, segments, heads, orders);
        permute::select(call, segments, gqa, self.causal, orders, kept_tiles)
    }

    /// Device steps exist only for the causal form, in calls longer than a segment; `None` otherwise.
    fn steps(&self, call: &Call<'_>, gqa: GqaPolicy) -> Option<BlockSelection> {
        let scores = match self.compensates(call.layer, call.num_layers) {
            false => BlockScores::Means { variances: 0.0 },
            true if self.compensation == Compensation::Covariance => {
                BlockScores::Means { variances: self.beta as f32 / call.shape.head_dim as f32 }
            }
            // Only the host computes the compensation by the variance.
            true => return None,
        };
        let moves_queries = matches!(self.sort, NormSort::Q | NormSort::Qk);
        // Each query head sorts its own queries, so the heads of a group cannot share a list.
        let fits = self.causal && call.shape.num_keys > self.segment && (!moves_queries || gqa == GqaPolicy::PerQuery);
        let keep = KeepBlocks::Share(1.0 - self.sparsity);
        let mut selection = BlockSelection::new(call.shape, self.block, scores, keep);
        selection.order = Some(SlotOrder {
            segment: self.segment,
            keys: matches!(self.sort, NormSort::K | NormSort::Qk).then_some(KeyScores::Length),
            moves_queries,
            keeps_first: false,
        });
        fits.then_some(selection)
    }

    fn knob(&self) -> Option<Knob> {
        Some(("sparsity", &["0.9", "0.75", "0.5", "0.25"]))
    }
}

impl BaAttConfig {
    /// Keys by rising norm, per KV head.
    fn key_orders(&self, call: &Call<'_>, segments: Segments) -> Vec<Vec<i32>> {
        let n = call.shape.num_keys;
        if !matches!(self.sort, NormSort::K | NormSort::Qk) {
            return vec![(0..n as i32).collect(); call.shape.num_kv_heads];
        }
        (0..call.shape.num_kv_heads)
            .into_par_iter()
            .map(|h| self.order(n, segments.whole(n), |key| call.key(h, key)))
            .collect()
    }

    /// Queries by ascending norm, for each query head; empty if they are not sorted.
    fn query_orders(&self, call: &Call<'_>, segments: Segments) -> Vec<Vec<i32>> {
        if matches!(self.sort, NormSort::K | NormSort::None) {
            return Vec::new();
        }
        let ranges = segments.rows(call);
        let order = |head| {
            let query = |row| call.query(head, row);
            self.order(call.shape.num_queries, ranges.iter().cloned(), query)
        };
        let heads = (0..call.shape.num_heads).into_par_iter();
        heads.map(order).collect()
    }

    /// Tokens sorted by rising norm; for a causal mask only within each of the ranges.
    fn order<'x>(
        &self,
        len: usize,
        ranges: impl Iterator<Item = Range<usize>>,
        token: impl Fn(usize) -> &'x [f32],
    ) -> Vec<i32> {
        let score: Vec<f32> = (0..len).map(|at| -norm(token(at))).collect();
        if self.causal { sort_ranges(len, ranges, &score) } else { sort_ranges(len, std::iter::once(0..len), &score) }
    }

    /// The key tiles that each query tile keeps, one choice for all of `heads`, which share a KV head; `None` on NaN.
    /// Where attention is causal, the tiles of earlier segments compete, and those of the query's own segment are kept.
    fn kept_tiles(&self, call: &Call<'_>, segments: Segments, heads: &[usize], orders: &Orders) -> Option<KeptRows> {
        let tiles = segments.tiles;
        let logits = self.summed_logits(call, tiles, heads, orders);
        if logits.iter().any(|x| x.is_nan()) {
            return None;
        }
        let num_key_tiles = tiles.num_key_tiles();
        Some(gqa::rows(tiles, |query_tile| {
            let competing = if self.causal { segments.earlier(query_tile) } else { num_key_tiles };
            // In f64 1 - 0.7 is a little more than 0.3; without the 1e-9, 0.3 of 10 blocks would round up to 4.
            let num_kept = ((1.0 - self.sparsity) * competing as f64 - 1e-9).ceil() as usize;
            // Ranked by logits, without the softmax over blocks, which would not change their order.
            let mut kept = top_k(&logits[query_tile * num_key_tiles..][..competing], num_kept);
            if self.causal {
                kept.extend(segments.own(query_tile));
            }
            kept
        }))
    }

    /// The block logits summed over `heads`, `[query tiles, key tiles]`. Tokens were sorted within their segments: a
    /// tile holds neighbouring slots of the sorted order, and `orders` says which token is in a slot.
    fn summed_logits(&self, call: &Call<'_>, tiles: Tiles, heads: &[usize], orders: &Orders) -> Vec<f32> {
        let head_dim = call.shape.head_dim;
        let kv_head = call.kv_head(heads[0]);
        let key_order = orders.keys_of(heads[0], call.shape.num_heads);
        let key_of_slot = |slot: usize| call.key(kv_head, key_order[slot] as usize);
        let key_tiles = (0..tiles.num_key_tiles()).map(|tile| tiles.keys(tile).map(key_of_slot));
        let k = mean_and_variance(key_tiles, head_dim);
        let mut sum: Vec<f32> = Vec::new();
        for &head in heads {
            let query_of_slot = |slot: usize| call.query(head, orders.query_row(head, slot));
            let query_tiles = (0..tiles.num_query_tiles()).map(|tile| tiles.rows(tile).map(query_of_slot));
            let q = mean_and_variance(query_tiles, head_dim);
            add(&mut sum, self.block_logits(call, &q, &k));
        }
        sum
    }

    /// Whether a layer's block scores get the compensation.
    fn compensates(&self, layer: usize, num_layers: usize) -> bool {
        let wanted = match self.compensate_layers {
            CompensateLayers::All => true,
            CompensateLayers::None => false,
            CompensateLayers::FirstLast => layer == 0 || layer + 1 == num_layers,
        };
        wanted && self.beta != 0.0
    }

    /// Logits of all pairs of a query block and a key block: scaled dot products of their means, plus in layers with
    /// compensation a term from their variances.
    pub(crate) fn block_logits(&self, call: &Call<'_>, q: &Pooled, k: &Pooled) -> Vec<f32> {
        let d = call.shape.head_dim;
        let mut logits = scores(&q.mean, &k.mean, d, call.shape.softmax_scale());
        if !self.compensates(call.layer, call.num_layers) {
            return logits;
        }
        let weight = self.beta as f32 / d as f32;
        let mut add = |a: &[f32], b: &[f32], factor: f32| {
            let term = scores(a, b, d, factor);
            logits.iter_mut().zip(term).for_each(|(x, term)| *x += term);
        };
        match self.compensation {
            Compensation::Covariance => add(&q.variance, &k.variance, weight),
            Compensation::Variance => {
                let square = |x: &[f32]| x.iter().map(|x| x * x).collect::<Vec<f32>>();
                add(&square(&q.mean), &k.variance, 0.5 * weight);
                add(&q.variance, &square(&k.mean), 0.5 * weight);
                add(&q.variance, &k.variance, 0.5 * weight);
            }
        }
        logits
    }
}
