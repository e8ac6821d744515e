//! Attention of one new query as a backend computes it; without gradient.
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use sieve_core::{DmaBias, DmaWindow};

/// The slots a DMA layer keeps: `len` of them in use, each KV head with keys of its own choice.
///
/// A key that leaves the mask never returns, so its slot is free for the key that pushed it out.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: FloatTensor<B>,
    /// What ranks the keys, `[batch, num_kv_heads, len]`; see [`crate::dma_rank`].
    pub rank: FloatTensor<B>,
    /// Positions of the keys, `[batch, num_kv_heads, len]`.
    pub positions: IntTensor<B>,
    /// Slots at most, and how many of them hold the last keys.
    pub window: DmaWindow,
}

/// One new token of every sequence.
#[derive(Clone, Debug)]
pub struct DmaToken<B: Backend> {
    /// `[batch, num_heads, head_dim]`.
    pub q: FloatTensor<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub v: FloatTensor<B>,
    /// Ranks, `[batch, num_kv_heads]`.
    pub rank: FloatTensor<B>,
    /// Position of the token, larger than any in the cache.
    pub position: usize,
}

/// Attention of one new query over the keys of a cache.
pub trait DecodeBackend: Backend {
    /// See [`crate::attention_decode`].
    fn attention_decode(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        delta: Option<FloatTensor<Self>>,
        softmax_scale: f64,
    ) -> FloatTensor<Self>;
    /// One decoding step of DMA; see [`crate::dma_decode`].
    fn dma_decode(
        cache: DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
    ) -> (DmaCache<Self>, FloatTensor<Self>);
}
