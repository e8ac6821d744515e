//! The steps of a run: rows, an update, and what is read, reported, validated and saved after it.
use super::Trainer;
use super::clock::Clock;
use super::guard_log::Verdict;
use super::peak::PeakWatch;
use super::reporter::Reporter;
use crate::device_batch::{num_labels_of_part, num_tokens_of_part};
use crate::group::Agreement;
use crate::{AttentionStatistics, Group, IndexerFit, StepReport, TrainError, TrainEvent, TrainSummary};
use sieve_comm::Work;
use sieve_data::{Batch, Prefetch, ShardCheck};
use sieve_ops::TrainBackend;
use std::sync::atomic::AtomicBool;

/// What one pass over the steps keeps from step to step.
struct Pace {
    /// The stage's batches; `None` while the stage changes.
    batches: Option<Prefetch>,
    clock: Clock,
    watch: PeakWatch,
    /// Whether the peak memory of the stage's first steps is not reported yet.
    peak_is_new: bool,
    /// Whether the next step is the first one of this process.
    is_first: bool,
    /// Whether the memory that no tensor has then goes back to the device behind the next step: the first one of a
    /// stage.
    releases_memory: bool,
}

/// A step that is about to be taken.
#[doc(hidden)]
#[derive(Debug)]
pub struct StepAhead {
    /// Its micro-batches.
    pub batches: Vec<Batch>,
    /// Its learning rate, by the schedule.
    pub lr: f64,
    /// What a label's loss counts: 1, unless a test falsifies it.
    pub loss_weight: f64,
    /// By what the weights are multiplied before the step: 1, unless a test falsifies it.
    pub weights: f64,
}

impl<B: TrainBackend> Trainer<B> {
    /// Trains step by step, until all steps are done or a stop is requested.
    pub(super) fn steps(
        &mut self,
        stop: &AtomicBool,
        reporter: &mut Reporter<'_>,
        summary: &mut TrainSummary,
    ) -> Result<(), TrainError> {
        let num_steps = self.recipe.training.steps as u64;
        let mut pace = Pace {
            batches: Some(self.stage.batches(self.progress.next_sample)?),
            clock: Clock::start(),
            watch: PeakWatch::start(self.machine.memory),
            peak_is_new: true,
            is_first: true,
            releases_memory: true,
        };
        self.checkpoints.is_due = false;
        self.release_unused_memory()?;
        // Ranks of a group agree on the step at which they stop.
        let stops_alone = self.ranks.is_alone();
        while self.progress.step < num_steps && !(stops_alone && self.is_asked_to_stop(stop)) {
            let is_usual = !self.change_stage(&mut pace, reporter)? && !pace.is_first && !self.guard_log.is_slow();
            // A first step compiles kernels, so other ranks wait longer for it.
            self.ranks.set_work(if is_usual { Work::Step } else { Work::Long });
            let mut step = self.step_ahead(&mut pace)?;
            self.falsify(&mut step)?;
            let agreed = self.agree(&step.batches, stop)?;
            self.checkpoints.writer.note_all_written(agreed.all_written);
            self.checkpoints.is_due |= agreed.saves;
            if agreed.stops {
                self.ranks.set_work(Work::Long);
                break;
            }
            self.take_step(&step, agreed, reporter)?;
            self.ranks.set_work(Work::Long);
            if std::mem::take(&mut pace.releases_memory) {
                self.release_unused_memory()?;
            }
            pace.clock.step(self.stage.recipe.training.tokens_per_step() as u64);
            pace.watch.step();
            if self.went_back(agreed, &mut pace, reporter)? {
                continue;
            }
            self.report_step(&step.batches, &mut pace, reporter, summary)?;
            self.save_if_due(&mut pace.clock, reporter)?;
            reporter.report_writes();
            if self.checkpoints.give_up() {
                break;
            }
            self.shard_checks.iter().try_for_each(ShardCheck::result)?;
        }
        let peak_is_new = pace.peak_is_new;
        drop(pace.batches);
        // A signal may have ended the loop while losses were unread; the guard may still go back to a checkpoint now.
        self.check_steps(true, reporter)?; // reads now
        if peak_is_new {
            self.report_peak(reporter)?;
        }
        self.finish_leaves()
    }

