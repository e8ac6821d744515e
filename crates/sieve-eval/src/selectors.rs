//! Selectors side by side on one model: what each computes, keeps, costs and breaks.
use crate::EvalError;
use crate::chunks::{call, prefill};
use crate::input::{check_vocabulary, check_windows};
use crate::pass::{attending_pass, milliseconds, own_pass};
use crate::selection::{Selection, layer_shape};
use serde::Serialize;
use sieve_nn::{HostOperands, Qwen3};
use sieve_ops::SieveBackend;
use sieve_select::{AttentionOutput, DecodeSession, Selector, SparseMask, dense_attention, recall};
use std::time::Instant;

/// One selector at one prompt length, over all layers and windows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SelectorMeasure {
    /// Its name.
    pub name: String,
    /// All its settings, as the flag reads them.
    pub selector: String,
    /// Tokens of a chunk, where prompts are read in chunks.
    pub chunk: Option<usize>,
    /// Tokens of a prompt.
    pub num_tokens: usize,
    /// Prompts.
    pub num_windows: usize,
    /// Computed pairs over causal pairs, probe rows included.
    pub density: f64,
    /// Kept tiles over admissible tiles; of prefill methods.
    pub tile_density: Option<f64>,
    /// Mean share of the dense attention mass on the kept pairs; of prefill methods.
    pub recall: Option<f64>,
    /// `|o - dense o| / |dense o|` of the layers' attention, on the dense model's operands.
    pub output_error: f64,
    /// Milliseconds of selection, of all layers of one prompt.
    pub select_ms: f64,
    /// Milliseconds of selection and attention, of all layers of one prompt.
    pub attention_ms: f64,
    /// The same of dense attention through the same code with every tile kept.
    pub dense_attention_ms: f64,
    /// Milliseconds from token ids to the last block's output, under the selector: the fastest prompt.
    pub prefill_ms: f64,
    /// The same of the model as it is.
    pub dense_prefill_ms: f64,
    /// Cross-entropy under the selector, nats per token; "prefill" for methods that are no causal maps.
    pub loss: f64,
    /// The model's own.
    pub dense_loss: f64,
    /// Whether rows depend on earlier tokens alone, so that the loss is a likelihood.
    pub causal: bool,
    /// Lists that ran dense because a score was no number.
    pub nan_lists: u64,
    /// By layer.
    pub layers: Vec<LayerMeasure>,
}

/// One layer of a [`SelectorMeasure`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerMeasure {
    /// Computed pairs over causal pairs.
    pub density: f64,
    /// Share of the dense mass kept; absent for decode methods.
    pub recall: Option<f64>,
    /// Relative error of the output.
    pub output_error: f64,
}

/// Operands of a layer, as the dense model made them, with what dense attention says.
struct Captured {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    place: Place,
    dense: AttentionOutput,
}

/// [`HostOperands`] without its slices.
#[derive(Clone, Copy)]
struct Place {
    layer: usize,
    num_layers: usize,
    num_tokens: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Captured {
    fn operands(&self) -> HostOperands<'_> {
        let Place {
            layer,
            num_layers,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
        } = self.place;
        HostOperands {
            layer,
            num_layers,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            q: &self.q,
            k: &self.k,
            v: &self.v,
        }
    }
}

