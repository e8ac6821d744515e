//! Token embedding as a backend computes it.
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;

/// Token embedding.
///
/// Burn's own backend trait has an `embedding` too: write `<B as EmbeddingBackend>::embedding`.
pub trait EmbeddingBackend: Backend {
    /// See [`crate::embedding`].
    fn embedding(weight: Float<Self>, ids: Ints<Self>) -> Float<Self>;
}

/// Its gradient, as a device computes it.
pub trait EmbeddingGradients: EmbeddingBackend {
    /// `dweight` of [`crate::embedding`], `[vocab_size, d_model]`.
    fn embedding_backward(dy: Float<Self>, ids: Ints<Self>, vocab_size: usize) -> Float<Self>;
}
