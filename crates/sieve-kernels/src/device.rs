//! The device of a program: the CPU, or a GPU.
use crate::DeviceReport;

/// Where a program computes.
#[derive(Clone, Debug, PartialEq)]
pub enum Device {
    /// The CPU, with the kernels of sieve-cpu.
    Cpu,
    /// A CUDA device whose runtime is ready.
    Cuda(DeviceReport),
}

impl Device {
    /// Name of the device.
    pub fn name(&self) -> String {
        match self {
            Self::Cpu => "cpu".to_owned(),
            Self::Cuda(gpu) => format!("{} ({})", gpu.name, gpu.arch()),
        }
    }
}
