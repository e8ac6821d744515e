//! CubeCL's device thread, which queues all work of a GPU: its server, and the errors of work that was queued.
use crate::locked::lock;
use cubecl::cuda::CudaRuntime;
use sieve_gpu::KernelError;
use std::sync::Mutex;

/// CubeCL's server, which lives on the device thread.
pub(crate) type Server = <CudaRuntime as cubecl::Runtime>::Server;

/// Reason of the error when CubeCL's device thread has ended.
pub(crate) const DEVICE_THREAD_GONE: &str = "the device thread is gone";

/// The first error of queued work that came after its call had returned. Process-wide, because Burn's backend methods
/// have no place for it.
static LATE_ERROR: Mutex<Option<KernelError>> = Mutex::new(None);

/// Keeps the first error of queued work for [`late_error`].
pub(crate) fn report_late(error: KernelError) {
    lock(&LATE_ERROR).get_or_insert(error);
}

/// Fails once after queued work has failed.
///
/// # Errors
/// The error of the queued work, which names its kernel.
pub(crate) fn late_error() -> Result<(), KernelError> {
    lock(&LATE_ERROR).take().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_queued_work_is_the_next_calls_error_once() {
        let error = |kernel| KernelError::Launch { kernel, reason: "refused".to_owned() };
        report_late(error("first"));
        report_late(error("second"));
        assert_eq!(late_error(), Err(error("first")));
        assert_eq!(late_error(), Ok(()));
    }
}
