//! Measures selectors on one dense model: density, recall, times, error and loss.
mod agreement;
mod grid;

pub use agreement::{BlockAgreement, block_agreement};
pub use grid::{READY_GRIDS, selector_grid};

use crate::EvalError;
use crate::captured::Captured;
use burn::tensor::Tensor;
use serde::Serialize;
use sieve_infer::chunks::call;
use sieve_infer::input::{check_vocabulary, check_windows};
use sieve_infer::pass::{Agreement, Pass, attending_pass, layers_pass, own_pass};
use sieve_infer::{LayerPath, Selection};
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;
use sieve_select::{
    Call, LayerSelectors, SelectError, Selected, Selector, block_sparse_attention, dense_attention, recall,
};

/// Measures of one selector at one prompt length, over all layers and prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SelectorMeasure {
    /// Name of the selector's method.
    pub name: String,
    /// All settings, in the form that `--selector` reads.
    pub selector: String,
    /// Tokens of a prompt's chunk, if prompts are read in chunks.
    pub chunk: Option<usize>,
    /// Number of tokens of each prompt.
    pub num_tokens: usize,
    /// Number of prompts.
    pub num_windows: usize,
    /// Computed pairs over causal pairs, probe rows included.
    pub density: f64,
    /// Kept tiles over causal tiles; `None` for decode methods.
    pub tile_density: Option<f64>,
    /// Mean share of dense attention's probability on the kept pairs; `None` for decode methods.
    pub recall: Option<f64>,
    /// `|o - dense o| / |dense o|` of the layers' attention, on the dense model's operands.
    pub output_error: f64,
    /// Milliseconds of selection in all layers, mean per prompt.
    pub select_ms: f64,
    /// Milliseconds of selection and attention in all layers, mean per prompt.
    pub attention_ms: f64,
    /// `attention_ms` of the fastest and of the slowest prompt.
    pub attention_ms_range: [f64; 2],
    /// `attention_ms` of dense attention: the same code with every tile kept.
    pub dense_attention_ms: f64,
    /// Milliseconds from token ids to the last block's output under the selector, for the fastest prompt.
    pub prefill_ms: f64,
    /// Milliseconds of a prefill with dense attention.
    pub dense_prefill_ms: f64,
    /// Cross-entropy under the selector, nats per token. It is no likelihood if `causal` is false.
    pub loss: f64,
    /// Cross-entropy with dense attention, nats per token.
    pub dense_loss: f64,
    /// Kullback-Leibler divergence of the predictions from the dense model's, nats per token.
    pub kl: f64,
    /// Share of the predictions whose likeliest token is the dense model's.
    pub top1: f64,
    /// Mean cosine between the last block's output and the dense model's.
    pub cosine: f64,
    /// Whether a row depends only on earlier tokens, so that the loss is a likelihood.
    pub causal: bool,
    /// Choices of a query head (with `gqa=mean`, of a group) that became dense because a score was NaN.
    pub nan_lists: u64,
    /// Calls whose masks were made on the device, in all layers, mean per prompt.
    pub device_selections: f64,
    /// Bytes of q, k, v and their means copied to the host, mean per prompt.
    pub host_bytes: f64,
    /// The code path that each layer took.
    pub paths: Vec<LayerPath>,
    /// Measures of each dense layer, in order.
    pub layers: Vec<LayerMeasure>,
}

/// One layer's share of a [`SelectorMeasure`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerMeasure {
    /// Computed query-key pairs divided by causal pairs.
    pub density: f64,
    /// Share of dense attention's probability on the kept pairs; `None` for decode methods.
    pub recall: Option<f64>,
    /// Relative error of the output, on the dense model's operands.
    pub output_error: f64,
    /// Mean cosine between the attention's output and the dense model's, with the selector in all earlier layers too.
    /// `None` if the model did not run with the selector.
    pub cosine: Option<f64>,
}

