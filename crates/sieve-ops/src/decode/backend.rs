//! Attention of new queries as a backend computes it; without gradient.
use crate::attention::AttentionSpec;
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;
use sieve_core::{DmaBias, DmaWindow};

/// The slots a DMA layer keeps: `len` of them in use, each KV head with keys of its own choice.
///
/// A key that leaves the mask never returns, so its slot is free for the key that pushed it out.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: Float<B>,
    /// What ranks the keys, `[batch, num_kv_heads, len]`; see [`crate::dma_rank`].
    pub rank: Float<B>,
    /// Positions of the keys, `[batch, num_kv_heads, len]`.
    pub positions: Ints<B>,
    /// Slots at most, and how many of them hold the last keys.
    pub window: DmaWindow,
}

/// Keys and values that a dense layer or one with a window keeps: `len` of them, of which a window shows the last.
#[derive(Clone, Debug)]
pub struct KeyCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: Float<B>,
}

/// One new token of every sequence.
#[derive(Clone, Debug)]
pub struct DmaToken<B: Backend> {
    /// `[batch, num_heads, head_dim]`.
    pub q: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub v: Float<B>,
    /// Ranks, `[batch, num_kv_heads]`.
    pub rank: Float<B>,
    /// Position of the token, larger than any in the cache.
    pub position: usize,
}

/// Attention of new queries over the keys of a cache.
pub trait DecodeBackend: Backend {
    /// See [`crate::attention_decode`].
    fn attention_decode(
        q: Float<Self>,
        k: Float<Self>,
        v: Float<Self>,
        delta: Option<Float<Self>>,
        softmax_scale: f64,
    ) -> Float<Self>;
    /// See [`crate::cached_attention`].
    fn cached_attention(cache: KeyCache<Self>, qkv: Float<Self>, spec: AttentionSpec) -> (KeyCache<Self>, Float<Self>);
    /// See [`crate::mla_decode`].
    fn mla_decode(
        q: Float<Self>,
        latents: Float<Self>,
        key_scale: Option<Float<Self>>,
        rank: usize,
        softmax_scale: f64,
    ) -> Float<Self>;
    /// One decoding step of DMA; see [`crate::dma_decode`].
    fn dma_decode(
        cache: DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
    ) -> (DmaCache<Self>, Float<Self>);
}
