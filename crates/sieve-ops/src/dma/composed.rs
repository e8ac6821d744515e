//! Scores, selection and attention together: one node of the autodiff graph.
use super::backend::{DmaBackend, DmaGradients, DmaSelection};
use super::bias::{dma_bias, dma_bias_backward};
use super::rank::{PositionOrigin, Recency};
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::device::autodiff::{constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::{Float, primitive, tensor};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use sieve_core::{DmaShape, KeepRest};

/// Everything a DMA forward pass computes, as primitives.
#[derive(Clone, Debug)]
pub struct DmaForward<B: Backend> {
    /// Attention output and log-sum-exp.
    pub output: AttentionOutput<B>,
    /// The exact mask.
    pub selection: DmaSelection<B>,
    /// What ranks the keys: their scores plus recency, f32 `[batch, num_kv_heads, seq_len]`.
    pub rank: Float<B>,
}

/// The composed op behind [`crate::dynamic_mask_attention`]. Devices run its parts; autodiff enters one node for all.
pub trait DynamicMaskBackend: Backend {
    /// The output, the selection and the ranks.
    fn dynamic_mask_attention(
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaShape,
    ) -> DmaForward<Self>;
}

impl<B: DmaGradients> DynamicMaskBackend for B {
    fn dynamic_mask_attention(
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaShape,
    ) -> DmaForward<Self> {
        // Nothing is differentiated.
        forward::<Self>(qkv, w_dt, a, documents, spec, dma, KeepRest::Never)
    }
}

impl<B: DmaGradients, C: CheckpointStrategy> DynamicMaskBackend for Autodiff<B, C> {
    fn dynamic_mask_attention(
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaShape,
    ) -> DmaForward<Self> {
        let [x, w, scale] = [&qkv, &w_dt, &a].map(inner::<B, C>);
        let rest = KeepRest::default();
        let whole = forward::<B>(x.clone(), w.clone(), scale.clone(), documents, spec, dma, rest);
        let kept = DmaState {
            qkv: x,
            w_dt: w,
            a: scale,
            documents: documents.clone(),
            spec,
            dma,
            forward: whole.clone(),
        };
        let (o, lse) = (whole.output.o, constant::<B, C>(whole.output.lse));
        let o = enter::<B, C, _, _>([&qkv, &w_dt, &a], o, move |d_o| backward::<B>(kept, d_o).into());
        DmaForward {
            output: AttentionOutput::new(o, lse),
            selection: whole.selection.on(),
            rank: constant::<B, C>(whole.rank),
        }
    }
}

pub(crate) fn forward<B: DmaBackend>(
    qkv: Float<B>,
    w_dt: Float<B>,
    a: Float<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    dma: DmaShape,
    rest: KeepRest,
) -> DmaForward<B> {
    let recency = Recency {
        slopes: dma.slopes(spec.num_kv_heads),
        origin: PositionOrigin::DocumentStart(documents[0].clone()),
    };
    let rank = tensor::<B, 3>(B::dma_ranks(qkv.clone(), w_dt, a, spec, recency));
    let delta = primitive(dma_bias(rank.clone(), dma.bias));
    let rank = primitive(rank);
    let selection = B::dma_select(rank.clone(), documents, dma.window());
    let output = B::dma_attention(qkv, delta, documents, &selection, spec, rest);
    DmaForward {
        output,
        selection,
        rank,
    }
}

/// Inputs and outputs of the forward pass that its backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct DmaState<B: Backend> {
    pub(crate) qkv: Float<B>,
    pub(crate) w_dt: Float<B>,
    pub(crate) a: Float<B>,
    pub(crate) documents: DocumentBounds<B>,
    pub(crate) spec: AttentionSpec,
    pub(crate) dma: DmaShape,
    pub(crate) forward: DmaForward<B>,
}

/// `(dqkv, dw_dt, da)`.
pub(crate) fn backward<B: DmaGradients>(state: DmaState<B>, d_o: Float<B>) -> (Float<B>, Float<B>, Float<B>) {
    let DmaState {
        qkv,
        w_dt,
        a,
        documents,
        spec,
        dma,
        forward,
    } = state;
    let rank = tensor::<B, 3>(forward.rank);
    let delta = dma_bias(rank.clone(), dma.bias);
    let (dqkv, d_delta) = B::dma_attention_backward(
        qkv.clone(),
        primitive(delta.clone()),
        &documents,
        &forward.selection,
        spec,
        forward.output,
        d_o,
    );
    // A slope is fixed, so the gradient of the rank is that of the score.
    let dz = dma_bias_backward(rank, delta, tensor(d_delta), dma.bias);
    B::dma_scores_backward(qkv, w_dt, a, spec, primitive(dz), dqkv)
}
