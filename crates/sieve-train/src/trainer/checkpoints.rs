//! Where a run's checkpoints are and go, and which writes failed.
use super::reporter::Reporter;
use super::writer::CheckpointWriter;
use crate::origin::Begun;
use crate::run_folder::rename_aside;
use crate::tries::Tries;
use crate::{RunFolder, TrainError, TrainEvent};
use sieve_core::ShownPath;
use sieve_hf::list_checkpoints;
use std::fs;
use std::path::{Path, PathBuf};

/// The checkpoints of a run: the last one, the one that is being written, and the failed ones.
pub(super) struct Checkpoints {
    /// The run's folder.
    pub(super) folder: RunFolder,
    /// The checkpoint of another folder that this process begins with.
    pub(super) begun: Option<Begun>,
    /// Step of the last checkpoint of this run.
    pub(super) last: Option<u64>,
    /// Folder to which the last checkpoint was written.
    pub(super) last_folder: PathBuf,
    pub(super) writer: CheckpointWriter,
    /// Whether a checkpoint must be written. It waits until a streak of bad steps is over, because the guard goes back
    /// to the last checkpoint, which must hold no bad step.
    pub(super) is_due: bool,
    pub(super) tries: Tries,
    /// The second place for the last checkpoint.
    pub(super) fallback: Fallback,
    /// Step and error of a failed checkpoint that was not reported yet, if there is one.
    pub(super) problem: Option<(u64, String)>,
}

/// The folder for the last checkpoint of a process when the run's own folder cannot be written to.
#[derive(Debug)]
pub(super) enum Fallback {
    /// There is none.
    None,
    /// The next checkpoint goes into the run's own folder.
    Waiting(PathBuf),
    /// The next checkpoint goes into this folder.
    Next(PathBuf),
}

impl Fallback {
    /// Exchanges the two folders, if there are two. Returns whether the next checkpoint goes into this one.
    pub(super) fn alternate(&mut self) -> bool {
        *self = match std::mem::replace(self, Self::None) {
            Self::None => Self::None,
            Self::Waiting(folder) => Self::Next(folder),
            Self::Next(folder) => Self::Waiting(folder),
        };
        matches!(self, Self::Next(_))
    }
}

impl Checkpoints {
    /// The checkpoints of a run in `folder` that has none yet.
    pub(super) fn new(folder: RunFolder) -> Self {
        Self {
            begun: None,
            last: None,
            last_folder: folder.checkpoint_path(),
            writer: CheckpointWriter::default(),
            is_due: false,
            tries: Tries::default(),
            fallback: Fallback::None,
            problem: None,
            folder,
        }
    }

    /// The folder into which the next checkpoint is written.
    pub(super) fn next_folder(&self) -> PathBuf {
        match &self.fallback {
            Fallback::Next(folder) => folder.clone(),
            Fallback::None | Fallback::Waiting(_) => self.folder.checkpoint_path(),
        }
    }

    /// Path of the last checkpoint of this run.
    pub(super) fn last_path(&self) -> Option<PathBuf> {
        let step = self.last?;
        Some(self.last_folder.join(format!("step-{step}")))
    }

    /// Whether a failed checkpoint must be tried again now.
    pub(super) fn must_retry(&self) -> bool {
        self.tries.is_due() && self.writer.step().is_none()
    }

    /// Whether this process has written its files of the checkpoint that is being written.
    pub(super) fn has_written(&self) -> bool {
        self.writer.step().is_some() && self.writer.is_done()
    }

    /// Whether enough checkpoints failed to end the run.
    pub(super) fn give_up(&self) -> bool {
        self.tries.num_failed >= self.tries.limits.max_failures
    }

    /// Records that the checkpoint of a step could not be written. All ranks call it.
    pub(super) fn note_failure(&mut self, step: u64, problem: String) {
        self.tries.fail();
        self.problem = Some((step, problem));
    }

    /// Reports a checkpoint that failed, and whether training continues.
    pub(super) fn warn_unsaved(&mut self, reporter: &mut Reporter<'_>) {
        if let Some((step, problem)) = self.problem.take() {
            let (failed, most) = (self.tries.num_failed, self.tries.limits.max_failures);
            let next = if self.give_up() {
                "the run stops".to_owned()
            } else {
                "training continues, and soon tries again".to_owned()
            };
            reporter.emit(TrainEvent::Warning(&format!(
                "warning: no checkpoint at step {step}: {problem}\n  {next} (failure {failed} of {most})"
            )));
        }
    }

    /// Checkpoints of another continuation of a run that is at `step`: they have a later step, or have this step and
    /// are not the one that this process resumed from.
    pub(super) fn others(&self, step: u64) -> Result<Vec<(u64, PathBuf)>, TrainError> {
        let mut all = list_checkpoints(&self.folder.checkpoint_path())?;
        all.retain(|(other, _)| *other >= step && self.last != Some(*other));
        Ok(all)
    }

    /// Removes half-written checkpoints of a killed process. Renames checkpoints of another continuation: otherwise a
    /// later resume would take them for this continuation's.
    pub(super) fn tidy(&self, step: u64, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        for (step, path) in self.others(step)? {
            let aside = rename_aside(&path, "aside")?;
            reporter.emit(TrainEvent::Notice(&format!(
                "note: step-{step} belongs to another continuation; it is kept as {}",
                aside.shown()
            )));
        }
        remove_half_written(&self.folder.checkpoint_path())
    }
}

/// Removes half-written checkpoints.
pub(super) fn remove_half_written(folder: &Path) -> Result<(), TrainError> {
    let Ok(entries) = fs::read_dir(folder) else {
        // A run without a checkpoint has no such folder.
        return Ok(());
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("step-") && name.ends_with(".tmp") {
            let path = entry.path();
            fs::remove_dir_all(&path).map_err(TrainError::io("removing", &path))?;
        }
    }
    Ok(())
}
