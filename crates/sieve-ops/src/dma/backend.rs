//! DMA's ops as a backend computes them.
use super::rank::Recency;
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use crate::tensors::{Float, Ints, tensor};
use burn::tensor::backend::Backend;
use sieve_core::{DmaWindow, KeepRest};

/// Largest score that still enters the exponential: `exp(z)` overflows f32 at 88.7.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// What `dma_select` found: the exact mask, and how the backend's kernels find its keys.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`:
    /// `active(i, j) <=> j <= i < expire[j]`.
    pub expire: Ints<B>,
    /// How kernels find the keys.
    pub keys: DmaKeys<B>,
}

/// How a backend's kernels find the keys of a selection, in the forward and the backward pass.
#[derive(Clone, Debug)]
pub enum DmaKeys<B: Backend> {
    /// By `expire` alone, as the references and the CPU do.
    Expire,
    /// All keys of the document so far are kept: dense attention with a bias per key.
    All,
    /// By lists of the kept keys.
    Lists(DmaKeyLists<B>),
}

/// Lists of the kept keys for tiles of queries, as `sieve_kernels::Selection::dma_lists` makes them.
#[derive(Clone, Debug)]
pub struct DmaKeyLists<B: Backend> {
    /// Keys of each tile.
    pub list: Ints<B>,
    /// Keys in each tile's list.
    pub list_len: Ints<B>,
    /// Stretch of the list that each tile of queries reads.
    pub tile_window: Ints<B>,
}

impl<B: Backend> DmaSelection<B> {
    /// A mask that no backend has prepared for its kernels.
    pub fn of_expire(expire: Ints<B>) -> Self {
        let keys = DmaKeys::Expire;
        Self { expire, keys }
    }

    /// The same selection on a backend with the same integers: an autodiff backend above this one.
    pub(crate) fn on<A>(self) -> DmaSelection<A>
    where
        A: Backend<IntTensorPrimitive = B::IntTensorPrimitive>,
    {
        let keys = match self.keys {
            DmaKeys::Expire => DmaKeys::Expire,
            DmaKeys::All => DmaKeys::All,
            DmaKeys::Lists(lists) => DmaKeys::Lists(DmaKeyLists {
                list: lists.list,
                list_len: lists.list_len,
                tile_window: lists.tile_window,
            }),
        };
        DmaSelection {
            expire: self.expire,
            keys,
        }
    }
}

/// DMA's ops.
pub trait DmaBackend: Backend {
    /// DMA's scores `z[b, g, j] = A[g] * softplus(concat(v_j) . W_dt[:, g])`, f32 `[batch, num_kv_heads, seq_len]`.
    ///
    /// `w_dt` is `[num_kv_heads * head_dim, num_kv_heads]`, `a` is `[num_kv_heads]`; v is read from the packed tensor.
    fn dma_scores(qkv: Float<Self>, w_dt: Float<Self>, a: Float<Self>, spec: AttentionSpec) -> Float<Self>;
    /// What ranks the keys: the scores plus what recency adds, rounded as [`dma_rank`](crate::dma_rank) does.
    fn dma_ranks(
        qkv: Float<Self>,
        w_dt: Float<Self>,
        a: Float<Self>,
        spec: AttentionSpec,
        recency: Recency<Self>,
    ) -> Float<Self> {
        recency.ranks(tensor(Self::dma_scores(qkv, w_dt, a, spec)))
    }
    /// See [`crate::dma_select`].
    fn dma_select(rank: Float<Self>, documents: &DocumentBounds<Self>, window: DmaWindow) -> DmaSelection<Self>;
    /// Attention over the kept keys with an additive bias per key, `delta` `[batch, num_kv_heads, seq_len]`. A kernel
    /// that can returns the rest of o in the rows of `rest`.
    fn dma_attention(
        qkv: Float<Self>,
        delta: Float<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        rest: KeepRest,
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
