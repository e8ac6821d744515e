//! The steps whose loss and gradient norm the host has not read yet, and the streak of bad ones.
use crate::guard::{GatedStep, LossMean, StepNumbers};
use crate::segment::Segment;
use crate::share::Share;
use crate::{GradientBuffer, Group, Precision, SkippedStep, TrainError};
use burn::tensor::Tensor;
use sieve_data::Batch;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The most steps whose loss and gradient norm are left on the device: reading them waits for the device.
pub(super) const MAX_UNREAD: usize = 64;
/// The most time that the device may need for its queued steps. After a longer wait for a loss, this rank would exceed
/// its progress timeout.
const MAX_BEHIND: Duration = Duration::from_secs(60);
/// With slower steps, this rank gets the longer progress timeout of [`Work::Long`](sieve_comm::Work::Long).
const SLOW_STEP: Duration = Duration::from_secs(20);
/// A streak of steps that were taken, with losses far above the mean, may be this many times `training.guard_patience`
/// long: near the highest usable learning rate the loss jumps now and then, and comes down by itself.
const PATIENCE_WITH_LOSS: usize = 10;

/// Whether the state after a check is still the state after the last step.
#[derive(PartialEq)]
pub(super) enum Verdict {
    GoOn,
    /// The state was restored from an earlier checkpoint.
    WentBack,
}

/// The steps whose loss and gradient norm were not read yet, the streak of bad steps, and the mean that losses are
/// compared with.
pub(super) struct GuardLog<B: TrainBackend> {
    pub(super) unread: VecDeque<Unread<B>>,
    pub(super) streak: Streak,
    pub(super) loss_mean: LossMean,
    /// Number and results of the last step that was read; `None` if none was since the start or a return.
    pub(super) last: Option<(u64, StepNumbers)>,
    /// Steps up to this one are read as soon as they are queued.
    pub(super) watched_until: u64,
    pub(super) returns: Returns,
    pub(super) pace: DevicePace,
}

/// The step of the checkpoint that the run went back to last, and how often it went back to this one.
#[derive(Clone, Copy, Default)]
pub(super) struct Returns {
    pub(super) to: u64,
    pub(super) times: u32,
}

impl Returns {
    /// Counts a return to the checkpoint of step `to`.
    pub(super) fn count(&mut self, to: u64) {
        let earlier = if self.to == to { self.times } else { 0 };
        *self = Self { to, times: earlier + 1 };
    }
}

/// How long the device takes for a step.
pub(super) struct DevicePace {
    /// Time at which the device had last done all queued steps.
    caught_up: Instant,
    step_time: Duration,
}

impl DevicePace {
    fn start() -> Self {
        Self { caught_up: Instant::now(), step_time: Duration::ZERO }
    }

    /// Records that the device has just done the last of its queued steps, `num_steps` after the previous call.
    pub(super) fn catches_up(&mut self, num_steps: usize, now: Instant) {
        let num_steps = num_steps.max(1) as u32;
        self.step_time = now.duration_since(self.caught_up) / num_steps;
        self.caught_up = now;
    }

    /// Whether `num_steps` queued steps take the device at least [`MAX_BEHIND`].
    fn is_far_behind(&self, num_steps: usize) -> bool {
        self.step_time * num_steps as u32 >= MAX_BEHIND
    }
}

/// Bad steps in a row: skipped, or taken with a loss far above the mean.
#[derive(Default)]
pub(super) struct Streak {
    pub(super) num_steps: usize,
    /// The steps of the streak that were skipped.
    pub(super) skipped: Vec<SkippedStep>,
}

impl Streak {
    /// Whether the streak is so long that the run must go back to a checkpoint.
    pub(super) fn exhausts(&self, patience: usize) -> bool {
        self.skipped.len() >= patience || self.num_steps >= patience.saturating_mul(PATIENCE_WITH_LOSS)
    }

    /// What was wrong with the steps; `losses` are the last one's and the mean.
    pub(super) fn in_words(&self, losses: &str) -> String {
        let far = format!("had a loss far above its mean {losses}");
        match self.skipped.len() {
            0 => far,
            num_skipped if num_skipped == self.num_steps => "were not taken".to_owned(),
            _ => format!("were not taken or {far}"),
        }
    }
}

