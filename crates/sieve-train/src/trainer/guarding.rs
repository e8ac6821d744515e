//! The host's part of the guard: reports skipped steps, and goes back to a checkpoint after too many bad ones.
use super::Trainer;
use super::guard_log::{MAX_UNREAD, Streak, Unread, Verdict};
use super::reporter::Reporter;
use super::stage::StageState;
use crate::guard::StepNumbers;
use crate::{SkippedStep, TrainError, TrainEvent};
use sieve_core::ShownPath;
use sieve_data::PAD_DOCUMENT;
use sieve_hf::Checkpoint;
use sieve_ops::TrainBackend;
use std::collections::BTreeSet;
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
        self.checkpoints.warn_unsaved(reporter);
        let (to, times) = self.guard_log.returns;
        let path = match self.checkpoints.last {
            Some(step) if !(step == to && times >= MAX_REWINDS) => self.checkpoints.last_path(),
            _ => None,
        };
        let StepNumbers { loss, grad_norm, .. } = numbers;
        let Some(path) = path else {
            let last = match self.checkpoints.last_path() {
                Some(path) => format!("the last checkpoint, {}, is untouched", path.shown()),
                None => "there is no checkpoint yet".to_owned(),
            };
            return Err(TrainError::Diverged(format!(
                "step {}: the loss is {loss} (its mean was {mean_loss}), the gradient norm {grad_norm}: training \
                 diverged; {last}\n  \
                 hint: start a new run (--out) with a lower optimizer.lr (now {:?}; the rate of this step is {lr:.2e}) \
                 or more lr_scheduler.warmup_steps",
                self.progress.step, self.recipe.optimizer.lr
            )));
        };
        let checkpoint = Checkpoint::open(&path)?;
        let (from, index, next_sample) = (self.progress.step, self.stage.stage.index, self.progress.next_sample);
        let stage = self.recipe.stage_of_step(checkpoint.state.step as usize);
        let same_stage = stage.index == index;
        if !same_stage {
            self.stage = StageState::new(&self.recipe, stage, &self.data, self.share())?;
        }
        let fresh_optimizer = false;
        self.restore(&checkpoint, fresh_optimizer)?;
        let first_skipped = self.progress.next_sample;
        if same_stage {
            self.progress.next_sample = next_sample;
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
        let times = if log.returns.0 == self.progress.step { log.returns.1 } else { 0 };
        log.returns = (self.progress.step, times + 1);
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
