//! How well means of blocks stand for their tokens: the bound U on their error (arXiv:2605.19726, design 2 and figure
//! 2) beside the error, and the estimated share of each block beside its share of attention.
//!
//! With `q_i = qbar + dq_i` and `k_j = kbar + dk_j` the error of a pair is `q_i.k_j - qbar.kbar = q_i.dk_j +
//! dq_i.kbar`, at most `M_Q R_K + R_Q M_K` by Cauchy-Schwarz: M is a block's largest norm, R the largest distance to
//! its mean.

use rayon::prelude::*;

use super::BaAttConfig;
use crate::keep::softmax;
use crate::permute::{Orders, Segments};
use crate::pool::{mean_and_variance, scores};
use crate::prelude::*;
use crate::vector::{dot, norm};

/// Agreement of one query head's block scores with its attention, over the pairs of blocks that compete.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct HeadAgreement {
    /// Pairs of a query block and a key block.
    pub pairs: usize,
    /// Pearson correlation of U with the pair's largest `|q.k - qbar.kbar| / sqrt(d)`; `None` where either is constant.
    pub bound: Option<f64>,
    /// The largest error divided by its U: at most 1.
    pub largest_of_bound: f64,
    /// Pearson correlation of a key block's estimated share (softmax of the block logits over the competing blocks)
    /// with its share of the query block's attention; `None` where either is constant.
    pub mass: Option<f64>,
}

/// The pairs of blocks of one head, in the same order.
#[derive(Debug, Default)]
struct Pairs {
    bound: Vec<f64>,
    error: Vec<f64>,
    estimate: Vec<f64>,
    mass: Vec<f64>,
}

impl BaAttConfig {
    /// The agreement of each query head's block scores with attention in a call. It computes all logits, as dense
    /// attention does.
    ///
    /// # Errors
    /// A call that the settings do not fit.
    pub fn agreement(&self, call: &Call<'_>) -> Result<Vec<HeadAgreement>, SelectError> {
        self.check_call(call)?;
        let segments = Segments::new(call, self.segment, self.block);
        let orders = Orders { keys: self.key_orders(call, segments), queries: self.query_orders(call, segments) };
        let heads = (0..call.shape.num_heads).into_par_iter();
        Ok(heads.map(|head| self.pairs(call, segments, head, &orders).agreement()).collect())
    }

    /// All pairs of a query block and a competing key block of a head.
    fn pairs(&self, call: &Call<'_>, segments: Segments, head: usize, orders: &Orders) -> Pairs {
        let (d, tiles, scale) = (call.shape.head_dim, segments.tiles, call.shape.softmax_scale());
        let (num_key_tiles, kv_head) = (tiles.num_key_tiles(), call.kv_head(head));
        let key_order = orders.keys_of(head, call.shape.num_heads);
        let key = |slot: usize| call.key(kv_head, key_order[slot] as usize);
        let query = |slot: usize| call.query(head, orders.query_row(head, slot));
        let k = mean_and_variance((0..num_key_tiles).map(|j| tiles.keys(j).map(key)), d);
        let q = mean_and_variance((0..tiles.num_query_tiles()).map(|i| tiles.rows(i).map(query)), d);
        let (estimates, means) = (self.block_logits(call, &q, &k), scores(&q.mean, &k.mean, d, scale));
        let reach_k: Vec<_> =
            (0..num_key_tiles).map(|j| Reach::of(tiles.keys(j).map(key), &k.mean[j * d..][..d])).collect();
        let mut pairs = Pairs::default();
        for i in 0..tiles.num_query_tiles() {
            let competing = if self.causal { segments.earlier(i) } else { num_key_tiles };
            if competing == 0 {
                continue;
            }
            let reach_q = Reach::of(tiles.rows(i).map(query), &q.mean[i * d..][..d]);
            let means_of_tile = &means[i * num_key_tiles..][..competing];
            let (error, mass) = errors_and_mass(tiles, i, means_of_tile, |query_slot| {
                let (q, position) = (query(query_slot), call.shape.context() + orders.query_row(head, query_slot));
                let is_seen = |key_slot: usize| !self.causal || key_order[key_slot] as usize <= position;
                let logit =
                    |key_slot| if is_seen(key_slot) { dot(q, key(key_slot)) * scale } else { f32::NEG_INFINITY };
                (0..key_order.len()).map(logit).collect()
            });
            let mut estimate = estimates[i * num_key_tiles..][..competing].to_vec();
            if !softmax(&mut estimate) {
                estimate.fill(f32::NAN);
            }
            pairs.bound.extend(reach_k[..competing].iter().map(|reach| reach_q.bound(reach) * f64::from(scale)));
            pairs.error.extend(error);
            pairs.estimate.extend(estimate.into_iter().map(f64::from));
            pairs.mass.extend(mass);
        }
        pairs
    }
}

