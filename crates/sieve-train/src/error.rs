//! Errors that end a run.
use sieve_core::recipe::TrainingSection;
use sieve_core::{Recipe, Refusal, ShownPath};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error that ends a training run.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// An error in the recipe.
    #[error(transparent)]
    Recipe(#[from] sieve_core::RecipeError),
    /// An error of the data or the tokenizer.
    #[error(transparent)]
    Data(#[from] sieve_data::DataError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] sieve_hf::CheckpointError),
    /// Communication with the other processes of the run.
    #[error(transparent)]
    Comm(#[from] sieve_comm::CommError),
    /// A collective operation on the ranks' devices.
    #[error("adding up gradients and gathering weights over all ranks: {0}")]
    Collective(String),
    /// The device could not return its tensors.
    #[error("reading weights and moments from the device: {0}")]
    Device(String),
    /// Another process trains in this output folder.
    #[error("another process is training in {}\n  \
        hint: wait for it or stop it, or name another folder with --out", .0.shown())]
    FolderBusy(PathBuf),
    /// Another process has not ended in the folder of a run that no user attends.
    #[error("another process is training in {}, and did not end in {} seconds\n  \
        hint: the same command continues the run when that one has ended", path.shown(), waited.as_secs())]
    FolderStillBusy {
        /// Folder of the run.
        path: PathBuf,
        /// How long this process waited.
        waited: Duration,
    },
    /// The recipe names a synthetic task where text is needed.
    #[error(
        "the recipe's data are a synthetic task (data.format = \"mqar\"), which has no text\n  \
         hint: give data.mqar, or name text with data.paths and a different data.format"
    )]
    NoText,
    /// The recipe of a synthetic task names no tokenizer.
    #[error(
        "the recipe's data need a tokenizer that is there before them\n  \
         hint: set tokenizer.numbers for a synthetic task"
    )]
    NoTokenizer,
    /// The folder for shards holds other data, perhaps another run's.
    #[error("the data folder {} {what}\n  \
        hint: name a different one with --set data.cache_dir=DIR; if no run needs this one, delete it, or replace what \
        was prepared there with sieve data prepare --replace", path.shown())]
    CacheInUse {
        /// Folder of the prepared shards.
        path: PathBuf,
        /// What the folder holds.
        what: String,
    },
    /// The loss or gradient norm was not finite, or the loss was far above its mean, for too many steps. The text names
    /// the step, the numbers and the last checkpoint.
    #[error("{0}")]
    Diverged(String),
    /// The last checkpoint could not be written after all retries. The text names the reason and the latest checkpoint
    /// on disk.
    #[error("{0}")]
    Unsaved(String),
    /// Folders, recipes, checkpoints or ranks that do not fit each other.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A file of the run could not be replaced as a whole.
    #[error(transparent)]
    File(#[from] sieve_files::FileError),
    /// An operation on a file of the run folder failed.
    #[error("{action} {}: {source}", path.shown())]
    Io {
        /// What was tried, as a present participle.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Why the operation failed.
        source: std::io::Error,
    },
}

impl TrainError {
    /// Checks that this number of processes can train a recipe.
    ///
    /// # Errors
    /// The processes cannot share the rows evenly.
    pub fn check_ranks(recipe: &Recipe, ranks: usize) -> Result<(), Self> {
        let degree = recipe.parallelism.context_parallel_degree;
        if !ranks.is_multiple_of(degree) {
            return Err(Self::refused(
                format!(
                    "parallelism.context_parallel_degree = {degree}, and {ranks} processes are not a multiple of that"
                ),
                format!("sieve launch --nproc {degree}, or --set parallelism.context_parallel_degree=1"),
            ));
        }
        let shards = recipe.parallelism.shard_ranks;
        if ranks > 1 && shards > 0 && !ranks.is_multiple_of(shards) {
            return Err(Self::refused(
                format!("parallelism.shard_ranks = {shards}, and {ranks} processes are not a multiple of that"),
                format!("sieve launch --nproc {shards}, or --set parallelism.shard_ranks=0: all processes"),
            ));
        }
        if ranks > 1 && recipe.training.trains_indexers_alone() {
            return Err(Self::refused(
                format!("training.train = [\"indexer\"] is for one process, and there are {ranks}"),
                "train without sieve launch",
            ));
        }
        let groups = ranks / degree;
        let mut stages = recipe.stages().into_iter();
        stages.try_for_each(|stage| Self::micro_batches(&recipe.at_stage(&stage).training, groups).map(drop))
    }

    /// Micro-batches per step for each of `ranks` processes that share the rows of a step; with context parallelism,
    /// for each of `ranks` groups of processes.
    ///
    /// # Errors
    /// The rows of a step cannot be shared evenly.
    pub fn micro_batches(training: &TrainingSection, ranks: usize) -> Result<usize, Self> {
        if let Some(number) = training.accumulation_steps(ranks) {
            return Ok(number);
        }
        let (global, local) = (training.global_batch_size, training.local_batch_size);
        let share = if ranks > 1 { format!(" x {ranks} ranks") } else { String::new() };
        let hint = if ranks > 1 && global > 0 && global.is_multiple_of(ranks) {
            format!("--set training.local_batch_size={} shares the same steps among {ranks}", global / ranks)
        } else {
            "choose multiples".to_owned()
        };
        let what = "is not a multiple of training.local_batch_size";
        Err(Self::refused(format!("training.global_batch_size {global} {what} {local}{share}"), hint))
    }

    pub(crate) fn refused(what: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(what, hint).into()
    }

    /// Adds to an error the number, from 1, of the later stage that it concerns.
    pub(crate) fn in_stage(number: usize, error: Self) -> Self {
        let Refusal { what, hint } = Refusal::of_text(&error.to_string(), "change that stage");
        Self::refused(format!("stage {number}: {what}"), hint)
    }

    /// On resume, `dir` does not hold the data that the run began with.
    pub(crate) fn other_data(dir: &Path, what: &str) -> Self {
        Self::refused(
            format!("the data in {} is not what this run began with: {what}", dir.shown()),
            "put the old files back and prepare them in a different folder, --set data.cache_dir=DIR; or start a new \
             run",
        )
    }

    /// For `map_err`: adds operation and path to an I/O error.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
