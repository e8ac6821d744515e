//! Decoding under autodiff: plain operations, each with its own node.
use super::backend::{DecodeBackend, DmaToken};
use super::cache::{DmaCache, KeyCache};
use super::reference;
use crate::attention::AttentionSpec;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use sieve_core::DmaBias;

impl<B: Backend, C: CheckpointStrategy> DecodeBackend for Autodiff<B, C> {
    type DecodeScratch = ();

    fn attention_decode(
        q: Float<Self>,
        keys: &KeyCache<Self>,
        delta: Option<Float<Self>>,
        softmax_scale: f64,
        (): &mut (),
    ) -> Float<Self> {
        reference::attention_decode::<Self>(q, keys, keys.len(), delta, softmax_scale)
    }

    fn cached_attention(cache: &mut KeyCache<Self>, qkv: Float<Self>, spec: AttentionSpec, (): &mut ()) -> Float<Self> {
        reference::cached_attention(cache, qkv, spec)
    }

    fn mla_decode(
        q: Float<Self>,
        latents: Float<Self>,
        key_scale: Option<Float<Self>>,
        rank: usize,
        softmax_scale: f64,
    ) -> Float<Self> {
        reference::mla_decode::<Self>(q, latents, key_scale, rank, softmax_scale)
    }

    fn dma_decode(
        cache: &mut DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
        scratch: &mut (),
    ) -> Float<Self> {
        reference::dma_decode(cache, token, softmax_scale, bias, scratch)
    }
}
