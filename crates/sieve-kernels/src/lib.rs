//! Sieve's CUDA kernels in a Burn program: launches on Burn's own stream, in order with Burn's operations, cuBLASLt's
//! GEMMs and NCCL's collectives; probes, the cache of compiled kernels, copies to the host and traces.
//!
//! Start with [`CudaReport::probe`], which says in one sentence what is missing, then [`KernelCache::open`] and
//! [`KernelCache::init_runtime`], all before the first CUDA tensor of the process. One thread per process touches
//! device tensors. [`kernel_tensor`] and [`ToBurn`] convert between Burn's tensors and the tensors of sieve-gpu's
//! launch wrappers, which are re-exported here.
mod burn_memory;
mod cache;
mod cache_files;
mod cublaslt;
mod device;
mod device_thread;
mod gpu_memory;
mod held_memory;
mod host_copy;
mod kernel_trace;
mod lane;
mod launch;
mod linear_cross_entropy;
mod locked;
mod memory_watch;
mod nccl;
mod nvml;
mod probe;
mod step_graph;
mod step_tape;

pub use sieve_gpu::*;

pub use burn_memory::{CudaPrimitive, ToBurn, burn_dtype, client_of, device_of, kernel_dtype, kernel_tensor};
pub use cache::KernelCache;
pub use cublaslt::{Cublaslt, GemmKind, MatmulOutput, fp8_matmul, matmul};
pub use device::Device;
pub use held_memory::{HeldMemory, HeldTensor, MemoryFull};
pub use host_copy::{HostCopy, HostReader};
pub use kernel_trace::{KernelTrace, TraceResult};
pub use launch::LaunchCounts;
pub use linear_cross_entropy::{
    LinearCrossEntropyGradients, linear_cross_entropy_with_gradients, loss_block_tokens, losses_of_logits, token_losses,
};
pub use memory_watch::MemoryPeak;
pub use nccl::{NcclGroup, NcclPiece, NcclReplicas, NcclStream, NcclSums, NcclWatch, NcclWork};
pub use nvml::GpuState;
pub use probe::{CudaReport, DeviceReport};
pub use step_graph::{StepGraph, StepInputs, StepPositions};
pub use step_tape::StepTape;
