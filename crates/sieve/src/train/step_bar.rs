//! The progress bar of `sieve train`: it moves with each micro-batch, and its time left with each second.
use indicatif::{ProgressBar, ProgressState};
use sieve_host::terminal;
use sieve_train::TrainEvent;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Places of the bar in one step.
const PLACES: f64 = 1000.0;

/// The bar, and how fast its steps come.
pub(super) struct StepBar {
    bar: ProgressBar,
    pace: Arc<Mutex<Pace>>,
}

impl StepBar {
    /// The bar of a run of `num_steps`, of which `step` are done.
    pub(super) fn new(num_steps: u64, step: u64) -> Self {
        let pace = Arc::new(Mutex::new(Pace { num_steps: num_steps as f64, begun: None, left: None }));
        let known = pace.clone();
        let steps = move |state: &ProgressState, out: &mut dyn Write| {
            let _ = write!(out, "{}/{num_steps} steps", state.pos() / PLACES as u64);
        };
        let left = move |_: &ProgressState, out: &mut dyn Write| {
            let pace = known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(left) = pace.left_at(Instant::now()) {
                let _ = write!(out, "{} left", terminal::duration(left.as_secs_f64()));
            }
        };
        let style = terminal::style("{bar:30} {steps}  {left}").with_key("steps", steps).with_key("left", left);
        let bar = terminal::styled_bar(num_steps * PLACES as u64, style);
        bar.set_position(step * PLACES as u64);
        Self { bar, pace }
    }

    /// The bar of a process that prints nothing.
    pub(super) fn hidden() -> Self {
        let pace = Pace { num_steps: 0.0, begun: None, left: None };
        Self { bar: ProgressBar::hidden(), pace: Arc::new(Mutex::new(pace)) }
    }

    /// Moves with an event of the run.
    pub(super) fn see(&self, event: &TrainEvent<'_>) {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = match event {
            TrainEvent::Step(report) => {
                pace.step(Instant::now(), report.step as f64, report.eta_seconds);
                report.step as f64
            }
            TrainEvent::Computed(steps) => {
                pace.computed(Instant::now(), *steps);
                *steps
            }
            _ => return,
        };
        // A redraw on another thread waits for this lock.
        drop(pace);
        self.bar.set_position((steps * PLACES) as u64);
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// How fast steps come.
#[derive(Debug)]
struct Pace {
    num_steps: f64,
    /// When the first logged step was done, and its number: a step before it compiles kernels.
    begun: Option<(Instant, f64)>,
    /// The time left, and when it was.
    left: Option<(Instant, Duration)>,
}

impl Pace {
    fn step(&mut self, now: Instant, step: f64, left: f64) {
        if self.begun.is_none() {
            self.begun = Some((now, step));
            self.left = Duration::try_from_secs_f64(left).ok().map(|left| (now, left));
        }
    }

    fn computed(&mut self, now: Instant, steps: f64) {
        if let Some((begun, first)) = self.begun.filter(|(_, first)| steps > *first) {
            let a_step = (now - begun).as_secs_f64() / (steps - first);
            let left = Duration::try_from_secs_f64(a_step * (self.num_steps - steps).max(0.0));
            self.left = left.ok().map(|left| (now, left));
        }
    }

    /// The time left at `now`; `None` before the first logged step.
    fn left_at(&self, now: Instant) -> Option<Duration> {
        self.left.map(|(since, left)| left.saturating_sub(now - since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_goes_on_between_two_logged_steps() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut pace = Pace { num_steps: 6.0, begun: None, left: None };
        let left = |pace: &Pace, seconds| pace.left_at(at(seconds)).map(|left| left.as_secs_f64().round());
        pace.computed(at(5), 0.5);
        assert_eq!(left(&pace, 5), None, "nothing is known before the first step");
        pace.step(at(60), 1.0, 300.0);
        assert_eq!((left(&pace, 60), left(&pace, 70)), (Some(300.0), Some(290.0)));
        // The steps after the first one are faster: half a step in five seconds.
        pace.computed(at(65), 1.5);
        assert_eq!((left(&pace, 65), left(&pace, 75), left(&pace, 200)), (Some(45.0), Some(35.0), Some(0.0)));
    }
}
