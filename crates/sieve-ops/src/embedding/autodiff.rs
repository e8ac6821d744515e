//! Token embedding as a node of the autodiff graph.
use super::backend::{EmbeddingBackend, EmbeddingGradients};
use crate::device::autodiff::enter;
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::TensorMetadata;

impl<B: EmbeddingGradients, C: CheckpointStrategy> EmbeddingBackend for Autodiff<B, C> {
    fn embedding(weight: Float<Self>, ids: Ints<Self>) -> Float<Self> {
        let vocab_size = weight.primitive.shape()[0];
        let y = <B as EmbeddingBackend>::embedding(weight.primitive.clone(), ids.clone());
        enter::<B, C, _, _>([&weight], y, move |dy| {
            [<B as EmbeddingGradients>::embedding_backward(dy, ids, vocab_size)]
        })
    }
}
