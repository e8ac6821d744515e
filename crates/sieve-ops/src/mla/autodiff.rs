//! MLA's ops as nodes of the autodiff graph.
use super::backend::{MlaBackend, MlaGradients, MlaNorm, MlaPackCall, MlaSpec};
use crate::attention::AttentionOutput;
use crate::device::autodiff::{constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

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
            None => enter::<B, C, _, _>(inputs.each_ref(), y, move |dy| B::mla_pack_backward(below, None, dy).0),
            Some(norm) => {
                let [q, kv, k_rope] = &inputs;
                enter::<B, C, _, _>([q, kv, k_rope, &norm.q_weight, &norm.k_weight], y, move |dy| {
                    let ([dq, dkv, dk_rope], weights) = B::mla_pack_backward(below, Some(inputs_below), dy);
                    let [dq_weight, dk_weight] = weights.expect("the call has norms");
                    [dq, dkv, dk_rope, dq_weight, dk_weight]
                })
            }
        };
        (y, keys.map(|keys| keys.map(constant::<B, C>)))
    }

    fn mla_attention(packed: Float<Self>, documents: &DocumentBounds<Self>, spec: MlaSpec) -> AttentionOutput<Self> {
        let (x, documents) = (inner::<B, C>(&packed), documents.clone());
        let output = B::mla_attention(x.clone(), &documents, spec);
        let (o, lse) = (output.o.clone(), constant::<B, C>(output.lse.clone()));
        let o = enter::<B, C, _, _>([&packed], o, move |d_o| {
            [B::mla_attention_backward(x, &documents, spec, output, d_o)]
        });
        AttentionOutput::new(o, lse)
    }
}
