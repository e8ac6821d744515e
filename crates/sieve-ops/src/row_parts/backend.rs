//! What rows in parts need of a device beside its other ops.
use super::RowLinks;
use crate::attention::AttentionSpec;
use crate::documents::DocumentBounds;
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;
use sieve_core::DmaWindow;
use std::ops::Range;

/// Tensors of one shape that go to the ranks of other parts, and from whom as many come.
pub struct Parcel<B: Backend> {
    /// What goes to which part.
    pub given: Vec<(usize, Float<B>)>,
    /// Parts that send one.
    pub from: Range<usize>,
    /// Shape of each.
    pub shape: Vec<usize>,
    /// A tensor of their type, and on this rank's device.
    pub like: Float<B>,
}

/// Ops of rows in parts, as a device computes them.
pub trait RowPartsBackend: Backend {
    /// The keys that DMA keeps at the last query of each row, by position: `[batch, num_kv_heads, slots]`, the first
    /// ones -1 where there are fewer. `rank` is `[batch, num_kv_heads, seq_len]`.
    fn dma_last_kept(
        rank: Float<Self>,
        documents: &DocumentBounds<Self>,
        window: DmaWindow,
        slots: usize,
    ) -> Ints<Self>;
    /// K and V of such keys, `[batch, slots, 2 * num_kv_heads, head_dim]`, out of the last heads of
    /// `[batch, seq_len, heads, head_dim]`, and their ranks, `[batch, num_kv_heads, slots]`; zeros where there is none.
    fn dma_border_keys(
        packed: Float<Self>,
        rank: Float<Self>,
        kept: Ints<Self>,
        spec: AttentionSpec,
    ) -> [Float<Self>; 2];
    /// Adds the gradients of these results to those of the packed tensor and of the ranks.
    fn dma_border_keys_backward(
        sums: [Float<Self>; 2],
        kept: Ints<Self>,
        gradients: [Float<Self>; 2],
        spec: AttentionSpec,
    ) -> [Float<Self>; 2];
    /// Gives tensors to the ranks of other parts, and returns what they give, part by part. All ranks of a row call it
    /// in the same order.
    fn exchange(links: &dyn RowLinks, parcel: Parcel<Self>) -> Vec<Float<Self>>;
    /// Gives each part's rank one of the slices `[1, batch, len, heads, width]` of `x`, and returns those that all give
    /// to this one, part by part. All ranks of a row call it in the same order.
    fn all_to_all(links: &dyn RowLinks, x: Float<Self>) -> Float<Self>;
}
