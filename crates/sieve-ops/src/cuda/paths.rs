//! Which way each op went: through its kernel, or through the reference and why.
use sieve_kernels::{KernelError, SumOrder};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls of one op since the process began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpPath {
    /// Calls that ran the kernel.
    pub kernel_calls: u64,
    /// Calls that took the plain-Burn reference.
    pub reference_calls: u64,
    /// Why the first of those did.
    pub reason: Option<String>,
}

// Process-wide, because Burn's backend methods have no place for state: these are counters and a mode, never data.
static PATHS: Mutex<BTreeMap<&'static str, OpPath>> = Mutex::new(BTreeMap::new());
static FIXED_ORDER: AtomicBool = AtomicBool::new(false);

/// The ops called so far, by name. A program prints the reasons, so that nobody takes the reference without knowing.
pub fn op_paths() -> BTreeMap<&'static str, OpPath> {
    PATHS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Chooses how backward kernels sum from now on: [`SumOrder::Fixed`] makes two runs bit-equal, at a cost.
pub fn set_sum_order(order: SumOrder) {
    FIXED_ORDER.store(order == SumOrder::Fixed, Ordering::Relaxed);
}

pub(super) fn sum_order() -> SumOrder {
    if FIXED_ORDER.load(Ordering::Relaxed) {
        SumOrder::Fixed
    } else {
        SumOrder::Any
    }
}

/// The kernel's result, or the reference's when the kernel cannot take the call.
///
/// Panics when a launch failed: the stream is broken then, and no other path on it would compute anything.
pub(super) fn kernel_or<T>(
    op: &'static str,
    attempt: Result<T, KernelError>,
    reference: impl FnOnce() -> T,
) -> T {
    let value = match attempt {
        Ok(value) => {
            count(op, |path| path.kernel_calls += 1);
            return value;
        }
        Err(error @ KernelError::Launch { .. }) => panic!("{error}"),
        Err(error) => {
            count(op, |path| {
                path.reference_calls += 1;
                path.reason.get_or_insert_with(|| error.to_string());
            });
            reference
        }
    };
    value()
}

fn count(op: &'static str, change: impl FnOnce(&mut OpPath)) {
    let mut paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner);
    change(paths.entry(op).or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_call_is_counted_with_its_reason() {
        let refused = || {
            Err(KernelError::Empty {
                kernel: "test_op",
                what: "seq_len",
            })
        };
        assert_eq!(kernel_or("test_op", Ok(1), || 2), 1);
        assert_eq!(kernel_or("test_op", refused(), || 2), 2);
        assert_eq!(kernel_or("test_op", refused(), || 3), 3);
        let path = op_paths().remove("test_op").expect("just called");
        assert_eq!((path.kernel_calls, path.reference_calls), (1, 2));
        assert!(path.reason.expect("a reason").contains("seq_len is 0"));
    }

    #[test]
    #[should_panic(expected = "broken stream")]
    fn a_failed_launch_is_not_papered_over() {
        let error = KernelError::Launch {
            kernel: "test_launch",
            reason: "broken stream".into(),
        };
        kernel_or("test_launch", Err(error), || ());
    }
}
