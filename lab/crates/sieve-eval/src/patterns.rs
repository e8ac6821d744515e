//! Offline searches on a dense model: MInference's pattern and DAM's map for every head.
use crate::EvalError;
use sieve_core::ModelShape;
use sieve_infer::InferError;
use sieve_infer::chunks::call;
use sieve_infer::input::check_row;
use sieve_infer::pass::attending_pass;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;
use sieve_select::decode::dam::{DamCapture, DamConfig, DamMaps};
use sieve_select::prefill::minference::{MinferenceConfig, Pattern, PatternFile, search_patterns};
use sieve_select::{Method, Selector, dense_attention, density};

/// Result of MInference's search on one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PatternSearch {
    /// `[layers][query heads]`: the pattern, and the share of the head's dense attention mass that it keeps. Layers
    /// whose attention is not dense have no heads.
    pub heads: Vec<Vec<(Pattern, f64)>>,
    /// Pairs that the patterns compute on the prompt over causal pairs, over all heads of the searched layers.
    pub density: f64,
}

impl PatternSearch {
    /// The content of the file that `minference:pattern=FILE` reads.
    pub fn file(&self) -> PatternFile {
        let layer = |heads: &Vec<(Pattern, f64)>| heads.iter().map(|head| Some(head.0)).collect();
        PatternFile { layers: self.heads.iter().map(layer).collect() }
    }
}

/// MInference's offline search (arXiv:2407.02490). For each head of the dense layers it chooses, among the paper's
/// candidates, the pattern that keeps most of the head's attention on the prompt: all tokens of `window` but the last.
/// `observe` is called with the number of layers done.
///
/// # Errors
/// A model without a dense layer, a prompt longer than its context, a token outside its vocabulary, no prompt.
pub fn search_minference<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    observe: &mut dyn FnMut(u64),
) -> Result<PatternSearch, EvalError> {
    check("minference", model.shape(), window)?;
    let mut selector = Selector::parse("minference")?;
    (selector.common.min_prefill_tokens, selector.common.first_dense_layers) = (0, 0);
    let num_searched = model.shape().num_layers_of_dense_attention();
    let mut found = PatternSearch { heads: vec![Vec::new(); model.shape().num_layers], density: 0.0 };
    let mut done = 0;
    attending_pass(model, window, device, &mut |operands| {
        let call = call(operands)?;
        found.heads[operands.layer] = search_patterns(&call)?;
        selector.method =
            Method::Minference(MinferenceConfig { patterns: found.file(), ..MinferenceConfig::default() });
        found.density += density(&selector.select(&call)?).token / num_searched as f64;
        done += 1;
        observe(done);
        Ok(dense_attention(&call)?.o)
    })?;
    Ok(found)
}

/// DAM's calibration (arXiv:2506.11104): a map for each head from its mean attention over the prompts. All tokens of a
/// window but the last are its prompt; the prompt's first `calibration.capture` tokens count. `observe` is called with
/// the number of prompts read.
///
/// # Errors
/// As [`search_minference`]; settings of the calibration outside their ranges; maps that take too much memory.
pub fn calibrate_dam<B: DeviceBackend>(
    model: &Qwen3<B>,
    windows: &[Vec<u32>],
    calibration: &DamConfig,
    device: &B::Device,
    observe: &mut dyn FnMut(u64),
) -> Result<DamMaps, EvalError> {
    let shape = model.shape();
    if windows.is_empty() {
        return Err(InferError::NoTokens.into());
    }
    for window in windows {
        check("dam", shape, window)?;
    }
    check_dam_memory(shape, calibration.capture)?;
    let mut captures = (0..shape.num_layers)
        .map(|layer| {
            let is_searched = shape.has_dense_attention(layer);
            let capture = is_searched.then(|| DamCapture::new(calibration.clone(), shape.num_heads));
            capture.transpose()
        })
        .collect::<Result<Vec<_>, _>>()?;
    for (read, window) in windows.iter().enumerate() {
        attending_pass(model, window, device, &mut |operands| {
            let call = call(operands)?;
            let capture = captures[operands.layer].as_mut();
            capture.expect("a dense layer").add(&call)?;
            Ok(dense_attention(&call)?.o)
        })?;
        observe(read as u64 + 1);
    }
    Ok(DamMaps {
        layers: captures.iter().map(|capture| capture.as_ref().map(DamCapture::maps).unwrap_or_default()).collect(),
    })
}

