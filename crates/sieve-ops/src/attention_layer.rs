//! An attention layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: the stream, the packed product before q/k-norm and rotation, and
//! the attention's output. The rotated packed tensor is made again by one memory-bound kernel; the norm's backward kernel writes
//! its output once more and adds the gradient of the residual stream.
use crate::autodiff::Gradient;
use crate::dma::{self, DmaState};
use crate::feed_forward::{Residual, norm_gradient};
use crate::{
    AttentionOutput, AttentionSpec, DmaForward, DmaSpec, DocumentBounds, Documents, QkNorm,
    RopeTables, RotaryEmbedding, SieveBackend,
};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorMetadata, TensorPrimitive};

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
    pub spec: DmaSpec,
}

/// As [`AttentionLayer`], as primitives.
#[derive(Clone, Debug)]
pub struct AttentionLayerWeights<B: Backend> {
    /// `[d_model]`.
    pub norm: FloatTensor<B>,
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`.
    pub qkv: FloatTensor<B>,
    /// `[head_dim]`.
    pub q_norm: FloatTensor<B>,
    /// `[head_dim]`.
    pub k_norm: FloatTensor<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o: FloatTensor<B>,
    /// `w_dt` and `a` of DMA.
    pub dma: Option<(FloatTensor<B>, FloatTensor<B>, DmaSpec)>,
    /// Added to the first norm's mean square.
    pub epsilon: f64,
    /// Added to the mean squares of the per-head norms.
    pub qk_epsilon: f64,
}

/// Where the tokens of a call stand, and how they attend.
#[derive(Clone, Debug)]
pub struct AttentionLayerCall<B: Backend> {
    /// Positions to rotate by, `[batch, seq_len]`.
    pub positions: IntTensor<B>,
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
pub fn attention_layer<B: SieveBackend>(
    x: Tensor<B, 3>,
    layer: AttentionLayer<B>,
    (positions, rope, documents): (Tensor<B, 2, Int>, &RotaryEmbedding<B>, &Documents<B>),
    spec: AttentionSpec,
    residual: Residual,
) -> (Tensor<B, 3>, Option<Tensor<B, 3, Int>>) {
    let weights = AttentionLayerWeights {
        norm: layer.norm.into_primitive().tensor(),
        qkv: layer.qkv.into_primitive().tensor(),
        q_norm: layer.qk_norm.q_weight.into_primitive().tensor(),
        k_norm: layer.qk_norm.k_weight.into_primitive().tensor(),
        o: layer.o.into_primitive().tensor(),
        dma: layer.dma.map(|dma| {
            let w_dt = dma.w_dt.into_primitive().tensor();
            (w_dt, dma.a.into_primitive().tensor(), dma.spec)
        }),
        epsilon: layer.epsilon,
        qk_epsilon: layer.qk_norm.epsilon,
    };
    let call = AttentionLayerCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        documents: documents.bounds(),
        spec,
        residual,
    };
    let (y, expire) = B::attention_layer(x.into_primitive().tensor(), weights, call);
    (
        Tensor::from_primitive(TensorPrimitive::Float(y)),
        expire.map(Tensor::from_primitive),
    )
}

/// What an attention call leaves for its backward pass.
#[derive(Clone, Debug)]
pub(crate) enum Attended<B: Backend> {
    Recent(AttentionOutput<B>),
    Selected(DmaForward<B>),
}

impl<B: Backend> Attended<B> {
    fn o(&self) -> FloatTensor<B> {
        match self {
            Self::Recent(output) => output.o.clone(),
            Self::Selected(forward) => forward.output.o.clone(),
        }
    }

    pub(crate) fn expire(&self) -> Option<IntTensor<B>> {
        match self {
            Self::Recent(_) => None,
            Self::Selected(forward) => Some(forward.selection.expire.clone()),
        }
    }
}

/// A forward pass's output and what the backward pass needs of it.
pub(crate) struct LayerForward<B: Backend> {
    /// Packed, before norm and rotation.
    pub(crate) qkv: FloatTensor<B>,
    pub(crate) attended: Attended<B>,
    pub(crate) y: FloatTensor<B>,
}

pub(crate) fn forward<B: SieveBackend>(
    x: FloatTensor<B>,
    weights: AttentionLayerWeights<B>,
    call: &AttentionLayerCall<B>,
) -> LayerForward<B> {
    let normed = B::rms_norm(x.clone(), weights.norm.clone(), weights.epsilon);
    let qkv = split_heads::<B>(B::linear_nt(normed, weights.qkv.clone()), call.spec);
    let rotated = rotated(qkv.clone(), &weights, call);
    let attended = match weights.dma {
        None => Attended::Recent(B::packed_attention(rotated, &call.documents, call.spec)),
        Some((w_dt, a, spec)) => Attended::Selected(B::dynamic_mask_attention(
            rotated,
            w_dt,
            a,
            &call.documents,
            call.spec,
            spec,
        )),
    };
    let o = merge_heads::<B>(attended.o());
    let y = match call.residual {
        Residual::Stream => B::linear_nt_add(o, weights.o, x),
        Residual::None => B::linear_nt(o, weights.o),
    };
    LayerForward { qkv, attended, y }
}

fn rotated<B: SieveBackend>(
    qkv: FloatTensor<B>,
    weights: &AttentionLayerWeights<B>,
    call: &AttentionLayerCall<B>,
) -> FloatTensor<B> {
    B::qk_norm_rope(
        qkv,
        weights.q_norm.clone(),
        weights.k_norm.clone(),
        call.positions.clone(),
        &call.rope,
        call.spec.num_kv_heads,
        weights.qk_epsilon,
    )
}

/// `[.., heads * head_dim]` as `[.., heads, head_dim]`.
fn split_heads<B: Backend>(packed: FloatTensor<B>, spec: AttentionSpec) -> FloatTensor<B> {
    let shape = packed.shape();
    let heads = spec.packed_heads();
    B::float_reshape(packed, [shape[0], shape[1], heads, shape[2] / heads].into())
}

/// The inverse.
fn merge_heads<B: Backend>(heads: FloatTensor<B>) -> FloatTensor<B> {
    let shape = heads.shape();
    B::float_reshape(heads, [shape[0], shape[1], shape[2] * shape[3]].into())
}

/// What a backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct AttentionLayerState<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    pub(crate) qkv: FloatTensor<B>,
    pub(crate) attended: Attended<B>,
    pub(crate) weights: AttentionLayerWeights<B>,
    pub(crate) call: AttentionLayerCall<B>,
}

/// Gradients of x, norm, qkv, q_norm, k_norm and o.
#[derive(Debug)]
pub(crate) struct RecentLayerGradient;

impl<B: SieveBackend> Gradient<B, 6> for RecentLayerGradient {
    type State = AttentionLayerState<B>;

    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 6] {
        backward(state, dy).0
    }
}

/// As [`RecentLayerGradient`], then w_dt and a.
#[derive(Debug)]
pub(crate) struct SelectedLayerGradient;

impl<B: SieveBackend> Gradient<B, 8> for SelectedLayerGradient {
    type State = AttentionLayerState<B>;

    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 8] {
        let ([dx, norm, qkv, q_norm, k_norm, o], dma) = backward(state, dy);
        let (w_dt, a) = dma.expect("the node of a layer with DMA");
        [dx, norm, qkv, q_norm, k_norm, o, w_dt, a]
    }
}

/// Gradients of x, norm, qkv, q_norm, k_norm and o; those of w_dt and a beside them.
#[allow(clippy::type_complexity)]
fn backward<B: SieveBackend>(
    state: AttentionLayerState<B>,
    dy: FloatTensor<B>,
) -> (
    [FloatTensor<B>; 6],
    Option<(FloatTensor<B>, FloatTensor<B>)>,
) {
    let AttentionLayerState {
        x,
        qkv,
        attended,
        weights,
        call,
    } = state;
    let o = attended.o();
    let o_shape = o.shape();
    let d_o_weight = B::linear_nt_weight_gradient(merge_heads::<B>(o), dy.clone());
    let d_o = B::linear_nt_input_gradient(weights.o.clone(), dy.clone());
    let d_o = B::float_reshape(d_o, o_shape);

    let again = rotated(qkv.clone(), &weights, &call);
    let (d_rotated, d_dma) = match (attended, weights.dma.clone()) {
        (Attended::Selected(forward), Some((w_dt, a, dma))) => {
            let state = DmaState {
                qkv: again,
                w_dt,
                a,
                documents: call.documents.clone(),
                spec: call.spec,
                dma,
                forward,
            };
            let (dqkv, dw_dt, da) = dma::backward::<B>(state, d_o);
            (dqkv, Some((dw_dt, da)))
        }
        (Attended::Recent(output), _) => {
            let documents = &call.documents;
            let dqkv = B::packed_attention_backward(again, documents, call.spec, output, d_o);
            (dqkv, None)
        }
        (Attended::Selected(_), None) => unreachable!("made with the weights of DMA"),
    };
    let (dqkv, d_q_norm, d_k_norm) = B::qk_norm_rope_backward(
        qkv,
        weights.q_norm,
        weights.k_norm,
        call.positions,
        &call.rope,
        call.spec.num_kv_heads,
        weights.qk_epsilon,
        d_rotated,
    );
    let dqkv = merge_heads::<B>(dqkv);
    let d_normed = B::linear_nt_input_gradient(weights.qkv, dqkv.clone());
    let residual = (call.residual, dy);
    let (dx, d_norm, normed) =
        norm_gradient::<B>([x, weights.norm], weights.epsilon, d_normed, residual);
    let d_qkv_weight = B::linear_nt_weight_gradient(normed, dqkv);
    (
        [dx, d_norm, d_qkv_weight, d_q_norm, d_k_norm, d_o_weight],
        d_dma,
    )
}

#[cfg(test)]
mod tests;
