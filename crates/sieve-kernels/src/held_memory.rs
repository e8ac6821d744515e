//! What CubeCL's allocator takes of a GPU for tensors of given sizes: the allocator itself, over a memory that counts
//! bytes and stores none.
//!
//! It cuts tensors out of pages of a 4th, a 16th, a 64th and so on of the GPU's memory. A tensor of more than half a
//! page of one size comes from the next larger one, so that the allocator holds more than the tensors take. Sizes for
//! which it was asked before ([`HeldMemory::expect`]) have memory of exactly their bytes.
use cubecl::backtrace::BackTrace;
use cubecl::ir::MemoryDeviceProperties;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
};
use cubecl_runtime::server::IoError;
use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Alignment of tensors in CubeCL's CUDA runtime, in bytes.
const ALIGNMENT: u64 = 512;

/// The memory of a GPU as CubeCL's allocator divides it, without a GPU.
pub struct HeldMemory {
    allocator: MemoryManagement<CountedPages>,
    peak_bytes: u64,
    /// Bytes of all tensors. The allocator adds them up anew when it is asked, over all its pages.
    tensor_bytes: Arc<AtomicU64>,
}

/// A tensor in a [`HeldMemory`]. Its memory is free again when it is dropped.
#[derive(Debug)]
pub struct HeldTensor {
    _handle: ManagedMemoryHandle,
    bytes: u64,
    /// The counter of its [`HeldMemory`], from which its bytes are taken when it is dropped.
    tensor_bytes: Arc<AtomicU64>,
}

impl Drop for HeldTensor {
    fn drop(&mut self) {
        self.tensor_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// The bytes that an allocation lacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFull {
    /// Size of the page, or of the tensor, that could not be had.
    pub bytes: u64,
}

impl HeldMemory {
    /// The empty memory of a GPU of `total_bytes`, of which this program may take `available_bytes`.
    pub fn new(total_bytes: u64, available_bytes: u64) -> Self {
        let pages = CountedPages { available: available_bytes, taken: 0, pages: HashMap::new() };
        let properties = MemoryDeviceProperties { max_page_size: total_bytes / 4, alignment: ALIGNMENT };
        let allocator = MemoryManagement::from_configuration(
            pages,
            &properties,
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("counted").mode(MemoryAllocationMode::Auto),
        );
        Self { allocator, peak_bytes: 0, tensor_bytes: Arc::default() }
    }

    /// Takes memory for a tensor of so many bytes.
    ///
    /// # Errors
    /// The GPU's memory is full.
    pub fn hold(&mut self, bytes: u64) -> Result<HeldTensor, MemoryFull> {
        let bytes = bytes.max(1);
        let reserved = self.allocator.reserve(bytes);
        let handle = reserved.map_err(|error| match error {
            IoError::BufferTooBig { size, .. } => MemoryFull { bytes: size },
            _ => MemoryFull { bytes },
        })?;
        self.peak_bytes = self.peak_bytes.max(self.held_bytes());
        self.tensor_bytes.fetch_add(bytes, Relaxed);
        Ok(HeldTensor { _handle: handle, bytes, tensor_bytes: self.tensor_bytes.clone() })
    }

    /// Takes memory for `count` tensors of each size at once and gives it back to the allocator, which keeps it for
    /// tensors of exactly these sizes.
    ///
    /// # Errors
    /// The GPU's memory is full.
    pub fn expect(&mut self, tensors: &BTreeMap<u64, usize>) -> Result<(), MemoryFull> {
        self.allocator.mode(MemoryAllocationMode::Persistent);
        let sizes = tensors.iter().flat_map(|(&bytes, &count)| std::iter::repeat_n(bytes, count));
        let held = sizes.map(|bytes| self.hold(bytes)).collect::<Result<Vec<_>, _>>();
        self.allocator.mode(MemoryAllocationMode::Auto);
        held.map(drop)
    }

    /// Gives back the pages in which there is no tensor, and forgets the expected sizes of which there is none.
    pub fn release_unused(&mut self) {
        self.allocator.cleanup(true);
        self.allocator.storage().flush();
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes.load(Relaxed)
    }

    /// Bytes that the allocator has of the GPU.
    pub fn held_bytes(&mut self) -> u64 {
        self.allocator.storage().taken
    }

    /// The most bytes that it had at once.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }
}

impl fmt::Debug for HeldMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldMemory").field("peak_bytes", &self.peak_bytes).finish_non_exhaustive()
    }
}

/// Pages of which only the sizes are kept.
struct CountedPages {
    available: u64,
    taken: u64,
    pages: HashMap<StorageId, u64>,
}

impl ComputeStorage for CountedPages {
    type Resource = ();

    fn alignment(&self) -> usize {
        ALIGNMENT as usize
    }

    fn get(&mut self, _handle: &StorageHandle) {}

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        if self.taken + size > self.available {
            return Err(IoError::BufferTooBig { size, backtrace: BackTrace::capture() });
        }
        let id = StorageId::new();
        self.pages.insert(id, size);
        self.taken += size;
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.taken -= self.pages.remove(&id).expect("a page is given back once");
    }

    fn flush(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A page of a quarter of an H100, as measured there: 19.8 GiB for a tensor of 2.9.
    #[test]
    fn a_tensor_that_was_expected_takes_its_own_bytes() {
        let total = 79 * GIB;
        let bytes = 29 * GIB / 10 / 512 * 512;
        for (is_expected, held) in [(false, total / 4 / 512 * 512), (true, bytes)] {
            let mut memory = HeldMemory::new(total, total);
            if is_expected {
                memory.expect(&BTreeMap::from([(bytes, 1)])).expect("it fits");
            }
            let tensor = memory.hold(bytes).expect("it fits");
            assert_eq!((memory.held_bytes(), memory.tensor_bytes()), (held, bytes));
            drop(tensor);
            memory.release_unused();
            assert_eq!((memory.held_bytes(), memory.peak_bytes()), (0, held));
        }
    }

    #[test]
    fn the_bytes_of_all_tensors_are_those_that_the_allocator_adds_up() {
        let mut memory = HeldMemory::new(64 * GIB, 64 * GIB);
        memory.expect(&BTreeMap::from([(3 << 20, 2), (700, 5)])).expect("it fits");
        let mut held = Vec::new();
        for step in 0..300 {
            if step % 3 == 2 {
                held.swap_remove(step * 31 % held.len());
            }
            let bytes = [0, 1, 511, 512, 700, 3 << 20, 5 << 20, 40_000_001][step * step % 11 % 8];
            held.push(memory.hold(bytes).expect("it fits"));
            assert_eq!(memory.tensor_bytes(), memory.allocator.memory_usage().bytes_in_use, "{} tensors", held.len());
        }
    }

    #[test]
    fn what_is_full_says_what_it_lacks() {
        let mut memory = HeldMemory::new(64 * GIB, 20 * GIB);
        let first = memory.hold(5 * GIB).expect("one page of a quarter");
        assert_eq!(memory.hold(12 * GIB).err(), Some(MemoryFull { bytes: 16 * GIB }));
        drop(first);
        memory.hold(12 * GIB).expect("in the first one's page");
    }
}
