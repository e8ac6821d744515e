//! BA-Att (arXiv:2605.19726): blocks of tokens sorted by norm, scored by the products of their means with a
//! second-order term.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa::{self, GqaPolicy};
use crate::keep::{sorted, top_k};
use crate::mask::{ListRows, SparseMask};
use crate::permute::{Segments, attach, drop_future_tiles, sort_ranges};
use crate::pool::{Pooled, mean_and_variance, scores};
use crate::prefill::{Knob, PrefillMethod};
use crate::range::Rules;
use crate::settings::settings;
use crate::vector::{add, norm};

/// Which sequences are sorted by norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormSort {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Both.
    Qk,
    /// Neither.
    None,
}

/// The term added to the products of means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compensation {
    /// `tr(Sigma_Q Sigma_K) / d`, diagonal.
    Covariance,
    /// Half the variance of the block's logits, diagonal: what lifts their log-mean-exp.
    Variance,
}

/// Layers with a compensation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompensateLayers {
    /// The first and the last (the last only where the depth is known).
    FirstLast,
    /// All.
    All,
    /// None.
    None,
}

settings! {
    /// Settings of `ba_att`.
    pub struct BaAttConfig {
        /// Tokens of a block; divides `segment`.
        pub block: usize = 128,
        /// Share of the competing blocks that are dropped.
        pub sparsity: f64 = 0.5,
        /// Which sequences are sorted.
        pub sort: NormSort = NormSort::Qk,
        /// Factor on the compensation.
        pub beta: f64 = 1.0,
        /// The compensation.
        pub compensation: Compensation = Compensation::Covariance,
        /// Layers with it.
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
                "gqa=mean averages blocks of queries, which sorting moves differently for each head".to_owned(),
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

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        let n = call.shape.num_keys;
        if self.causal && n <= self.segment {
            return SparseMask::dense(call.shape);
        }
        let segments = Segments {
            segment: self.segment,
            block: self.block,
        };
        let tiles = Tiles::new(call.shape, self.block, self.block);
        let started = std::time::Instant::now();
        let keys = self.key_orders(call, segments);
        let queries = self.query_orders(call, segments);
        let permute_seconds = started.elapsed().as_secs_f64();
        let nan = std::sync::atomic::AtomicUsize::new(0);
        let (per, mut lists) = gqa::lists_as_selected(call, tiles, gqa, |heads| {
            let list = self.rows(call, tiles, segments, heads, &keys, &queries);
            list.unwrap_or_else(|| {
                nan.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let end = |i| {
                    if self.causal {
                        segments.own(tiles, i).end
                    } else {
                        tiles.num_key_tiles()
                    }
                };
                gqa::rows(tiles, |i| (0..end(i)).collect())
            })
        });
        if self.causal {
            drop_future_tiles(call, tiles, &mut lists, &keys, &queries);
        }
        let mut mask = SparseMask::from_lists(call.shape, tiles, per, &lists);
        attach(&mut mask, &keys, &queries);
        mask.causal = self.causal;
        mask.stats.nan_lists = nan.into_inner();
        mask.stats.permute_seconds = permute_seconds;
        mask
    }

    fn knob(&self) -> Option<Knob> {
        Some(("sparsity", &["0.9", "0.75", "0.5", "0.25"]))
    }
}

impl BaAttConfig {
    /// Keys by rising norm, per KV head.
    fn key_orders(&self, call: &Call<'_>, segments: Segments) -> Vec<Vec<i32>> {
        let n = call.shape.num_keys;
        let sort = matches!(self.sort, NormSort::K | NormSort::Qk);
        (0..call.shape.num_kv_heads)
            .into_par_iter()
            .map(|h| {
                if !sort {
                    return (0..n as i32).collect();
                }
                let score: Vec<f32> = (0..n).map(|key| -norm(call.key(h, key))).collect();
                if self.causal {
                    sort_ranges(n, segments.whole(n), &score)
                } else {
                    sort_ranges(n, std::iter::once(0..n), &score)
                }
            })
            .collect()
    }

    /// Queries by rising norm, per query head; empty when they stay.
    fn query_orders(&self, call: &Call<'_>, segments: Segments) -> Vec<Vec<i32>> {
        if matches!(self.sort, NormSort::K | NormSort::None) {
            return Vec::new();
        }
        let rows = call.shape.num_queries;
        (0..call.shape.num_heads)
            .into_par_iter()
            .map(|head| {
                let score: Vec<f32> = (0..rows).map(|row| -norm(call.query(head, row))).collect();
                if self.causal {
                    sort_ranges(rows, segments.rows(call).into_iter(), &score)
                } else {
                    sort_ranges(rows, std::iter::once(0..rows), &score)
                }
            })
            .collect()
    }

