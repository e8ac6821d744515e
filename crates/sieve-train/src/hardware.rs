//! What a run computes on.
use crate::memory::process_memory;
use burn::tensor::backend::Backend;

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
    /// `(in use, total)` memory in bytes, asked at every report.
    pub memory: MemoryProbe,
}

/// How to ask for memory.
#[derive(Clone, Copy, Debug)]
pub enum MemoryProbe {
    /// Resident memory of this process and memory of the machine.
    Process,
    /// A device's own answer, by its number.
    Device(fn(usize) -> (u64, u64), usize),
}

impl MemoryProbe {
    /// `(in use, total)` in bytes; zero where unknown.
    pub fn read(self) -> (u64, u64) {
        match self {
            Self::Process => process_memory(),
            Self::Device(probe, index) => probe(index),
        }
    }
}
