//! MLA's ops as nodes of the autodiff graph.
use super::backend::{MlaBackend, MlaGradients, MlaNorm, MlaPackCall, MlaSpec};
use crate::attention::AttentionOutput;
use crate::device::autodiff::{Gradient, constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

impl<B: MlaGradients> Gradient<B, 3> for MlaPackCall<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 3] {
        B::mla_pack_backward(self, None, dy).0
    }
}

/// A call with norms, and what they read.
#[derive(Clone, Debug)]
struct Normed<B: Backend> {
    call: MlaPackCall<B>,
    inputs: [Float<B>; 3],
}

impl<B: MlaGradients> Gradient<B, 5> for Normed<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 5] {
        let ([dq, dkv, dk_rope], weights) = B::mla_pack_backward(self.call, Some(self.inputs), dy);
        let [dq_weight, dk_weight] = weights.expect("the call has norms");
        [dq, dkv, dk_rope, dq_weight, dk_weight]
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
    fn mla_pack(inputs: [Float<Self>; 3], call: MlaPackCall<Self>) -> (Float<Self>, Option<[Float<Self>; 2]>) {
        let below = MlaPackCall {
            positions: call.positions,
            rope: call.rope.inner(),
            norm: call.norm.as_ref().map(|norm| MlaNorm {
                q_weight: inner::<B, C>(&norm.q_weight),
                k_weight: inner::<B, C>(&norm.k_weight),
                epsilon: norm.epsilon,
            }),
            spec: call.spec,
        };
        let inputs_below = inputs.each_ref().map(inner::<B, C>);
        let (y, keys) = B::mla_pack(inputs_below.clone(), below.clone());
        let y = match &call.norm {
            None => enter::<B, C, _, 3>(inputs.each_ref(), below, y),
            Some(norm) => {
                let [q, kv, k_rope] = &inputs;
                let kept = Normed {
                    call: below,
                    inputs: inputs_below,
                };
                enter::<B, C, _, 5>([q, kv, k_rope, &norm.q_weight, &norm.k_weight], kept, y)
            }
        };
        (y, keys.map(|keys| keys.map(constant::<B, C>)))
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
