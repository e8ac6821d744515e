//! Token embedding.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{EmbeddingBackend, EmbeddingGradients};

use crate::tensors::{primitive, tensor};
use burn::tensor::{Int, Tensor};

/// Rows of `weight` by token id.
///
/// # Shapes
/// - weight: `[vocab_size, d_model]`
/// - ids: `[batch, seq_len]`, each in `0..vocab_size`
/// - returns: `[batch, seq_len, d_model]`
pub fn embedding<B: EmbeddingBackend>(weight: Tensor<B, 2>, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    let ids = ids.into_primitive();
    tensor(<B as EmbeddingBackend>::embedding(primitive(weight), ids))
}
