//! From a kernel's text to a finished launch: sources, tensors, machine code, launches as data. Knows no kernel by
//! name.
pub mod ahead_of_time;
pub(crate) mod checks;
pub(crate) mod compiled;
pub(crate) mod cubins;
pub(crate) mod cuda_tensor;
pub(crate) mod dtype;
pub(crate) mod layout;
pub(crate) mod operands;
pub(crate) mod params;
#[cfg(test)]
mod params_text;
pub(crate) mod policy;
pub(crate) mod recording;
pub(crate) mod source;
pub(crate) mod source_kernel;
