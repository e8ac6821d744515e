//! Host tokens to device tensors, checked first: an id outside the embedding would be undefined on a GPU.
use crate::EvalError;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

/// Refuses ids that are no row of the embedding.
pub(crate) fn check_vocabulary(tokens: &[u32], vocab_size: usize) -> Result<(), EvalError> {
    match tokens
        .iter()
        .position(|&token| token as usize >= vocab_size)
    {
        None => Ok(()),
        Some(position) => Err(EvalError::TokenOutOfVocabulary {
            token: tokens[position],
            position,
            vocab_size,
        }),
    }
}

/// `[batch, seq_len]` ids from rows laid end to end.
pub(crate) fn ids<B: Backend>(
    tokens: &[u32],
    shape: [usize; 2],
    device: &B::Device,
) -> Tensor<B, 2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}
