//! Dynamic Mask Attention (paper: Trainable Dynamic Mask Sparse Attention, eq. 3 to 6), exact to the token.
//!
//! Every key has a score z that does not depend on the query; a query sees the `keep_window_size` keys of its document so
//! far with the largest (z, position). A key that has left never returns, so one integer a key is the whole mask.
use crate::{
    AttentionOutput, AttentionSpec, DMA_SCORE_CLAMP, DmaBias, DmaSelection, DocumentBounds,
    Documents, SieveBackend,
};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Int, Tensor, TensorPrimitive};

/// What DMA adds to an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaSpec {
    /// Keys a query keeps.
    pub keep_window_size: usize,
    /// How scores become biases.
    pub bias: DmaBias,
}

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

/// What a DMA layer hands on.
#[derive(Clone, Debug)]
pub struct DmaAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// Scores without gradient, `[batch, num_kv_heads, seq_len]`.
    pub z: Tensor<B, 3>,
    /// First query that no longer sees the key, `[batch, num_kv_heads, seq_len]`.
    pub expire: Tensor<B, 3, Int>,
}

/// Scores, selection and attention over the kept keys. The selection has no gradient; scores get theirs through the bias.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, after q/k-norm and RoPE
/// - w_dt: `[num_kv_heads * head_dim, num_kv_heads]`
/// - a: `[num_kv_heads]`
pub fn dynamic_mask_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    w_dt: Tensor<B, 2>,
    a: Tensor<B, 1>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    dma: DmaSpec,
) -> DmaAttention<B> {
    let forward = B::dynamic_mask_attention(
        qkv.into_primitive().tensor(),
        w_dt.into_primitive().tensor(),
        a.into_primitive().tensor(),
        &documents.bounds(),
        spec,
        dma,
    );
    DmaAttention {
        o: Tensor::from_primitive(TensorPrimitive::Float(forward.output.o)),
        z: Tensor::from_primitive(TensorPrimitive::Float(forward.z)),
        expire: Tensor::from_primitive(forward.selection.expire),
    }
}

/// The exact mask of DMA: `expire` `[batch, num_kv_heads, seq_len]` for scores z of the same shape.
///
/// Of equal scores the more recent key stays; `expire[j] = j` marks a key that left with its own arrival.
pub fn dma_select<B: SieveBackend>(
    z: Tensor<B, 3>,
    documents: &Documents<B>,
    keep_window_size: usize,
) -> Tensor<B, 3, Int> {
    let selection = B::dma_select(
        z.into_primitive().tensor(),
        &documents.bounds(),
        keep_window_size,
    );
    Tensor::from_primitive(selection.expire)
}

/// The additive bias of each key: `exp(min(z, 60))` or `z`.
pub fn dma_bias<B: Backend, const D: usize>(z: Tensor<B, D>, bias: DmaBias) -> Tensor<B, D> {
    match bias {
        DmaBias::Exp => z.clamp_max(DMA_SCORE_CLAMP).exp(),
        DmaBias::Linear => z,
    }
}

/// Gradient of [`dma_bias`]: `ddelta * delta` below the clamp and zero above it, or `ddelta`.
fn dma_bias_backward<B: Backend>(
    z: Tensor<B, 3>,
    delta: Tensor<B, 3>,
    d_delta: Tensor<B, 3>,
    bias: DmaBias,
) -> Tensor<B, 3> {
    match bias {
        DmaBias::Exp => (d_delta * delta).mask_fill(z.greater_elem(DMA_SCORE_CLAMP), 0.0),
        DmaBias::Linear => d_delta,
    }
}

fn float<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(crate) fn forward<B: SieveBackend>(
    qkv: FloatTensor<B>,
    w_dt: FloatTensor<B>,
    a: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    dma: DmaSpec,
) -> DmaForward<B> {
    let z = B::dma_scores(qkv.clone(), w_dt, a, spec);
    let delta = dma_bias(float::<B, 3>(z.clone()), dma.bias)
        .into_primitive()
        .tensor();
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
pub(crate) fn backward<B: SieveBackend>(
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
    let z = float::<B, 3>(forward.z);
    let delta = dma_bias(z.clone(), dma.bias);
    let (dqkv, d_delta) = B::dma_attention_backward(
        qkv.clone(),
        delta.clone().into_primitive().tensor(),
        &documents,
        &forward.selection,
        spec,
        forward.output,
        d_o,
    );
    let dz = dma_bias_backward(z, delta, float(d_delta), dma.bias);
    B::dma_scores_backward(qkv, w_dt, a, spec, dz.into_primitive().tensor(), dqkv)
}

#[cfg(test)]
mod tests;