/// Measures every selector on prompts of one length. Each of `windows` is a prompt and the one token after it, which
/// the prompt's last position predicts. A selector that fails returns its error, the others are measured.
///
/// `observe` is called with the name of each selector before it runs on a prompt; on the first prompt twice, the first
/// time for a warm-up that is not counted (in which a token-by-token selector does not run).
///
/// # Errors
/// A token outside the vocabulary, no window, a model that fails without a selector.
pub fn measure_selectors<B: DeviceBackend>(
    model: &Qwen3<B>,
    windows: &[Vec<u32>],
    selections: &[Selection],
    device: &B::Device,
    observe: &mut dyn FnMut(&str),
) -> Result<Vec<Result<SelectorMeasure, EvalError>>, EvalError> {
    let num_tokens = check_windows(windows, model.shape())?;
    let mut selections = selections.to_vec();
    let mut sums: Vec<Result<Sums, EvalError>> = selections.iter().map(|_| Ok(Sums::default())).collect();
    let (mut dense_nats, mut dense_ms, mut dense_prefill_ms) = (0.0, 0.0, f64::INFINITY);
    // Round 0 is a warm-up with the first prompt, in which kernels are compiled and memory is allocated.
    let (warm, timed) = (windows.iter().take(1), windows.iter());
    for (round, window) in warm.chain(timed).enumerate() {
        if round == 1 {
            (dense_nats, dense_ms, dense_prefill_ms) = (0.0, 0.0, f64::INFINITY);
            sums.iter_mut().flatten().for_each(|sum| *sum = Sums::default());
        }
        // The first pass times the model's own dense prefill. The second stops at each layer's attention: it captures
        // the operands for the selectors, and times dense attention by the code that they use.
        dense_prefill_ms = own_pass(model, window, device)?.prefill_ms.min(dense_prefill_ms);
        let (dense, captured) = captured_pass(model, window, device)?;
        dense_ms += captured.iter().map(|layer| layer.dense_ms).sum::<f64>();
        dense_nats += dense.nats;
        for (selection, total) in selections.iter_mut().zip(&mut sums) {
            observe(&selection.selectors().name());
            let Ok(sum) = total else {
                continue;
            };
            if round == 0 && selection.is_token_by_token() {
                // Reading token by token is slow and has nothing to compile, so it needs no warm-up.
                continue;
            }
            if let Err(error) = sum.window(selection, &captured, &dense.hidden, model, window, device) {
                *total = Err(error);
            }
        }
    }
    let dense = Dense {
        num_tokens,
        num_windows: windows.len(),
        attention_ms: dense_ms / windows.len() as f64,
        prefill_ms: dense_prefill_ms,
        loss: dense_nats / (windows.len() * num_tokens) as f64,
    };
    let measures = selections.iter().zip(sums);
    Ok(measures.map(|(selection, sum)| Ok(sum?.measure(selection, &dense))).collect())
}

/// Density and recall of a selector on one prompt, or why it failed there.
pub type DensityAndRecall = Result<(f64, f64), EvalError>;

/// Each selector's density and recall on one prompt, for curves over a setting. A selector that fails returns its
/// error.
///
/// # Errors
/// As [`measure_selectors`].
pub fn sweep_selectors<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    selections: &[Selection],
    device: &B::Device,
) -> Result<Vec<DensityAndRecall>, EvalError> {
    check_vocabulary(window, model.shape().vocab_size)?;
    let (_, captured) = captured_pass(model, window, device)?;
    let point = |selection: &Selection| {
        let mut sum = Sums::default();
        let (mut density, mut recall) = (0.0, 0.0);
        for layer in &captured {
            let measure = sum.layer(selection, layer)?;
            density += measure.density / captured.len() as f64;
            recall += measure.recall.unwrap_or(0.0) / captured.len() as f64;
        }
        Ok((density, recall))
    };
    Ok(selections.iter().map(point).collect())
}

/// What a selector keeps in one dense layer.
#[derive(Clone, Debug)]
pub struct LayerMask {
    /// The layer's index.
    pub layer: usize,
    /// The keys that each query sees.
    pub selected: Selected,
    /// For each query head, the mean share of dense attention's probability on the kept pairs.
    pub mass: Vec<f64>,
}

