//! The forward pass of an attention layer.
use crate::backend::value;
use crate::block::gemm::{Operands, gemm};
use crate::context_parallel::{self, Parted};
use crate::dma::composed::{self, DmaForward};
use crate::tensors::{Float, Ints, primitive, tensor};
use crate::{
    AttentionCall, AttentionOutput, AttentionSpec, ContextParallel, DeviceBackend, DmaLayer, GemmPrecision, QkNorm,
    QkNormRopeCall, Residual, RmsNormCall, RopeTables, SieveBackend, ToQuantise, WeightSums,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use sieve_core::Keeping;

/// Weights and settings of [`attention_layer`](super::attention_layer).
#[derive(Clone, Debug)]
pub struct AttentionLayer<B: Backend> {
    /// Weight of the RMSNorm before attention, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// Epsilon that the norm adds to the mean square.
    pub epsilon: f64,
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`, rows in the order q, k, v.
    pub qkv: Tensor<B, 2>,
    /// RMSNorms of each query head and key head.
    pub qk_norm: QkNorm<B>,
    /// Weight of the output projection, `[d_model, num_heads * head_dim]`.
    pub o: Tensor<B, 2>,
    /// DMA's parameters; `None` for dense or windowed attention, as the call's spec says.
    pub dma: Option<DmaLayer<B>>,
    /// Data type of the GEMMs with `qkv` and `o`.
    pub precision: GemmPrecision,
    /// What is kept for the backward pass beyond the minimum: `o_low` (the low 16 bits of the attention's f32 output,
    /// which the bf16 output lacks), and activations that it could recompute.
    pub keeping: Keeping,
    /// Sums of earlier micro-batches' gradients of `qkv` and `o`.
    pub sums: WeightSums<B>,
    /// What an earlier pass over the same x has kept; this pass does not compute it again.
    pub kept: Option<KeptAttention<B>>,
}

/// What a pass without a graph keeps of dense or windowed attention, for the pass that recomputes the layer.
#[derive(Clone, Debug)]
pub struct KeptAttention<B: Backend> {
    /// The attention's output before the output projection, `[batch, seq_len, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// Log-sum-exp of each row's logits, f32 `[batch, num_heads, seq_len]`.
    pub lse: Tensor<B, 3>,
    /// The layer's output, shape of x.
    pub y: Tensor<B, 3>,
}

impl<B: SieveBackend> KeptAttention<B> {
    /// As a constant of another graph.
    pub fn from_inner(inner: KeptAttention<B::Inner>) -> Self {
        let KeptAttention { o, lse, y } = inner;
        Self {
            o: tensor(B::constant(primitive(o))),
            lse: tensor(B::constant(primitive(lse))),
            y: tensor(B::constant(primitive(y))),
        }
    }

    /// Without the tensors' places in the graph.
    pub(super) fn values(self) -> KeptAttention<B::Inner> {
        KeptAttention { o: value::<B, 4>(self.o), lse: value::<B, 3>(self.lse), y: value::<B, 3>(self.y) }
    }
}

/// Operands of a layer other than x and the weights.
#[derive(Clone, Debug)]
pub(super) struct AttentionLayerCall<B: Backend> {
    /// Position of each token, for RoPE, `[batch, seq_len]`.
    pub(super) positions: Ints<B>,
    pub(super) rope: RopeTables<B>,
    pub(super) attention: AttentionCall<B>,
    /// With context parallelism: how whole rows are divided among ranks; the tokens of this call are one rank's part.
    pub(super) parts: Option<ContextParallel>,
    pub(super) residual: Residual,
}

/// What an attention call keeps for its backward pass.
#[derive(Clone, Debug)]
pub(super) enum Attended<B: Backend> {
    /// Output of dense or sliding-window attention.
    Recent(AttentionOutput<B>),
    /// Output of dynamic mask attention, with the selected keys.
    Selected(DmaForward<B>),
    /// Attention of a part of each row (context parallelism).
    Parted(Parted<B>),
}

impl<B: Backend> Attended<B> {
    /// The attention's output, `[batch, seq_len, num_heads, head_dim]`.
    pub(super) fn o(&self) -> Float<B> {
        match self {
            Self::Recent(output) => output.o.clone(),
            Self::Selected(forward) => forward.output.o.clone(),
            Self::Parted(parted) => parted.o.clone(),
        }
    }

    /// What the pass that recomputes the layer needs not compute again; `None` for DMA and for parts of rows.
    pub(super) fn kept(&self, y: Float<B>) -> Option<KeptAttention<B>> {
        match self {
            Self::Recent(AttentionOutput { o, lse, o_low: None, base: None }) => {
                Some(KeptAttention { o: tensor(o.clone()), lse: tensor(lse.clone()), y: tensor(y) })
            }
            _ => None,
        }
    }

    /// DMA's mask (`expire`) and ranks; `None` for other kinds.
    pub(super) fn chosen(&self) -> Option<(Ints<B>, Float<B>)> {
        match self {
            Self::Recent(_) | Self::Parted(_) => None,
            Self::Selected(forward) => Some((forward.selection.expire.clone(), forward.rank.clone())),
        }
    }
}

/// What the forward pass keeps for the backward pass.
#[derive(Clone, Debug)]
pub(super) struct Kept<B: Backend> {
    pub(super) x: Float<B>,
    /// The packed projection before norms and rotation.
    pub(super) qkv: Float<B>,
    /// `qkv` after norms and rotation; `None` where the backward pass recomputes it.
    pub(super) rotated: Option<Float<B>>,
    pub(super) attended: Attended<B>,
    /// Inputs of the GEMMs with the weights `qkv` and `o`.
    pub(super) operands: [Operands<B>; 2],
    pub(super) layer: AttentionLayer<B>,
    pub(super) call: AttentionLayerCall<B>,
}

/// The layer's output, and what its backward pass needs.
pub(super) fn forward<B: DeviceBackend>(
    x: Float<B>,
    layer: AttentionLayer<B>,
    call: AttentionLayerCall<B>,
) -> (Float<B>, Kept<B>) {
    let normed = ToQuantise::new(B::rms_norm(RmsNormCall {
        x: x.clone(),
        weight: primitive(layer.norm.clone()),
        epsilon: layer.epsilon,
    }));
    let (how, o_low) = ((layer.precision, layer.keeping), layer.keeping.o_low);
    // `None`: the residual stream is added in the second GEMM.
    let (qkv, first) = gemm::<B>(how, normed, primitive(layer.qkv.clone()), None);
    let qkv = split_heads::<B>(qkv, call.attention.spec);
    if let Some(KeptAttention { o, lse, y }) = layer.kept.clone() {
        let attended = Attended::Recent(AttentionOutput::new(primitive(o), primitive(lse)));
        let layer = AttentionLayer { kept: None, ..layer };
        let kept = Kept { x, qkv, rotated: None, attended, operands: [first, Operands::None], layer, call };
        return (primitive(y), kept);
    }
    let rotated = B::qk_norm_rope(qkv.clone(), rotation(layer.qk_norm.clone(), &call));
    let kept_rotated = layer.keeping.recomputable.then(|| rotated.clone());
    let attended = match (&call.parts, layer.dma.clone()) {
        (Some(parts), dma) => {
            let dma = dma.map(|dma| (dma, call.positions.clone()));
            Attended::Parted(context_parallel::forward(rotated, dma, (parts, &call.attention), o_low))
        }
        (None, None) => Attended::Recent(<B as DeviceBackend>::attention(rotated, &call.attention)),
        (None, Some(dma)) => Attended::Selected(composed::forward(&dma.inputs(rotated, &call.attention), o_low)),
    };
    let heads = ToQuantise::new(merge_heads::<B>(attended.o()));
    let added = (call.residual == Residual::Stream).then(|| x.clone());
    let (y, second) = gemm::<B>(how, heads, primitive(layer.o.clone()), added);
    let kept = Kept { x, qkv, rotated: kept_rotated, attended, operands: [first, second], layer, call };
    (y, kept)
}

/// Operands of the norms and the rotation of queries and keys.
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

/// `[.., heads, head_dim]` as `[.., heads * head_dim]`.
pub(super) fn merge_heads<B: Backend>(heads: Float<B>) -> Float<B> {
    let shape = heads.shape();
    B::float_reshape(heads, [shape[0], shape[1], shape[2] * shape[3]].into())
}
