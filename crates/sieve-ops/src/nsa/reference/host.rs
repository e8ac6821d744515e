//! Document bounds, and small tables of integers, on the host.
use crate::documents::DocumentBounds;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_cpu::NsaBlocks;

/// Document bounds on the host.
pub(super) struct Host {
    pub(super) start: Vec<i32>,
    pub(super) end: Vec<i32>,
    batch: usize,
    pub(super) seq_len: usize,
}

impl Host {
    pub(super) fn new<B: Backend>(documents: &DocumentBounds<B>) -> Self {
        let [start, end] = documents.clone().map(Tensor::<B, 2, Int>::from_primitive);
        let [batch, seq_len] = start.dims();
        let read = |x: Tensor<B, 2, Int>| x.into_data().iter::<i32>().collect();
        Self {
            start: read(start),
            end: read(end),
            batch,
            seq_len,
        }
    }

    /// First token of the block in each slot, `[batch, num_slots]`, -1 where a slot is empty.
    pub(super) fn slot_starts(&self, blocks: NsaBlocks) -> Vec<i32> {
        let documents = sieve_cpu::Documents {
            start: &self.start,
            end: &self.end,
        };
        sieve_cpu::nsa::slot_starts(blocks, self.batch, self.seq_len, documents)
    }
}

pub(super) fn ints<B: Backend, const D: usize>(
    values: Vec<i32>,
    dims: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(values, dims), device)
}