/// What a selector keeps in each dense layer.
pub type LayerMasks = Vec<LayerMask>;

impl LayerMask {
    /// A selector's choice for a call, beside the log-sum-exps of dense attention, `[num_heads, num_queries]`.
    fn of(selector: &Selector, call: &Call<'_>, dense_lse: &[f32]) -> Result<Self, SelectError> {
        let selected = selector.select(call)?;
        let kept = block_sparse_attention(call, &selected)?;
        let heads = kept.lse.chunks(call.shape.num_queries).zip(dense_lse.chunks(call.shape.num_queries));
        let mass = heads.map(|(kept, dense)| recall(kept, dense)).collect();
        Ok(Self { layer: call.layer, selected, mass })
    }
}

/// The masks of each selector for one prompt, on the activations of the dense model. A selector that fails (as every
/// decode method does) returns its error.
///
/// # Errors
/// As [`measure_selectors`].
pub fn selector_masks<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    selectors: &[LayerSelectors],
    device: &B::Device,
) -> Result<Vec<Result<LayerMasks, EvalError>>, EvalError> {
    check_vocabulary(window, model.shape().vocab_size)?;
    let start = |one: &LayerSelectors| Ok(Selection::new(one.clone(), model.shape()).map(|_| Vec::new())?);
    let mut masks: Vec<Result<LayerMasks, EvalError>> = selectors.iter().map(start).collect();
    attending_pass(model, window, device, &mut |operands| {
        let call = call(operands)?;
        let dense = dense_attention(&call)?;
        for (one, found) in selectors.iter().zip(&mut masks) {
            let Ok(layers) = found else {
                continue;
            };
            match LayerMask::of(one.of(call.layer), &call, &dense.lse) {
                Ok(mask) => layers.push(mask),
                Err(error) => *found = Err(error.into()),
            }
        }
        Ok(dense.o)
    })?;
    Ok(masks)
}

/// A dense pass over a window, and each dense layer's operands and attention in it.
fn captured_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
) -> Result<(Pass<B>, Vec<Captured<B>>), EvalError> {
    let mut captured = Vec::new();
    let pass = layers_pass(model, window, device, &mut |operands| {
        let (layer, o) = Captured::of(operands)?;
        captured.push(layer);
        Ok(o)
    })?;
    Ok((pass, captured))
}

/// How many tokens and windows the prompts have, and the dense model's measures on them; see [`SelectorMeasure`].
struct Dense {
    num_tokens: usize,
    num_windows: usize,
    attention_ms: f64,
    prefill_ms: f64,
    loss: f64,
}

/// Sums of one selector's measures over prompts.
#[derive(Clone, Debug, Default)]
struct Sums {
    nats: f64,
    agreement: Agreement,
    tiles: f64,
    select_ms: f64,
    attention_ms: f64,
    /// `attention_ms` of the fastest and of the slowest prompt; `None` before the first prompt.
    attention_ms_range: Option<[f64; 2]>,
    /// Of the fastest prompt; `None` before the first prompt.
    prefill_ms: Option<f64>,
    nan_lists: u64,
    device_selections: u64,
    host_bytes: u64,
    layers: Vec<LayerMeasure>,
}