/// Memory that a calibration's sums may take.
const MAX_SUM_BYTES: u64 = 32 << 30;

/// Fails if the sums of `capture` x `capture` f64 for each head take more than [`MAX_SUM_BYTES`].
fn check_dam_memory(shape: &ModelShape, capture: usize) -> Result<(), EvalError> {
    let heads = (shape.num_layers_of_dense_attention() * shape.num_heads) as u64;
    let bytes = heads.saturating_mul((capture as u64).saturating_pow(2).saturating_mul(8));
    if bytes <= MAX_SUM_BYTES {
        return Ok(());
    }
    Err(EvalError::setting(
        "capture",
        format!("{capture}, whose sums take {} GiB for {heads} heads", bytes >> 30),
        "give dam a smaller capture",
    ))
}

fn check(method: &'static str, shape: &ModelShape, window: &[u32]) -> Result<(), EvalError> {
    InferError::require_dense(method, shape)?;
    Ok(check_row(window, window.len().saturating_sub(1), shape)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{tiny_model, words as window};
    use burn_flex::Flex;
    use sieve_core::Attention;
    use sieve_testing::refusal;

    fn model(attention: Attention) -> Qwen3<Flex> {
        tiny_model(attention, 4200)
    }

    #[test]
    fn minference_patterns_are_those_of_the_search_on_each_layers_operands() {
        let (model, window, device) = (model(Attention::Mha), window(4101), Default::default());
        let mut heard = Vec::new();
        let found = search_minference(&model, &window, &device, &mut |n| heard.push(n));
        let found = found.expect("it fits");
        assert_eq!(heard, [1, 2]);
        assert!(found.density > 0.0 && found.density < 1.0, "{}", found.density);
        let mut layers = 0;
        attending_pass(&model, &window, &device, &mut |operands| {
            let call = call(operands)?;
            assert_eq!(found.heads[operands.layer], search_patterns(&call)?);
            layers += 1;
            Ok(dense_attention(&call)?.o)
        })
        .expect("it fits");
        assert_eq!((layers, found.heads.len()), (2, 2));
        for (pattern, mass) in found.heads.iter().flatten() {
            assert!((0.0..1.0 + 1e-6).contains(mass), "{pattern:?} {mass}");
        }
        let file = found.file();
        assert_eq!(file.layers[1][3], Some(found.heads[1][3].0));
    }

    #[test]
    fn dam_maps_are_of_the_mean_of_all_prompts() {
        let (model, device) = (model(Attention::Mha), Default::default());
        let calibration = DamConfig { capture: 24, ..DamConfig::default() };
        let windows = [window(31), window(41)[10..].to_vec()];
        let of =
            |windows: &[Vec<u32>]| calibrate_dam(&model, windows, &calibration, &device, &mut |_| {}).expect("it fits");
        let both = of(&windows);
        assert_eq!((both.layers.len(), both.layers[0].len()), (2, 4));
        assert_eq!(both.layers[1][2].rows.len(), 24);
        assert_ne!(both, of(&windows[..1]));
        assert_ne!(both, of(&windows[1..]));
        let reversed = [windows[1].clone(), windows[0].clone()];
        assert_eq!(both, of(&reversed));
    }

    #[test]
    fn other_attention_long_prompts_and_unknown_tokens_are_refused() {
        let device = Default::default();
        let error = |attention, window: &[u32]| {
            let model = model(attention);
            let a = search_minference(&model, window, &device, &mut |_| {}).expect_err("refused");
            let windows = [window.to_vec()];
            let calibration = DamConfig::default();
            let b = calibrate_dam(&model, &windows, &calibration, &device, &mut |_| {});
            format!("{a}\n{}", b.expect_err("refused"))
        };
        for (attention, window, words) in [
            (Attention::swa(4), window(9), "selects for dense attention"),
            (Attention::Mha, window(4202), "context of 4200"),
            (Attention::Mha, vec![3, 31, 1], "vocabulary of 31"),
            (Attention::Mha, vec![3], "no token"),
        ] {
            let text = error(attention, &window);
            assert_eq!(text.matches(words).count(), 2, "{text}");
        }
        let large = check_dam_memory(model(Attention::Mha).shape(), 40_000);
        refusal(large, "capture is 40000 | 8 heads");
    }
}
