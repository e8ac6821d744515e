//! What a run computes on.
use crate::memory::{process_available, process_memory, process_peak};
use burn::tensor::backend::Backend;
use serde::Serialize;
use sieve_core::Keeping;

/// The float type of the model's parameters and activations. Masters, moments, losses and norms are f32 in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// bf16 parameters and activations over f32 masters.
    Bf16,
}

/// A device and what is known about it.
#[derive(Clone, Debug)]
pub struct Hardware<B: Backend> {
    /// Where tensors live.
    pub device: B::Device,
    /// Float type of the model.
    pub precision: Precision,
    /// FLOP/s in that type, where known.
    pub peak_flops: Option<f64>,
    /// Returns `(in use, total)` memory in bytes; called at every report.
    pub memory: MemoryProbe,
    /// Optional activations that blocks save for their backward pass: more where the device has room, as
    /// `sieve_plan::MemoryPlan` says. [`Keeping::default`] is a fair choice without a plan.
    pub keeping: Keeping,
}

/// How to query the memory in use.
#[derive(Clone, Copy, Debug)]
pub enum MemoryProbe {
    /// Resident memory of this process and memory of the machine.
    Process,
    /// A device's own answers.
    Device(DeviceMemory),
}

/// Queries of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemory {
    /// Its number.
    pub index: usize,
    /// `(in use, total)` of the device of a number, in bytes.
    pub now: fn(usize) -> (u64, u64),
    /// Begins to look for the most in use, which may slow the steps until `unwatch`.
    pub watch: fn(),
    /// Ends that.
    pub unwatch: fn(),
    /// The most found.
    pub peak: fn() -> Option<PeakMemory>,
}

/// Memory at its fullest, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeakMemory {
    /// Of tensors; on the CPU resident memory of the whole process.
    pub in_use_bytes: u64,
    /// That the allocator held for them.
    pub reserved_bytes: u64,
}

impl MemoryProbe {
    /// `(in use, total)` in bytes; zero where unknown.
    pub fn read(self) -> (u64, u64) {
        match self {
            Self::Process => process_memory(),
            Self::Device(device) => (device.now)(device.index),
        }
    }

    /// The most bytes this process could hold given everything else in memory; zero where unknown.
    pub fn available(self) -> u64 {
        match self {
            Self::Process => process_available(),
            Self::Device(device) => {
                let (in_use, total) = (device.now)(device.index);
                total.saturating_sub(in_use)
            }
        }
    }

    /// The most so far: of a process since it began, of a device in the steps that were watched. `None` where unknown.
    pub fn peak(self) -> Option<PeakMemory> {
        match self {
            Self::Process => process_peak(),
            Self::Device(device) => (device.peak)(),
        }
    }

    pub(crate) fn watch(self) {
        if let Self::Device(device) = self {
            (device.watch)();
        }
    }

    pub(crate) fn unwatch(self) {
        if let Self::Device(device) = self {
            (device.unwatch)();
        }
    }
}