impl Sums {
    /// Measures one prompt: first each layer on the dense model's operands, then the whole model under the selector.
    fn window<B: DeviceBackend>(
        &mut self,
        selection: &mut Selection,
        captured: &[Captured<B>],
        dense_hidden: &Tensor<B, 3>,
        model: &Qwen3<B>,
        window: &[u32],
        device: &B::Device,
    ) -> Result<(), EvalError> {
        let ms_before = self.attention_ms;
        self.layers.resize(captured.len(), LayerMeasure::default());
        for (at, layer) in captured.iter().enumerate() {
            let measure = self.layer(selection, layer)?;
            let total = &mut self.layers[at];
            total.density += measure.density;
            total.output_error += measure.output_error;
            total.recall = measure.recall.map(|x| x + total.recall.unwrap_or(0.0));
        }
        let prompt_ms = self.attention_ms - ms_before;
        let [least, most] = self.attention_ms_range.unwrap_or([prompt_ms; 2]);
        self.attention_ms_range = Some([least.min(prompt_ms), most.max(prompt_ms)]);
        let mut outputs = Vec::new();
        let pass = layers_pass(model, window, device, &mut |operands| {
            let o = selection.attend(operands)?;
            outputs.push(o.clone());
            Ok(o)
        })?;
        self.nats += pass.nats;
        for ((layer, o), total) in captured.iter().zip(&outputs).zip(&mut self.layers) {
            total.cosine = Some(layer.cosine(o) + total.cosine.unwrap_or(0.0));
        }
        let agreement = Agreement::of(model, dense_hidden, &pass.hidden);
        self.agreement.kl += agreement.kl;
        self.agreement.same_first += agreement.same_first;
        self.agreement.cosine += agreement.cosine;
        self.prefill_ms = Some(self.prefill_ms.map_or(pass.prefill_ms, |fastest| pass.prefill_ms.min(fastest)));
        Ok(())
    }

    /// The measures as means over all prompts.
    fn measure(self, selection: &Selection, dense: &Dense) -> SelectorMeasure {
        let selectors = selection.selectors();
        let count = dense.num_windows as f64;
        let predictions = (dense.num_windows * dense.num_tokens) as f64;
        let layers: Vec<LayerMeasure> = self.layers.iter().map(|layer| layer.over(count)).collect();
        let mean = |x: &dyn Fn(&LayerMeasure) -> f64| layers.iter().map(x).sum::<f64>() / layers.len().max(1) as f64;
        let is_prefill = !selectors.is_token_by_token();
        SelectorMeasure {
            name: selectors.name(),
            selector: selectors.to_string(),
            chunk: selection.chunk(),
            num_tokens: dense.num_tokens,
            num_windows: dense.num_windows,
            density: mean(&|layer| layer.density),
            tile_density: is_prefill.then_some(self.tiles / (count * layers.len() as f64)),
            recall: is_prefill.then(|| mean(&|layer| layer.recall.unwrap_or(0.0))),
            output_error: mean(&|layer| layer.output_error),
            select_ms: self.select_ms / count,
            attention_ms: self.attention_ms / count,
            attention_ms_range: self.attention_ms_range.unwrap_or_default(),
            dense_attention_ms: dense.attention_ms,
            prefill_ms: self.prefill_ms.unwrap_or(0.0),
            dense_prefill_ms: dense.prefill_ms,
            loss: self.nats / predictions,
            dense_loss: dense.loss,
            kl: self.agreement.kl / predictions,
            top1: self.agreement.same_first / predictions,
            cosine: self.agreement.cosine / predictions,
            causal: selectors.is_causal_map(),
            nan_lists: self.nan_lists,
            device_selections: self.device_selections as f64 / count,
            host_bytes: self.host_bytes as f64 / count,
            paths: selection.paths(),
            layers,
        }
    }

    /// Runs a selector on one layer's operands, adds its times and counts, and compares its output with dense
    /// attention.
    fn layer<B: DeviceBackend>(
        &mut self,
        selection: &Selection,
        layer: &Captured<B>,
    ) -> Result<LayerMeasure, EvalError> {
        let done = layer.run(selection)?;
        self.attention_ms += done.milliseconds;
        self.select_ms += 1e3 * done.cost.select_seconds;
        self.nan_lists += done.cost.nan_lists;
        self.tiles += done.cost.tile_density;
        self.device_selections += done.cost.device_calls;
        self.host_bytes += done.cost.host_bytes;
        Ok(layer.compare(&done)?)
    }
}

impl LayerMeasure {
    /// These sums divided by `count`.
    fn over(&self, count: f64) -> Self {
        Self {
            density: self.density / count,
            recall: self.recall.map(|x| x / count),
            output_error: self.output_error / count,
            cosine: self.cosine.map(|x| x / count),
        }
    }
}

#[cfg(test)]
mod tests;
