//! Host tokens to device tensors, checked first: an id outside the embedding would be undefined on a GPU.
use crate::EvalError;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::ModelShape;

/// Refuses ids that are no row of the embedding.
pub(crate) fn check_vocabulary(tokens: &[u32], vocab_size: usize) -> Result<(), EvalError> {
    match tokens.iter().position(|&token| token as usize >= vocab_size) {
        None => Ok(()),
        Some(position) => {
            let token = tokens[position];
            let what =
                format!("token {token} at position {position} is outside the model's vocabulary of {vocab_size}");
            let hint = "leave the token out, if it was added to the tokenizer without a row of the embedding; else use \
                        the tokenizer.json of the checkpoint";
            Err(EvalError::refused(what, hint))
        }
    }
}

/// Refuses a row that the model cannot read: `num_inputs` of `tokens` are inputs, at least one and at most its context.
pub(crate) fn check_row(tokens: &[u32], num_inputs: usize, shape: &ModelShape) -> Result<(), EvalError> {
    if num_inputs == 0 {
        return Err(EvalError::NoTokens);
    }
    check_length(num_inputs, shape)?;
    check_vocabulary(tokens, shape.vocab_size)
}

/// Refuses more tokens than the model has positions for.
pub(crate) fn check_length(num_tokens: usize, shape: &ModelShape) -> Result<(), EvalError> {
    let context = shape.max_seq_len;
    match num_tokens > context {
        true => Err(EvalError::TooLong { num_tokens, context }),
        false => Ok(()),
    }
}

/// Number of inputs of a window (its last token is only predicted), from the first window. Refuses an empty list, and
/// what [`check_row`] refuses.
pub(crate) fn check_windows(windows: &[Vec<u32>], shape: &ModelShape) -> Result<usize, EvalError> {
    let num_inputs = |window: &Vec<u32>| window.len().saturating_sub(1);
    for window in windows {
        check_row(window, num_inputs(window), shape)?;
    }
    windows.first().map(num_inputs).ok_or(EvalError::NoTokens)
}

/// `[batch, seq_len]` ids from rows laid end to end.
pub(crate) fn ids<B: Backend>(tokens: &[u32], shape: [usize; 2], device: &B::Device) -> Tensor<B, 2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}
