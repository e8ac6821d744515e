//! Retries failed writes while training continues; a run ends only after many failures.
use std::time::{Duration, Instant};

/// How often and how long a failed write is retried.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct WriteLimits {
    /// Pause before the second attempt to write; it doubles with every further one.
    pub first_pause: Duration,
    /// Longest pause between two attempts to write.
    pub longest_pause: Duration,
    /// A run ends after this many failed checkpoints in a row.
    pub max_failures: u32,
    /// How long the last checkpoint of a run is retried.
    pub last: Duration,
}

impl Default for WriteLimits {
    /// Ten failures take half an hour, with pauses from five seconds to ten minutes.
    fn default() -> Self {
        Self {
            first_pause: Duration::from_secs(5),
            longest_pause: Duration::from_secs(600),
            max_failures: 10,
            last: Duration::from_secs(600),
        }
    }
}

/// The failed attempts of a write, and the time of the next one.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    pub(crate) limits: WriteLimits,
    /// Number of failures since the last success.
    pub(crate) num_failed: u32,
    /// Time of the next attempt; `None` if the last write succeeded.
    next: Option<Instant>,
}

impl Tries {
    /// Whether the last write failed and the pause after it has passed.
    pub(crate) fn is_due(&self) -> bool {
        self.next.is_some_and(|next| Instant::now() >= next)
    }

    /// Whether the last attempt to write failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.next.is_some()
    }

    /// Records a failed write. Returns the pause until the next try.
    pub(crate) fn fail(&mut self) -> Duration {
        let WriteLimits { first_pause, longest_pause, .. } = self.limits;
        // Doubles with each failure; the exponent is limited, so that the shift cannot overflow.
        let pause = first_pause.saturating_mul(1 << self.num_failed.min(16)).min(longest_pause);
        self.num_failed += 1;
        self.next = Some(Instant::now() + pause);
        pause
    }

    /// Records a successful write. Returns whether the write before it had failed.
    pub(crate) fn succeed(&mut self) -> bool {
        self.num_failed = 0;
        self.next.take().is_some()
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
