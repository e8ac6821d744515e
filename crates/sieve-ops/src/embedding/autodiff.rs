//! Token embedding as a node of the autodiff graph.
use super::backend::{EmbeddingBackend, EmbeddingGradients};
use crate::device::autodiff::{Gradient, enter};
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Rows<B: Backend> {
    ids: Ints<B>,
    vocab_size: usize,
}

impl<B: EmbeddingGradients> Gradient<B, 1> for Rows<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        [<B as EmbeddingGradients>::embedding_backward(
            dy,
            self.ids,
            self.vocab_size,
        )]
    }
}

impl<B: EmbeddingGradients, C: CheckpointStrategy> EmbeddingBackend for Autodiff<B, C> {
    fn embedding(weight: Float<Self>, ids: Ints<Self>) -> Float<Self> {
        let vocab_size = weight.primitive.shape()[0];
        let y = <B as EmbeddingBackend>::embedding(weight.primitive.clone(), ids.clone());
        enter::<B, C, _, 1>([&weight], Rows::<B> { ids, vocab_size }, y)
    }
}
