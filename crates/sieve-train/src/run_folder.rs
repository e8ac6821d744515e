//! The output folder of a run: `config.toml`, `checkpoint/step-N/`, `tb/`, `metrics.jsonl`, `log`.
use crate::TrainError;
use std::fs;
use std::path::{Path, PathBuf};

/// How a run begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// In an empty folder.
    New,
    /// From the latest checkpoint.
    Resume,
    /// From a checkpoint named by the user.
    ResumeFrom(PathBuf),
}

/// Paths inside an output folder.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
    checkpoint_folder: String,
}

impl RunFolder {
    /// Checks that `path` is free for a new run, or holds one to resume; creates it for a new run.
    ///
    /// # Errors
    /// A folder that holds another run; nothing to resume; a path that cannot be created.
    pub fn open(path: &Path, checkpoint_folder: &str, start: &Start) -> Result<Self, TrainError> {
        let folder = Self {
            path: path.to_owned(),
            checkpoint_folder: checkpoint_folder.to_owned(),
        };
        let has_run = folder.config_path().exists() || folder.metrics_path().exists();
        match start {
            Start::New if has_run => Err(TrainError::FolderInUse {
                path: path.to_owned(),
            }),
            Start::New => {
                fs::create_dir_all(path).map_err(TrainError::io("creating", path))?;
                Ok(folder)
            }
            _ if !folder.config_path().is_file() => Err(TrainError::NothingToResume {
                path: path.to_owned(),
                problem: "it has no config.toml",
            }),
            _ => Ok(folder),
        }
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The resolved recipe.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// One JSON object per logged step and validation.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// TensorBoard event files.
    pub fn tensorboard_path(&self) -> PathBuf {
        self.path.join("tb")
    }

    /// What the terminal showed, as plain lines.
    pub fn log_path(&self) -> PathBuf {
        self.path.join("log")
    }

    /// Checkpoints.
    pub fn checkpoint_path(&self) -> PathBuf {
        self.path.join(&self.checkpoint_folder)
    }

    /// Where shards and a trained tokenizer go when the recipe names no cache.
    pub fn data_path(&self) -> PathBuf {
        self.path.join("data")
    }
}
