//! One process's attention of its part with all that it read and returned, for files that tests in Python check.
use super::{ContextParallel, backward, forward};
use crate::tensors::{Float, Ints};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, DmaLayer, DocumentBounds, Documents};
use burn::tensor::backend::Backend;
use sieve_core::KeepOLow;

/// What attention of a part read and returned. A longer row is the halo's slots, then the part's tokens.
#[derive(Clone, Debug)]
pub struct TracedPart<B: Backend> {
    /// Keys, then values, of earlier parts that the part's queries may see,
    /// `[batch, slots, 2 * num_kv_heads, head_dim]`; the first slots may be empty. `None` without a halo.
    pub halo: Option<Float<B>>,
    /// DMA's ranks of these keys, `[batch, num_kv_heads, slots]`; `None` without DMA or without a halo.
    pub halo_ranks: Option<Float<B>>,
    /// Bounds of the documents in the longer rows; empty slots are a document of their own.
    pub documents: DocumentBounds<B>,
    /// DMA's mask over the longer rows, `[batch, num_kv_heads, slots + len]`; `None` without DMA.
    pub expire: Option<Ints<B>>,
    /// Attention output, `[batch, len, num_heads, head_dim]`.
    pub o: Float<B>,
    /// Gradient of the part's packed tensor, with what later parts contribute.
    pub d_qkv: Float<B>,
    /// Gradients of w_dt and a from this part's tokens; `None` without DMA.
    pub d_dma: Option<[Float<B>; 2]>,
}

impl<B: DeviceBackend> TracedPart<B> {
    /// Attention of this process's `qkv` `[batch, len, num_heads + 2 * num_kv_heads, head_dim]`, and its gradient for
    /// `d_o`. All processes of `parts` call it at once. `dma` is `None` for window attention with the spec's window.
    pub fn new(
        parts: &ContextParallel,
        [qkv, d_o]: [Float<B>; 2],
        dma: Option<DmaLayer<B>>,
        spec: AttentionSpec,
        device: &B::Device,
    ) -> Self {
        let of_part = Documents::<B>::of_part(parts, device);
        let own = AttentionCall::new(of_part.bounds(), spec);
        let place = (parts, &own);
        let dma = dma.map(|dma| (dma, of_part.positions.clone().into_primitive()));
        let parted = forward::<B>(qkv.clone(), dma.clone(), place, KeepOLow::default());
        let (halo, expire) = parted.halo().unzip();
        let documents = halo.map_or_else(|| own.clone(), |halo| halo.call(&own)).documents;
        let keys = halo.and_then(|halo| halo.keys.clone());
        let ranks = halo.and_then(|halo| halo.ranks.clone());
        let (expire, o) = (expire.flatten(), parted.o.clone());
        let (d_qkv, d_dma) = backward::<B>(parted, qkv, dma, place, d_o);
        Self { halo: keys, halo_ranks: ranks, documents, expire, o, d_qkv, d_dma }
    }
}
