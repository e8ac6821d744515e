//! From a kernel's text to a finished launch: sources, tensors, the cache of compiled kernels, probes, and records of
//! what ran. Knows no kernel by name.
pub mod ahead_of_time;
pub(crate) mod cache;
mod cache_files;
pub(crate) mod checks;
pub(crate) mod compiled;
pub(crate) mod cubins;
pub(crate) mod cuda_tensor;
pub(crate) mod host_copy;
pub(crate) mod kernel_trace;
pub(crate) mod lane;
pub(crate) mod launch;
pub(crate) mod layout;
pub(crate) mod memory_watch;
pub(crate) mod nccl;
pub(crate) mod operands;
pub(crate) mod params;
#[cfg(test)]
mod params_text;
pub(crate) mod probe;
pub(crate) mod recording;
pub(crate) mod source;
pub(crate) mod source_kernel;
