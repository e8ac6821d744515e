//! The host's part of the guard: reports skipped steps, and goes back to a checkpoint after too many bad ones.
use super::Trainer;
use super::guard_log::{MAX_UNREAD, Returns, Streak, Unread, Verdict};
use super::reporter::Reporter;
use super::stage::StageState;
use crate::guard::StepNumbers;
use crate::{SkippedStep, TrainError, TrainEvent};
use sieve_core::ShownPath;
use sieve_data::PAD_DOCUMENT;
use sieve_hf::Checkpoint;
use sieve_ops::TrainBackend;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

/// After a skipped step, this many steps are read one by one while their gradients exist: if one of them is skipped
/// too, its gradient norms by layer are reported.
const WATCHED_STEPS: u64 = 100;
/// The most documents of a skipped step that a report names.
const MAX_NAMED_DOCUMENTS: usize = 16;
/// A run ends when it would go back to one checkpoint for the third time.
const MAX_REWINDS: u32 = 2;

impl<B: TrainBackend> Trainer<B> {
    /// Counts a step whose rows hold no label on any rank, and therefore change no weight.
    ///
    /// # Errors
    /// As many consecutive rows as an epoch has held no label.
    pub(super) fn pass_over(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let (first, num_rows) = (self.progress.next_sample, self.stage.recipe.training.global_batch_size as u64);
        self.progress.unlabelled.num_steps += 1;
        self.progress.unlabelled.num_rows_in_a_row += num_rows;
        if self.progress.unlabelled.num_rows_in_a_row >= self.stage.loader.samples_per_epoch() {
            // All ranks return this error at this step, so all of them can finish the checkpoint.
            self.finish_checkpoint(reporter)?;
            return Err(TrainError::refused(
                format!("step {}: no row of the text holds a token with a label", self.progress.step + 1),
                "documents of one token teach nothing, nor do rows that a prompt or a question of a chat \
                 fills (data.prompt_column, data.messages_column): check data.paths, or raise training.seq_len",
            ));
        }
        self.count_step();
        let count = self.progress.unlabelled.num_steps;
        if count.is_power_of_two() {
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: step {}: rows {first} to {} hold no token with a label and are skipped ({count} such \
                 steps in this process)",
                self.progress.step,
                first + num_rows - 1
            )));
        }
        Ok(())
    }

    /// Advances step, next row and tokens by one step.
    pub(super) fn count_step(&mut self) {
        let training = &self.stage.recipe.training;
        self.progress.step += 1;
        self.progress.next_sample += training.global_batch_size as u64;
        self.progress.tokens_seen += training.tokens_per_step() as u64;
    }

    /// Reads the losses and gradient norms of all unread steps, if `now` is set, a step is watched, or [`MAX_UNREAD`]
    /// steps are unread. After too many bad steps, goes back to the last checkpoint.
    pub(super) fn check_steps(&mut self, now: bool, reporter: &mut Reporter<'_>) -> Result<Verdict, TrainError> {
        let is_watched = self.progress.step <= self.guard_log.watched_until;
        if !(now || is_watched || self.guard_log.unread.len() >= MAX_UNREAD) {
            return Ok(Verdict::GoOn);
        }
        let num_steps = self.guard_log.unread.len();
        while let Some(unread) = self.guard_log.unread.pop_front() {
            let numbers = StepNumbers::read::<B>(&unread.row);
            // If a rank is lost, sums over the ranks are worthless.
            self.ranks.check()?;
            if self.guard_log.unread.is_empty() {
                self.guard_log.pace.catches_up(num_steps, Instant::now());
            }
            let log = &mut self.guard_log;
            let mean_loss = log.loss_mean.state().mean_loss;
            log.last = Some((unread.step, numbers));
            if numbers.is_taken {
                let is_far_above_mean = log.loss_mean.judge(numbers.loss);
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
        self.checkpoints.warn_unsaved(reporter);
        let Some(path) = self.checkpoint_to_go_back_to() else {
            return Err(self.diverged(numbers, mean_loss, lr));
        };
        let from = self.progress.step;
        let rows = self.restore_behind_read_rows(&Checkpoint::open(&path)?)?;
        let streak = self.forget_steps(reporter);
        self.guard_log.returns.count(self.progress.step);
        let loss = numbers.loss;
        let what = streak.in_words(&format!("(the last {loss:.4}, the mean {mean_loss:.4})"));
        reporter.emit(TrainEvent::Notice(&format!(
            "guard: {} steps in a row {what}; back from step {from} to {}, {rows}",
            streak.num_steps,
            path.shown()
        )));
        Ok(())
    }

    /// The last checkpoint; `None` without one, and after [`MAX_REWINDS`] returns to it.
    fn checkpoint_to_go_back_to(&self) -> Option<PathBuf> {
        let Returns { to, times } = self.guard_log.returns;
        let last = self.checkpoints.last?;
        let is_used_up = last == to && times >= MAX_REWINDS;
        self.checkpoints.last_path().filter(|_| !is_used_up)
    }

    /// The error that ends a run which cannot go back.
    fn diverged(&self, StepNumbers { loss, grad_norm, .. }: StepNumbers, mean_loss: f32, lr: f64) -> TrainError {
        let last = match self.checkpoints.last_path() {
            Some(path) => format!("the last checkpoint, {}, is untouched", path.shown()),
            None => "there is no checkpoint yet".to_owned(),
        };
        TrainError::Diverged(format!(
            "step {}: the loss is {loss} (its mean was {mean_loss}), the gradient norm {grad_norm}: training \
             diverged; {last}\n  \
             hint: start a new run (--out) with a lower optimizer.lr (now {:?}; the rate of this step is {lr:.2e}) \
             or more lr_scheduler.warmup_steps",
            self.progress.step, self.recipe.optimizer.lr
        ))
    }

    /// Restores a checkpoint. The next row stays the present one, so that the rows read since the checkpoint are
    /// skipped; a checkpoint of another stage begins with its own next row. Returns which it is, in words.
    fn restore_behind_read_rows(&mut self, checkpoint: &Checkpoint) -> Result<String, TrainError> {
        let next_sample = self.progress.next_sample;
        let stage = self.recipe.stage_of_step(checkpoint.state.step as usize);
        let same_stage = stage.index == self.stage.stage.index;
        if !same_stage {
            self.stage = StageState::new(&self.recipe, stage, &self.data, self.share())?;
        }
        let fresh_optimizer = false;
        self.restore(checkpoint, fresh_optimizer)?;
        if !same_stage {
            return Ok("the rows of the stage before are read again".to_owned());
        }
        let first_skipped = self.progress.next_sample;
        self.progress.next_sample = next_sample;
        Ok(format!("rows {first_skipped} to {} are skipped", next_sample.max(1) - 1))
    }

    /// Drops what is known of the steps after the restored checkpoint, in `metrics.jsonl` too, where only the lines of
    /// the streak's skipped steps are written again. Returns the streak.
    fn forget_steps(&mut self, reporter: &mut Reporter<'_>) -> Streak {
        match self.open_metrics() {
            Ok((metrics, _)) => reporter.metrics = metrics,
            Err(error) => reporter.emit(TrainEvent::Warning(&format!(
                "warning: metrics.jsonl keeps the lines of steps that were taken back: {error}"
            ))),
        }
        let streak = std::mem::take(&mut self.guard_log.streak);
        for skipped in &streak.skipped {
            reporter.metrics.skipped(skipped);
        }
        self.guard_log.unread.clear();
        self.guard_log.last = None;
        streak
    }

    /// The report of a step that the guard skipped, by its numbers and the mean loss before it.
    fn skipped_step(&self, unread: Unread<B>, numbers: StepNumbers, mean_loss: f32) -> Result<SkippedStep, TrainError> {
        let documents = match self.ranks.is_alone() {
            true => unread.documents,
            // A rank knows only the documents of its own rows; rank 0, which writes the report, reads all rows again.
            false if self.ranks.writes() => {
                let rows = unread.num_rows as usize;
                self.stage.loader.batch(unread.first_sample, rows)?.documents
            }
            false => Vec::new(),
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