    /// Enters the stage of the next step if it is not the present one. Returns whether it is another.
    fn change_stage(&mut self, pace: &mut Pace, reporter: &mut Reporter<'_>) -> Result<bool, TrainError> {
        let Some(next) = self.next_stage() else {
            return Ok(false);
        };
        pace.batches = None;
        let notes = pace.clock.pause(|| self.enter_or_save(next, reporter))?;
        self.release_unused_memory()?;
        pace.releases_memory = true;
        pace.watch.restart();
        pace.peak_is_new = true;
        reporter.emit(TrainEvent::Notice(&self.stage_line()));
        notes.iter().for_each(|note| reporter.emit(TrainEvent::Notice(note)));
        pace.batches = Some(self.stage.batches(self.progress.next_sample)?);
        Ok(true)
    }

    /// Takes the step, or passes over it if no rank has a row with a label.
    fn take_step(
        &mut self,
        step: &StepAhead,
        agreed: Agreement,
        reporter: &mut Reporter<'_>,
    ) -> Result<(), TrainError> {
        if agreed.num_labels == 0 {
            return self.pass_over(reporter);
        }
        // Every `training.guard_replay` steps, checks the devices for silent data corruption.
        self.replay(reporter)?;
        self.train_step(step, [agreed.num_labels, agreed.num_tokens], reporter)?;
        self.progress.unlabelled.num_rows_in_a_row = 0;
        Ok(())
    }

    /// Reads the losses that must be known now. Returns whether the guard has gone back to a checkpoint.
    fn went_back(
        &mut self,
        agreed: Agreement,
        pace: &mut Pace,
        reporter: &mut Reporter<'_>,
    ) -> Result<bool, TrainError> {
        let interval = self.recipe.checkpoint.interval as u64;
        let is_last = self.progress.step == self.recipe.training.steps as u64;
        // A failed checkpoint is retried after a pause (`agreed.saves`) and not at each interval.
        let checkpoints = &mut self.checkpoints;
        checkpoints.is_due |=
            (is_last || self.progress.step.is_multiple_of(interval)) && !checkpoints.tries.has_failed();
        // The guard compares a loss with the mean of its stage, so all losses are read before the stage ends.
        let ends_stage = self.next_stage().is_some();
        let must_save = self.checkpoints.is_due;
        let reads =
            self.is_logged(self.progress.step) || must_save || pace.is_first || ends_stage || agreed.is_far_behind;
        let verdict = self.check_steps(reads, reporter)?;
        if std::mem::take(&mut pace.is_first) {
            reporter.emit(TrainEvent::FirstStep);
        }
        if verdict == Verdict::GoOn {
            return Ok(false);
        }
        pace.batches = Some(self.stage.batches(self.progress.next_sample)?);
        pace.clock = Clock::start();
        self.checkpoints.is_due = false;
        Ok(true)
    }

    /// Reports a step that is logged, and validates if it is time.
    fn report_step(
        &mut self,
        batches: &[Batch],
        pace: &mut Pace,
        reporter: &mut Reporter<'_>,
        summary: &mut TrainSummary,
    ) -> Result<(), TrainError> {
        let (is_last, is_logged) =
            (self.progress.step == self.recipe.training.steps as u64, self.is_logged(self.progress.step));
        if is_logged && let Some(report) = self.step_report(batches, &mut pace.clock) {
            reporter.metrics.step(&report);
            reporter.emit(TrainEvent::Step(&report));
            summary.last_step = Some(report);
        }
        // Reading a logged step's loss has waited for the device, so the peak of the watched steps is complete.
        if is_logged && pace.watch.is_over() && std::mem::take(&mut pace.peak_is_new) {
            self.report_peak(reporter)?;
        }
        if is_logged
            && self.ranks.writes()
            && let Some(slow) = self.ranks.group().and_then(Group::slow_rank)
        {
            reporter.emit(TrainEvent::Notice(&slow));
        }
        if is_last || self.progress.step.is_multiple_of(self.recipe.validation.interval as u64) {
            let report = pace.clock.pause(|| self.validate(reporter))?;
            summary.last_validation = report.or(summary.last_validation.take());
        }
        if self.samples_now() {
            pace.clock.pause(|| self.sample(reporter))?;
        }
        Ok(())
    }

    /// Begins a checkpoint that is due, unless the last steps are bad, and ends the one that all ranks have written.
    fn save_if_due(&mut self, clock: &mut Clock, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        if self.checkpoints.is_due && !self.guard_log.in_streak() {
            clock.pause(|| self.start_checkpoint(reporter))?;
            self.checkpoints.is_due = false;
        }
        self.poll_checkpoint(reporter)?;
        self.checkpoints.warn_unsaved(reporter);
        Ok(())
    }

