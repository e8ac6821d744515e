//! What the allocator of a GPU is told. It cuts tensors out of pages. A tensor of more than a 32nd of the GPU's memory
//! comes from a page of a quarter of that memory, unless the allocator was asked for exactly so many bytes before.
use super::Trainer;
use crate::{Precision, TrainError};
use burn::tensor::Tensor;
use sieve_ops::TrainBackend;
use std::collections::BTreeSet;

/// Elements of the smallest f32 tensor that may come from the largest pages, on GPUs of 16 GiB and more.
const MANY_ELEMENTS: usize = 1 << 27;

impl<B: TrainBackend> Trainer<B> {
    /// With ZeRO-3, has the allocator keep memory of exactly the bytes of the largest matrices' gradients, and of this
    /// rank's pieces.
    ///
    /// Whole weights that are drawn have such memory, and with ZeRO-3 none is drawn whole. On an H100, the embedding's
    /// gradient of a 14.8B model, 2.9 GiB, took a page of 19.8 GiB.
    pub(super) fn expect_gradients(&self) {
        if !self.shards_weights() || self.machine.precision == Precision::F32 {
            return;
        }
        let (share, device) = (self.share(), &self.machine.device);
        let sizes = self.stage.shape.all_parameters().into_iter().flat_map(|spec| {
            let whole = spec.num_elements() as usize;
            let piece = share.range(&spec.dims).map(|range| range.len());
            [Some(whole).filter(|elements| *elements >= MANY_ELEMENTS), piece]
        });
        for elements in sizes.flatten().collect::<BTreeSet<_>>() {
            B::memory_persistent_allocations(device, (), |()| {
                drop(Tensor::<B::InnerBackend, 1>::empty([elements], device));
            });
        }
    }

    /// Gives the device the memory back that no tensor has now, but for what gradients will take. Tensors of other rows
    /// have other sizes: on an H200, a stage of half as many rows took 17 GiB beside the 105 GiB that the stage before
    /// had reserved. What is done before a first step, such as drawing and a validation, has other sizes too.
    pub(super) fn release_unused_memory(&self) -> Result<(), TrainError> {
        let device = &self.machine.device;
        // Work that was begun may still read it.
        B::sync(device).map_err(|error| TrainError::Device(error.to_string()))?;
        B::memory_cleanup(device);
        // The allocator has forgotten the sizes of gradients.
        self.expect_gradients();
        Ok(())
    }
}
