//! MLA's ops as nodes of the autodiff graph.
use super::backend::{MlaBackend, MlaGradients, MlaPackCall, MlaSpec};
use crate::attention::AttentionOutput;
use crate::device::autodiff::{Gradient, constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

impl<B: MlaGradients> Gradient<B, 3> for MlaPackCall<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 3] {
        B::mla_pack_backward(self, dy)
    }
}

#[derive(Clone, Debug)]
struct Attention<B: Backend> {
    packed: Float<B>,
    documents: DocumentBounds<B>,
    spec: MlaSpec,
    output: AttentionOutput<B>,
}

impl<B: MlaGradients> Gradient<B, 1> for Attention<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        let (packed, documents) = (self.packed, &self.documents);
        [B::mla_attention_backward(packed, documents, self.spec, self.output, dy)]
    }
}

impl<B: MlaGradients, C: CheckpointStrategy> MlaBackend for Autodiff<B, C> {
    fn mla_pack(inputs: [Float<Self>; 3], call: MlaPackCall<Self>) -> Float<Self> {
        let call = MlaPackCall {
            positions: call.positions,
            rope: call.rope.inner(),
            spec: call.spec,
        };
        let y = B::mla_pack(inputs.each_ref().map(inner::<B, C>), call.clone());
        enter::<B, C, _, 3>(inputs.each_ref(), call, y)
    }

    fn mla_attention(packed: Float<Self>, documents: &DocumentBounds<Self>, spec: MlaSpec) -> AttentionOutput<Self> {
        let output = B::mla_attention(packed.primitive.clone(), documents, spec);
        let kept = Attention {
            packed: packed.primitive.clone(),
            documents: documents.clone(),
            spec,
            output: output.clone(),
        };
        AttentionOutput {
            o: enter::<B, C, _, 1>([&packed], kept, output.o),
            lse: constant::<B, C>(output.lse),
            o_rest: None,
            base: None,
        }
    }
}
