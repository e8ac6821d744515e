//! An attention layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: the stream, the packed product before q/k-norm and rotation, and
//! the attention's output. The rotated packed tensor is made again by one memory-bound kernel; the norm's backward kernel writes
//! its output once more and adds the gradient of the residual stream.
mod backward;

use super::residual::Residual;
use crate::attention::{AttentionBackend, AttentionOutput, AttentionSpec};
use crate::device::autodiff::enter;
use crate::device_backend::DeviceBackend;
use crate::dma::{DmaForward, DynamicMaskBackend};
use crate::documents::{DocumentBounds, Documents};
use crate::linear::LinearBackend;
use crate::norm::RmsNormCall;
use crate::rope::{QkNorm, QkNormRopeCall, RopeTables, RotaryEmbedding};
use crate::tensors::{Float, Ints, primitive, tensor};
use backward::{Kept, Recent, Selected};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorMetadata};

/// What [`attention_layer`] computes with.
#[derive(Clone, Debug)]
pub struct AttentionLayer<B: Backend> {
    /// Weight of the norm, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// Added to the norm's mean square.
    pub epsilon: f64,
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`, rows in the order q, k, v.
    pub qkv: Tensor<B, 2>,
    /// Per-head norms.
    pub qk_norm: QkNorm<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o: Tensor<B, 2>,
    /// `None`: dense or windowed attention, as the call's spec says.
    pub dma: Option<DmaLayer<B>>,
}

/// What dynamic mask attention has beside the projections.
#[derive(Clone, Debug)]
pub struct DmaLayer<B: Backend> {
    /// `[num_kv_heads * head_dim, num_kv_heads]`.
    pub w_dt: Tensor<B, 2>,
    /// `[num_kv_heads]`.
    pub a: Tensor<B, 1>,
    /// Kept keys and form of the bias.
    pub spec: sieve_core::DmaShape,
}

/// Where the tokens of a call stand, and how they attend.
#[derive(Clone, Debug)]
pub struct AttentionLayerCall<B: Backend> {
    /// Positions to rotate by, `[batch, seq_len]`.
    pub positions: Ints<B>,
    /// Rotary tables.
    pub rope: RopeTables<B>,
    /// Document bounds.
    pub documents: DocumentBounds<B>,
    /// Heads, scale and window.
    pub spec: AttentionSpec,
    /// Whether x is added to the output.
    pub residual: Residual,
}

/// `[x +] o(attention(qk_norm_rope(qkv(rms_norm(x)))))`, and DMA's mask, as
/// [`dynamic_mask_attention`](crate::dynamic_mask_attention) returns it.
///
/// # Shapes
/// - x: `[batch, seq_len, d_model]`
/// - positions: `[batch, seq_len]`
/// - returns: shape of x; `[batch, num_kv_heads, seq_len]`
pub fn attention_layer<B: AttentionLayerBackend>(
    x: Tensor<B, 3>,
    layer: AttentionLayer<B>,
    (positions, rope, documents): (Tensor<B, 2, Int>, &RotaryEmbedding<B>, &Documents<B>),
    spec: AttentionSpec,
    residual: Residual,
) -> (Tensor<B, 3>, Option<Tensor<B, 3, Int>>) {
    let call = AttentionLayerCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        documents: documents.bounds(),
        spec,
        residual,
    };
    let (y, expire) = B::attention_layer(primitive(x), layer, call);
    (tensor(y), expire.map(Tensor::from_primitive))
}

/// The composed op behind [`attention_layer()`].
pub trait AttentionLayerBackend: Backend {
    /// The output, and DMA's mask.
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<Ints<Self>>);
}

impl<B: DeviceBackend> AttentionLayerBackend for B {
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<Ints<Self>>) {
        let forward = forward::<Self>(x, layer, &call);
        let expire = forward.attended.expire();
        (forward.y, expire)
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> AttentionLayerBackend for Autodiff<B, C> {
    fn attention_layer(
        x: Float<Self>,
        layer: AttentionLayer<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (Float<Self>, Option<Ints<Self>>) {
        let inner = AttentionLayer {
            norm: layer.norm.clone().inner(),
            epsilon: layer.epsilon,
            qkv: layer.qkv.clone().inner(),
            qk_norm: QkNorm {
                q_weight: layer.qk_norm.q_weight.clone().inner(),
                k_weight: layer.qk_norm.k_weight.clone().inner(),
                epsilon: layer.qk_norm.epsilon,
            },
            o: layer.o.clone().inner(),
            dma: layer.dma.clone().map(|dma| DmaLayer {
                w_dt: dma.w_dt.inner(),
                a: dma.a.inner(),
                spec: dma.spec,
            }),
        };
        let call = AttentionLayerCall {
            positions: call.positions,
            rope: call.rope.inner(),
            documents: call.documents,
            spec: call.spec,
            residual: call.residual,
        };
        let forward = forward::<B>(x.primitive.clone(), inner.clone(), &call);
        let expire = forward.attended.expire();
        let kept = Kept::<B> {
            x: x.primitive.clone(),
            qkv: forward.qkv,
            attended: forward.attended,
            layer: inner,
            call,
        };
        let [q_norm, k_norm] = [layer.qk_norm.q_weight, layer.qk_norm.k_weight].map(primitive);
        let (norm, qkv, o) = (
            primitive(layer.norm),
            primitive(layer.qkv),
            primitive(layer.o),
        );
        let y = match layer.dma {
            None => {
                let parents = [&x, &norm, &qkv, &q_norm, &k_norm, &o];
                enter::<B, C, _, 6>(parents, Recent(kept), forward.y)
            }
            Some(dma) => {
                let (w_dt, a) = (primitive(dma.w_dt), primitive(dma.a));
                let parents = [&x, &norm, &qkv, &q_norm, &k_norm, &o, &w_dt, &a];
                enter::<B, C, _, 8>(parents, Selected(kept), forward.y)
            }
        };
        (y, expire)
    }
}

/// What an attention call leaves for its backward pass.
#[derive(Clone, Debug)]
enum Attended<B: Backend> {
    Recent(AttentionOutput<B>),
    Selected(DmaForward<B>),
}

impl<B: Backend> Attended<B> {
    fn o(&self) -> Float<B> {
        match self {
            Self::Recent(output) => output.o.clone(),
            Self::Selected(forward) => forward.output.o.clone(),
        }
    }

    fn expire(&self) -> Option<Ints<B>> {
        match self {
            Self::Recent(_) => None,
            Self::Selected(forward) => Some(forward.selection.expire.clone()),
        }
    }
}

/// A forward pass's output and what the backward pass needs of it.
struct LayerForward<B: Backend> {
    /// Packed, before norm and rotation.
    qkv: Float<B>,
    attended: Attended<B>,
    y: Float<B>,
}

fn forward<B: DeviceBackend>(
    x: Float<B>,
    layer: AttentionLayer<B>,
    call: &AttentionLayerCall<B>,
) -> LayerForward<B> {
    let normed = B::rms_norm(RmsNormCall {
        x: x.clone(),
        weight: primitive(layer.norm),
        epsilon: layer.epsilon,
    });
    let qkv = <B as LinearBackend>::linear(normed, primitive(layer.qkv));
    let qkv = split_heads::<B>(qkv, call.spec);
    let rotated = B::qk_norm_rope(qkv.clone(), rotation(layer.qk_norm, call));
    let (documents, spec) = (&call.documents, call.spec);
    let attended = match layer.dma {
        None => Attended::Recent(<B as AttentionBackend>::attention(rotated, documents, spec)),
        Some(dma) => {
            let (w_dt, a) = (primitive(dma.w_dt), primitive(dma.a));
            let forward = B::dynamic_mask_attention(rotated, w_dt, a, documents, spec, dma.spec);
            Attended::Selected(forward)
        }
    };
    let (heads, o) = (merge_heads::<B>(attended.o()), primitive(layer.o));
    let y = match call.residual {
        Residual::Stream => B::linear_add(heads, o, x),
        Residual::None => <B as LinearBackend>::linear(heads, o),
    };
    LayerForward { qkv, attended, y }
}

fn rotation<B: Backend>(norm: QkNorm<B>, call: &AttentionLayerCall<B>) -> QkNormRopeCall<B> {
    QkNormRopeCall {
        q_weight: primitive(norm.q_weight),
        k_weight: primitive(norm.k_weight),
        positions: call.positions.clone(),
        rope: call.rope.clone(),
        num_kv_heads: call.spec.num_kv_heads,
        epsilon: norm.epsilon,
    }
}

/// `[.., heads * head_dim]` as `[.., heads, head_dim]`.
fn split_heads<B: Backend>(packed: Float<B>, spec: AttentionSpec) -> Float<B> {
    let shape = packed.shape();
    let heads = spec.packed_heads();
    B::float_reshape(packed, [shape[0], shape[1], heads, shape[2] / heads].into())
}

/// The inverse.
fn merge_heads<B: Backend>(heads: Float<B>) -> Float<B> {
    let shape = heads.shape();
    B::float_reshape(heads, [shape[0], shape[1], shape[2] * shape[3]].into())
}

#[cfg(test)]
mod tests;