/// Measures every selector on prompts of one length: `windows` are token sequences, each one longer than the prompt by the
/// token that its last position predicts.
///
/// `observe` hears the name of each selector before it runs.
///
/// # Errors
/// A token outside the vocabulary, operands that a selector refuses, no window.
pub fn measure_selectors<B: SieveBackend>(
    model: &Qwen3<B>,
    windows: &[Vec<u32>],
    selections: &[Selection],
    device: &B::Device,
    observe: &mut dyn FnMut(&str),
) -> Result<Vec<SelectorMeasure>, EvalError> {
    let num_tokens = check_windows(windows, model.shape())?;
    let mut selections = selections.to_vec();
    let mut sums = vec![Sums::default(); selections.len()];
    let (mut dense_nats, mut dense_ms, mut dense_prefill_ms) = (0.0, 0.0, f64::INFINITY);
    // The first pass of a length also allocates.
    own_pass(model, &windows[0], device)?;
    for window in windows {
        let mut captured = Vec::new();
        dense_prefill_ms = own_pass(model, window, device)?
            .prefill_ms
            .min(dense_prefill_ms);
        let dense = attending_pass(model, window, device, &mut |operands| {
            let call = call(operands)?;
            let started = Instant::now();
            let dense = dense_attention(&call)?;
            dense_ms += milliseconds(started);
            let o = dense.o.clone();
            captured.push(capture(operands, dense));
            Ok(o)
        })?;
        dense_nats += dense.nats;
        for (selection, sum) in selections.iter_mut().zip(&mut sums) {
            observe(selection.selector().name());
            for layer in &captured {
                sum.layers.resize(captured.len(), LayerMeasure::default());
                let measure = sum.layer(selection, layer)?;
                let total = &mut sum.layers[layer.place.layer];
                total.density += measure.density;
                total.output_error += measure.output_error;
                total.recall = measure.recall.map(|x| x + total.recall.unwrap_or(0.0));
            }
            let attend = &mut |operands: HostOperands<'_>| selection.attend(operands);
            let pass = attending_pass(model, window, device, attend)?;
            sum.nats += pass.nats;
            sum.prefill_ms = match sum.prefill_ms {
                Some(fastest) => Some(pass.prefill_ms.min(fastest)),
                None => Some(pass.prefill_ms),
            };
        }
    }
    let predictions = (windows.len() * num_tokens) as f64;
    let count = windows.len() as f64;
    let measures = selections.iter().zip(sums).map(|(selection, sum)| {
        let selector = selection.selector();
        let layers: Vec<LayerMeasure> = sum.layers.iter().map(|layer| layer.over(count)).collect();
        let mean = |x: &dyn Fn(&LayerMeasure) -> f64| {
            layers.iter().map(x).sum::<f64>() / layers.len().max(1) as f64
        };
        let is_prefill = !selector.is_stream();
        SelectorMeasure {
            name: selector.name().to_owned(),
            selector: selector.to_string(),
            chunk: selection.chunk(),
            num_tokens,
            num_windows: windows.len(),
            density: mean(&|layer| layer.density),
            tile_density: is_prefill.then_some(sum.tiles / (count * layers.len() as f64)),
            recall: is_prefill.then(|| mean(&|layer| layer.recall.unwrap_or(0.0))),
            output_error: mean(&|layer| layer.output_error),
            select_ms: sum.select_ms / count,
            attention_ms: sum.attention_ms / count,
            dense_attention_ms: dense_ms / count,
            prefill_ms: sum.prefill_ms.unwrap_or(0.0),
            dense_prefill_ms,
            loss: sum.nats / predictions,
            dense_loss: dense_nats / predictions,
            causal: selector.is_causal_map(),
            nan_lists: sum.nan_lists,
            layers,
        }
    });
    Ok(measures.collect())
}

/// Operands of every layer for one prompt, `[layers]`, and a selector's density and recall on them: for sweeps of a setting.
///
/// # Errors
/// As [`measure_selectors`].
pub fn sweep_selectors<B: SieveBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    selections: &[Selection],
    device: &B::Device,
) -> Result<Vec<(f64, f64)>, EvalError> {
    check_vocabulary(window, model.shape().vocab_size)?;
    let mut captured = Vec::new();
    attending_pass(model, window, device, &mut |operands| {
        let dense = dense_attention(&call(operands)?)?;
        let o = dense.o.clone();
        captured.push(capture(operands, dense));
        Ok(o)
    })?;
    let mut points = Vec::new();
    for selection in selections {
        let mut sum = Sums::default();
        let (mut density, mut recall) = (0.0, 0.0);
        for layer in &captured {
            let measure = sum.layer(selection, layer)?;
            density += measure.density / captured.len() as f64;
            recall += measure.recall.unwrap_or(0.0) / captured.len() as f64;
        }
        points.push((density, recall));
    }
    Ok(points)
}

