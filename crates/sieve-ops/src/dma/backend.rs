//! DMA's ops as a backend computes them.
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use sieve_core::DmaWindow;

/// Largest score that still enters the exponential: `exp(z)` overflows f32 at 88.7.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// What `dma_select` found: the exact mask, and what a backend derived from it for its kernels.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`:
    /// `active(i, j) <=> j <= i < expire[j]`.
    pub expire: IntTensor<B>,
    /// Key lists of the backend's kernels, shared by forward and backward; empty where none are used.
    pub lists: Vec<IntTensor<B>>,
}

impl<B: Backend> DmaSelection<B> {
    /// The same selection on a backend with the same integers: an autodiff backend above this one.
    pub(crate) fn on<A>(self) -> DmaSelection<A>
    where
        A: Backend<IntTensorPrimitive = B::IntTensorPrimitive>,
    {
        DmaSelection {
            expire: self.expire,
            lists: self.lists,
        }
    }
}

/// DMA's ops.
pub trait DmaBackend: Backend {
    /// DMA's scores `z[b, g, j] = A[g] * softplus(concat(v_j) . W_dt[:, g])`, f32 `[batch, num_kv_heads, seq_len]`.
    ///
    /// `w_dt` is `[num_kv_heads * head_dim, num_kv_heads]`, `a` is `[num_kv_heads]`; v is read from the packed tensor.
    fn dma_scores(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self>;
    /// See [`crate::dma_select`].
    fn dma_select(
        rank: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        window: DmaWindow,
    ) -> DmaSelection<Self>;
    /// Attention over the kept keys with an additive bias per key, `delta` `[batch, num_kv_heads, seq_len]`.
    fn dma_attention(
        qkv: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self>;
}

/// Their gradients, as a device computes them.
pub trait DmaGradients: DmaBackend {
    /// Adds the path through the scores to `dqkv`; returns `(dqkv, dw_dt, da)`.
    fn dma_scores_backward(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        spec: AttentionSpec,
        dz: FloatTensor<Self>,
        dqkv: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// `(dqkv, ddelta)` of [`dma_attention`](DmaBackend::dma_attention).
    fn dma_attention_backward(
        qkv: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
