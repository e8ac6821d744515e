//! Measures the peak memory in use during the first steps of a stage.
use super::Trainer;
use super::reporter::Reporter;
use crate::{MemoryProbe, TrainError};
use sieve_ops::TrainBackend;

/// Steps of a stage that are watched: the optimizer creates its moments at the end of the first step, so the second one
/// is the first that has all tensors in memory.
const WATCHED_STEPS: u32 = 2;

/// A watch over the first steps of a stage.
pub(super) struct PeakWatch {
    memory: MemoryProbe,
    steps_left: u32,
}

impl PeakWatch {
    pub(super) fn start(memory: MemoryProbe) -> Self {
        let mut watch = Self { memory, steps_left: 0 };
        watch.restart();
        watch
    }

    /// Watches the first steps of another stage.
    pub(super) fn restart(&mut self) {
        self.steps_left = WATCHED_STEPS;
        self.memory.watch();
    }

    /// Whether all watched steps of the stage were queued on the device.
    pub(super) fn is_over(&self) -> bool {
        self.steps_left == 0
    }

    /// Counts a step that was queued on the device.
    pub(super) fn step(&mut self) {
        if self.steps_left > 0 {
            self.steps_left -= 1;
            if self.steps_left == 0 {
                self.memory.unwatch();
            }
        }
    }
}

impl Drop for PeakWatch {
    fn drop(&mut self) {
        self.memory.unwatch();
    }
}

impl<B: TrainBackend> Trainer<B> {
    /// Writes the peak memory of the watched steps, of every process, to the metrics; nothing for a CPU.
    pub(super) fn report_peak(&self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let peak = self.machine.memory.peak();
        let own = peak.map_or(0, |peak| peak.in_use_bytes);
        let by_rank = self.gathered(own)?;
        if let (MemoryProbe::Device(_), Some(peak)) = (self.machine.memory, peak) {
            reporter.metrics.memory(self.progress.step, peak, by_rank);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceMemory;
    use sieve_ops::MemoryPeak;
    use std::sync::atomic::{AtomicU32, Ordering};

    static STARTED: AtomicU32 = AtomicU32::new(0);
    static STOPPED: AtomicU32 = AtomicU32::new(0);

    fn counts() -> (u32, u32) {
        (STARTED.load(Ordering::Relaxed), STOPPED.load(Ordering::Relaxed))
    }

    #[test]
    fn two_steps_of_every_stage_are_watched() {
        let memory = MemoryProbe::Device(DeviceMemory {
            index: 0,
            now: |_| (1, 2),
            watch: || {
                STARTED.fetch_add(1, Ordering::Relaxed);
            },
            unwatch: || {
                STOPPED.fetch_add(1, Ordering::Relaxed);
            },
            peak: || Some(MemoryPeak { in_use_bytes: 3, reserved_bytes: 4 }),
        });
        let mut watch = PeakWatch::start(memory);
        assert_eq!(counts(), (1, 0));
        watch.step();
        assert_eq!((counts(), watch.is_over()), ((1, 0), false));
        for _ in 0..3 {
            watch.step();
        }
        assert_eq!((counts(), watch.is_over()), ((1, 1), true));
        watch.restart();
        watch.step();
        assert_eq!(counts(), (2, 1));
        drop(watch);
        assert_eq!(counts(), (2, 2));
        assert_eq!(memory.peak().map(|peak| peak.in_use_bytes), Some(3));
    }
}