/// Masks of each selector in every layer for one prompt, `[selectors][layers]`; the model's own activations, densely computed.
///
/// # Errors
/// As [`measure_selectors`]; a decode method.
pub fn selector_masks<B: SieveBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    selectors: &[Selector],
    device: &B::Device,
) -> Result<Vec<Vec<SparseMask>>, EvalError> {
    check_vocabulary(window, model.shape().vocab_size)?;
    for selector in selectors {
        Selection::new(selector.clone(), model.shape())?;
    }
    let mut masks = vec![Vec::new(); selectors.len()];
    attending_pass(model, window, device, &mut |operands| {
        let call = call(operands)?;
        for (selector, masks) in selectors.iter().zip(&mut masks) {
            masks.push(selector.select(&call)?);
        }
        Ok(dense_attention(&call)?.o)
    })?;
    Ok(masks)
}

/// Sums of one selector.
#[derive(Clone, Debug, Default)]
struct Sums {
    nats: f64,
    tiles: f64,
    select_ms: f64,
    attention_ms: f64,
    prefill_ms: Option<f64>,
    nan_lists: u64,
    layers: Vec<LayerMeasure>,
}

impl Sums {
    /// Runs a selector on a captured layer.
    fn layer(
        &mut self,
        selection: &Selection,
        layer: &Captured,
    ) -> Result<LayerMeasure, EvalError> {
        let (selector, operands) = (selection.selector(), layer.operands());
        let started = Instant::now();
        if selector.is_stream() {
            let mut session = DecodeSession::new(selector, layer_shape(operands))?;
            let o = session.stream(operands.q, operands.k, operands.v)?;
            self.attention_ms += milliseconds(started);
            let shape = call(operands)?.shape;
            let pairs = shape.causal_pairs() * shape.num_heads as u64;
            return Ok(LayerMeasure {
                density: session.pairs_read() as f64 / pairs as f64,
                recall: None,
                output_error: relative_error(&o, &layer.dense.o),
            });
        }
        let done = prefill(selector, operands, selection.chunk())?;
        self.attention_ms += milliseconds(started);
        self.select_ms += 1e3 * done.select_seconds;
        self.nan_lists += done.nan_lists;
        self.tiles += done.tile_density;
        Ok(LayerMeasure {
            density: done.density,
            recall: Some(recall(&done.lse, &layer.dense.lse)),
            output_error: relative_error(&done.o, &layer.dense.o),
        })
    }
}

impl LayerMeasure {
    fn over(&self, count: f64) -> Self {
        Self {
            density: self.density / count,
            recall: self.recall.map(|x| x / count),
            output_error: self.output_error / count,
        }
    }
}

