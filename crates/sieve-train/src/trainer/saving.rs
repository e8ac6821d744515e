//! Writes that fail: what could not be written is tried again while training continues, and a run ends only after many
//! failures.
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long writes that fail are tried again.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct WriteLimits {
    /// Until the second try; doubled from try to try.
    pub first_pause: Duration,
    /// Between two tries at most.
    pub longest_pause: Duration,
    /// Checkpoints that fail one after another until a run ends.
    pub max_failures: u32,
    /// How long the last checkpoint is tried.
    pub last: Duration,
}

impl Default for WriteLimits {
    /// From five seconds to ten minutes, ten failures: half an hour; the last checkpoint for ten minutes.
    fn default() -> Self {
        Self {
            first_pause: Duration::from_secs(5),
            longest_pause: Duration::from_secs(600),
            max_failures: 10,
            last: Duration::from_secs(600),
        }
    }
}

/// Growing pauses between the tries of a write that fails.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    limits: WriteLimits,
    num_failed: u32,
    /// When the next try is due; `None` where the last write succeeded.
    next: Option<Instant>,
}

impl Tries {
    pub(crate) fn set_limits(&mut self, limits: WriteLimits) {
        self.limits = limits;
    }

    pub(crate) fn limits(&self) -> WriteLimits {
        self.limits
    }

    /// Whether the last write failed, and it is time for another.
    pub(crate) fn is_due(&self) -> bool {
        self.next.is_some_and(|next| Instant::now() >= next)
    }

    /// Whether the last write failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.next.is_some()
    }

    /// How many writes failed one after another.
    pub(crate) fn num_failed(&self) -> u32 {
        self.num_failed
    }

    /// A write has failed. Returns the pause until the next one.
    pub(crate) fn fail(&mut self) -> Duration {
        let WriteLimits {
            first_pause,
            longest_pause,
            ..
        } = self.limits;
        let pause = first_pause
            .saturating_mul(1 << self.num_failed.min(16))
            .min(longest_pause);
        self.num_failed += 1;
        self.next = Some(Instant::now() + pause);
        pause
    }

    /// A write has succeeded. Returns whether the one before had failed.
    pub(crate) fn succeed(&mut self) -> bool {
        self.num_failed = 0;
        self.next.take().is_some()
    }
}

/// Where checkpoints go, and what became of them.
#[derive(Debug, Default)]
pub(super) struct Saving {
    pub(super) tries: Tries,
    /// Where the last checkpoint of a process goes when its own place fails.
    pub(super) fallback: Option<PathBuf>,
    /// Whether checkpoints go there.
    pub(super) uses_fallback: bool,
    /// Step and error of a failed try, until it is reported.
    pub(super) problem: Option<(u64, String)>,
}

impl Saving {
    /// Whether enough checkpoints failed to end the run.
    pub(super) fn gives_up(&self) -> bool {
        self.tries.num_failed() >= self.tries.limits().max_failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew() {
        let mut tries = Tries::default();
        assert!(!tries.has_failed() && !tries.is_due());
        let pauses = [(); 9].map(|()| tries.fail().as_secs());
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600]);
        assert!(tries.has_failed() && !tries.is_due());
        assert!(tries.succeed() && !tries.succeed());
        assert_eq!(tries.fail().as_secs(), 5);
    }
}
