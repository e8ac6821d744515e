//! Measures models with their own trained attention beside selectors: density from the masks that they use, loss and
//! time.
use crate::EvalError;
use burn::tensor::Tensor;
use serde::Serialize;
use sieve_core::kinds::BlockPairs;
use sieve_core::{ModelShape, attention_label};
use sieve_infer::dense_pairs;
use sieve_infer::input::{check_windows, ids};
use sieve_infer::pass::own_pass;
use sieve_nn::{DecoderLayer, LayerContext, PassState, Qwen3};
use sieve_ops::{DeviceBackend, Documents};
use std::convert::Infallible;

/// Measures of one model at one prompt length, over all layers and prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainedMeasure {
    /// Name of the model's attention, from [`attention_label`].
    pub attention: String,
    /// Number of tokens of each prompt.
    pub num_tokens: usize,
    /// Number of prompts.
    pub num_windows: usize,
    /// Computed pairs over causal pairs. For NSA: pairs of all three branches, where a compressed block counts as one
    /// key.
    pub density: f64,
    /// For kinds with blocks: causal (query, token) pairs in the chosen blocks or the window, each counted once, over
    /// all causal pairs. For other kinds: the same as `density`.
    pub distinct_density: f64,
    /// Mean cross-entropy of a token, in nats.
    pub loss: f64,
    /// Milliseconds from token ids to the last block's output, for the fastest prompt.
    pub prefill_ms: f64,
    /// `density` of each layer.
    pub layers: Vec<f64>,
}

