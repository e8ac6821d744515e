//! What the allocator of a GPU is told. It cuts tensors out of pages. A tensor of more than a 32nd of the GPU's memory
//! comes from a page of a quarter of that memory, unless the allocator was asked for exactly so many bytes before.
use super::Trainer;
use crate::share::Share;
use crate::{Precision, TrainError};
use burn::tensor::Tensor;
use sieve_core::ModelShape;
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
        let device = &self.machine.device;
        for elements in gradient_sizes(&self.stage.shape, self.share()) {
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

/// Elements of the largest matrices' gradients, whole, and of this rank's piece of each parameter that ranks divide.
fn gradient_sizes(shape: &ModelShape, share: Share) -> BTreeSet<usize> {
    let of_parameter = shape.all_parameters().into_iter().flat_map(|spec| {
        let whole = spec.num_elements() as usize;
        let piece = share.range(&spec.dims).map(|range| range.len());
        [Some(whole).filter(|elements| *elements >= MANY_ELEMENTS), piece]
    });
    of_parameter.flatten().collect()
}

#[cfg(test)]
mod tests {
    //! CubeCL's allocator itself, with the memory of several GPUs and a storage that only counts bytes.
    use super::*;
    use cubecl::backtrace::BackTrace;
    use cubecl::ir::MemoryDeviceProperties;
    use cubecl_runtime::logging::ServerLogger;
    use cubecl_runtime::memory_management::{
        ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
    };
    use cubecl_runtime::server::IoError;
    use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};
    use sieve_comm::ShardGroup;
    use sieve_core::Recipe;
    use std::collections::HashMap;
    use std::sync::Arc;

    const GIB: u64 = 1 << 30;
    const F32_BYTES: u64 = 4;

    /// A GPU that counts the bytes of its pages and stores none.
    struct CountedMemory {
        total: u64,
        pages: HashMap<StorageId, u64>,
    }

    impl ComputeStorage for CountedMemory {
        type Resource = ();

        fn alignment(&self) -> usize {
            512
        }

        fn get(&mut self, _handle: &StorageHandle) {}

        fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
            if self.pages.values().sum::<u64>() + size > self.total {
                return Err(IoError::BufferTooBig { size, backtrace: BackTrace::capture() });
            }
            let id = StorageId::new();
            self.pages.insert(id, size);
            Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
        }

        fn dealloc(&mut self, id: StorageId) {
            self.pages.remove(&id).expect("a page is given back once");
        }

        fn flush(&mut self) {}
    }

    /// The allocator of a GPU with so many bytes, as CubeCL's CUDA runtime makes it.
    fn allocator(bytes: u64) -> MemoryManagement<CountedMemory> {
        MemoryManagement::from_configuration(
            CountedMemory { total: bytes, pages: HashMap::new() },
            &MemoryDeviceProperties { max_page_size: bytes / 4, alignment: 512 },
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("test").mode(MemoryAllocationMode::Auto),
        )
    }

    /// Asks for the sizes as `expect_gradients` does through Burn, which has no allocator but a device's own.
    fn expect(allocator: &mut MemoryManagement<CountedMemory>, sizes: &BTreeSet<usize>) {
        allocator.mode(MemoryAllocationMode::Persistent);
        for elements in sizes {
            drop(allocator.reserve(*elements as u64 * F32_BYTES).expect("one gradient fits"));
        }
        allocator.mode(MemoryAllocationMode::Auto);
    }

    fn hold(allocator: &mut MemoryManagement<CountedMemory>, elements: usize) -> ManagedMemoryHandle {
        allocator.reserve(elements as u64 * F32_BYTES).expect("a gradient fits")
    }

    /// Bytes that the allocator has of the GPU beyond the tensors' own.
    fn unused(allocator: &MemoryManagement<CountedMemory>) -> u64 {
        let usage = allocator.memory_usage();
        usage.bytes_reserved - usage.bytes_in_use
    }

    fn share(ranks: usize) -> Share {
        Share { rank: 1, size: ranks, group: ShardGroup::new(1, ranks, 0), cuts: true, keeps_whole: false }
    }

    /// The shape of a recipe of Qwen3's sizes, and the elements of its embedding.
    fn model(recipe: &str) -> (ModelShape, usize) {
        let recipe = Recipe::load(recipe, "a recipe", &[]).expect("a recipe");
        let shape = recipe.model_shape(151_936).expect("a shape");
        let embedding = shape.all_parameters()[0].num_elements() as usize;
        (shape, embedding)
    }

    /// GPUs of 40 to 192 GiB, models of 8B, 14.8B and 32B, two to eight ranks.
    #[test]
    fn the_largest_gradients_take_their_own_bytes_on_every_gpu() {
        for recipe in [
            include_str!("../../../../recipes/dma_8b.toml"),
            include_str!("../../../../recipes/dma_14b.toml"),
            include_str!("../../../../recipes/dma_32b.toml"),
        ] {
            let (shape, largest) = model(recipe);
            for gib in [40, 48, 64, 79, 80, 94, 139, 140, 180, 192] {
                for ranks in [2, 4, 8] {
                    let sizes = gradient_sizes(&shape, share(ranks));
                    assert_eq!(sizes.last(), Some(&largest));
                    let mut memory = allocator(gib * GIB);
                    expect(&mut memory, &sizes);
                    // The output's gradient and the embedding's, before their pieces are summed.
                    let both = [hold(&mut memory, largest), hold(&mut memory, largest)];
                    let most: u64 = sizes.iter().rev().skip(1).map(|elements| *elements as u64 * F32_BYTES).sum();
                    let rest = unused(&memory);
                    assert!(rest <= most + GIB / 64, "{gib} GiB, {ranks} ranks: {rest} bytes beyond the gradients");
                    drop(both);
                }
            }
        }
    }

    /// On an H100, 14.8B ran out of memory with two rows before the allocator was asked for the sizes.
    #[test]
    fn without_its_size_the_embeddings_gradient_takes_a_quarter_of_an_h100() {
        let (shape, largest) = model(include_str!("../../../../recipes/dma_14b.toml"));
        let of = |gib: f64, expected: bool| {
            let mut memory = allocator((gib * GIB as f64) as u64);
            if expected {
                expect(&mut memory, &gradient_sizes(&shape, share(4)));
            }
            let gradient = hold(&mut memory, largest);
            let reserved = memory.memory_usage().bytes_reserved as f64 / GIB as f64;
            drop(gradient);
            memory.cleanup(true);
            assert_eq!(memory.memory_usage().bytes_reserved, 0, "a stage's first step gives all of it back");
            reserved
        };
        let (h100, h200) = (79.2, 139.7);
        assert!((19.7..19.9).contains(&of(h100, false)), "{}", of(h100, false));
        assert!((8.6..8.8).contains(&of(h200, false)), "{}", of(h200, false));
        assert!(of(h100, true) < 5.0, "{}", of(h100, true));
        assert!(of(h200, true) < 5.0, "{}", of(h200, true));
    }
}
