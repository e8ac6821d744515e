//! Calls of CUDA kernels: a kernel's result, or the reference's where the kernel refuses the call.
use super::paths::{Memory, Place, count, count_refusal, reference};
use sieve_core::ScoreMatrix;
use sieve_kernels::KernelError;

/// The CUDA kernel's result, or the reference's when the kernel cannot take the call.
///
/// Panics when a launch failed: the stream is broken then, and nothing else could run on it.
pub(crate) fn kernel_or<T>(op: &'static str, attempt: Result<T, KernelError>, run: impl FnOnce() -> T) -> T {
    kernel_result(op, attempt).unwrap_or_else(|reason| reference((Place::Cuda, op), &reason, Memory::Linear, run))
}

/// Like [`kernel_or`], for an op whose reference holds a score matrix of this size.
pub(crate) fn kernel_or_scores<T>(
    op: &'static str,
    attempt: Result<T, KernelError>,
    scores: ScoreMatrix,
    run: impl FnOnce() -> T,
) -> T {
    kernel_result(op, attempt)
        .unwrap_or_else(|reason| reference((Place::Cuda, op), &reason, Memory::Quadratic(scores), run))
}

/// As [`kernel_or`] for a kernel that works in place on `tensors`, which the reference gets after a refusal.
pub(crate) fn kernel_on<T>(
    op: &'static str,
    tensors: T,
    outcome: Result<(), KernelError>,
    run: impl FnOnce(T) -> T,
) -> T {
    match kernel_result(op, outcome) {
        Ok(()) => tensors,
        Err(reason) => reference((Place::Cuda, op), &reason, Memory::Linear, || run(tensors)),
    }
}

/// The CUDA kernel's result, or why it cannot take the call, for an op that the caller then computes otherwise. The
/// refusal is counted like a reference.
///
/// Panics when a launch failed, as [`kernel_or`].
pub(crate) fn kernel_or_refusal<T>(op: &'static str, attempt: Result<T, KernelError>) -> Result<T, String> {
    kernel_result(op, attempt).inspect_err(|reason| count_refusal((Place::Cuda, op), reason))
}

/// The kernel's result, which is counted, or the reason of its refusal, which is not. Panics when a launch failed.
fn kernel_result<T>(op: &'static str, attempt: Result<T, KernelError>) -> Result<T, String> {
    match attempt {
        Ok(value) => {
            count(Place::Cuda, op, |path| path.kernel_calls += 1);
            Ok(value)
        }
        Err(error @ KernelError::Launch { .. }) => panic!("{error}"),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op_paths;

    #[test]
    fn a_refused_call_is_counted_with_its_reason() {
        let refused = || Err(KernelError::empty("test_op", "seq_len"));
        let call = |attempt, otherwise| kernel_or("test_op", attempt, || otherwise);
        assert_eq!(call(Ok(1), 2), 1);
        assert_eq!(call(refused(), 2), 2);
        assert_eq!(call(refused(), 3), 3);
        let path = op_paths().remove(&(Place::Cuda, "test_op"));
        let path = path.expect("just called");
        assert_eq!((path.kernel_calls, path.reference_calls), (1, 2));
        assert!(path.reason.expect("a reason").contains("seq_len is 0"));
    }

    #[test]
    fn a_refusal_handed_to_the_caller_is_counted_with_its_reason() {
        let attempts = [Ok(1), Err(KernelError::empty("test_handed", "num_keys"))];
        let [taken, refused] = attempts.map(|attempt| kernel_or_refusal("test_handed", attempt));
        assert_eq!(taken, Ok(1));
        let path = op_paths().remove(&(Place::Cuda, "test_handed"));
        let path = path.expect("just called");
        assert_eq!((path.kernel_calls, path.reference_calls), (1, 1));
        assert_eq!(path.reason, refused.err());
    }

    #[test]
    #[should_panic(expected = "broken stream")]
    fn a_failed_launch_panics_and_runs_no_reference() {
        let error = KernelError::Launch { kernel: "test_launch", reason: "broken stream".into() };
        kernel_or("test_launch", Err(error), || ());
    }
}
