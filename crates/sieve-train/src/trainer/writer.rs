//! Checkpoints written beside the training, on a thread of their own.
use crate::TrainError;
use sieve_hf::{Checkpoint, CheckpointError, CheckpointFiles, CheckpointState};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// At most one checkpoint on its way to the disk. Training goes on beside it.
#[derive(Debug, Default)]
pub(super) struct CheckpointWriter {
    job: Option<Job>,
}

#[derive(Debug)]
struct Job {
    step: u64,
    thread: JoinHandle<Result<PathBuf, CheckpointError>>,
}

/// A checkpoint that is on disk.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) step: u64,
    pub(super) path: PathBuf,
}

impl CheckpointWriter {
    /// Begins to read `files` and to write them. The one before must be finished.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(super) fn start(
        &mut self,
        folder: &Path,
        state: CheckpointState,
        files: impl FnOnce() -> Result<CheckpointFiles, String> + Send + 'static,
    ) -> Result<(), TrainError> {
        assert!(self.job.is_none(), "one checkpoint at a time");
        let step = state.step;
        let into = folder.to_owned();
        let thread = std::thread::Builder::new()
            .name("sieve-checkpoint".into())
            .spawn(move || {
                let files = files().map_err(|problem| CheckpointError::Io {
                    action: "reading weights and moments for a checkpoint in",
                    path: into.clone(),
                    source: std::io::Error::other(problem),
                })?;
                Checkpoint::write(&into, state, &files)
            })
            .map_err(TrainError::io("starting a thread to write", folder))?;
        self.job = Some(Job { step, thread });
        Ok(())
    }

    /// Step of the checkpoint being written.
    pub(super) fn step(&self) -> Option<u64> {
        self.job.as_ref().map(|job| job.step)
    }

    /// The checkpoint that has been written since the last call; does not wait.
    ///
    /// # Errors
    /// Why it could not be written.
    pub(super) fn poll(&mut self) -> Result<Option<Written>, TrainError> {
        match &self.job {
            Some(job) if job.thread.is_finished() => self.finish(),
            _ => Ok(None),
        }
    }

    /// Waits for the checkpoint being written.
    ///
    /// # Errors
    /// Why it could not be written.
    pub(super) fn finish(&mut self) -> Result<Option<Written>, TrainError> {
        let Some(Job { step, thread }) = self.job.take() else {
            return Ok(None);
        };
        match thread.join() {
            Ok(path) => Ok(Some(Written { step, path: path? })),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        // A run that ends by another error told that one; what is being written is still made whole.
        if let Some(job) = self.job.take() {
            let _ = job.thread.join();
        }
    }
}