/// One layer's attention in words: its kind and sizes, and whether it takes an earlier layer's choice.
pub(crate) fn layer_label(shape: &ModelShape, layer: usize) -> String {
    let own = shape.of_layer(layer);
    // Its pattern has one entry for all layers.
    let is_without = own.num_nope_layers() > 0;
    let words = [
        Some(own.attention.kind().name().to_owned()),
        own.attention.as_kind().label(),
        shape.is_shared_layer(layer).then(|| "with an earlier layer's choice".to_owned()),
        is_without.then(|| "without RoPE".to_owned()),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Measures a model on prompts of one length, as [`measure_selectors`](crate::measure_selectors) does: `windows` are
/// token sequences, each one longer than the prompt by the token that its last position predicts.
///
/// # Errors
/// No window; a token outside the vocabulary; a prompt longer than the model's context; a loss that is not finite.
pub fn measure_trained<B: DeviceBackend>(
    model: &Qwen3<B>,
    windows: &[Vec<u32>],
    device: &B::Device,
) -> Result<TrainedMeasure, EvalError> {
    let num_tokens = check_windows(windows, model.shape())?;
    let (mut nats, mut prefill_ms) = (0.0, f64::INFINITY);
    let mut layers = vec![Counted::default(); model.layers.len()];
    for (n, window) in windows.iter().enumerate() {
        if n == 0 {
            // Warm-up: the first pass also allocates memory.
            own_pass(model, window, device)?;
        }
        let pass = own_pass(model, window, device)?;
        nats += pass.nats;
        prefill_ms = pass.prefill_ms.min(prefill_ms);
        for (sum, layer) in layers.iter_mut().zip(pairs_of_layers(model, window, device)) {
            sum.computed += layer.computed / windows.len() as f64;
            sum.distinct += layer.distinct / windows.len() as f64;
        }
    }
    let mean = |x: fn(&Counted) -> f64| layers.iter().map(x).sum::<f64>() / layers.len().max(1) as f64;
    Ok(TrainedMeasure {
        attention: attention_label(model.shape()),
        num_tokens,
        num_windows: windows.len(),
        density: mean(|layer| layer.computed),
        distinct_density: mean(|layer| layer.distinct),
        loss: nats / (windows.len() * num_tokens) as f64,
        prefill_ms,
        layers: layers.iter().map(|layer| layer.computed).collect(),
    })
}

/// Computed pairs of one layer, and its distinct pairs (each counted once), divided by its causal pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counted {
    computed: f64,
    distinct: f64,
}

impl Counted {
    /// The share, from the numbers of pairs of one head.
    fn of(computed: f64, distinct: f64, num_tokens: usize) -> Self {
        let causal = dense_pairs(num_tokens, 1);
        Self { computed: computed / causal, distinct: distinct / causal }
    }
}

/// Runs the model on a window and counts the pairs of each layer's mask.
fn pairs_of_layers<B: DeviceBackend>(model: &Qwen3<B>, window: &[u32], device: &B::Device) -> Vec<Counted> {
    let num_tokens = window.len() - 1;
    let shape = [1, num_tokens];
    let documents = Documents::whole_rows(shape, device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let ids = ids(&window[..num_tokens], shape, device);
    let (mut counted, mut state) = (Vec::new(), PassState::default());
    let Ok(_) = model.through_layers(ids, |index, layer, x| {
        let attention = model.shape().attention_of(index);
        let chosen = blocks_of(layer, &x, &context, &state);
        let no_caches = None;
        let output = layer.forward(x, &context, &mut state, no_caches);
        counted.push(match (output.expire, chosen) {
            (Some(expire), _) => {
                let expire: Vec<i64> = expire.into_data().iter::<i64>().collect();
                count_by_expire(&expire, num_tokens)
            }
            (None, Some(chosen)) => {
                let pairs = attention.as_kind().block_pairs().expect("its layers choose blocks");
                count_by_blocks(&chosen, pairs, num_tokens)
            }
            // The other masks depend on positions only.
            (None, None) => {
                let mean = sieve_core::model::mean_active_keys(attention, num_tokens);
                let pairs = mean * num_tokens as f64;
                Counted::of(pairs, pairs, num_tokens)
            }
        });
        Ok::<_, Infallible>(output.x)
    });
    counted
}

/// The blocks that a layer selects, `[num_tokens, heads, num_selected_blocks]`; `None` for a kind without blocks.
fn blocks_of<B: DeviceBackend>(
    layer: &DecoderLayer<B>,
    x: &Tensor<B, 3>,
    context: &LayerContext<'_, B>,
    state: &PassState<B>,
) -> Option<Vec<i64>> {
    let normed = || layer.input_layernorm.forward(x.clone());
    let context = layer.attention_context(context);
    let chosen = layer.self_attn.as_layer().block_indices(&normed, &context, state)?;
    Some(chosen.into_data().iter::<i64>().collect())
}

/// Counts DMA's pairs. Queries from j to before `expire[j]` see key j; `expire` is `[num_kv_heads, num_tokens]`.
fn count_by_expire(expire: &[i64], num_tokens: usize) -> Counted {
    let heads = expire.len() / num_tokens;
    let rows = expire.chunks(num_tokens);
    let pairs: i64 =
        rows.flat_map(|row| row.iter().enumerate()).map(|(key, &expire)| (expire - key as i64).max(0)).sum();
    let pairs = pairs as f64 / heads as f64;
    Counted::of(pairs, pairs, num_tokens)
}

/// Counts the tokens of the blocks that the queries chose, `chosen` as `[queries, heads, blocks]` with -1 for no block.
/// In NSA the visible compressed blocks and the window count too, in other kinds half a key for each pooled key, which
/// has a score but no value. An indexer's scores are not counted.
fn count_by_blocks(chosen: &[i64], pairs: BlockPairs, num_tokens: usize) -> Counted {
    let BlockPairs { chosen: sizes, pooled, window_size, halves_of_pooled } = pairs;
    let of_pooled = f64::from(halves_of_pooled) / 2.0;
    let per_query = sizes.num_selected_blocks;
    let heads = chosen.len() / (num_tokens * per_query);
    let (mut computed, mut distinct) = (0.0, 0);
    for (row, blocks) in chosen.chunks(per_query).enumerate() {
        let query = row / heads;
        let compressed = pooled.num_compressed_blocks(query + 1);
        let window_start = (query + 1).saturating_sub(window_size);
        let window = query + 1 - window_start;
        // Tokens of the blocks up to the query, and those of them that the window does not hold.
        let (mut selected, mut before_window) = (0, 0);
        for &block in blocks.iter().filter(|&&block| block >= 0) {
            let first = block as usize * sizes.select_block_size;
            let end = (first + sizes.select_block_size).min(query + 1);
            selected += end.saturating_sub(first);
            before_window += end.min(window_start).saturating_sub(first);
        }
        computed += of_pooled * compressed as f64 + (selected + window) as f64;
        distinct += before_window + window;
    }
    Counted::of(computed / heads as f64, distinct as f64 / heads as f64, num_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{NSA, tiny_model};
    use sieve_core::kinds::Kind;
    use sieve_core::model::test_shapes::mean_key_kind;
    use sieve_core::{Attention, DmaShape, NsaShape};
    use sieve_testing::refusal;

    fn measured(attention: Attention, windows: &[Vec<u32>]) -> Result<TrainedMeasure, EvalError> {
        let model = tiny_model(attention, 128);
        measure_trained(&model, windows, &Default::default())
    }

    /// Two prompts of 100 tokens, each with the token after it.
    fn windows() -> [Vec<u32>; 2] {
        [1, 3].map(|k| (0..101).map(|n| ((n * n * 5 + n * k) % 31) as u32).collect())
    }

    #[test]
    fn densities_are_those_of_the_masks() {
        let causal = 100.0 * 101.0 / 2.0;
        let dense = measured(Attention::Mha, &windows()).expect("valid");
        assert_eq!((dense.density, dense.distinct_density), (1.0, 1.0));
        let window = measured(Attention::swa(10), &windows()).expect("valid");
        let pairs: usize = (0..100).map(|t: usize| (t + 1).min(10)).sum();
        assert!((window.density - pairs as f64 / causal).abs() < 1e-12);
        let dma = |a_init| Attention::Dma(DmaShape { a_init, ..DmaShape::published(10) });
        // DMA reads as many keys for each query as the window does, whichever scores it has.
        for a_init in [0.0, 0.7] {
            let dma = measured(dma(a_init), &windows()).expect("valid");
            assert!((dma.density - window.density).abs() < 1e-12, "{dma:?}");
            assert_eq!(dma.attention, "dma, keeps 10");
        }
        let nsa = measured(Attention::Nsa(NSA), &windows()).expect("valid");
        let pairs: f64 = NSA.pairs(100).iter().sum();
        assert!((nsa.density - pairs / causal).abs() < 1e-12, "{nsa:?}");
        // Part of the window lies inside the chosen blocks.
        assert!(nsa.distinct_density < nsa.density);
        assert!(nsa.distinct_density > window.density);
        let by_mean_key = mean_key_kind(8, 3);
        let pairs = by_mean_key.as_kind().pairs(100);
        let by_mean_key = measured(by_mean_key, &windows()).expect("valid");
        assert!((by_mean_key.density - pairs / causal).abs() < 1e-12, "{by_mean_key:?}");
        assert!(by_mean_key.distinct_density < by_mean_key.density);
        for measure in [dense, window, nsa, by_mean_key] {
            assert!(measure.loss.is_finite() && measure.prefill_ms > 0.0);
            assert_eq!((measure.num_windows, measure.layers.len()), (2, 2));
        }
    }

    #[test]
    fn a_key_counts_for_the_queries_from_its_own_position_to_its_expire() {
        // Two heads of four keys; key 1 of the first head is never seen, as its expire is its own position.
        let counted = count_by_expire(&[2, 1, 4, 4, 4, 2, 3, 4], 4);
        let pairs = ((2 + 2 + 1) + (4 + 1 + 1 + 1)) as f64 / 2.0;
        assert_eq!(counted, Counted::of(pairs, pairs, 4));
    }

    #[test]
    fn blocks_inside_the_window_are_counted_once_in_distinct() {
        let nsa = NsaShape {
            compress_block_size: 2,
            compress_stride: 2,
            select_block_size: 2,
            num_selected_blocks: 2,
            window_size: 2,
            ..NSA
        };
        // Two chosen blocks of two tokens for each of five queries of one head; -1 is none.
        let chosen = [0, -1, 0, -1, 0, 1, 0, 1, 0, 2];
        let counted = count_by_blocks(&chosen, nsa.block_pairs().expect("blocks"), 5);
        let selected = 1 + 2 + 3 + 4 + 3;
        let (compressed, window) = (1 + 1 + 2 + 2, 1 + 2 + 2 + 2 + 2);
        // Chosen tokens before the window, query by query: none, none, token 0, tokens 0 and 1, tokens 0 and 1.
        let expected = Counted::of(f64::from(selected + compressed + window), f64::from(window + 1 + 2 + 2), 5);
        assert_eq!(counted, expected);
    }

    #[test]
    fn no_window_a_long_one_and_unknown_tokens_are_refused() {
        for (windows, words) in [
            (&[][..], "no token"),
            (&[vec![0; 130]], "context of 128"),
            (&[vec![31; 5]], "outside the model's vocabulary"),
        ] {
            refusal(measured(Attention::Mha, windows), words);
        }
    }
}
