//! What can stop a run.
use std::path::PathBuf;

/// An error of the training loop.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] sieve_core::RecipeError),
    /// Data or tokenizer.
    #[error(transparent)]
    Data(#[from] sieve_data::DataError),
    /// Checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] sieve_hf::CheckpointError),
    /// The output folder holds another run.
    #[error(
        "{} already holds a run\n  hint: continue it with --resume, or name another folder with --out",
        path.display()
    )]
    FolderInUse {
        /// The folder.
        path: PathBuf,
    },
    /// `--resume` where nothing can be resumed.
    #[error("{} holds no run to resume: {problem}\n  hint: leave out --resume to start one there", path.display())]
    NothingToResume {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        problem: &'static str,
    },
    /// The tokenizer found on resume is not the one the run began with.
    #[error(
        "the tokenizer has {now} tokens, the run began with {saved}\n  hint: give the tokenizer.json of the run's checkpoint as tokenizer.path"
    )]
    OtherTokenizer {
        /// Tokens when the run began.
        saved: usize,
        /// Tokens now.
        now: usize,
    },
    /// The data found on resume is not the data the run began with.
    #[error("the prepared data in {} is not what this run began with: its files or settings have changed since\n  hint: put the old files back, or start a new run", path.display())]
    OtherData {
        /// Folder of the shards.
        path: PathBuf,
    },
    /// The loss is no number any more.
    #[error(
        "step {step}: the loss is {loss}; the last checkpoint is untouched\n  hint: lower optimizer.lr (now {lr:e}) or raise lr_scheduler.warmup_steps, then --resume"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its learning rate.
        lr: f64,
    },
    /// Rows of the recipe do not divide.
    #[error(
        "training.global_batch_size {global} is no multiple of training.local_batch_size {local}\n  hint: choose multiples"
    )]
    BatchSizes {
        /// Rows of a step.
        global: usize,
        /// Rows of a micro-batch.
        local: usize,
    },
    /// No label in a whole step.
    #[error(
        "step {step} holds no token with a label\n  hint: documents of one token teach nothing; check data.paths"
    )]
    NoLabels {
        /// The step.
        step: u64,
    },
    /// A file of the run folder.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a present participle.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl TrainError {
    /// Adapter for `map_err`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