/// A step whose numbers are still on the device.
pub(super) struct Unread<B: TrainBackend> {
    pub(super) step: u64,
    pub(super) lr: f64,
    pub(super) first_sample: u64,
    pub(super) num_rows: u64,
    /// Documents of this rank's rows, in their order, without repeated neighbours.
    pub(super) documents: Vec<u32>,
    /// On the device, `[3]`: loss, gradient norm, and 1 if the step is taken, else 0.
    pub(super) row: Tensor<B::InnerBackend, 1>,
    /// Gradient norms by part of the model; empty unless the step was read at once and was skipped.
    pub(super) norms: Vec<(String, f64)>,
}

impl<B: TrainBackend> GuardLog<B> {
    /// A log without steps; in f32 every step is read at once.
    pub(super) fn new(precision: Precision, loss_mean: LossMean) -> Self {
        Self {
            unread: VecDeque::new(),
            streak: Streak::default(),
            loss_mean,
            last: None,
            watched_until: match precision {
                // f32 runs on the CPU, where reading costs nothing.
                Precision::F32 => u64::MAX,
                Precision::Bf16 => 0,
            },
            returns: Returns::default(),
            pace: DevicePace::start(),
        }
    }

    /// Whether the unread steps and one more take the device at least [`MAX_BEHIND`].
    pub(super) fn is_far_behind(&self) -> bool {
        self.pace.is_far_behind(self.unread.len() + 1)
    }

    /// Whether one step takes the device longer than [`SLOW_STEP`].
    pub(super) fn is_slow(&self) -> bool {
        self.pace.step_time > SLOW_STEP
    }

    /// Remembers a step, whose gradients still exist, until its numbers are read. If the step is watched and was
    /// skipped, remembers its gradient norms by part of the model too.
    pub(super) fn note(
        &mut self,
        step: u64,
        lr: f64,
        (first_sample, num_rows): (u64, u64),
        batches: &[Batch],
        gated: &GatedStep<B>,
        norms_by_part: impl FnOnce() -> Result<Vec<(String, f64)>, TrainError>,
    ) -> Result<(), TrainError> {
        let is_watched = step <= self.watched_until;
        let is_bad = is_watched && !StepNumbers::read::<B>(&gated.row).is_taken;
        let documents = batches.iter().flat_map(|batch| &batch.documents);
        let mut documents = documents.copied().collect::<Vec<_>>();
        documents.dedup();
        self.unread.push_back(Unread {
            step,
            lr,
            first_sample,
            num_rows,
            documents,
            row: gated.row.clone(),
            norms: if is_bad { norms_by_part()? } else { Vec::new() },
        });
        Ok(())
    }

    /// The numbers of `step`, if it is the last one that was read and it was taken.
    pub(super) fn last_taken(&self, step: u64) -> Option<StepNumbers> {
        let (last, numbers) = self.last?;
        (last == step && numbers.is_taken).then_some(numbers)
    }

    /// Whether the last step that was read is bad.
    pub(super) fn in_streak(&self) -> bool {
        self.streak.num_steps > 0
    }
}

/// Gradient norm of every part of the model, over all ranks.
pub(super) fn norms_by_part<B: TrainBackend>(
    model: &Qwen3<B>,
    gradients: &GradientBuffer<B>,
    group: Option<&Group<B>>,
    device: &B::Device,
) -> Result<Vec<(String, f64)>, TrainError> {
    let layers = (0..model.layers.len()).map(|layer| format!("layer {layer}"));
    let names = [vec!["embedding".to_owned()], layers.collect()].concat();
    let names = names.into_iter().chain(Some("head".to_owned()));
    let norms = Segment::all(model).map(|segment| {
        let share = group.map_or(Share::ALL, Group::share);
        gradients.norm_of(&segment.ids(model), device, share)
    });
    let mut norms = Tensor::cat(norms.collect(), 0);
    if let Some(group) = group {
        norms = group.sum_of(norms.clone() * norms)?.sqrt();
    }
    let norms = norms.into_data();
    Ok(names.zip(norms.iter::<f64>()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_far_behind_with_a_minute_of_queued_steps() {
        let mut pace = DevicePace::start();
        assert!(!pace.is_far_behind(MAX_UNREAD), "nothing is known yet");
        let mut now = pace.caught_up;
        // Ten steps of 0.1 s, then two of 25 s.
        for (num_steps, seconds, within, beyond) in [(10, 1, 599, 600), (2, 50, 2, 3)] {
            now += Duration::from_secs(seconds);
            pace.catches_up(num_steps, now);
            assert!(!pace.is_far_behind(within) && pace.is_far_behind(beyond));
        }
    }
}
