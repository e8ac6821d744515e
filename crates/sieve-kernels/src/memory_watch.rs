//! The most GPU memory that tensors took at once.
//!
//! The allocator reports what is in use now, not its peak. While a watch is on, every allocation of a launch wrapper
//! queries it; each query waits for the device thread, so a program watches a step or two and then stops.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::ComputeClient;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The largest values seen on a device, or of a process, each by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPeak {
    /// Most bytes that tensors held at once; on the CPU, resident memory of the whole process.
    pub in_use_bytes: u64,
    /// Most bytes that the allocator had reserved for the tensors, its slack included.
    pub reserved_bytes: u64,
}

// Process-wide, because Burn's backend methods have no place for state: a switch and two numbers.
static IS_ON: AtomicBool = AtomicBool::new(false);
static IN_USE: AtomicU64 = AtomicU64::new(0);
static RESERVED: AtomicU64 = AtomicU64::new(0);

impl MemoryPeak {
    /// Starts to watch; the peak of earlier watches is kept.
    pub fn watch() {
        IS_ON.store(true, Ordering::Relaxed);
    }

    /// Stops watching the GPU's memory.
    pub fn unwatch() {
        IS_ON.store(false, Ordering::Relaxed);
    }

    /// The peak while a watch was on; `None` if nothing was allocated.
    pub fn seen() -> Option<MemoryPeak> {
        let peak = MemoryPeak {
            in_use_bytes: IN_USE.load(Ordering::Relaxed),
            reserved_bytes: RESERVED.load(Ordering::Relaxed),
        };
        (peak.in_use_bytes > 0).then_some(peak)
    }
}

/// Queries the allocator if a watch is on.
pub(crate) fn note_allocation(client: &ComputeClient<CudaRuntime>) {
    if !IS_ON.load(Ordering::Relaxed) {
        return;
    }
    // An error is left to the step itself, which fails when the device thread does not answer.
    if let Ok(usage) = client.memory_usage() {
        note(usage.bytes_in_use, usage.bytes_reserved);
    }
}

fn note(in_use: u64, reserved: u64) {
    IN_USE.fetch_max(in_use, Ordering::Relaxed);
    RESERVED.fetch_max(reserved, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_each_number_is_kept() {
        assert_eq!(MemoryPeak::seen(), None);
        for (in_use, reserved) in [(5, 9), (7, 8), (6, 11)] {
            note(in_use, reserved);
        }
        let peak = MemoryPeak::seen().expect("noted");
        assert_eq!((peak.in_use_bytes, peak.reserved_bytes), (7, 11));
    }
}