    /// The next step: its micro-batches, and its learning rate.
    fn step_ahead(&self, pace: &mut Pace) -> Result<StepAhead, TrainError> {
        let batches = pace.batches.as_mut().expect("the stage has begun");
        let mut kinds = self.stage.shape.attentions().into_iter();
        let has_indexer = kinds.any(|(attention, _)| attention.as_kind().indexer().is_some());
        let taken = (0..self.stage.micro_batches).map(|_| {
            let mut batch = batches.next().expect("the plan has no end")?;
            // Tokens that no label depends on become documents of one token each. Such a query attends only to itself,
            // with a divergence of 0, so it adds nothing to an indexer's loss.
            if has_indexer {
                batch.part_padding();
            }
            Ok(batch)
        });
        let lr = self.recipe.learning_rate(self.progress.step as usize);
        Ok(StepAhead { batches: taken.collect::<Result<_, TrainError>>()?, lr, loss_weight: 1.0, weights: 1.0 })
    }

    /// Exchanges what all ranks must know before the next step.
    fn agree(&self, batches: &[Batch], stop: &AtomicBool) -> Result<Agreement, TrainError> {
        let [num_labels, num_tokens] = self.counts(batches);
        let own = Agreement {
            num_labels,
            num_tokens,
            // A process without others checks before it reads the rows.
            stops: !self.ranks.is_alone() && self.is_asked_to_stop(stop),
            is_far_behind: self.guard_log.is_far_behind(),
            all_written: self.checkpoints.has_written(),
            saves: self.ranks.writes() && self.checkpoints.must_retry(),
        };
        self.ranks.agree(self.progress.step, self.guard_log.loss_mean.state().mean_loss, own)
    }

    /// Labels, and tokens besides padding, in this process's part of the batches (context parallelism: of each row).
    fn counts(&self, batches: &[Batch]) -> [usize; 2] {
        let degree = self.recipe.parallelism.context_parallel_degree;
        let part = [self.share().rank % degree, degree];
        [num_labels_of_part, num_tokens_of_part].map(|count| batches.iter().map(|batch| count(batch, part)).sum())
    }

    /// The report of the last step; `None` if it was skipped, which [`TrainEvent::Skipped`] has reported.
    fn step_report(&self, batches: &[Batch], clock: &mut Clock) -> Option<StepReport> {
        let numbers = self.guard_log.last_taken(self.progress.step)?;
        let (lr, result) = self.learner.last_step.as_ref()?;
        let last = batches.last()?;
        let shape = &self.stage.shape;
        let attention = AttentionStatistics {
            indexer: IndexerFit::of_layers(&result.indexers),
            ..AttentionStatistics::of_model(
                shape,
                self.recipe.training.dense_steps,
                last,
                &result.expire,
                &result.clamped_scores,
            )
        };
        let labels: usize = batches.iter().map(Batch::num_labels).sum();
        let tokens: usize = batches.iter().map(|batch| batch.tokens.len()).sum();
        let unlabelled = 1.0 - labels as f64 / tokens.max(1) as f64;
        // All FLOPs are per token; tokens without a label save part of the head's.
        let saved = unlabelled * shape.unlabelled_training_flops();
        // `keys / density` is the mean number of causal keys.
        let keys = attention.mean_active_keys;
        let executed = shape.flops_per_token(keys, keys / attention.density).in_steps(&self.recipe.training) - saved;
        let seq_len = self.stage.recipe.training.seq_len;
        let dense = shape.dense_flops_per_token(seq_len).training() - saved;
        let (tokens_per_second, step_seconds) = clock.restart();
        let device_rate = tokens_per_second / self.share().size as f64;
        let percent = |flops: f64| self.machine.peak_flops.map(|peak| 100.0 * flops * device_rate / peak);
        let (memory_bytes, memory_total_bytes) = self.machine.memory.read();
        let num_steps = self.recipe.training.steps as u64;
        Some(StepReport {
            step: self.progress.step,
            num_steps,
            loss: f64::from(numbers.loss),
            grad_norm: f64::from(numbers.grad_norm),
            lr: *lr,
            tokens_seen: self.progress.tokens_seen,
            tokens_per_second,
            tflops: executed * device_rate / 1e12,
            mfu_percent: percent(executed),
            dense_mfu_percent: percent(dense),
            memory_bytes,
            memory_total_bytes,
            eta_seconds: (num_steps - self.progress.step) as f64 * step_seconds,
            attention,
        })
    }
}