fn capture(operands: HostOperands<'_>, dense: AttentionOutput) -> Captured {
    Captured {
        q: operands.q.to_vec(),
        k: operands.k.to_vec(),
        v: operands.v.to_vec(),
        place: Place {
            layer: operands.layer,
            num_layers: operands.num_layers,
            num_tokens: operands.num_tokens,
            num_heads: operands.num_heads,
            num_kv_heads: operands.num_kv_heads,
            head_dim: operands.head_dim,
        },
        dense,
    }
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (error / size.max(f64::MIN_POSITIVE)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{tiny_model, words as window};
    use burn_flex::Flex;
    use sieve_core::Attention;

    fn model(attention: Attention) -> Qwen3<Flex> {
        tiny_model(attention, 512)
    }

    fn selection(text: &str) -> Selection {
        let selector = Selector::parse(text).expect("valid");
        Selection::new(selector, model(Attention::Mha).shape()).expect("it fits")
    }

    fn measured(selectors: &[&str]) -> Vec<SelectorMeasure> {
        let selections: Vec<Selection> = selectors.iter().map(|text| selection(text)).collect();
        measured_with(&selections)
    }

    fn measured_with(selections: &[Selection]) -> Vec<SelectorMeasure> {
        let windows = [
            window(301),
            window(301)[1..].iter().chain(&[3]).copied().collect(),
        ];
        measure_selectors(
            &model(Attention::Mha),
            &windows,
            selections,
            &Default::default(),
            &mut |_| {},
        )
        .expect("valid")
    }

    #[test]
    fn everything_kept_is_the_model_itself_and_less_is_less() {
        let all = measured(&[
            "meanpool:tau=1",
            "streamingllm:n_init=2,n_local=40",
            "exact_top:k=1000",
            "h2o:heavy=20,recent=20",
            "momo:first_dense_layers=0,gamma=8,beta=16,chi=32,k=2,k_exact=1",
        ]);
        for full in [&all[0], &all[2]] {
            assert!((full.loss - full.dense_loss).abs() < 1e-5, "{full:?}");
            assert!(
                (full.density - 1.0).abs() < 1e-9 && full.output_error < 1e-5,
                "{full:?}"
            );
        }
        assert!((all[0].recall.expect("prefill") - 1.0).abs() < 1e-5);
        assert_eq!(all[2].recall, None);
        for part in [&all[1], &all[3], &all[4]] {
            assert!(part.density < 0.6 && part.output_error > 1e-4, "{part:?}");
            assert!(part.loss.is_finite() && part.layers.len() == 2);
        }
        assert!(all[1].recall.expect("prefill") < 0.9);
        assert!(all[1].causal && !all[0].causal && all[3].causal);
    }

    #[test]
    fn a_sweep_moves_density_and_recall_together() {
        let selections =
            [40, 80, 160].map(|local| selection(&format!("streamingllm:n_local={local}")));
        let points = sweep_selectors(
            &model(Attention::Mha),
            &window(301),
            &selections,
            &Default::default(),
        )
        .expect("valid");
        assert!(
            points
                .windows(2)
                .all(|w| w[0].0 < w[1].0 && w[0].1 < w[1].1),
            "{points:?}"
        );
    }

    #[test]
    fn chunks_of_whole_blocks_measure_as_the_whole_prompt_does() {
        for text in [
            "meanpool:block=16,tau=0.5,min_prefill_tokens=0",
            "xattention:block=16,stride=4,tau=0.6,min_prefill_tokens=0",
            "oracle_topk:block=16,k=3,min_prefill_tokens=0",
            "streamingllm:n_init=2,n_local=40,min_prefill_tokens=0",
        ] {
            let (whole, cut) = (selection(text), selection(text));
            let cut = cut.in_chunks(64).expect("a prefill method");
            let [a, b] = &measured_with(&[whole, cut])[..] else {
                panic!("two were given");
            };
            assert_eq!((a.chunk, b.chunk), (None, Some(64)));
            assert!((a.density - b.density).abs() < 1e-12, "{a:?} {b:?}");
            assert!(
                (a.output_error - b.output_error).abs() < 1e-5,
                "{a:?} {b:?}"
            );
            assert!((a.loss - b.loss).abs() < 1e-5, "{a:?} {b:?}");
            let recalls = a.recall.zip(b.recall).expect("prefill methods");
            assert!((recalls.0 - recalls.1).abs() < 1e-5, "{a:?} {b:?}");
        }
        // Chunks that cut a probe's blocks: other lists, and with everything kept still the model itself.
        let text = "pbs:block=16,segment=64,tau=0.5,min_prefill_tokens=0";
        let cut = selection(text).in_chunks(100).expect("a prefill method");
        let found = measured_with(&[selection(text), cut]);
        assert!(found[0].density != found[1].density, "{found:?}");
        let all = selection("meanpool:tau=1,min_prefill_tokens=0").in_chunks(100);
        let all = &measured_with(&[all.expect("a prefill method")])[0];
        assert!((all.density - 1.0).abs() < 1e-12 && (all.loss - all.dense_loss).abs() < 1e-5);
    }

    #[test]
    fn chunks_that_change_nothing_or_everything_are_refused() {
        for (text, chunk, words) in [
            ("meanpool", 0, "at least 1 token"),
            ("meanpool", 100, "every call would be dense"),
            ("h2o", 512, "token by token"),
            ("streamingllm:reindex=true", 512, "token by token"),
        ] {
            let error = selection(text).in_chunks(chunk).expect_err("refused");
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_model_with_an_own_sparse_attention_is_refused() {
        let model = model(Attention::Swa { window_size: 4 });
        let selector = Selector::parse("meanpool").expect("valid");
        let error = Selection::new(selector, model.shape()).expect_err("not dense");
        assert!(error.to_string().contains("meanpool"));
    }
}
