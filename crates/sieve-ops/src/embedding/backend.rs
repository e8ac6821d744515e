//! Token embedding as a backend computes it.
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

/// Token embedding.
///
/// Burn's own backend trait has an `embedding` too: write `<B as EmbeddingBackend>::embedding`.
pub trait EmbeddingBackend: Backend {
    /// See [`crate::embedding`].
    fn embedding(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

/// Its gradient, as a device computes it.
pub trait EmbeddingGradients: EmbeddingBackend {
    /// `dweight` of [`crate::embedding`], `[vocab_size, d_model]`.
    fn embedding_backward(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab_size: usize,
    ) -> FloatTensor<Self>;
}
