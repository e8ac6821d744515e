//! The attention weights of every layer and head of a trained model on one prompt, and statistics of them.
use crate::EvalError;
use crate::trained::layer_label;
use burn::tensor::Tensor;
use serde::Serialize;
use sieve_core::{MOST_REFERENCE_SCORES, ModelShape, ScoreMatrix};
use sieve_infer::input::{check_row, ids};
use sieve_nn::{LayerContext, PassState, Qwen3};
use sieve_ops::{DeviceBackend, Documents};
use std::convert::Infallible;

/// Distances between query and key, in tokens, for [`HeadWeights::beyond`].
pub const DISTANCES: [usize; 4] = [16, 64, 256, 1024];

/// The attention of one layer on one prompt.
#[derive(Clone, Debug, Serialize)]
pub struct LayerWeights {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Name of the layer's attention.
    pub attention: String,
    /// Attention weights of each query head.
    pub heads: Vec<HeadWeights>,
    /// Mean over pairs of KV heads and over queries: keys that both see over keys that at least one of them sees.
    /// `None` with one KV head.
    pub overlap: Option<f64>,
    /// How long DMA keeps a key; `None` for other kinds.
    pub life: Option<KeyLifetimes>,
    /// As `life`, but of each KV head alone; empty for other kinds.
    pub lives: Vec<KeyLifetimes>,
    /// Statistics of the chosen keys, DMA's or a chosen block's; `None` for kinds without a choice, and for NSA, whose
    /// branches have a softmax each.
    pub chosen: Option<ChosenKeys>,
}

/// Attention weights of one query head, and means over the queries.
#[derive(Clone, Debug, Serialize)]
pub struct HeadWeights {
    /// Weights `[queries, keys]`, both `num_tokens`.
    #[serde(skip)]
    pub weights: Vec<f32>,
    /// Share of the causal pairs with a weight above 0.
    pub density: f64,
    /// Share of the weight that lies on the fifth of a query's causal keys with the largest weights. Queries with fewer
    /// than five keys are left out.
    pub top_fifth: f64,
    /// Entropy of a query's normalised weights in nats, `-sum p ln p`.
    pub entropy: f64,
    /// Mean distance from the query to the key in tokens, weighted by the attention weights.
    pub distance: f64,
    /// Mean weight of a query on its own token.
    pub own: f64,
    /// Weight on the first token; the first query is left out.
    pub first: f64,
    /// Share of the weight on keys more than each of [`DISTANCES`] tokens back, over queries with such keys. `None` if
    /// no query has any.
    pub beyond: [Option<f64>; DISTANCES.len()],
}

/// Statistics of the chosen keys: means over query heads and queries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ChosenKeys {
    /// Mean distance from the query to a key that it reads, in tokens.
    pub age: f64,
    /// Share of these keys that a sliding window of the same number of keys would also read.
    pub in_window: f64,
    /// Share of dense attention's weight, for the same queries and keys, on the keys read.
    pub mass: f64,
}

/// For how many queries DMA keeps a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeyLifetimes {
    /// Share of keys that no query sees.
    pub never: f64,
    /// Share of keys that the last query still sees.
    pub to_the_end: f64,
    /// The 10th, 50th and 90th percentile of the life span in tokens, over keys that were seen and then dropped. `None`
    /// without such keys.
    pub percentiles: Option<[usize; 3]>,
}

