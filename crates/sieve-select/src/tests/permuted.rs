//! BA-Att and PBS-Attn, which permute tokens, checked against their papers.

use super::{attend, prefill, select, selector};
use crate::oracle::{expanded_row, oracle_row};
use crate::pool::mean_and_variance;
use crate::prefill::ba_att::{BaAttConfig, CompensateLayers, Compensation};
use crate::test_data::TestCall;
use crate::vector::{dot, norm};
use crate::{Method, oracle_attention, oracle_dense};
use sieve_testing::{Random, assert_close, assert_close_relative, refusal, wide};

#[test]
fn ba_att_bidirectional_equals_its_definition() {
    let data = TestCall::random(&mut Random(49), 150, 150, [4, 2], 16);
    let call = data.call();
    let everything = prefill("ba_att:causal=false,sparsity=0,block=16,segment=32", &call);
    let all = vec![true; 150];
    let expected: Vec<f64> = (0..150)
        .flat_map(|row| (0..4).map(move |head| (head, row)))
        .flat_map(|(head, row)| oracle_row(&call, head, row, &all).0)
        .collect();
    assert_close_relative("bidirectional", &everything.output.o, &expected, 2e-5);
    let chosen = select("ba_att:causal=false,sparsity=0.7,block=16,segment=32", &data);
    // Each row keeps ceil(0.3 * 10) of its 10 blocks.
    assert!((0..4).all(|head| (0..10).all(|i| chosen.mask.row(head, i).len() == 3)));
    let output = attend(&data, &chosen);
    assert_close_relative("sparse", &output.o, &crate::oracle_attention(&call, &chosen).o, 2e-5);
    let error = selector("ba_att:causal=false").select(&TestCall::random(&mut Random(1), 20, 30, [1, 1], 4).call());
    refusal(error, "causal=false needs all tokens at once");
}

/// Vectors of a heavy-tailed sequence: normal ones, whose lengths spread over an order of magnitude.
fn heavy_tailed(random: &mut Random, tokens: usize, d: usize) -> Vec<f32> {
    let mut x = random.vector(tokens * d);
    for token in x.chunks_exact_mut(d) {
        let length = (0.9 * random.normal()).exp() * 0.5;
        token.iter_mut().for_each(|x| *x *= length);
    }
    x
}

fn sorted_by_norm(x: &[f32], d: usize) -> Vec<f32> {
    let mut tokens: Vec<&[f32]> = x.chunks_exact(d).collect();
    tokens.sort_by(|a, b| norm(a).total_cmp(&norm(b)));
    tokens.concat()
}

/// Spearman's rank correlation of the block scores with the log-mean-exp of the blocks' logits, averaged over
/// rows of blocks.
fn rank_correlation(q: &[f32], k: &[f32], d: usize, compensation: Option<Compensation>) -> f64 {
    let (block, tokens) = (32, q.len() / d);
    let blocks = tokens / block;
    // Block scores read only the head dimension, the scale and the layer of this call.
    let data = TestCall::random(&mut Random(1), 1, 1, [1, 1], d);
    let call = data.call();
    let pool = |x: &[f32]| {
        let cut: Vec<&[f32]> = x.chunks_exact(block * d).collect();
        let cut: Vec<Vec<&[f32]>> = cut.into_iter().map(|x| x.chunks_exact(d).collect()).collect();
        mean_and_variance(cut.iter().map(|tokens| tokens.iter().copied()), d)
    };
    let config = BaAttConfig {
        compensate_layers: match compensation {
            Some(_) => CompensateLayers::All,
            None => CompensateLayers::None,
        },
        compensation: compensation.unwrap_or(Compensation::Covariance),
        ..BaAttConfig::default()
    };
    let logits = config.block_logits(&call, &pool(q), &pool(k));
    let ranks = |x: &[f64]| {
        let mut order: Vec<usize> = (0..x.len()).collect();
        order.sort_by(|&a, &b| x[a].total_cmp(&x[b]));
        let mut rank = vec![0.0; x.len()];
        order.into_iter().enumerate().for_each(|(r, at)| rank[at] = r as f64);
        rank
    };
    let mut total = 0.0;
    for (i, q) in q.chunks_exact(block * d).enumerate() {
        let exact: Vec<f64> = k
            .chunks_exact(block * d)
            .map(|k| {
                let pairs = q.chunks_exact(d).flat_map(|q| k.chunks_exact(d).map(move |k| (q, k)));
                let scale = f64::from(call.shape.softmax_scale());
                pairs.map(|(q, k)| (scale * f64::from(dot(q, k))).exp()).sum::<f64>().ln()
            })
            .collect();
        let estimate = wide(&logits[i * blocks..(i + 1) * blocks]);
        let (a, b) = (ranks(&exact), ranks(&estimate));
        let squares: f64 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
        let n = blocks as f64;
        total += 1.0 - 6.0 * squares / (n * (n * n - 1.0));
    }
    total / blocks as f64
}

/// On heavy-tailed vectors, means of blocks alone rank blocks badly, sorted or not. With the second-order term they
/// rank them well, and best when tokens are sorted.
#[test]
fn ba_att_compensation_and_sorting_rank_blocks() {
    let d = 32;
    let mut random = Random(151);
    let (q, k) = (heavy_tailed(&mut random, 1024, d), heavy_tailed(&mut random, 1024, d));
    let (sorted_q, sorted_k) = (sorted_by_norm(&q, d), sorted_by_norm(&k, d));
    let plain = rank_correlation(&q, &k, d, None);
    let sorted = rank_correlation(&sorted_q, &sorted_k, d, None);
    assert!(plain < 0.4 && sorted < 0.4, "{plain} {sorted}");
    for compensation in [Compensation::Covariance, Compensation::Variance] {
        let alone = rank_correlation(&q, &k, d, Some(compensation));
        let both = rank_correlation(&sorted_q, &sorted_k, d, Some(compensation));
        assert!(alone > 0.5 && both > 0.95, "{compensation:?}: {alone} {both}");
    }
}

