//! Scores, selection and attention together: one node of the autodiff graph.
use super::backend::{DmaBackend, DmaGradients, DmaSelection, DmaSpec};
use super::bias::{dma_bias, dma_bias_backward};
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::device::autodiff::{Gradient, constant, enter, inner};
use crate::documents::DocumentBounds;
use crate::tensors::{primitive, tensor};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// Everything a DMA forward pass computes, as primitives.
#[derive(Clone, Debug)]
pub struct DmaForward<B: Backend> {
    /// Attention output and log-sum-exp.
    pub output: AttentionOutput<B>,
    /// The exact mask.
    pub selection: DmaSelection<B>,
    /// Scores, f32 `[batch, num_kv_heads, seq_len]`.
    pub z: FloatTensor<B>,
}

/// The composed op behind [`crate::dynamic_mask_attention`]. Devices run its parts; autodiff enters one node for all.
pub trait DynamicMaskBackend: Backend {
    /// The output, the selection and the scores.
    fn dynamic_mask_attention(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaSpec,
    ) -> DmaForward<Self>;
}

impl<B: DmaGradients> DynamicMaskBackend for B {
    fn dynamic_mask_attention(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaSpec,
    ) -> DmaForward<Self> {
        forward::<Self>(qkv, w_dt, a, documents, spec, dma)
    }
}

impl<B: DmaGradients, C: CheckpointStrategy> DynamicMaskBackend for Autodiff<B, C> {
    fn dynamic_mask_attention(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaSpec,
    ) -> DmaForward<Self> {
        let [x, w, scale] = [&qkv, &w_dt, &a].map(inner::<B, C>);
        let whole = forward::<B>(x.clone(), w.clone(), scale.clone(), documents, spec, dma);
        let kept = DmaState {
            qkv: x,
            w_dt: w,
            a: scale,
            documents: documents.clone(),
            spec,
            dma,
            forward: whole.clone(),
        };
        let DmaForward {
            output,
            selection,
            z,
        } = whole;
        DmaForward {
            output: AttentionOutput {
                o: enter::<B, C, _, 3>([&qkv, &w_dt, &a], kept, output.o),
                lse: constant::<B, C>(output.lse),
                o_rest: None,
            },
            selection: selection.on(),
            z: constant::<B, C>(z),
        }
    }
}

impl<B: DmaGradients> Gradient<B, 3> for DmaState<B> {
    fn gradients(self, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        backward::<B>(self, dy).into()
    }
}

pub(crate) fn forward<B: DmaBackend>(
    qkv: FloatTensor<B>,
    w_dt: FloatTensor<B>,
    a: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    dma: DmaSpec,
) -> DmaForward<B> {
    let z = B::dma_scores(qkv.clone(), w_dt, a, spec);
    let delta = primitive(dma_bias(tensor::<B, 3>(z.clone()), dma.bias));
    let selection = B::dma_select(z.clone(), documents, dma.keep_window_size);
    let output = B::dma_attention(qkv, delta, documents, &selection, spec);
    DmaForward {
        output,
        selection,
        z,
    }
}

/// Inputs and outputs of the forward pass that its backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct DmaState<B: Backend> {
    pub(crate) qkv: FloatTensor<B>,
    pub(crate) w_dt: FloatTensor<B>,
    pub(crate) a: FloatTensor<B>,
    pub(crate) documents: DocumentBounds<B>,
    pub(crate) spec: AttentionSpec,
    pub(crate) dma: DmaSpec,
    pub(crate) forward: DmaForward<B>,
}

/// `(dqkv, dw_dt, da)`.
pub(crate) fn backward<B: DmaGradients>(
    state: DmaState<B>,
    d_o: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let DmaState {
        qkv,
        w_dt,
        a,
        documents,
        spec,
        dma,
        forward,
    } = state;
    let z = tensor::<B, 3>(forward.z);
    let delta = dma_bias(z.clone(), dma.bias);
    let (dqkv, d_delta) = B::dma_attention_backward(
        qkv.clone(),
        primitive(delta.clone()),
        &documents,
        &forward.selection,
        spec,
        forward.output,
        d_o,
    );
    let dz = dma_bias_backward(z, delta, tensor(d_delta), dma.bias);
    B::dma_scores_backward(qkv, w_dt, a, spec, primitive(dz), dqkv)
}
