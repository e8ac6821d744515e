//! Raw model output, for comparison with other programs.
use crate::EvalError;
use crate::input::{check_vocabulary, ids};
use burn::tensor::TensorData;
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{Documents, SieveBackend};

/// Logits of every position of one document, f32 `[1, num_tokens, vocab_size]`, by one full forward pass.
///
/// # Errors
/// No token, a token outside the vocabulary, more tokens than the model's context.
pub fn logits<B: SieveBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<TensorData, EvalError> {
    let (num_tokens, shape) = (tokens.len(), model.shape());
    if num_tokens == 0 {
        return Err(EvalError::NoTokens);
    }
    if num_tokens > shape.max_seq_len {
        return Err(EvalError::TooLong {
            num_tokens,
            context: shape.max_seq_len,
        });
    }
    check_vocabulary(tokens, shape.vocab_size)?;
    let documents = Documents::whole_rows([1, num_tokens], device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let logits = model.logits(ids(tokens, [1, num_tokens], device), &context);
    Ok(logits.into_data().convert::<f32>())
}
