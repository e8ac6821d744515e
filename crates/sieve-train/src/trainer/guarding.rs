//! The host's part of the guard: reports skipped steps, and goes back to a checkpoint after too many bad ones.
use super::{Reporter, Trainer};
use crate::guard::{GatedStep, StepNumbers};
use crate::segment::Segment;
use crate::trainer::stage::StageState;
use crate::{GradientBuffer, Group, Precision, SkippedStep, TrainError, TrainEvent};
use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;
use sieve_core::ShownPath;
use sieve_data::{Batch, PAD_DOCUMENT};
use sieve_hf::Checkpoint;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most steps whose loss and gradient norm are left on the device: reading them waits for the device.
const MAX_UNREAD: usize = 64;
/// The most time that the device may need for its queued steps. After a longer wait for a loss, this rank would exceed
/// its progress timeout.
const MAX_BEHIND: Duration = Duration::from_secs(60);
/// With slower steps, this rank gets the longer progress timeout of [`Work::Long`](sieve_comm::Work::Long).
const SLOW_STEP: Duration = Duration::from_secs(20);
/// After a skipped step, this many steps are read one by one while their gradients exist: if one of them is skipped
/// too, its gradient norms by layer are reported.
const WATCHED_STEPS: u64 = 100;
/// The most documents of a skipped step that a report names.
const MAX_NAMED_DOCUMENTS: usize = 16;
/// A streak of steps that were taken, with losses far above the mean, may be this many times `training.guard_patience`
/// long: near the highest usable learning rate the loss jumps now and then, and comes down by itself.
const PATIENCE_WITH_LOSS: usize = 10;
/// A run ends when it would go back to one checkpoint for the third time.
const MAX_REWINDS: u32 = 2;

/// A point at which tests inject a fault.
#[doc(hidden)]
#[derive(Debug)]
pub enum Moment<'a> {
    /// The factor multiplies the loss of a step, and with it the gradients.
    Loss,
    /// The factor multiplies the loss of the micro-batch whose gradients ranks compare.
    Replay,
    /// The factor multiplies the learning rate of a step.
    Rate,
    /// The factor multiplies the weights that this rank computes with, after a step.
    Leaves,
    /// The micro-batches of a step were read, and may be changed.
    Batches(&'a mut [Batch]),
    /// A validation begins.
    Validating,
    /// The thread that writes a checkpoint begins.
    Writing,
    /// All ranks have written a checkpoint, which is about to get its final name.
    Naming,
}

