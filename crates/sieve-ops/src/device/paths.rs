//! The path that each call of an op took, kernel or reference, and why.
//!
//! Each call without a kernel is counted by its place and reason; `train`, `eval`, `generate` and `logits` print
//! the counts. An attention reference that would hold more than 2^26 scores is refused on every device, and
//! `--device auto` never chooses a device that would need one.
use burn::tensor::TensorMetadata;
use sieve_core::ScoreMatrix;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The kind of device that an op ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "the CPU",
            Self::Cuda => "the GPU",
        })
    }
}

/// Number of calls of one op on one device since the process began. Calls of CPU kernels are not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpPath {
    /// Calls that took the op's kernel.
    pub kernel_calls: u64,
    /// Calls that ran the plain-Burn reference, or that the kernel refused and the caller computed otherwise.
    pub reference_calls: u64,
    /// Why the first of the `reference_calls` did not run the kernel; `None` without such calls.
    pub reason: Option<String>,
}

type Paths = BTreeMap<(Place, &'static str), OpPath>;

// The counts are process-wide, because Burn's backend methods have no place for state. They change no result.
static PATHS: Mutex<Paths> = Mutex::new(BTreeMap::new());

/// The ops called so far, by device and name. Programs print the reasons, so that no reference runs unnoticed.
pub fn op_paths() -> BTreeMap<(Place, &'static str), OpPath> {
    PATHS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Memory that a reference needs in addition to its inputs and outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// A few tensors as large as the inputs.
    Linear,
    /// A score for every pair of tokens.
    Quadratic(ScoreMatrix),
}

/// Counts a call that `place` has no kernel for, with the reason, and runs the op's reference.
///
/// Panics with a [`sieve_core::ReferenceTooLarge`] where the reference would hold too many scores: the ops of a Burn
/// backend cannot return errors.
pub(crate) fn reference<T>(
    (place, op): (Place, &'static str),
    reason: &str,
    memory: Memory,
    run: impl FnOnce() -> T,
) -> T {
    count_refusal((place, op), reason);
    if let Memory::Quadratic(scores) = memory
        && let Err(error) = scores.check(op, &place.to_string(), reason)
    {
        std::panic::panic_any(error);
    }
    run()
}

/// The score matrix of attention with `num_heads` on a tensor whose first dimensions are rows and tokens.
pub(crate) fn scores(x: &impl TensorMetadata, num_heads: usize) -> ScoreMatrix {
    let shape = x.shape();
    ScoreMatrix { batch: shape[0], num_heads, seq_len: shape[1] }
}

/// Counts a call that took no kernel, and keeps the reason of the first.
pub(super) fn count_refusal((place, op): (Place, &'static str), reason: &str) {
    count(place, op, |path| {
        path.reference_calls += 1;
        path.reason.get_or_insert_with(|| reason.to_owned());
    });
}

pub(super) fn count(place: Place, op: &'static str, change: impl FnOnce(&mut OpPath)) {
    let mut paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner);
    change(paths.entry((place, op)).or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, Documents};
    use burn::tensor::{DType, Tensor};
    use burn_flex::{Flex, FlexDevice};
    use sieve_core::ReferenceTooLarge;

    #[test]
    fn a_reference_with_too_many_scores_does_not_run() {
        let scores = ScoreMatrix { batch: 16, num_heads: 6, seq_len: 2048 };
        let run = || unreachable!("it would take the memory");
        let call = || {
            let op = (Place::Cuda, "test_scores");
            reference(op, "no kernel", Memory::Quadratic(scores), run)
        };
        let panic = std::panic::catch_unwind(call).expect_err("refused");
        let error = panic.downcast::<ReferenceTooLarge>().expect("says why");
        assert_eq!((error.op.as_str(), error.scores), ("test_scores", scores));
    }

    /// Attention in f64, which no kernel of the CPU takes.
    fn attend_in_f64(seq_len: usize) {
        let spec = AttentionSpec::dense([1, 1], 1);
        let documents = Documents::<Flex>::whole_rows([1, seq_len], &FlexDevice);
        let qkv = Tensor::<Flex, 4>::zeros([1, seq_len, 3, 1], (&FlexDevice, DType::F64));
        let _o = crate::attention(qkv, &documents, spec);
    }

    #[test]
    fn references_of_the_cpu_are_counted_and_refused_too() {
        let calls = || {
            let path = op_paths().remove(&(Place::Cpu, "attention"));
            path.map_or(0, |path| path.reference_calls)
        };
        let before = calls();
        attend_in_f64(5);
        assert!(calls() > before);
        // One token more than the limit: 8192 x 8192 scores are allowed.
        let panic = std::panic::catch_unwind(|| attend_in_f64(8193)).expect_err("refused");
        let error = panic.downcast::<ReferenceTooLarge>().expect("says why");
        assert_eq!(error.device, "the CPU");
        assert!(error.reason.contains("f32"), "{error}");
    }
}
