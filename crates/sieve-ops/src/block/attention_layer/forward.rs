//! The forward pass of an attention layer.
use crate::block::product::{Operands, product};
use crate::context_parallel::{self, Parted};
use crate::dma::composed::{self, DmaForward};
use crate::tensors::{Float, Ints, primitive};
use crate::{
    AttentionCall, AttentionOutput, AttentionSpec, ContextParallel, DeviceBackend, DmaLayer, GemmPrecision, QkNorm,
    QkNormRopeCall, Residual, RmsNormCall, RopeTables, ToQuantise, WeightSums,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use sieve_core::Keeping;

/// What [`attention_layer`](super::attention_layer) computes with.
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
    /// What the products with `qkv` and `o` multiply in.
    pub precision: GemmPrecision,
    /// What the backward pass is left beside the least.
    pub keeping: Keeping,
    /// Of `qkv` and `o`.
    pub sums: WeightSums<B>,
}

/// Where the tokens of a call stand, and how they attend.
#[derive(Clone, Debug)]
pub struct AttentionLayerCall<B: Backend> {
    /// Positions to rotate by, `[batch, seq_len]`.
    pub positions: Ints<B>,
    /// Rotary tables.
    pub rope: RopeTables<B>,
    /// Documents, heads, scale and window.
    pub attention: AttentionCall<B>,
    /// Where the tokens are parts of rows: the whole rows.
    pub parts: Option<ContextParallel>,
    /// Whether x is added to the output.
    pub residual: Residual,
}

/// What an attention call keeps for its backward pass.
#[derive(Clone, Debug)]
pub(super) enum Attended<B: Backend> {
    Recent(AttentionOutput<B>),
    Selected(DmaForward<B>),
    /// Attention of rows cut into parts (context parallelism).
    Parted(Parted<B>),
}

impl<B: Backend> Attended<B> {
    pub(super) fn o(&self) -> Float<B> {
        match self {
            Self::Recent(output) => output.o.clone(),
            Self::Selected(forward) => forward.output.o.clone(),
            Self::Parted(parted) => parted.o.clone(),
        }
    }

    /// DMA's mask and ranks.
    pub(super) fn chosen(&self) -> Option<(Ints<B>, Float<B>)> {
        match self {
            Self::Recent(_) | Self::Parted(_) => None,
            Self::Selected(forward) => Some((forward.selection.expire.clone(), forward.rank.clone())),
        }
    }
}

/// A forward pass's output and what the backward pass needs of it.
pub(super) struct LayerForward<B: Backend> {
    /// Packed, before norm and rotation.
    pub(super) qkv: Float<B>,
    /// `qkv` after norm and rotation; `None` where the backward pass computes it again.
    pub(super) rotated: Option<Float<B>>,
    pub(super) attended: Attended<B>,
    /// What the products with the weights of `qkv` and `o` keep for their backward passes.
    pub(super) operands: [Operands<B>; 2],
    pub(super) y: Float<B>,
}

pub(super) fn forward<B: DeviceBackend>(
    x: Float<B>,
    layer: AttentionLayer<B>,
    call: &AttentionLayerCall<B>,
) -> LayerForward<B> {
    let normed = B::rms_norm(RmsNormCall {
        x: x.clone(),
        weight: primitive(layer.norm),
        epsilon: layer.epsilon,
    });
    let normed = ToQuantise::new(normed);
    let (how, o_low) = ((layer.precision, layer.keeping), layer.keeping.o_low);
    let (qkv, first) = product::<B>(how, normed, primitive(layer.qkv), None);
    let qkv = split_heads::<B>(qkv, call.attention.spec);
    let rotated = B::qk_norm_rope(qkv.clone(), rotation(layer.qk_norm, call));
    let kept_rotated = layer.keeping.recomputable.then(|| rotated.clone());
    let attended = match (&call.parts, layer.dma) {
        (Some(parts), dma) => {
            let dma = dma.map(|dma| (dma, call.positions.clone()));
            Attended::Parted(context_parallel::forward(rotated, dma, (parts, &call.attention), o_low))
        }
        (None, None) => Attended::Recent(<B as DeviceBackend>::attention(rotated, &call.attention)),
        (None, Some(dma)) => Attended::Selected(composed::forward(&dma.inputs(rotated, &call.attention), o_low)),
    };
    let heads = ToQuantise::new(merge_heads::<B>(attended.o()));
    let o = primitive(layer.o);
    let added = (call.residual == Residual::Stream).then_some(x);
    let (y, second) = product::<B>(how, heads, o, added);
    LayerForward {
        qkv,
        rotated: kept_rotated,
        attended,
        operands: [first, second],
        y,
    }
}

pub(super) fn rotation<B: Backend>(norm: QkNorm<B>, call: &AttentionLayerCall<B>) -> QkNormRopeCall<B> {
    QkNormRopeCall {
        q_weight: primitive(norm.q_weight),
        k_weight: primitive(norm.k_weight),
        positions: call.positions.clone(),
        rope: call.rope.clone(),
        num_kv_heads: call.attention.spec.num_kv_heads,
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
pub(super) fn merge_heads<B: Backend>(heads: Float<B>) -> Float<B> {
    let shape = heads.shape();
    B::float_reshape(heads, [shape[0], shape[1], shape[2] * shape[3]].into())
}
