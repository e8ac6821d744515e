//! Sieve's CUDA kernels behind a C interface (`include/sieve.h`), for PyTorch and any program with device pointers and
//! a stream.
//!
//! A request in JSON becomes a [`Plan`]: every launch of an op for given shapes, as the wrappers of sieve-gpu record
//! them, sharing one scratch buffer. That needs no GPU. [`Loaded`] is a plan with its kernels on a GPU; running it
//! queues launches, or one CUDA graph of them, and a caller's own graph can capture it.

pub mod abi;
mod capacity;
mod graph;
mod launch;
pub mod ops;
mod plan;
mod request;

pub use capacity::Capacity;
pub use launch::Loaded;
pub use ops::Call;
pub use plan::Plan;
pub use request::{Gpu, PlanError, Request, TensorSpec};