/// Fault injection for tests: a function that is called at each [`Moment`]. Its first argument is the first row of the
/// step, or outside of a step the number of steps done. It returns a factor; 1 changes nothing.
#[doc(hidden)]
#[derive(Clone)]
pub struct FaultInjection(Arc<dyn Fn(u64, Moment<'_>) -> f64 + Send + Sync>);

impl Default for FaultInjection {
    fn default() -> Self {
        Self::new(|_, _| 1.0)
    }
}

impl FaultInjection {
    /// Fault injection that calls `disturb` at every [`Moment`].
    pub fn new(disturb: impl Fn(u64, Moment<'_>) -> f64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(disturb))
    }

    /// The factor by which `disturb` falsifies a number at a [`Moment`].
    pub(super) fn at(&self, number: u64, moment: Moment<'_>) -> f64 {
        (self.0)(number, moment)
    }
}

/// Whether the state after a check is still the state after the last step.
#[derive(PartialEq)]
pub(super) enum Verdict {
    GoOn,
    /// The state was restored from an earlier checkpoint.
    WentBack,
}

/// The steps whose loss and gradient norm were not read yet, and the streak of bad steps.
pub(super) struct GuardLog<B: TrainBackend> {
    unread: VecDeque<Unread<B>>,
    streak: Streak,
    /// Number and results of the last step that was read; `None` if none was since the start or a return.
    last: Option<(u64, StepNumbers)>,
    /// Steps up to this one are read as soon as they are queued.
    watched_until: u64,
    /// Step of the checkpoint that the run went back to last, and how often it did.
    returns: (u64, u32),
    pace: DevicePace,
}

/// How long the device takes for a step.
struct DevicePace {
    /// Time at which the device had last done all queued steps.
    caught_up: Instant,
    step_time: Duration,
}

impl DevicePace {
    fn start() -> Self {
        Self { caught_up: Instant::now(), step_time: Duration::ZERO }
    }

    /// Records that the device has just done the last of its queued steps, `num_steps` after the previous call.
    fn catches_up(&mut self, num_steps: usize, now: Instant) {
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
struct Streak {
    num_steps: usize,
    /// The steps of the streak that were skipped.
    skipped: Vec<SkippedStep>,
}

impl Streak {
    /// Whether the streak is so long that the run must go back to a checkpoint.
    fn exhausts(&self, patience: usize) -> bool {
        self.skipped.len() >= patience || self.num_steps >= patience.saturating_mul(PATIENCE_WITH_LOSS)
    }
}

/// A step whose numbers are still on the device.
struct Unread<B: TrainBackend> {
    step: u64,
    lr: f64,
    first_sample: u64,
    num_rows: u64,
    /// Documents of this rank's rows, in their order, without repeated neighbours.
    documents: Vec<u32>,
    /// On the device, `[3]`: loss, gradient norm, and 1 if the step is taken, else 0.
    row: Tensor<B::InnerBackend, 1>,
    /// Gradient norms by part of the model; empty unless the step was read at once and was skipped.
    norms: Vec<(String, f64)>,
}

impl<B: TrainBackend> GuardLog<B> {
    pub(super) fn new(precision: Precision) -> Self {
        Self {
            unread: VecDeque::new(),
            streak: Streak::default(),
            last: None,
            watched_until: match precision {
                // f32 runs on the CPU, where reading costs nothing.
                Precision::F32 => u64::MAX,
                Precision::Bf16 => 0,
            },
            returns: (0, 0),
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
        // Gradients that every rank holds whole are counted once, by rank 0.
        let whole = group.is_none_or(|group| group.share().rank == 0);
        gradients.norm_of(&segment.ids(model), device, whole)
    });
    let mut norms = Tensor::cat(norms.collect(), 0);
    if let Some(group) = group {
        norms = group.sum_of(norms.clone() * norms)?.sqrt();
    }
    let norms = norms.into_data();
    Ok(names.zip(norms.iter::<f64>()).collect())
}

impl<B: TrainBackend> Trainer<B> {
    /// Counts a step whose rows hold no label on any rank, and therefore change no weight.
    ///
    /// # Errors
    /// As many consecutive rows as an epoch has held no label.
    pub(super) fn pass_over(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let (first, num_rows) = (self.next_sample, self.stage.recipe.training.global_batch_size as u64);
        self.unlabelled.num_steps += 1;
        self.unlabelled.num_rows_in_a_row += num_rows;
        if self.unlabelled.num_rows_in_a_row >= self.stage.loader.samples_per_epoch() {
            // All ranks return this error at this step, so all of them can finish the checkpoint.
            self.finish_checkpoint(reporter)?;
            return Err(TrainError::refused(
                format!("step {}: no row of the text holds a token with a label", self.step + 1),
                "documents of one token teach nothing, nor do rows that a prompt or a question of a chat \
                 fills (data.prompt_column, data.messages_column): check data.paths, or raise training.seq_len",
            ));
        }
        self.count_step();
        let count = self.unlabelled.num_steps;
        if count.is_power_of_two() {
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: step {}: rows {first} to {} hold no token with a label and are skipped ({count} such \
                 steps in this process)",
                self.step,
                first + num_rows - 1
            )));
        }
        Ok(())
    }

    /// Advances step, next row and tokens by one step.
    pub(super) fn count_step(&mut self) {
        let training = &self.stage.recipe.training;
        self.step += 1;
        self.next_sample += training.global_batch_size as u64;
        self.tokens_seen += training.tokens_per_step() as u64;
    }

    /// Reads the losses and gradient norms of all unread steps, if `now` is set, a step is watched, or [`MAX_UNREAD`]
    /// steps are unread. After too many bad steps, goes back to the last checkpoint.
    pub(super) fn check_steps(&mut self, now: bool, reporter: &mut Reporter<'_>) -> Result<Verdict, TrainError> {
        let is_watched = self.step <= self.guard_log.watched_until;
        if !(now || is_watched || self.guard_log.unread.len() >= MAX_UNREAD) {
            return Ok(Verdict::GoOn);
        }
        let num_steps = self.guard_log.unread.len();
        while let Some(unread) = self.guard_log.unread.pop_front() {
            let numbers = StepNumbers::read::<B>(&unread.row);
            // If a rank is lost, sums over the ranks are worthless.
            self.group.as_ref().map_or(Ok(()), Group::check)?;
            if self.guard_log.unread.is_empty() {
                self.guard_log.pace.catches_up(num_steps, Instant::now());
            }
            let mean_loss = self.loss_mean.state().mean_loss;
            let log = &mut self.guard_log;
            log.last = Some((unread.step, numbers));
            if numbers.is_taken {
                let is_far_above_mean = self.loss_mean.judge(numbers.loss);
                if !is_far_above_mean {
                    log.streak = Streak::default();
                    continue;
                }
            } else {
                let watched = unread.step.saturating_add(WATCHED_STEPS);
                log.watched_until = log.watched_until.max(watched);
            }
            log.streak.num_steps += 1;
            let lr = unread.lr;
            if !numbers.is_taken {
                let skipped = self.skipped_step(unread, numbers, mean_loss)?;
                reporter.metrics.skipped(&skipped);
                reporter.emit(TrainEvent::Skipped(&skipped));
                self.guard_log.streak.skipped.push(skipped);
            }
            if self.guard_log.streak.exhausts(self.recipe.training.guard_patience) {
                self.go_back(numbers, mean_loss, lr, reporter)?;
                return Ok(Verdict::WentBack);
            }
        }
        Ok(Verdict::GoOn)
    }

    /// Restores the last checkpoint, and continues after the rows that were read since, unless these belong to another
    /// stage.
    fn go_back(
        &mut self,
        numbers: StepNumbers,
        mean_loss: f32,
        lr: f64,
        reporter: &mut Reporter<'_>,
    ) -> Result<(), TrainError> {
        self.finish_checkpoint(reporter)?;
        self.warn_unsaved(reporter);
        let (to, times) = self.guard_log.returns;
        let path = match self.last_checkpoint {
            Some(step) if !(step == to && times >= MAX_REWINDS) => self.last_checkpoint_path(),
            _ => None,
        };
        let StepNumbers { loss, grad_norm, .. } = numbers;
        let Some(path) = path else {
            let last = match self.last_checkpoint_path() {
                Some(path) => format!("the last checkpoint, {}, is untouched", path.shown()),
                None => "there is no checkpoint yet".to_owned(),
            };
            return Err(TrainError::Diverged(format!(
                "step {}: the loss is {loss} (its mean was {mean_loss}), the gradient norm {grad_norm}: training \
                 diverged; {last}\n  \
                 hint: start a new run (--out) with a lower optimizer.lr (now {:?}; the rate of this step is {lr:.2e}) \
                 or more lr_scheduler.warmup_steps",
                self.step, self.recipe.optimizer.lr
            )));
        };
        let checkpoint = Checkpoint::open(&path)?;
        let (from, index, next_sample) = (self.step, self.stage.stage.index, self.next_sample);
        let stage = self.recipe.stage_of_step(checkpoint.state.step as usize);
        let same_stage = stage.index == index;
        if !same_stage {
            self.stage = StageState::new(&self.recipe, stage, &self.data, self.share())?;
        }
        let fresh_optimizer = false;
        self.restore(&checkpoint, fresh_optimizer)?;
        let first_skipped = self.next_sample;
        if same_stage {
            self.next_sample = next_sample;
        }
        // Drops the lines of steps after the checkpoint; the lines of the skipped steps are written again below.
        match self.open_metrics() {
            Ok((metrics, _)) => reporter.metrics = metrics,
            Err(error) => reporter.emit(TrainEvent::Warning(&format!(
                "warning: metrics.jsonl keeps the lines of steps that were taken back: {error}"
            ))),
        }
        let log = &mut self.guard_log;
        let streak = std::mem::take(&mut log.streak);
        for skipped in &streak.skipped {
            reporter.metrics.skipped(skipped);
        }
        log.unread.clear();
        log.last = None;
        let times = if log.returns.0 == self.step { log.returns.1 } else { 0 };
        log.returns = (self.step, times + 1);
        let rows = if same_stage {
            format!("rows {first_skipped} to {} are skipped", next_sample.max(1) - 1)
        } else {
            "the rows of the stage before are read again".to_owned()
        };
        let num_steps = streak.num_steps;
        let far = format!("had a loss far above its mean (the last {loss:.4}, the mean {mean_loss:.4})");
        let what = match streak.skipped.len() {
            0 => far,
            skipped if skipped == num_steps => "were not taken".to_owned(),
            _ => format!("were not taken or {far}"),
        };
        reporter.emit(TrainEvent::Notice(&format!(
            "guard: {num_steps} steps in a row {what}; back from step {from} to {}, {rows}",
            path.shown()
        )));
        Ok(())
    }

    /// The report of a step that the guard skipped, by its numbers and the mean loss before it.
    fn skipped_step(&self, unread: Unread<B>, numbers: StepNumbers, mean_loss: f32) -> Result<SkippedStep, TrainError> {
        let documents = match &self.group {
            None => unread.documents,
            // A rank knows only the documents of its own rows; rank 0, which writes the report, reads all rows again.
            Some(_) if self.writes() => {
                let rows = unread.num_rows as usize;
                self.stage.loader.batch(unread.first_sample, rows)?.documents
            }
            Some(_) => Vec::new(),
        };
        let documents = documents.into_iter();
        let documents = documents.filter(|document| *document != PAD_DOCUMENT).collect::<BTreeSet<_>>();
        Ok(SkippedStep {
            step: unread.step,
            loss: f64::from(numbers.loss),
            grad_norm: f64::from(numbers.grad_norm),
            mean_loss: f64::from(mean_loss),
            first_row: unread.first_sample,
            num_rows: unread.num_rows,
            num_documents: documents.len(),
            documents: documents.into_iter().take(MAX_NAMED_DOCUMENTS).collect(),
            grad_norms: unread.norms,
        })
    }
}

/// Multiplies all parameters by a factor, for [`FaultInjection`].
pub(super) struct Scaled(pub(super) f64);

impl<B: TrainBackend> ModuleMapper<B> for Scaled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| Tensor::from_inner(tensor.inner() * self.0).require_grad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_are_read_before_they_look_like_a_device_that_hangs() {
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
