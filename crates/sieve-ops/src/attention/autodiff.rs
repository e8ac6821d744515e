//! Dense and sliding-window attention as a node of the autodiff graph.
use super::backend::{AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec};
use crate::device::autodiff::{Gradient, constant, enter};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Attended<B: Backend> {
    qkv: Float<B>,
    documents: DocumentBounds<B>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
}

impl<B: AttentionGradients> Gradient<B, 1> for Attended<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        [B::attention_backward(
            self.qkv,
            &self.documents,
            self.spec,
            self.output,
            dy,
        )]
    }
}

impl<B: AttentionGradients, C: CheckpointStrategy> AttentionBackend for Autodiff<B, C> {
    fn attention(qkv: Float<Self>, documents: &DocumentBounds<Self>, spec: AttentionSpec) -> AttentionOutput<Self> {
        let output = <B as AttentionBackend>::attention(qkv.primitive.clone(), documents, spec);
        let kept = Attended::<B> {
            qkv: qkv.primitive.clone(),
            documents: documents.clone(),
            spec,
            output: output.clone(),
        };
        AttentionOutput {
            o: enter::<B, C, _, 1>([&qkv], kept, output.o),
            lse: constant::<B, C>(output.lse),
            o_rest: None,
            base: None,
        }
    }
}
