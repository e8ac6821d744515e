//! Logits of a whole document, for comparison with other programs; and the log-probability of a token by its logits.
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

/// The natural logarithm of a token's probability by the logits before it: on a CPU the same number, to the bit, as the
/// negative of [`Qwen3::token_losses_of`].
pub(crate) fn log_probability(logits: &[f32], token: u32) -> f64 {
    -f64::from(sieve_ops::token_loss_on_host(logits, token))
}
