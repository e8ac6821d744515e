//! Bounds of the documents in a batch of packed rows.
use crate::tensors::{Ints, ints};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::NsaBlocks;

/// First position and one-past-last position of each token's document inside its row, both `[batch, seq_len]` ints.
///
/// An alias of integer primitives, which an autodiff backend and its inner backend share.
pub type DocumentBounds<B> = [Ints<B>; 2];

/// Document bounds and positions of a packed batch. Attention stays inside a document, and positions restart in each.
#[derive(Clone, Debug)]
pub struct Documents<B: Backend> {
    /// First position of each token's document inside its row, `[batch, seq_len]`.
    pub start: Tensor<B, 2, Int>,
    /// One past the last position of each token's document inside its row, `[batch, seq_len]`.
    pub end: Tensor<B, 2, Int>,
    /// Position of each token inside its document, `[batch, seq_len]`.
    pub positions: Tensor<B, 2, Int>,
}

impl<B: Backend> Documents<B> {
    /// From each token's first and one-past-last position of its document, `[batch, seq_len]` row-major.
    ///
    /// Panics when a slice has another length, or a token is outside its document.
    pub fn new(start: &[u32], end: &[u32], [batch, seq_len]: [usize; 2], device: &B::Device) -> Self {
        assert_eq!(start.len(), batch * seq_len, "one start per token");
        assert_eq!(end.len(), batch * seq_len, "one end per token");
        let positions: Vec<i32> = (0..batch * seq_len)
            .map(|token| {
                let column = (token % seq_len) as u32;
                assert!(
                    start[token] <= column && column < end[token] && end[token] as usize <= seq_len,
                    "token {token} is outside its document"
                );
                (column - start[token]) as i32
            })
            .collect();
        let [start, end] = [start, end].map(|bounds| bounds.iter().map(|&bound| bound as i32).collect());
        let [start, end, positions] = [start, end, positions].map(|values| ints(values, [batch, seq_len], device));
        Self { start, end, positions }
    }

    /// Documents that each fill a whole row.
    pub fn whole_rows([batch, seq_len]: [usize; 2], device: &B::Device) -> Self {
        // Made on the device: layers that attend to cached tokens have rows of their own in each part of a prompt.
        let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, device);
        Self {
            start: Tensor::zeros([batch, seq_len], device),
            end: Tensor::full([batch, seq_len], seq_len as i64, device),
            positions: positions.unsqueeze_dim::<2>(0).repeat_dim(0, batch),
        }
    }

    /// The bounds as backend primitives, `[start, end]`.
    pub fn bounds(&self) -> DocumentBounds<B> {
        [self.start.clone().into_primitive(), self.end.clone().into_primitive()]
    }
}

/// Document bounds copied to the host.
pub(crate) struct HostBounds {
    pub(crate) start: Vec<i32>,
    pub(crate) end: Vec<i32>,
    batch: usize,
    pub(crate) seq_len: usize,
}

impl HostBounds {
    /// Copies the bounds to the host.
    pub(crate) fn new<B: Backend>(documents: &DocumentBounds<B>) -> Self {
        let [start, end] = documents.clone().map(Tensor::<B, 2, Int>::from_primitive);
        let [batch, seq_len] = start.dims();
        let read = |x: Tensor<B, 2, Int>| x.into_data().iter::<i32>().collect();
        Self { start: read(start), end: read(end), batch, seq_len }
    }

    /// The bounds as slices, for ops of `sieve-cpu`.
    pub(crate) fn slices(&self) -> sieve_cpu::Documents<'_> {
        sieve_cpu::Documents::new(&self.start, &self.end)
    }

    /// First token of the block in each slot, `[batch, num_slots]`, -1 where a slot is empty.
    pub(crate) fn slot_starts(&self, blocks: NsaBlocks) -> Vec<i32> {
        sieve_cpu::nsa::slot_starts(blocks, self.batch, self.seq_len, self.slices())
    }
}

#[cfg(test)]
mod tests;
