//! The device that a run computes on, and queries of its memory.
use crate::memory::{process_available, process_memory, process_peak};
use burn::tensor::backend::Backend;
use sieve_core::{Keeping, NumberFormat};
use sieve_ops::MemoryPeak;

/// The float type of the model's parameters and activations. Masters, moments, losses and norms are f32 in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// All tensors in f32.
    F32,
    /// bf16 parameters and activations over f32 masters.
    Bf16,
}

impl Precision {
    /// The number format of a run in this precision.
    pub(crate) fn number_format(self) -> NumberFormat {
        match self {
            Self::F32 => NumberFormat::TrainedInF32,
            Self::Bf16 => NumberFormat::TrainedInBf16,
        }
    }
}

/// A device, and its properties as far as they are known.
#[derive(Clone, Debug)]
pub struct Hardware<B: Backend> {
    /// The device that holds the model.
    pub device: B::Device,
    /// Float type of parameters and activations.
    pub precision: Precision,
    /// Peak FLOP/s in that type, if known.
    pub peak_flops: Option<f64>,
    /// How to query the memory in use.
    pub memory: MemoryProbe,
    /// Optional activations that blocks save for their backward pass. `sieve_plan::MemoryPlan` chooses them by the
    /// device's memory; without a plan, [`Keeping::default`] suits most devices.
    pub keeping: Keeping,
}

/// How to query the memory in use.
#[derive(Clone, Copy, Debug)]
pub enum MemoryProbe {
    /// Resident memory of this process and memory of the machine.
    Process,
    /// Functions that query a device's driver.
    Device(DeviceMemory),
}

/// Functions that query the memory of one GPU.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemory {
    /// Index of the GPU, as in `cuda:N`.
    pub index: usize,
    /// `(in use, total)` memory in bytes of the device with the given index.
    pub now: fn(usize) -> (u64, u64),
    /// Begins to measure the peak, which may slow the steps until `unwatch` is called.
    pub watch: fn(),
    /// Ends the measurement of peak memory that `watch` began.
    pub unwatch: fn(),
    /// The peak memory between `watch` and `unwatch`.
    pub peak: fn() -> Option<MemoryPeak>,
}

impl MemoryProbe {
    /// `(in use, total)` in bytes; zero where unknown.
    pub fn read(self) -> (u64, u64) {
        match self {
            Self::Process => process_memory(),
            Self::Device(device) => (device.now)(device.index),
        }
    }

    /// Bytes that this process can hold at most: on the CPU including the bytes that it holds now, on a device the free
    /// bytes. Zero where unknown.
    pub fn available(self) -> u64 {
        match self {
            Self::Process => process_available(),
            Self::Device(device) => {
                let (in_use, total) = (device.now)(device.index);
                total.saturating_sub(in_use)
            }
        }
    }

    /// Peak of the process since it began, or of the device in the steps that were watched. `None` where unknown.
    pub fn peak(self) -> Option<MemoryPeak> {
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
