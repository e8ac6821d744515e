//! What the allocator of a GPU is told. It cuts tensors out of pages. A tensor of more than a 32nd of the GPU's memory
//! comes from a page of a quarter of that memory, unless the allocator was asked for exactly so many bytes before.
use super::Trainer;
use crate::{Precision, TrainError};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{Lasting, TensorSizes};
use sieve_ops::TrainBackend;

/// Bytes of the f32 tensors that memory is asked for with.
const F32_BYTES: u64 = 4;

impl<B: TrainBackend> Trainer<B> {
    /// Gives the device the memory back that no tensor has now, and then asks the allocator for memory of exactly the
    /// bytes of all tensors that last: the moments that the first update makes, gradients that are added up over
    /// micro-batches, and the largest matrices of ZeRO-3.
    ///
    /// So the first step of a stage has as little room as the second, and fails if that one would. Tensors of other
    /// rows have other sizes, too: on an H200, a stage of half as many rows took 17 GiB beside the 105 GiB that the
    /// stage before had reserved. What is done before a first step, such as drawing and a validation, has other sizes.
    pub(super) fn release_unused_memory(&self) -> Result<(), TrainError> {
        let device = &self.machine.device;
        // Work that was begun may still read it.
        B::sync(device).map_err(|error| TrainError::Device(error.to_string()))?;
        B::memory_cleanup(device);
        if self.machine.precision == Precision::F32 {
            return Ok(());
        }
        expect::<B::InnerBackend>(&self.lasting_tensors(), device)
    }

    /// The lasting tensors that there are none of now: moments exist from the first update on.
    fn lasting_tensors(&self) -> TensorSizes {
        let share = self.share();
        let piece = |spec: &sieve_core::kinds::ParamSpec| Some(share.range(&spec.dims)?.len() as u64);
        let mut lasting = Lasting::of(&self.stage.recipe, &self.stage.shape, share.size, piece);
        if self.learner.optimizer.has_updated() {
            lasting.moments.clear();
        }
        lasting.all()
    }
}

/// Has the allocator keep memory for so many tensors of each size.
fn expect<B: Backend>(tensors: &TensorSizes, device: &B::Device) -> Result<(), TrainError> {
    let sizes = tensors.iter().flat_map(|(&bytes, &count)| std::iter::repeat_n(bytes, count));
    let sizes: Vec<usize> = sizes.map(|bytes| bytes.div_ceil(F32_BYTES) as usize).collect();
    let outcome = B::memory_persistent_allocations(device, sizes, |sizes| {
        let held: Vec<Tensor<B, 1>> = sizes.into_iter().map(|elements| Tensor::empty([elements], device)).collect();
        // Allocations are queued: one that is dropped before its turn would leave its memory to the next one.
        let outcome = B::sync(device);
        drop(held);
        outcome
    });
    outcome.map_err(|error| TrainError::Device(error.to_string()))
}

#[cfg(test)]
mod tests {
    //! CubeCL's allocator itself, with the memory of several GPUs and a storage that only counts bytes.
    use crate::share::Share;
    use sieve_comm::ShardGroup;
    use sieve_core::kinds::ParamSpec;
    use sieve_core::{Lasting, ModelShape, Recipe, TensorSizes};
    use sieve_kernels::HeldMemory;

    const GIB: u64 = 1 << 30;

    fn share(ranks: usize) -> Share {
        Share { rank: 1, size: ranks, group: ShardGroup::new(1, ranks, 0), cuts: true, keeps_whole: false }
    }

    /// What one of some ranks asks the allocator for, and the bytes of the embedding's gradient.
    fn lasting(recipe: &str, ranks: usize) -> (TensorSizes, u64) {
        let recipe = Recipe::load(recipe, "a recipe", &[]).expect("a recipe");
        let shape: ModelShape = recipe.model_shape(151_936).expect("a shape");
        let share = share(ranks);
        let piece = |spec: &ParamSpec| Some(share.range(&spec.dims)?.len() as u64);
        let embedding = 4 * shape.all_parameters()[0].num_elements();
        (Lasting::of(&recipe, &shape, ranks, piece).all(), embedding)
    }

    fn bytes(tensors: &TensorSizes) -> u64 {
        tensors.iter().map(|(bytes, count)| bytes * *count as u64).sum()
    }

    /// GPUs of 40 to 192 GiB, models of 8B, 14.8B and 32B, two to eight ranks.
    #[test]
    fn the_largest_gradients_take_their_own_bytes_on_every_gpu() {
        for recipe in [
            include_str!("../../../../recipes/dma_8b.toml"),
            include_str!("../../../../recipes/dma_14b.toml"),
            include_str!("../../../../recipes/dma_32b.toml"),
        ] {
            for gib in [40, 48, 64, 79, 80, 94, 139, 140, 180, 192] {
                for ranks in [2, 4, 8] {
                    let (sizes, largest) = lasting(recipe, ranks);
                    // More than the card has, as only the size of its pages matters here.
                    let mut memory = HeldMemory::new(gib * GIB, 1024 * GIB);
                    memory.expect(&sizes).expect("it fits");
                    let before = memory.held_bytes();
                    assert!(before - bytes(&sizes) < GIB / 64, "{gib} GiB, {ranks} ranks: {before}");
                    // The output's gradient and the embedding's, before their pieces are summed.
                    let both = [(); 2].map(|()| memory.hold(largest).expect("it fits"));
                    let rest = memory.held_bytes() - before;
                    assert!(rest <= largest, "{gib} GiB, {ranks} ranks: {rest} bytes for a second gradient");
                    drop(both);
                }
            }
        }
    }

    /// On an H100, 14.8B ran out of memory with two rows before the allocator was asked for the sizes.
    #[test]
    fn without_its_size_the_embeddings_gradient_takes_a_quarter_of_an_h100() {
        let (mut sizes, largest) = lasting(include_str!("../../../../recipes/dma_14b.toml"), 4);
        sizes.retain(|bytes, _| *bytes == largest);
        let of = |gib: f64, expected: bool| {
            let card = (gib * GIB as f64) as u64;
            let mut memory = HeldMemory::new(card, card);
            if expected {
                memory.expect(&sizes).expect("it fits");
            }
            let gradient = memory.hold(largest).expect("it fits");
            let held = memory.held_bytes() as f64 / GIB as f64;
            drop(gradient);
            memory.release_unused();
            assert_eq!(memory.held_bytes(), 0, "what no tensor has goes back");
            held
        };
        let (h100, h200) = (79.2, 139.7);
        assert!((19.7..19.9).contains(&of(h100, false)), "{}", of(h100, false));
        assert!((8.6..8.8).contains(&of(h200, false)), "{}", of(h200, false));
        assert!(of(h100, true) < 3.0, "{}", of(h100, true));
        assert!(of(h200, true) < 3.0, "{}", of(h200, true));
    }
}
