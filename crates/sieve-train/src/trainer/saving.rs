//! Writes a run's recipe and checkpoints, and removes outdated checkpoints.
#[cfg(doc)]
use super::checkpoints::Checkpoints;
use super::checkpoints::{Fallback, remove_half_written};
use super::faults::Moment;
use super::reporter::Reporter;
use super::writer::{Shard, Written};
use super::{Trainer, best_checkpoint};
use crate::metrics::drop_later_lines;
use crate::optimizer::ReplicaSums;
use crate::run_folder::rename_aside;
use crate::{Origin, RunFolder, TrainError, TrainEvent};
use sieve_core::recipe::CheckpointSection;
use sieve_core::{MODEL_LINE, Recipe, ShownPath};
use sieve_files::write_atomically;
use sieve_hf::{Checkpoint, CheckpointFiles, CheckpointState, FORMAT_VERSION, list_checkpoints};
use sieve_ops::TrainBackend;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest pause between two tries to write the last checkpoint.
const LONGEST_LAST_PAUSE: Duration = Duration::from_secs(60);

impl<B: TrainBackend> Trainer<B> {
    /// Takes a snapshot of the state and begins to write it, unless the folder has it already. Waits until the previous
    /// checkpoint is on disk or has failed. Each rank writes its shards. If a write fails, training continues on all
    /// ranks: see [`Checkpoints::warn_unsaved`].
    ///
    /// # Errors
    /// A rank or a device is lost; another process has taken the output folder.
    pub(super) fn start_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        if [self.checkpoints.last, self.checkpoints.writer.step()].contains(&Some(self.progress.step)) {
            return Ok(());
        }
        self.finish_checkpoint(reporter)?;
        // Reports a failure of the previous checkpoint before this one's can replace it.
        self.checkpoints.warn_unsaved(reporter);
        self.finish_leaves()?;
        let folder = self.checkpoints.next_folder();
        let begun = if self.ranks.writes() { self.begin_folder(&folder, reporter) } else { Ok(()) };
        let problem = match begun {
            Err(error @ TrainError::FolderBusy(_)) => return Err(error),
            begun => begun.err().map(|error| error.to_string()),
        };
        // The other ranks write into the folder that rank 0 has created.
        if let Some(problem) = self.ranks.problem_of_any(problem)? {
            self.checkpoints.note_failure(self.progress.step, problem);
            return Ok(());
        }
        let (recipe_toml, tokenizer_json) = (self.recipe.to_toml()?, self.data.tokenizer_json.clone());
        let distance = self.distance(self.progress.step);
        let snapshot = self.learner.optimizer.snapshot(self.model(), &self.machine.device, distance);
        let (step, disturbance) = (self.progress.step, self.machine.disturbance.clone());
        let files = move || {
            disturbance.at(step, Moment::Writing);
            let (model, optimizer, replica) = snapshot.read()?;
            let files = CheckpointFiles { model, optimizer, recipe_toml, tokenizer_json };
            Ok((files, replica))
        };
        let share = self.share();
        let state = CheckpointState {
            format_version: FORMAT_VERSION,
            step: self.progress.step,
            next_sample: self.progress.next_sample,
            tokens_seen: self.progress.tokens_seen,
            guard: Some(self.guard_log.loss_mean.state()),
            vocab_size: self.stage.shape.vocab_size,
            data_fingerprint: self.data.fingerprint(),
            data_tokens: self.data.tokens(),
            num_threads: rayon::current_num_threads(),
            sieve_version: env!("CARGO_PKG_VERSION").to_owned(),
            num_shards: share.group.size(),
            checksums: Default::default(),
        };
        self.checkpoints.writer.start(&folder, state, share, files)
    }

    /// What is trained, on one line ([`model_line`](sieve_core::model_line)).
    pub fn model_line(&self) -> &str {
        &self.lines.model
    }

    /// Writes the recipe into the run's folder, with [`model_line`](Self::model_line) as a comment on its first line.
    /// It is the first file of a run, and a run without it cannot be resumed.
    /// Also writes `origin.json` (the checkpoint that the run began with), until the run has a checkpoint of its own.
    /// [`run`](Self::run) writes it too; a caller that writes other files into the folder calls this first.
    ///
    /// # Errors
    /// Any failure of the file system.
    pub fn write_config(&self) -> Result<(), TrainError> {
        if !self.ranks.writes() {
            return Ok(());
        }
        if self.checkpoints.last.is_none() {
            Origin::note(self.checkpoints.begun.as_ref(), &self.checkpoints.folder)?;
        }
        let text = format!("{MODEL_LINE}{}\n{}", self.lines.model, self.recipe.to_toml()?);
        Ok(write_atomically(&self.checkpoints.folder.config_path(), text.as_bytes())?)
    }

    /// Prepares the folder of the next checkpoint: makes the run's folder again if it was removed, opens
    /// `metrics.jsonl` again if it was moved, moves an earlier `step-N` out of the way in the folder of
    /// `--checkpoint-fallback`, and begins the checkpoint.
    ///
    /// # Errors
    /// The disk has too little room, or refuses a file.
    fn begin_folder(&mut self, folder: &Path, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        if self.checkpoints.folder.regain()? {
            self.write_config()?;
            reporter.metrics.reopen();
            let path = self.checkpoints.folder.path().shown();
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: {path} was removed while the run writes to it; it is recreated without its earlier contents"
            )));
        } else if reporter.metrics.is_elsewhere() {
            reporter.metrics.reopen();
            let path = self.checkpoints.folder.metrics_path();
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: {} was moved, removed or replaced while the run writes to it; the lines since the last \
                 checkpoint are in the old file, later ones go to the new one",
                path.shown()
            )));
        }
        fs::create_dir_all(folder).map_err(TrainError::io("creating", folder))?;
        let taken = folder.join(format!("step-{}", self.progress.step));
        if matches!(self.checkpoints.fallback, Fallback::Next(_)) && taken.exists() {
            rename_aside(&taken, "aside")?;
        }
        let indexers_alone = self.recipe.training.trains_indexers_alone();
        let needed = self.learner.optimizer.checkpoint_bytes(indexers_alone);
        let free = sieve_files::free_bytes(folder);
        if let Some(free) = free.filter(|free| *free < needed) {
            // Written until the disk is full, a large one would take minutes at each try.
            let shown = |bytes: u64| match bytes >> 30 {
                0 => format!("{} KiB", bytes.div_ceil(1 << 10)),
                _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
            };
            return Err(TrainError::refused(
                format!("it takes {}, and {} are free in {}", shown(needed), shown(free), folder.shown()),
                "make room, or lower checkpoint.keep_latest_k: the one before stays until the new one is written",
            ));
        }
        Ok(Checkpoint::begin(folder, self.progress.step)?)
    }

    /// Waits until all ranks have written the pending checkpoint, gives it its final name, reports it, and removes
    /// outdated checkpoints.
    ///
    /// # Errors
    /// A rank or a device is lost; ranks compute with different weights.
    pub(super) fn finish_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let Some(Written { folder, state, shard }) = self.finish_writing()? else {
            return Ok(());
        };
        let step = state.step;
        self.machine.disturbance.at(step, Moment::Naming);
        let writes = self.ranks.writes();
        let discard = || {
            if writes {
                Checkpoint::discard(&folder, step);
            }
        };
        let all = self.gathered(shard).inspect_err(|_| discard())?;
        let name = |(rank, shard): (usize, Result<Shard, String>)| {
            shard.map_err(|problem| if self.ranks.is_alone() { problem } else { format!("rank {rank}: {problem}") })
        };
        let shards = match all.into_iter().enumerate().map(name).collect::<Result<Vec<_>, _>>() {
            Ok(shards) => shards,
            Err(problem) => {
                discard();
                self.checkpoints.note_failure(step, problem);
                return Ok(());
            }
        };
        if !self.ranks.is_alone() {
            let sums = shards.iter().map(|shard| shard.replica.clone());
            if let Some([one, other]) = ReplicaSums::differ(&sums.collect::<Vec<_>>(), self.distance(step)) {
                discard();
                return Err(TrainError::refused(
                    format!(
                        "the weights of ranks {one} and {other} differ at step {step}: bad memory of one of their \
                         devices, or a fault of Sieve's; no checkpoint of this step is written"
                    ),
                    "--resume continues from the checkpoint before",
                ));
            }
        }
        let checksums = shards.into_iter().flat_map(|shard| shard.files).collect();
        let mut problem = None;
        if writes {
            match Checkpoint::publish(&folder, state, checksums) {
                Ok(path) => reporter.emit(TrainEvent::Checkpoint(&path)),
                Err(error) => {
                    discard();
                    problem = Some(error.to_string());
                }
            }
        }
        // All ranks learn from rank 0 whether the checkpoint has its final name.
        if let Some(problem) = self.ranks.problem_of_any(problem)? {
            self.checkpoints.note_failure(step, problem);
            return Ok(());
        }
        self.checkpoints.tries.succeed();
        self.checkpoints.last = Some(step);
        self.checkpoints.last_folder = folder;
        if writes && let Err(error) = prune(&self.checkpoints.folder, &self.recipe) {
            reporter.emit(TrainEvent::Warning(&format!("warning: old checkpoints stay: {error}")));
        }
        Ok(())
    }

    /// Waits for this process's files of the pending checkpoint and drops the checkpoint. It cannot be finished after
    /// an error of this rank alone: the other ranks are in another collective, and would take the messages that finish
    /// a checkpoint for its messages. Errors that occur on all ranks finish the checkpoint before they return.
    pub(super) fn discard_checkpoint(&mut self) -> Result<(), TrainError> {
        if let Some(Written { folder, state, .. }) = self.finish_writing()?
            && self.ranks.writes()
        {
            Checkpoint::discard(&folder, state.step);
        }
        Ok(())
    }

    /// Writes the last state of the run. Failures are retried for [`WriteLimits::last`](crate::WriteLimits::last),
    /// first at once and then after pauses, alternating between the run's folder and the fallback folder if there is
    /// one.
    ///
    /// # Errors
    /// It cannot be written; a rank or a device is lost.
    pub(super) fn save_last(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let limits = self.checkpoints.tries.limits;
        let (since, mut pause) = (Instant::now(), Duration::ZERO);
        loop {
            self.start_checkpoint(reporter)?;
            self.finish_checkpoint(reporter)?;
            let Some((step, problem)) = self.checkpoints.problem.take() else {
                return Ok(());
            };
            let goes_to_fallback = self.checkpoints.fallback.alternate();
            let left = limits.last.saturating_sub(since.elapsed());
            // The last pause is shorter, so that a try ends it. Rank 0's clock decides for all ranks.
            let (is_over, wait) = self.gathered((left.is_zero(), pause.min(left)))?[0];
            let next = match (goes_to_fallback, is_over) {
                (true, _) => "it goes to the folder of --checkpoint-fallback".to_owned(),
                (false, false) if wait.is_zero() => "the weights are kept in memory, the next try is now".to_owned(),
                (false, false) => {
                    format!("the weights are kept in memory, the next try is in {:.0} s", wait.as_secs_f64().ceil())
                }
                (false, true) => {
                    let last = match self.checkpoints.last_path() {
                        Some(path) => format!("the last one is {}", path.shown()),
                        None => "there is no earlier one".to_owned(),
                    };
                    return Err(TrainError::Unsaved(format!(
                        "no checkpoint of step {step} can be written: {problem}\n  hint: {last}; make room or repair \
                         the file system, then the same command with --resume=auto continues; \
                         --checkpoint-fallback DIR names a second place for the last one"
                    )));
                }
            };
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: the last checkpoint, of step {step}, could not be written: {problem}\n  {next}"
            )));
            if !goes_to_fallback {
                let until = Instant::now() + wait;
                while Instant::now() < until {
                    self.ranks.tick();
                    std::thread::sleep(Duration::from_millis(100));
                }
                pause = (2 * pause).clamp(limits.first_pause, LONGEST_LAST_PAUSE);
            }
        }
    }

    /// Waits until this process has written its files of the pending checkpoint; `None` if no checkpoint is pending.
    fn finish_writing(&mut self) -> Result<Option<Written>, TrainError> {
        let ranks = &self.ranks;
        let written = self.checkpoints.writer.finish(&|| ranks.tick());
        // If a rank is lost, rank 0 has removed the folder, so writing into it failed. Then the error to return is that
        // the rank is lost.
        written.or_else(|error| {
            ranks.check()?;
            Err(error)
        })
    }

    /// Rank r compares its copy of the weights with the pieces of rank r + distance. The distance changes from
    /// checkpoint to checkpoint, so that in time every pair of ranks is compared.
    fn distance(&self, step: u64) -> usize {
        let share = self.share();
        // With ZeRO-3 only the ranks of one place, one in each replica, have the same piece to compare.
        let (num_ranks, apart) =
            if share.keeps_whole { (share.size, 1) } else { (share.group.num_replicas(), share.group.size()) };
        let others = num_ranks.saturating_sub(1).max(1) as u64;
        let interval = self.recipe.checkpoint.interval.max(1) as u64;
        apart * (1 + (step / interval % others) as usize)
    }

    /// Calls [`finish_checkpoint`](Self::finish_checkpoint) if all processes have written their files, else nothing.
    ///
    /// # Errors
    /// The errors of [`finish_checkpoint`](Self::finish_checkpoint).
    pub(super) fn poll_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let is_done = if self.ranks.is_alone() {
            self.checkpoints.writer.is_done()
        } else {
            self.checkpoints.writer.is_written_by_all()
        };
        if is_done { self.finish_checkpoint(reporter) } else { Ok(()) }
    }
}