/// For each key tile that competes for a query tile, by the queries' exact logits: the largest distance of a logit
/// from the product of the two tiles' means, which `means` has, and the attention mass, averaged over queries.
///
/// `logits_of` gives the logits of the query in a slot, with minus infinity at keys that it does not see.
fn errors_and_mass(
    tiles: Tiles,
    query_tile: usize,
    means: &[f32],
    logits_of: impl Fn(usize) -> Vec<f32>,
) -> (Vec<f64>, Vec<f64>) {
    let (mut errors, mut masses) = (vec![0.0f64; means.len()], vec![0.0f64; means.len()]);
    let num_queries = tiles.rows(query_tile).len() as f64;
    for slot in tiles.rows(query_tile) {
        let mut logits = logits_of(slot);
        for (key_tile, (error, mean)) in errors.iter_mut().zip(means).enumerate() {
            let distances = logits[tiles.keys(key_tile)].iter().map(|logit| f64::from((logit - mean).abs()));
            *error = distances.fold(*error, f64::max);
        }
        if !softmax(&mut logits) {
            // A NaN, which makes the head's correlations None.
            logits.fill(f32::NAN);
        }
        let probabilities = logits;
        for (key_tile, mass) in masses.iter_mut().enumerate() {
            let of_tile = probabilities[tiles.keys(key_tile)].iter().map(|&p| f64::from(p));
            *mass += of_tile.sum::<f64>() / num_queries;
        }
    }
    (errors, masses)
}

impl Pairs {
    /// Over all pairs of tiles: how the bound goes with the error and the estimate with the attention mass, and the
    /// largest error as a share of its bound, of the bounds above 0.
    fn agreement(&self) -> HeadAgreement {
        let of_bound = self.error.iter().zip(&self.bound).filter(|&(_, &bound)| bound > 0.0);
        HeadAgreement {
            pairs: self.bound.len(),
            bound: pearson(&self.bound, &self.error),
            largest_of_bound: of_bound.map(|(error, bound)| error / bound).fold(0.0, f64::max),
            mass: pearson(&self.estimate, &self.mass),
        }
    }
}

/// How far a block's tokens reach.
struct Reach {
    /// The largest norm.
    norm: f64,
    /// The largest distance to the block's mean.
    radius: f64,
}

impl Reach {
    /// Of a block's tokens, each as wide as their `mean`; zero for no token.
    fn of<'x>(tokens: impl Iterator<Item = &'x [f32]>, mean: &[f32]) -> Self {
        let mut reach = Self { norm: 0.0, radius: 0.0 };
        for x in tokens {
            let distance: Vec<f32> = x.iter().zip(mean).map(|(x, mean)| x - mean).collect();
            reach.norm = reach.norm.max(norm(x).into());
            reach.radius = reach.radius.max(norm(&distance).into());
        }
        reach
    }

    /// `M_Q R_K + R_Q M_K` of two blocks: U without the softmax scale.
    fn bound(&self, of_keys: &Self) -> f64 {
        self.norm * of_keys.radius + self.radius * of_keys.norm
    }
}

