//! DMA's parts under autodiff. Models use the composed op; alone, scores and attention are plain operations with their
//! own nodes, and the selection has no gradient.
use super::backend::{DmaBackend, DmaGradients, DmaSelection};
use super::reference;
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use sieve_core::{DmaWindow, KeepRest};

impl<B: DmaGradients, C: CheckpointStrategy> DmaBackend for Autodiff<B, C> {
    fn dma_scores(qkv: Float<Self>, w_dt: Float<Self>, a: Float<Self>, spec: AttentionSpec) -> Float<Self> {
        reference::dma_scores::<Self>(qkv, w_dt, a, spec)
    }

    fn dma_select(rank: Float<Self>, documents: &DocumentBounds<Self>, window: DmaWindow) -> DmaSelection<Self> {
        B::dma_select(rank.primitive, documents, window).on()
    }

    fn dma_attention(
        qkv: Float<Self>,
        delta: Float<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        _rest: KeepRest,
    ) -> AttentionOutput<Self> {
        reference::dma_attention::<Self>(qkv, delta, documents, selection, spec)
    }
}
