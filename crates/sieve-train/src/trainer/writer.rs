//! Writes checkpoints on a thread of its own while training continues.
use crate::TrainError;
use crate::optimizer::ReplicaSums;
use crate::share::Share;
use serde::{Deserialize, Serialize};
use sieve_hf::{Checkpoint, CheckpointFiles, CheckpointState};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Writes at most one checkpoint at a time.
#[derive(Debug, Default)]
pub(super) struct CheckpointWriter {
    job: Option<Job>,
}

#[derive(Debug)]
struct Job {
    folder: PathBuf,
    state: CheckpointState,
    thread: JoinHandle<Result<Shard, TrainError>>,
    /// Whether all processes have written their files, as they have agreed.
    is_written_by_all: bool,
}

/// The part of a checkpoint that this process has written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Shard {
    /// Checksum of each written file, by file name.
    pub(super) files: BTreeMap<String, String>,
    pub(super) replica: ReplicaSums,
}

/// A checkpoint after this process has written its files, or failed to. The folder still has its temporary name.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) folder: PathBuf,
    pub(super) state: CheckpointState,
    pub(super) shard: Result<Shard, String>,
}

impl CheckpointWriter {
    /// Starts reading `files` and writing them into the folder that [`Checkpoint::begin`] created. The previous
    /// checkpoint must be finished.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn start(
        &mut self,
        folder: &Path,
        state: CheckpointState,
        share: Share,
        files: impl FnOnce() -> Result<(CheckpointFiles, ReplicaSums), String> + Send + 'static,
    ) -> Result<(), TrainError> {
        assert!(self.job.is_none(), "one checkpoint at a time");
        let (into, step) = (folder.to_owned(), state.step);
        let thread = std::thread::Builder::new()
            .name("sieve-checkpoint".into())
            .spawn(move || {
                let written = write(&into, step, share, files);
                if written.is_err() && share.rank == 0 {
                    // The disk may be full, and the run's other files need the room at once.
                    Checkpoint::discard(&into, step);
                }
                written
            })
            .map_err(TrainError::io("starting a thread to write", folder))?;
        self.job = Some(Job { folder: folder.to_owned(), state, thread, is_written_by_all: false });
        Ok(())
    }

    /// Step of the checkpoint that is being written.
    pub(super) fn step(&self) -> Option<u64> {
        self.job.as_ref().map(|job| job.state.step)
    }

    /// The processes have agreed whether all have written their files.
    pub(super) fn note_all_written(&mut self, all_written: bool) {
        if let Some(job) = &mut self.job {
            job.is_written_by_all = all_written;
        }
    }

    /// Whether all processes have written their files of the checkpoint that is being written.
    pub(super) fn is_written_by_all(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.is_written_by_all)
    }

    /// Whether no checkpoint is being written.
    pub(super) fn is_done(&self) -> bool {
        self.job.as_ref().is_none_or(|job| job.thread.is_finished())
    }

    /// Waits until the files are written; `None` if no checkpoint is pending. Calls `tick` each second in which the
    /// files have grown.
    ///
    /// # Errors
    /// The device could not return its tensors. A file that could not be written is an error of [`Written::shard`], so
    /// that the caller can tell the other ranks.
    pub(super) fn finish(&mut self, tick: &dyn Fn()) -> Result<Option<Written>, TrainError> {
        let Some(job) = self.job.take() else {
            return Ok(None);
        };
        let Job { folder, state, thread, .. } = job;
        let (mut looked, mut written) = (Instant::now(), 0);
        while !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
            if looked.elapsed() < Duration::from_secs(1) {
                continue;
            }
            let bytes = Checkpoint::bytes_written(&folder, state.step);
            if bytes != written {
                tick();
            }
            (looked, written) = (Instant::now(), bytes);
        }
        match thread.join() {
            Ok(Err(error @ TrainError::Device(_))) => Err(error),
            Ok(shard) => Ok(Some(Written { folder, state, shard: shard.map_err(|error| error.to_string()) })),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Reads the snapshot from the device and writes this process's files.
fn write(
    folder: &Path,
    step: u64,
    share: Share,
    files: impl FnOnce() -> Result<(CheckpointFiles, ReplicaSums), String>,
) -> Result<Shard, TrainError> {
    let (files, replica) = files().map_err(TrainError::Device)?;
    let files = if share.group.is_first() {
        Checkpoint::write_shard(folder, step, [share.group.place(), share.group.size()], &files)?
    } else {
        // The first replica has written the same.
        BTreeMap::new()
    };
    Ok(Shard { files, replica })
}
