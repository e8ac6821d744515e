//! DMA's ops as a backend computes them.
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;
use sieve_core::DmaWindow;

/// Largest score that still enters the exponential: `exp(z)` overflows f32 at 88.7.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// What `dma_select` found: the exact mask, and what a backend derived from it for its kernels.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`:
    /// `active(i, j) <=> j <= i < expire[j]`.
    pub expire: Ints<B>,
    /// Key lists of the backend's kernels, shared by forward and backward; empty where none are used.
    pub lists: Vec<Ints<B>>,
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
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        spec: AttentionSpec,
    ) -> Float<Self>;
    /// See [`crate::dma_select`].
    fn dma_select(
        rank: Float<Self>,
        documents: &DocumentBounds<Self>,
        window: DmaWindow,
    ) -> DmaSelection<Self>;
    /// Attention over the kept keys with an additive bias per key, `delta` `[batch, num_kv_heads, seq_len]`.
    fn dma_attention(
        qkv: Float<Self>,
        delta: Float<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self>;
}

/// Their gradients, as a device computes them.
pub trait DmaGradients: DmaBackend {
    /// Adds the path through the scores to `dqkv`; returns `(dqkv, dw_dt, da)`.
    fn dma_scores_backward(
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        spec: AttentionSpec,
        dz: Float<Self>,
        dqkv: Float<Self>,
    ) -> (Float<Self>, Float<Self>, Float<Self>);
    /// `(dqkv, ddelta)` of [`dma_attention`](DmaBackend::dma_attention).
    fn dma_attention_backward(
        qkv: Float<Self>,
        delta: Float<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Float<Self>,
    ) -> (Float<Self>, Float<Self>);
}
