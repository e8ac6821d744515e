//! An attention layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: the stream, the packed product before q/k-norm and
//! rotation, and the attention's output. The rotated packed tensor is made again by one memory-bound kernel; the norm's
//! backward kernel writes its output once more and adds the gradient of the residual stream.
mod backward;
mod forward;

pub use forward::{AttentionLayer, AttentionLayerCall, DmaLayer};

use super::residual::Residual;
use crate::DeviceBackend;
use crate::attention::AttentionSpec;
use crate::device::autodiff::{constant, enter};
use crate::documents::Documents;
use crate::rope::{QkNorm, RotaryEmbedding};
use crate::tensors::{Float, Ints, primitive, tensor};
use backward::{Kept, backward};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use forward::forward;
use sieve_core::Keeping;

/// DMA's mask (`expire`) and what it ranks keys by, each `[batch, num_kv_heads, seq_len]`.
pub type MaskAndRanks<B> = (Tensor<B, 3, Int>, Tensor<B, 3>);
/// The same below Burn's tensors.
type MaskAndRankPrimitives<B> = (Ints<B>, Float<B>);

/// `[x +] o(attention(qk_norm_rope(qkv(rms_norm(x)))))`, and DMA's mask and ranks, as
/// [`dynamic_mask_attention`](crate::dynamic_mask_attention) returns them.
///
/// # Shapes
/// - x: `[batch, seq_len, d_model]`
/// - positions: `[batch, seq_len]`
/// - returns: shape of x; `[batch, num_kv_heads, seq_len]` twice
pub fn attention_layer<B: AttentionLayerBackend>(
    x: Tensor<B, 3>,
    layer: AttentionLayer<B>,
    (positions, rope, documents): (Tensor<B, 2, Int>, &RotaryEmbedding<B>, &Documents<B>),
    spec: AttentionSpec,
    residual: Residual,
) -> (Tensor<B, 3>, Option<MaskAndRanks<B>>) {
    let call = AttentionLayerCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        documents: documents.bounds(),
        parts: documents.parts.clone(),
        spec,
        residual,
    };
    let (y, chosen) = B::attention_layer(primitive(x), layer, call);
    let chosen = chosen.map(|(expire, rank)| (Tensor::from_primitive(expire), tensor(rank)));
    (tensor(y), chosen)
}

/// The composed op behind [`attention_layer()`].
pub trait AttentionLayerBackend: Backend {
    /// The output, and DMA's mask and ranks, without gradient.
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<MaskAndRankPrimitives<Self>>);
}

impl<B: DeviceBackend> AttentionLayerBackend for B {
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<MaskAndRankPrimitives<Self>>) {
        let keeping = Keeping::NOTHING;
        let forward = forward::<Self>(x, AttentionLayer { keeping, ..layer }, &call);
        let chosen = forward.attended.chosen();
        (forward.y, chosen)
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> AttentionLayer<Autodiff<B, C>> {
    fn inner(&self) -> AttentionLayer<B> {
        AttentionLayer {
            norm: self.norm.clone().inner(),
            epsilon: self.epsilon,
            qkv: self.qkv.clone().inner(),
            qk_norm: QkNorm {
                q_weight: self.qk_norm.q_weight.clone().inner(),
                k_weight: self.qk_norm.k_weight.clone().inner(),
                epsilon: self.qk_norm.epsilon,
            },
            o: self.o.clone().inner(),
            dma: self.dma.clone().map(|dma| DmaLayer {
                w_dt: dma.w_dt.inner(),
                a: dma.a.inner(),
                spec: dma.spec,
            }),
            precision: self.precision,
            keeping: self.keeping,
            sums: self.sums.clone().map(|sum| sum.map(Tensor::inner)),
        }
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> AttentionLayerCall<Autodiff<B, C>> {
    fn inner(self) -> AttentionLayerCall<B> {
        AttentionLayerCall {
            positions: self.positions,
            rope: self.rope.inner(),
            documents: self.documents,
            parts: self.parts,
            spec: self.spec,
            residual: self.residual,
        }
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> AttentionLayerBackend for Autodiff<B, C> {
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<MaskAndRankPrimitives<Self>>) {
        let (inner, call) = (layer.inner(), call.inner());
        let forward = forward::<B>(x.primitive.clone(), inner.clone(), &call);
        let chosen = forward.attended.chosen();
        let kept = Kept::<B> {
            x: x.primitive.clone(),
            qkv: forward.qkv,
            rotated: forward.rotated,
            attended: forward.attended,
            operands: forward.operands,
            layer: inner,
            call,
        };
        let [q_norm, k_norm] = [layer.qk_norm.q_weight, layer.qk_norm.k_weight].map(primitive);
        let (norm, qkv, o) = (primitive(layer.norm), primitive(layer.qkv), primitive(layer.o));
        let y = match layer.dma {
            None => {
                let parents = [&x, &norm, &qkv, &q_norm, &k_norm, &o];
                enter::<B, C, _, _>(parents, forward.y, move |dy| backward(kept, dy).0)
            }
            Some(dma) => {
                let (w_dt, a) = (primitive(dma.w_dt), primitive(dma.a));
                let parents = [&x, &norm, &qkv, &q_norm, &k_norm, &o, &w_dt, &a];
                enter::<B, C, _, _>(parents, forward.y, move |dy| {
                    let ([dx, norm, qkv, q_norm, k_norm, o], dma) = backward(kept, dy);
                    let (w_dt, a) = dma.expect("the node of a layer with DMA");
                    [dx, norm, qkv, q_norm, k_norm, o, w_dt, a]
                })
            }
        };
        (y, chosen.map(|(expire, rank)| (expire, constant::<B, C>(rank))))
    }
}

#[cfg(test)]
mod tests;
