//! Measures how long training steps take.
use std::time::{Duration, Instant};

/// Wall time and tokens of steps since the last report, without validations and checkpoints. The device is synchronised
/// at every report.
pub(super) struct Clock {
    since: Instant,
    paused: Duration,
    tokens: u64,
    steps: u32,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { since: Instant::now(), paused: Duration::ZERO, tokens: 0, steps: 0 }
    }

    /// Counts a step that was queued on the device.
    pub(super) fn step(&mut self, tokens: u64) {
        self.tokens += tokens;
        self.steps += 1;
    }

    /// Runs `work` without counting its time.
    pub(super) fn pause<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.paused += started.elapsed();
        result
    }

    /// `(tokens a second, seconds a step)` since the last call.
    pub(super) fn restart(&mut self) -> (f64, f64) {
        let elapsed = self.since.elapsed().saturating_sub(self.paused);
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let result = (self.tokens as f64 / seconds, seconds / f64::from(self.steps.max(1)));
        *self = Self::start();
        result
    }
}