/// Cleans up after a run that was killed when its last checkpoint existed: removes outdated checkpoints, half-written
/// files and a half-written line of metrics.
///
/// # Errors
/// Any failure of the file system.
pub fn tidy_finished(folder: &RunFolder, recipe: &Recipe) -> Result<(), TrainError> {
    let metrics = folder.metrics_path();
    if metrics.exists() {
        drop_later_lines(&metrics, u64::MAX, None)?;
    }
    remove_half_written(&folder.checkpoint_path())?;
    prune(folder, recipe)
}

/// Removes the checkpoints that the recipe does not keep ([`outdated`]).
fn prune(run: &RunFolder, recipe: &Recipe) -> Result<(), TrainError> {
    let folder = &run.checkpoint_path();
    if recipe.checkpoint.keep_latest_k == 0 {
        return Ok(());
    }
    let best = if recipe.checkpoint.keep_best { best_checkpoint(run)?.map(|best| best.step) } else { None };
    let all = list_checkpoints(folder)?;
    let steps: Vec<u64> = all.iter().map(|(step, _)| *step).collect();
    let outdated = outdated(&steps, &recipe.checkpoint, best);
    for (step, path) in all.into_iter().filter(|(step, _)| outdated.contains(step)) {
        // Renamed first, so that a kill in the middle leaves no incomplete folder under a checkpoint's name.
        let temporary = folder.join(format!("step-{step}.tmp"));
        fs::rename(&path, &temporary)
            .and_then(|()| fs::remove_dir_all(&temporary))
            .map_err(TrainError::io("removing", &path))?;
    }
    Ok(())
}

