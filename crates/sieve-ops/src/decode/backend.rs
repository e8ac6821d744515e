//! Attention of new queries as a backend computes it; without gradient.
use super::cache::{DmaCache, KeyCache};
use crate::attention::AttentionSpec;
use crate::tensors::Float;
use burn::tensor::backend::Backend;
use sieve_core::DmaBias;
use std::fmt::Debug;

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
    /// Tensors that the layers of a decoding step share, and one step leaves to the next. Whoever owns the caches owns
    /// them too.
    type DecodeScratch: Clone + Debug + Default + Send;

    /// See [`crate::attention_decode`].
    fn attention_decode(
        q: Float<Self>,
        keys: &KeyCache<Self>,
        delta: Option<Float<Self>>,
        softmax_scale: f64,
        scratch: &mut Self::DecodeScratch,
    ) -> Float<Self>;
    /// See [`crate::cached_attention`]; the cache has room for the token.
    fn cached_attention(
        cache: &mut KeyCache<Self>,
        qkv: Float<Self>,
        spec: AttentionSpec,
        scratch: &mut Self::DecodeScratch,
    ) -> Float<Self>;
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
        cache: &mut DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
        scratch: &mut Self::DecodeScratch,
    ) -> Float<Self>;
}