    /// Tiles of one list; `None` on NaN.
    fn rows(
        &self,
        call: &Call<'_>,
        tiles: Tiles,
        segments: Segments,
        heads: &[usize],
        keys: &[Vec<i32>],
        queries: &[Vec<i32>],
    ) -> Option<ListRows> {
        let d = call.shape.head_dim;
        let kv_head = call.kv_head(heads[0]);
        let order = &keys[kv_head];
        let key = |slot: usize| call.key(kv_head, order[slot] as usize);
        let k = mean_and_variance((0..tiles.num_key_tiles()).map(|j| tiles.keys(j).map(key)), d);
        let mut sum: Vec<f32> = Vec::new();
        for &head in heads {
            let query = |slot: usize| {
                let row = queries.get(head).map_or(slot, |order| order[slot] as usize);
                call.query(head, row)
            };
            let q = mean_and_variance((0..tiles.num_query_tiles()).map(|i| tiles.rows(i).map(query)), d);
            add(&mut sum, self.block_logits(call, &q, &k));
        }
        if sum.iter().any(|x| x.is_nan()) {
            return None;
        }
        let cols = tiles.num_key_tiles();
        let rows = sum.chunks_exact(cols).enumerate().map(|(i, row)| {
            let competing = if self.causal { segments.earlier(tiles, i) } else { cols };
            // The softmax over blocks keeps their order, so the logits decide.
            // 1 - 0.7 is a little more than 0.3; that must not round up.
            let kappa = ((1.0 - self.sparsity) * competing as f64 - 1e-9).ceil() as usize;
            let mut kept = top_k(&row[..competing], kappa);
            if self.causal {
                kept.extend(segments.own(tiles, i));
            }
            sorted(kept)
        });
        Some(ListRows {
            tiles: rows.collect(),
            columns: Vec::new(),
        })
    }

    /// Whether a layer has a compensation.
    pub(crate) fn compensates(&self, layer: usize, num_layers: usize) -> bool {
        let wanted = match self.compensate_layers {
            CompensateLayers::All => true,
            CompensateLayers::None => false,
            CompensateLayers::FirstLast => layer == 0 || layer + 1 == num_layers,
        };
        wanted && self.beta != 0.0
    }

    /// Products of means, with the compensation where this layer has one.
    pub(crate) fn block_logits(&self, call: &Call<'_>, q: &Pooled, k: &Pooled) -> Vec<f32> {
        let d = call.shape.head_dim;
        let mut logits = scores(&q.mean, &k.mean, d, call.shape.softmax_scale());
        if !self.compensates(call.layer, call.num_layers) {
            return logits;
        }
        let beta = self.beta as f32 / d as f32;
        let mut add = |a: &[f32], b: &[f32], factor: f32| {
            let term = scores(a, b, d, factor);
            logits.iter_mut().zip(term).for_each(|(x, term)| *x += term);
        };
        match self.compensation {
            Compensation::Covariance => add(&q.variance, &k.variance, beta),
            Compensation::Variance => {
                let square = |x: &[f32]| x.iter().map(|x| x * x).collect::<Vec<f32>>();
                add(&square(&q.mean), &k.variance, 0.5 * beta);
                add(&q.variance, &square(&k.mean), 0.5 * beta);
                add(&q.variance, &k.variance, 0.5 * beta);
            }
        }
        logits
    }
}

/// Bound on `|q.k - qbar.kbar| / sqrt(d)` over the pairs of two blocks: `(M_Q R_K + M_K R_Q) / sqrt(d)` with the
/// largest norm M and the largest distance to the mean R (Cauchy-Schwarz).
///
/// # Shapes
/// - q, k: `[tokens, head_dim]`
pub fn pooling_bound(q: &[f32], k: &[f32], head_dim: usize) -> f32 {
    let [(m_q, r_q), (m_k, r_k)] = [q, k].map(|x| {
        let tokens = x.chunks_exact(head_dim);
        let mean = crate::pool::mean_pool(std::iter::once(tokens.clone()), head_dim);
        let largest = tokens.clone().map(norm).fold(0.0, f32::max);
        let radius = tokens
            .map(|x| norm(&x.iter().zip(&mean).map(|(x, mean)| x - mean).collect::<Vec<f32>>()))
            .fold(0.0, f32::max);
        (largest, radius)
    });
    (m_q * r_k + m_k * r_q) / (head_dim as f32).sqrt()
}