/// Pearson's correlation of two lists of equal length; `None` where one is constant or holds a NaN.
fn pearson(x: &[f64], y: &[f64]) -> Option<f64> {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len().max(1) as f64;
    let (mean_x, mean_y) = (mean(x), mean(y));
    let products = |x: &[f64], of_x: f64, y: &[f64], of_y: f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - of_x) * (y - of_y)).sum()
    };
    let spread = products(x, mean_x, x, mean_x) * products(y, mean_y, y, mean_y);
    (spread > 0.0).then(|| products(x, mean_x, y, mean_y) / spread.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefill::ba_att::NormSort;
    use crate::test_data::TestCall;
    use sieve_testing::Random;

    fn config(sort: NormSort, causal: bool) -> BaAttConfig {
        BaAttConfig { block: 16, segment: 32, sort, causal, ..BaAttConfig::default() }
    }

    /// Queries or keys whose lengths spread over an order of magnitude.
    fn heavy_tailed(random: &mut Random, x: &mut [f32], d: usize) {
        for token in x.chunks_exact_mut(d) {
            let length = (0.9 * random.normal()).exp();
            token.iter_mut().for_each(|x| *x *= length);
        }
    }

    #[test]
    fn the_bound_of_the_means_error_holds() {
        for case in 0..60 {
            let mut random = Random(50 + case);
            let tokens = 40 + random.below(150);
            let [q_scale, k_scale] = [0; 2].map(|_| 10f32.powi(random.below(5) as i32 - 2));
            let mut data = TestCall::random(&mut random, tokens, tokens, [4, 2], 12);
            data.q.iter_mut().for_each(|x| *x *= q_scale);
            data.k.iter_mut().for_each(|x| *x = *x * k_scale + 0.1 * case as f32);
            heavy_tailed(&mut random, &mut data.k, 12);
            let sort = [NormSort::Qk, NormSort::K, NormSort::Q, NormSort::None][case as usize % 4];
            for causal in [true, false] {
                let found = config(sort, causal).agreement(&data.call()).expect("one whole call");
                for head in found {
                    assert!(head.pairs > 0 && head.largest_of_bound <= 1.0 + 1e-5, "case {case}: {head:?}");
                    assert!(head.largest_of_bound > 0.05, "case {case}: {head:?}");
                }
            }
        }
    }

    /// Equal tokens have no distance to their block's mean, so the error and both terms of the bound are 0.
    #[test]
    fn equal_tokens_have_no_error_and_no_bound() {
        let mut data = TestCall::random(&mut Random(3), 96, 96, [2, 1], 8);
        for (x, heads) in [(&mut data.q, 2), (&mut data.k, 1)] {
            for (token, row) in x.chunks_exact_mut(8 * heads).enumerate() {
                // Blocks of 16 equal tokens, each block's shorter than those of the block before.
                row.fill(1.0 / (1 + token / 16) as f32);
            }
        }
        let segments = config(NormSort::None, true);
        let orders = Orders { keys: vec![(0..96).collect()], queries: Vec::new() };
        let call = data.call();
        let pairs = segments.pairs(&call, Segments::new(&call, 32, 16), 0, &orders);
        // Query blocks 2 and 3 compete for 2 key blocks, 4 and 5 for 4.
        assert_eq!(pairs.bound.len(), 12);
        assert!(pairs.bound.iter().chain(&pairs.error).all(|&x| x < 1e-6), "{pairs:?}");
    }

    /// As the paper's Figure 2 says: after sorting, the bound predicts the error.
    #[test]
    fn sorting_makes_the_bound_a_predictor() {
        let mut random = Random(151);
        let mut data = TestCall::random(&mut random, 512, 512, [2, 2], 32);
        heavy_tailed(&mut random, &mut data.q, 32);
        heavy_tailed(&mut random, &mut data.k, 32);
        let mean = |sort: NormSort, of: fn(&HeadAgreement) -> Option<f64>| {
            let found = config(sort, false).agreement(&data.call()).expect("one whole call");
            found.iter().filter_map(of).sum::<f64>() / found.len() as f64
        };
        let [sorted, plain] = [NormSort::Qk, NormSort::None].map(|sort| mean(sort, |head| head.bound));
        assert!(sorted > 0.9 && plain < sorted, "{sorted} {plain}");
    }

    #[test]
    fn correlations_by_hand() {
        assert_eq!(pearson(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.0]), Some(1.0));
        assert_eq!(pearson(&[1.0, 2.0, 3.0], &[1.0, 0.0, -1.0]), Some(-1.0));
        assert_eq!(pearson(&[1.0, 2.0, 3.0, 4.0], &[1.0, -1.0, -1.0, 1.0]), Some(0.0));
        assert_eq!([pearson(&[], &[]), pearson(&[1.0, 1.0], &[1.0, 2.0])], [None; 2]);
        assert_eq!(pearson(&[1.0, f64::NAN], &[1.0, 2.0]), None);
    }
}
