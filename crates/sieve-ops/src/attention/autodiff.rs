//! Dense and sliding-window attention as a node of the autodiff graph.
use super::backend::{AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec};
use crate::device::autodiff::{constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: AttentionGradients, C: CheckpointStrategy> AttentionBackend for Autodiff<B, C> {
    fn attention(qkv: Float<Self>, documents: &DocumentBounds<Self>, spec: AttentionSpec) -> AttentionOutput<Self> {
        let (x, documents) = (inner::<B, C>(&qkv), documents.clone());
        let output = <B as AttentionBackend>::attention(x.clone(), &documents, spec);
        let (o, lse) = (output.o.clone(), constant::<B, C>(output.lse.clone()));
        let o = enter::<B, C, _, _>([&qkv], o, move |d_o| {
            [B::attention_backward(x, &documents, spec, output, d_o)]
        });
        AttentionOutput::new(o, lse)
    }
}
