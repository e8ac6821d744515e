//! The device that a run is planned for.

use sieve_core::model::gpu;

/// The device that a run is planned for.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// The CPU, in f32.
    Cpu {
        /// FLOP/s of f32 GEMMs; with `None` no time is estimated.
        flops_per_second: Option<f64>,
        /// Free memory in bytes; 0 if unknown.
        memory_bytes: u64,
    },
    /// One GPU, with the model in bf16 over f32 master weights.
    Gpu(gpu::Gpu),
}

impl Target {
    /// Bytes of a parameter and of an activation in the type that the layers compute in.
    pub fn value_bytes(&self) -> u64 {
        match self {
            Self::Cpu { .. } => 4,
            Self::Gpu(_) => 2,
        }
    }

    /// Free memory in bytes; 0 if unknown.
    pub fn memory_bytes(&self) -> u64 {
        match self {
            Self::Cpu { memory_bytes, .. } => *memory_bytes,
            Self::Gpu(gpu) => gpu.memory_bytes,
        }
    }

    /// Peak FLOP/s in the type that the layers compute in.
    pub fn flops_per_second(&self) -> Option<f64> {
        match self {
            Self::Cpu { flops_per_second, .. } => *flops_per_second,
            Self::Gpu(gpu) => Some(gpu.bf16_flops),
        }
    }
}
