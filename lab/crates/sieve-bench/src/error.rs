//! Errors that end a check, a benchmark or a build; a wrong result is a row of the report instead.
use sieve_hf::CheckpointError;
use sieve_kernels::KernelError;

/// Every error of a check or benchmark.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A request that makes no sense, or that this machine cannot fulfil.
    #[error("{0}")]
    Refused(String),
    /// A kernel was not compiled or not launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No kernel takes the requested call.
    #[error("no kernel takes this call")]
    NotTaken(#[source] KernelError),
    /// A file of tensors could not be read or written.
    #[error(transparent)]
    File(#[from] CheckpointError),
    /// Work on the GPU ended with an error.
    #[error("the GPU reported an error: {0}")]
    Gpu(String),
}

impl BenchError {
    /// An error that Burn or CubeCL returned.
    pub(crate) fn gpu(error: impl std::fmt::Debug) -> Self {
        Self::Gpu(format!("{error:?}"))
    }
}

/// A result with this crate's error.
pub(crate) type Result<T, E = BenchError> = std::result::Result<T, E>;

/// Refuses a request, for the reason given.
pub(crate) fn refused<T>(reason: impl Into<String>) -> Result<T> {
    Err(BenchError::Refused(reason.into()))
}