#[test]
fn ba_att_compensates_the_first_and_the_last_layer() {
    let data = TestCall::structured(&mut Random(152), 300, [2, 1], 16);
    let lists = |text: &str, layer: usize| {
        let call = data.call().in_layer(layer, 4);
        selector(text).select(&call).expect("valid").mask
    };
    let base = "ba_att:block=16,segment=32,sparsity=0.8,beta=300,";
    let [with, without] = ["all", "none"].map(|layers| format!("{base}compensate_layers={layers}"));
    assert_ne!(lists(&with, 0), lists(&without, 0));
    for (layer, compensated) in [(0, true), (1, false), (2, false), (3, true)] {
        let expected = if compensated { &with } else { &without };
        assert_eq!(lists(base.trim_end_matches(','), layer), lists(expected, layer), "layer {layer}");
    }
    assert_eq!(lists(&with.replace("beta=300", "beta=0"), 0), lists(&without, 0));
}

#[test]
fn pbs_has_a_permutation_per_kv_head_or_per_query_head() {
    let data = TestCall::structured(&mut Random(51), 250, [4, 2], 16);
    for (perm, lists) in [("", 2), (",perm=query", 4)] {
        let chosen = select(&format!("pbs:block=16,segment=64,tau=0.4{perm}"), &data);
        assert_eq!(chosen.mask.key_order().len(), lists * 250);
    }
}

#[test]
fn pbs_of_one_segment_is_dense_and_of_one_more_token_is_not() {
    for (n, dense) in [(32, true), (33, false)] {
        let data = TestCall::random(&mut Random(52), n, n, [1, 1], 8);
        assert_eq!(select("pbs:block=16,segment=32,tau=0.1", &data).stats.dense_call, dense);
    }
}

#[test]
fn pbs_permuted_keys_need_fewer_blocks() {
    // Important keys that are scattered over blocks come together in few blocks, which is the method's purpose.
    let mut random = Random(54);
    let mut data = TestCall::random(&mut random, 1024, 1024, [1, 1], 16);
    data.q.iter_mut().for_each(|x| *x *= 0.3);
    for token in data.q.chunks_exact_mut(16) {
        token[0] = 4.0;
    }
    for (t, token) in data.k.chunks_exact_mut(16).enumerate() {
        token[0] = if t % 16 == 3 { 6.0 } else { 0.0 };
    }
    let density = |text: &str| crate::density(&select(text, &data)).tile;
    let (plain, permuted) = (density("meanpool:block=16,tau=0.9"), density("pbs:block=16,segment=256,tau=0.9"));
    assert!(permuted < 0.75 * plain, "{permuted} {plain}");
}

#[test]
fn pbs_with_every_block_kept_is_dense_to_rounding_in_f64() {
    let data = TestCall::structured(&mut Random(154), 250, [4, 2], 16);
    let call = data.call();
    let dense = oracle_dense(&call);
    for permute in ["keys", "queries", "both", "none"] {
        let chosen = select(&format!("pbs:block=16,segment=64,tau=1,permute={permute}"), &data);
        assert_close(&format!("permute={permute}"), &oracle_attention(&call, &chosen).o, &dense.o, 1e-14);
    }
}

#[test]
fn pbs_without_a_permutation_keeps_the_order_and_its_rule() {
    let data = TestCall::structured(&mut Random(155), 250, [2, 1], 16);
    let chosen = select("pbs:block=16,segment=64,tau=0.4,permute=none", &data);
    assert!(chosen.mask.key_order().is_empty() && chosen.mask.query_order().is_empty());
    let plain = select("meanpool:block=16,tau=0.4", &data);
    for i in 0..chosen.mask.tiles.num_query_tiles() {
        let own = i as i32 / 4 * 4..=i as i32;
        assert!(own.clone().chain([0]).all(|j| chosen.mask.row(0, i).contains(&j)), "{i}");
        // At the start of a segment, the competing blocks are the ones that meanpool has before the diagonal.
        if i % 4 == 0 && i > 0 {
            assert!(chosen.mask.row(0, i).len() <= plain.mask.row(0, i).len() + 4);
        }
    }
    assert!(matches!(selector("pbs").method, Method::Pbs(config) if config.segment == 256));
}

#[test]
fn density_counts_rows_in_the_order_of_each_head() {
    let data = TestCall::structured(&mut Random(156), 100, [4, 2], 16);
    let mut chosen = select("meanpool:block=16,tau=0.5,gqa=union", &data);
    assert_eq!(chosen.mask.num_lists(), 2);
    let rows = |head: i32| (0..100).map(move |slot| (slot + 9 * head) % 100);
    let order: Vec<i32> = (0..4).flat_map(rows).collect();
    chosen.mask.set_query_order(&order);
    let seen = |at: usize| expanded_row(&chosen.mask, at / 100, at % 100).into_iter().filter(|&seen| seen);
    let pairs: usize = (0..400).map(|at| seen(at).count()).sum();
    let expected = pairs as f64 / (4 * data.shape.causal_pairs()) as f64;
    let found = crate::density(&chosen).token;
    assert!((found - expected).abs() < 1e-12, "{found}, {expected}");
}
