//! Token embedding.
use crate::SieveBackend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

/// Rows of `weight` by token id.
///
/// # Shapes
/// - weight: `[vocab_size, d_model]`
/// - ids: `[batch, seq_len]`, each in `0..vocab_size`
/// - returns: `[batch, seq_len, d_model]`
pub fn embedding<B: SieveBackend>(weight: Tensor<B, 2>, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    let y = B::embedding_rows(weight.into_primitive().tensor(), ids.into_primitive());
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

#[cfg(test)]
mod tests;
