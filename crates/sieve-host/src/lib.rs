//! What every program of Sieve needs of its machine: a terminal, files to write, devices, kernels compiled ahead,
//! memory that is predicted before it is taken, loaded models, and the ranks that use one together.
//!
//! The commands of `sieve` and of the lab use this crate. It may print; the libraries that it uses may not.

pub mod environment;
pub mod exit;

pub mod terminal;

pub mod ask;
pub mod out_file;
pub mod paths;
pub mod room;
pub mod stopped;

pub mod hub;
pub mod interrupt;
pub mod on_event;
pub mod once;
pub mod text_files;

pub mod device;
pub mod kernels_ahead;
pub mod out_of_memory;

pub mod loaded;
pub mod same_bits;
pub mod selector;

pub mod gpus;
pub mod model_ranks;
pub mod ranks;

pub mod evaluation;
pub mod line_chart;

/// The backends and devices that [`on_device`] chooses from.
pub mod backends {
    pub use burn_cuda::CudaDevice;
    pub use burn_flex::{Flex, FlexDevice};
    pub use sieve_ops::Cuda;
}