/// The attention weights of `layers` (all if empty) on one prompt; `observe` is called with the number of layers done.
///
/// # Errors
/// No token; a token outside the vocabulary; a prompt longer than the model's context, or so long that one layer has
/// more than 2^26 weights; a layer that does not exist.
pub fn attention_weights<B: DeviceBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    layers: &[usize],
    device: &B::Device,
    observe: &mut dyn FnMut(u64),
) -> Result<Vec<LayerWeights>, EvalError> {
    let shape = model.shape();
    check(shape, tokens, layers)?;
    let num_tokens = tokens.len();
    let documents = Documents::whole_rows([1, num_tokens], device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let (mut all, mut state) = (Vec::new(), PassState::default());
    let Ok(_) = model.through_layers(ids(tokens, [1, num_tokens], device), |idx, layer, x| {
        let is_asked = layers.is_empty() || layers.contains(&idx);
        let weights = is_asked.then(|| {
            let normed = layer.input_layernorm.forward(x.clone());
            let host = |x: Tensor<B, 3>| x.into_data().iter::<f32>().collect::<Vec<f32>>();
            let (attention, context) = (layer.self_attn.as_layer(), layer.attention_context(&context));
            let dense = attention.dense_weights(normed.clone(), &context).map(host);
            (host(attention.weights(normed, &context, &state)), dense)
        });
        let no_caches = None;
        let output = layer.forward(x, &context, &mut state, no_caches);
        if let Some((weights, dense)) = weights {
            let heads = weights.chunks(num_tokens * num_tokens);
            let of_layer = shape.of_layer(idx);
            let heads: Vec<HeadWeights> = heads.map(|head| head_weights(head, num_tokens)).collect();
            let group = heads.len() / of_layer.num_kv_heads.max(1);
            let expire = output.expire.map(|expire| expire.into_data().iter::<i64>().collect::<Vec<i64>>());
            all.push(LayerWeights {
                layer: idx,
                attention: layer_label(shape, idx),
                overlap: overlap(&heads, group, num_tokens),
                life: expire.as_ref().map(|expire| life_spans(expire, num_tokens)),
                lives: expire
                    .iter()
                    .flat_map(|all| all.chunks(num_tokens))
                    .map(|one| life_spans(one, num_tokens))
                    .collect(),
                chosen: dense.map(|dense| chosen_keys(&weights, &dense, num_tokens)),
                heads,
            });
        }
        observe(idx as u64 + 1);
        Ok::<_, Infallible>(output.x)
    });
    Ok(all)
}

/// Refuses tokens that the model does not have, layers that it does not have, and prompts that are too long.
fn check(shape: &ModelShape, tokens: &[u32], layers: &[usize]) -> Result<(), EvalError> {
    check_row(tokens, tokens.len(), shape)?;
    if let Some(layer) = layers.iter().find(|&&layer| layer >= shape.num_layers) {
        return Err(EvalError::setting(
            "layers",
            format!("{layer}, and the model has {} layers", shape.num_layers),
            "layers are counted from 0",
        ));
    }
    check_length(shape, tokens.len())
}

/// Refuses a prompt on which a layer has more than 2^26 weights.
pub(crate) fn check_length(shape: &ModelShape, num_tokens: usize) -> Result<(), EvalError> {
    let scores = ScoreMatrix { batch: 1, num_heads: shape.num_heads, seq_len: num_tokens };
    if scores.num_scores() <= MOST_REFERENCE_SCORES {
        Ok(())
    } else {
        Err(EvalError::setting(
            "length",
            format!(
                "{num_tokens}, and a layer would have {} weights ({scores}), more than {MOST_REFERENCE_SCORES}",
                scores.num_scores()
            ),
            "choose a shorter prompt",
        ))
    }
}

/// The statistics of one head's weights, `[num_tokens, num_tokens]`.
fn head_weights(weights: &[f32], num_tokens: usize) -> HeadWeights {
    let mut pairs = 0_usize;
    let (mut entropy, mut distance, mut own, mut first) = (0.0, 0.0, 0.0, 0.0);
    let (mut top_fifth, mut num_top) = (0.0, 0_usize);
    let mut beyond = [(0.0, 0_usize); DISTANCES.len()];
    let mut sorted = Vec::new();
    for (query, row) in weights.chunks(num_tokens).enumerate() {
        let row = &row[..=query];
        let sum: f64 = row.iter().map(|&weight| f64::from(weight)).sum();
        let share = |key: usize| f64::from(row[key]) / sum.max(f64::MIN_POSITIVE);
        pairs += row.iter().filter(|&&weight| weight > 0.0).count();
        own += share(query);
        if query > 0 {
            first += share(0);
        }
        for key in 0..=query {
            let p = share(key);
            distance += p * (query - key) as f64;
            entropy -= if p > 0.0 { p * p.ln() } else { 0.0 };
        }
        for ((sum_far, num_far), &far) in beyond.iter_mut().zip(&DISTANCES) {
            if query > far {
                *sum_far += (0..query - far).map(share).sum::<f64>();
                *num_far += 1;
            }
        }
        if row.len() >= 5 {
            sorted.clear();
            sorted.extend_from_slice(row);
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            let top: f64 = sorted[..row.len() / 5].iter().map(|&weight| f64::from(weight)).sum();
            top_fifth += top / sum.max(f64::MIN_POSITIVE);
            num_top += 1;
        }
    }
    let queries = num_tokens as f64;
    HeadWeights {
        weights: weights.to_vec(),
        density: pairs as f64 / (queries * (queries + 1.0) / 2.0),
        top_fifth: top_fifth / num_top.max(1) as f64,
        entropy: entropy / queries,
        distance: distance / queries,
        own: own / queries,
        first: first / (queries - 1.0).max(1.0),
        beyond: beyond.map(|(sum, num)| (num > 0).then(|| sum / num as f64)),
    }
}

/// [`ChosenKeys`] from a layer's weights and dense attention's weights, both `[num_heads, num_tokens, num_tokens]`. A
/// key with a weight above 0 counts as read.
fn chosen_keys(weights: &[f32], dense: &[f32], num_tokens: usize) -> ChosenKeys {
    let rows = weights.chunks(num_tokens).zip(dense.chunks(num_tokens));
    let (mut age, mut in_window, mut mass) = (0.0, 0.0, 0.0);
    for (row, (weights, dense)) in rows.enumerate() {
        let query = row % num_tokens;
        let read = || (0..=query).filter(|&key| weights[key] > 0.0);
        let count = read().count();
        age += read().map(|key| query - key).sum::<usize>() as f64 / count.max(1) as f64;
        // A window of `count` keys would hold these.
        let kept_by_window = read().filter(|key| query - key < count).count();
        in_window += kept_by_window as f64 / count.max(1) as f64;
        let all: f64 = dense[..=query].iter().map(|&weight| f64::from(weight)).sum();
        mass += read().map(|key| f64::from(dense[key])).sum::<f64>() / all.max(f64::MIN_POSITIVE);
    }
    let num_rows = (weights.len() / num_tokens) as f64;
    ChosenKeys { age: age / num_rows, in_window: in_window / num_rows, mass: mass / num_rows }
}

/// [`LayerWeights::overlap`], from the first query head of each KV head. A key with a weight above 0 counts as seen.
fn overlap(heads: &[HeadWeights], group: usize, num_tokens: usize) -> Option<f64> {
    let of_kv: Vec<&[f32]> = heads.iter().step_by(group.max(1)).map(|head| head.weights.as_slice()).collect();
    let (mut sum, mut num) = (0.0, 0_usize);
    for (idx, a) in of_kv.iter().enumerate() {
        for b in &of_kv[idx + 1..] {
            for (row_a, row_b) in a.chunks(num_tokens).zip(b.chunks(num_tokens)) {
                let seen = |(&a, &b): (&f32, &f32)| (a > 0.0, b > 0.0);
                let pairs = || row_a.iter().zip(row_b).map(seen);
                let both = pairs().filter(|&(a, b)| a && b).count();
                let one = pairs().filter(|&(a, b)| a || b).count();
                sum += both as f64 / one.max(1) as f64;
                num += 1;
            }
        }
    }
    (num > 0).then(|| sum / num as f64)
}

/// [`KeyLifetimes`] from `expire`, `[num_kv_heads, num_tokens]` or one head of it: the first query that no longer sees
/// the key.
fn life_spans(expire: &[i64], num_tokens: usize) -> KeyLifetimes {
    let (mut never, mut to_the_end, mut spans) = (0_usize, 0_usize, Vec::new());
    for (idx, &end) in expire.iter().enumerate() {
        match end - (idx % num_tokens) as i64 {
            span if span <= 0 => never += 1,
            _ if end >= num_tokens as i64 => to_the_end += 1,
            span => spans.push(span as usize),
        }
    }
    spans.sort_unstable();
    let at = |share: f64| spans[((spans.len() - 1) as f64 * share).round() as usize];
    let share = |count: usize| count as f64 / expire.len().max(1) as f64;
    KeyLifetimes {
        never: share(never),
        to_the_end: share(to_the_end),
        percentiles: (!spans.is_empty()).then(|| [0.1, 0.5, 0.9].map(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{tiny_model, tiny_shape, words};
    use sieve_core::model::test_shapes::mean_key_kind;
    use sieve_core::{Attention, DmaShape, LayerPattern, LayerType};
    use sieve_testing::refusal;

    #[test]
    fn statistics_of_a_known_matrix() {
        let mut weights = vec![0.0_f32; 36];
        // Query i gives half to itself and half to token 0; query 0 all to itself.
        for query in 0..6 {
            weights[query * 6] += 0.5;
            weights[query * 6 + query] += 0.5;
        }
        let head = head_weights(&weights, 6);
        assert!((head.density - 11.0 / 21.0).abs() < 1e-12);
        assert!((head.own - (1.0 + 5.0 * 0.5) / 6.0).abs() < 1e-12);
        assert!((head.first - 0.5).abs() < 1e-12);
        assert!((head.distance - (1.0 + 2.0 + 3.0 + 4.0 + 5.0) / 2.0 / 6.0).abs() < 1e-12);
        assert!((head.entropy - 5.0 * 2.0_f64.ln() / 6.0).abs() < 1e-12);
        // Only queries 4 and 5 have five keys or more; a fifth of them, rounded down, is one key.
        assert!((head.top_fifth - 0.5).abs() < 1e-12);
        assert_eq!(head.beyond, [None; 4]);
    }

    #[test]
    fn overlap_is_the_share_of_keys_that_both_heads_see() {
        let head = |keys: [f32; 4]| head_weights(&keys, 2);
        let (own, first) = (head([1.0, 0.0, 0.0, 1.0]), head([1.0, 0.0, 1.0, 0.0]));
        assert_eq!(overlap(&[own.clone(), first.clone()], 1, 2), Some(0.5));
        assert_eq!(overlap(&[own.clone(), first, own.clone()], 2, 2), Some(1.0));
        assert_eq!(overlap(&[own], 1, 2), None);
    }

    #[test]
    fn chosen_keys_of_known_weights() {
        // Query 0 reads itself, query 1 both keys, query 2 the first key and itself.
        let weights = [1.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.4, 0.0, 0.6];
        let dense = [1.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.2, 0.5, 0.3];
        let chosen = chosen_keys(&weights, &dense, 3);
        assert!((chosen.age - (0.0 + 0.5 + 1.0) / 3.0).abs() < 1e-6, "{chosen:?}");
        assert!((chosen.in_window - (1.0 + 1.0 + 0.5) / 3.0).abs() < 1e-6, "{chosen:?}");
        assert!((chosen.mass - (1.0 + 1.0 + 0.5) / 3.0).abs() < 1e-6, "{chosen:?}");
    }

    #[test]
    fn chosen_blocks_hold_part_of_the_mass_unless_all_are_chosen() {
        let device = Default::default();
        let of_blocks = |num_selected_blocks| {
            let model = tiny_model(mean_key_kind(4, num_selected_blocks), 64);
            let all = attention_weights(&model, &words(40), &[1], &device, &mut |_| {}).expect("valid");
            all[0].chosen.expect("a kind that chooses")
        };
        // The 40 tokens are 10 blocks.
        let (few, all) = (of_blocks(2), of_blocks(10));
        assert!((all.mass - 1.0).abs() < 1e-5 && (all.in_window - 1.0).abs() < 1e-5, "{all:?}");
        assert!(few.mass < 0.99 && few.in_window < 1.0 && few.age < all.age, "{few:?}");
    }

    /// A layer that shares a choice reads the keys that the layer before it chose, not its own choice.
    #[test]
    fn a_layer_that_shares_a_choice_reads_those_blocks() {
        let device = Default::default();
        let attention = mean_key_kind(4, 2);
        let shape = ModelShape {
            layers: LayerPattern::new(attention, [LayerType::OWN, LayerType::SHARED]),
            ..tiny_shape(attention, 64)
        };
        let model = Qwen3::new(&shape, 4, &device);
        let all = attention_weights::<burn_flex::Flex>(&model, &words(40), &[], &device, &mut |_| {}).expect("valid");
        let labels: Vec<_> = all.iter().map(|layer| layer.attention.as_str()).collect();
        let own = format!("{}, 2 x 4 selected", attention.kind().name());
        assert_eq!(labels, [own.clone(), format!("{own}, with an earlier layer's choice")]);
        let read = |layer: &LayerWeights| -> Vec<Vec<bool>> {
            let of_head = |head: &HeadWeights| head.weights.iter().map(|&weight| weight > 0.0).collect();
            layer.heads.iter().map(of_head).collect()
        };
        assert!(read(&all[0]) == read(&all[1]));
    }

    #[test]
    fn life_spans_of_known_keys() {
        let spans = life_spans(&[0, 3, 4, 4], 4);
        assert_eq!(spans, KeyLifetimes { never: 0.25, to_the_end: 0.5, percentiles: Some([2, 2, 2]) });
        assert_eq!(life_spans(&[4, 4, 4, 4], 4).percentiles, None);
    }

    #[test]
    fn a_query_of_a_dma_model_reads_at_most_the_kept_keys() {
        let dma = Attention::Dma(DmaShape::published(5));
        let (model, device) = (tiny_model(dma, 64), Default::default());
        let mut steps = Vec::new();
        let all = attention_weights(&model, &words(40), &[1], &device, &mut |done| steps.push(done)).unwrap();
        assert_eq!((all.len(), all[0].layer, all[0].heads.len(), steps), (1, 1, 4, vec![1, 2]));
        for head in &all[0].heads {
            for row in head.weights.chunks(40) {
                assert!(row.iter().filter(|&&weight| weight > 0.0).count() <= 5);
            }
        }
        let life = all[0].life.as_ref().unwrap();
        assert!(life.percentiles.is_some() && life.to_the_end <= 5.0 / 40.0 + 1e-12, "{life:?}");
        // All scores are equal, so both KV heads keep each key equally long.
        let lives = &all[0].lives;
        assert!(lives.len() == 2 && lives.iter().all(|one| one == life), "{lives:?}");
        // With A = 0 all scores are equal, and a query keeps the last 5 keys, on average 2 tokens back.
        let chosen = all[0].chosen.expect("DMA chooses keys");
        let age = (0.0 + 0.5 + 1.0 + 1.5 + 36.0 * 2.0) / 40.0;
        assert!((chosen.age - age).abs() < 1e-9 && chosen.in_window == 1.0, "{chosen:?}");
        let scored = DmaShape { a_init: 3.0, ..DmaShape::published(5) };
        let model = tiny_model(Attention::Dma(scored), 64);
        let all = attention_weights(&model, &words(40), &[1], &device, &mut |_| {}).expect("valid");
        let chosen = all[0].chosen.expect("DMA chooses keys");
        assert!(chosen.age > age && chosen.in_window < 1.0 && chosen.mass < 0.99, "{chosen:?}");
    }

    #[test]
    fn a_layer_and_a_length_out_of_range_are_refused() {
        let (model, device) = (tiny_model(Attention::Mha, 8192), Default::default());
        refusal(attention_weights(&model, &words(4), &[2], &device, &mut |_| {}), "layers is 2 | 2 layers");
        refusal(attention_weights(&model, &words(5000), &[], &device, &mut |_| {}), "length is 5000 | shorter prompt");
    }
}
