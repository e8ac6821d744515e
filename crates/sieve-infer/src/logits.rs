//! Logits of a whole document, for comparison with other programs; and the sum by which logits become probabilities.
use crate::InferError;
use crate::input::{check_row, ids};
use burn::tensor::TensorData;
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{DeviceBackend, Documents};

/// Logits of every position of one document, f32 `[1, num_tokens, vocab_size]`, by one full forward pass.
///
/// # Errors
/// No token, a token outside the vocabulary, more tokens than the model's context.
pub fn logits<B: DeviceBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<TensorData, InferError> {
    let (num_tokens, shape) = (tokens.len(), model.shape());
    check_row(tokens, num_tokens, shape)?;
    let documents = Documents::whole_rows([1, num_tokens], device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let logits = model.logits(ids(tokens, [1, num_tokens], device), &context);
    Ok(logits.into_data().convert::<f32>())
}

/// The largest of `logits`, m, and `ln(sum(exp(x - m)))`: the log-probability of x is `x - m` less the latter.
pub(crate) fn max_and_log_sum(logits: &[f32]) -> (f32, f64) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    (max, sum.ln())
}