/// Of the steps of checkpoints, in order, those that are not kept: all but the latest `keep_latest_k` (0 keeps all),
/// the one before the first step (`at_start`), every `keep_every` steps, and the one with the lowest loss, `best`. The
/// latest count as such whether or not they are kept for another reason, too.
fn outdated(steps: &[u64], kept: &CheckpointSection, best: Option<u64>) -> Vec<u64> {
    let keep_every = kept.keep_every as u64;
    let always = |step: u64| match step {
        step if best == Some(step) => true,
        0 => kept.at_start,
        step => keep_every > 0 && step.is_multiple_of(keep_every),
    };
    let num_earlier = if kept.keep_latest_k == 0 { 0 } else { steps.len().saturating_sub(kept.keep_latest_k) };
    steps[..num_earlier].iter().copied().filter(|step| !always(*step)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_checkpoints_count_also_where_they_are_kept_for_another_reason() {
        let kept = |keep_latest_k, keep_every| CheckpointSection { keep_latest_k, keep_every, ..Default::default() };
        let steps = [0, 10, 20, 30, 40];
        assert_eq!(outdated(&steps, &kept(1, 0), Some(40)), [0, 10, 20, 30]);
        assert_eq!(outdated(&steps, &kept(1, 0), Some(20)), [0, 10, 30]);
        assert_eq!(outdated(&steps, &kept(1, 20), None), [0, 10, 30]);
        assert_eq!(outdated(&steps, &kept(2, 0), None), [0, 10, 20]);
        let at_start = CheckpointSection { at_start: true, ..kept(2, 40) };
        assert_eq!(outdated(&steps, &at_start, Some(10)), [20]);
        assert!(outdated(&steps, &kept(0, 0), None).is_empty() && outdated(&steps, &kept(9, 0), None).is_empty());
    }
}
