//! Decoding under autodiff: plain operations, each with its own node.
use super::backend::{DecodeBackend, DmaCache, DmaToken};
use super::reference;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use sieve_core::DmaBias;

impl<B: Backend, C: CheckpointStrategy> DecodeBackend for Autodiff<B, C> {
    fn attention_decode(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        delta: Option<FloatTensor<Self>>,
        softmax_scale: f64,
    ) -> FloatTensor<Self> {
        reference::attention_decode::<Self>(q, k, v, delta, softmax_scale)
    }

    fn dma_decode(
        cache: DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
    ) -> (DmaCache<Self>, FloatTensor<Self>) {
        reference::dma_decode(cache, token, softmax_scale, bias)
    }
}
