//! Checks token ids and uploads them. An id outside the embedding would read foreign memory on a GPU.
use crate::InferError;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::ModelShape;

/// Fails if an id has no row in the embedding.
pub fn check_vocabulary(tokens: &[u32], vocab_size: usize) -> Result<(), InferError> {
    let Some(position) = tokens.iter().position(|&token| token as usize >= vocab_size) else {
        return Ok(());
    };
    let token = tokens[position];
    let what = format!("token {token} at position {position} is outside the model's vocabulary of {vocab_size}");
    let hint = "leave the token out, if it was added to the tokenizer without a row of the embedding; else use the \
                tokenizer.json of the checkpoint";
    Err(InferError::refused(what, hint))
}

/// Fails if the model cannot read a row: of its `tokens`, the `num_inputs` inputs must be at least one and at most the
/// model's context.
pub fn check_row(tokens: &[u32], num_inputs: usize, shape: &ModelShape) -> Result<(), InferError> {
    if num_inputs == 0 {
        return Err(InferError::NoTokens);
    }
    check_length(num_inputs, shape)?;
    check_vocabulary(tokens, shape.vocab_size)
}

/// Fails for more tokens than the model has positions.
pub fn check_length(num_tokens: usize, shape: &ModelShape) -> Result<(), InferError> {
    let context = shape.max_seq_len;
    if num_tokens > context { Err(InferError::TooLong { num_tokens, context }) } else { Ok(()) }
}

/// Checks windows by [`check_row`]; all tokens of a window but the last are inputs. Returns the number of inputs of the
/// first window. Fails if there is no window.
pub fn check_windows(windows: &[Vec<u32>], shape: &ModelShape) -> Result<usize, InferError> {
    let num_inputs = |window: &Vec<u32>| window.len().saturating_sub(1);
    for window in windows {
        check_row(window, num_inputs(window), shape)?;
    }
    windows.first().map(num_inputs).ok_or(InferError::NoTokens)
}

/// Uploads ids: `shape` is `[batch, seq_len]`, and `tokens` are the rows, concatenated.
pub fn ids<B: Backend>(tokens: &[u32], shape: [usize; 2], device: &B::Device) -> Tensor<B, 2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}
