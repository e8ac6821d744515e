//! DMA's parts under autodiff. Models use the composed op; alone, scores and attention are plain operations with their own
//! nodes, and the selection has no gradient.
use super::backend::{DmaBackend, DmaGradients, DmaSelection};
use super::reference;
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::ops::FloatTensor;
use sieve_core::DmaWindow;

impl<B: DmaGradients, C: CheckpointStrategy> DmaBackend for Autodiff<B, C> {
    fn dma_scores(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        reference::dma_scores::<Self>(qkv, w_dt, a, spec)
    }

    fn dma_select(
        rank: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        window: DmaWindow,
    ) -> DmaSelection<Self> {
        B::dma_select(rank.primitive, documents, window).on()
    }

    fn dma_attention(
        qkv: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        reference::dma_attention::<Self>(qkv, delta, documents, selection, spec)
    }
}
