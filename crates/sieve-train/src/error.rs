//! What can stop a run.
use sieve_core::Recipe;
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
    /// The other processes of the run.
    #[error(transparent)]
    Comm(#[from] sieve_comm::CommError),
    /// What all ranks do together on their devices.
    #[error("adding up gradients and gathering weights over all ranks: {0}")]
    Collective(String),
    /// Ranks compute with other weights, though they took the same steps.
    #[error(
        "the weights of ranks {} and {} differ at step {step}: bad memory of one of their devices, or a fault of \
         Sieve's; no checkpoint of this step is written\n  hint: --resume goes on from the one before",
        ranks[0], ranks[1]
    )]
    ReplicasDiffer {
        /// The two.
        ranks: [usize; 2],
        /// When they were compared.
        step: u64,
    },
    /// The same micro-batch has other gradients on some ranks, or a second time.
    #[error(
        "{} of one micro-batch, which all ranks computed before step {}, {}: bad memory or arithmetic of a device, \
         or a fault of Sieve's; the step was not taken\n  \
         hint: --resume continues from the last checkpoint, without that device; ranks on GPUs of two models may \
         differ by right: training.guard_replay = 0",
        gradients_of(ranks), step + 1, if ranks.len() == 1 { "are wrong" } else { "differ" }
    )]
    GradientsDiffer {
        /// Those at fault, as far as that can be known.
        ranks: Vec<usize>,
        /// Steps done.
        step: u64,
    },
    /// The device did not give its tensors.
    #[error("reading weights and moments from the device: {0}")]
    Device(String),
    /// The output folder holds another run.
    #[error(
        "{} already holds a run ({found} is there)\n  \
         hint: continue it with --resume, or name another folder with --out",
        path.display()
    )]
    FolderInUse {
        /// The folder.
        path: PathBuf,
        /// What a run wrote there.
        found: String,
    },
    /// Another process trains in the output folder.
    #[error("another process is training in {}\n  \
        hint: wait for it or stop it, or name another folder with --out", path.display())]
    FolderBusy {
        /// The folder.
        path: PathBuf,
    },
    /// The output folder is a file.
    #[error("{} is a file, and a run needs a folder\n  hint: name another folder with --out", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// `--resume` where nothing can be resumed.
    #[error("{} holds no run to resume: {problem}\n  \
        hint: check --out, or leave out --resume to start a run there", path.display())]
    NothingToResume {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        problem: &'static str,
    },
    /// The tokenizer found on resume is not the one the run began with.
    #[error(
        "the tokenizer has {now} tokens, the run began with {saved}\n  \
         hint: give the tokenizer.json of the run's checkpoint as tokenizer.path"
    )]
    OtherTokenizer {
        /// Tokens when the run began.
        saved: usize,
        /// Tokens now.
        now: usize,
    },
    /// The checkpoint to branch from is another model's.
    #[error(
        "{} cannot begin this run: {what}\n  hint: {hint}",
        path.display()
    )]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        what: String,
        /// How to go on.
        hint: String,
    },
    /// The data found on resume is not the data the run began with.
    #[error("the data in {} is not what this run began with: {what}\n  \
        hint: put the old files back and prepare them in another folder, --set data.cache_dir=DIR; or start a new \
        run", path.display())]
    OtherData {
        /// Folder of the shards.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// Text is asked of a synthetic task.
    #[error(
        "the recipe's data are a synthetic task (data.format = \"mqar\"), which has no text\n  \
         hint: give data.mqar, or name text with data.paths and another data.format"
    )]
    NoText,
    /// A synthetic task came without a tokenizer.
    #[error(
        "the recipe's data need a tokenizer that is there before them\n  \
         hint: set tokenizer.numbers for a synthetic task"
    )]
    NoTokenizer,
    /// A folder of shards that may be another run's holds other data.
    #[error("the data folder {} {what}\n  \
        hint: name another with --set data.cache_dir=DIR, or delete this one if no run needs it", path.display())]
    CacheInUse {
        /// Folder of the shards.
        path: PathBuf,
        /// What it holds.
        what: String,
    },
    /// The loss or the gradient norm stays not finite, or the loss far above its mean.
    #[error(
        "step {step}: the loss is {loss} (its mean was {mean_loss}), the gradient norm {grad_norm}: training \
         diverged; {}\n  \
         hint: start a new run (--out) with a lower optimizer.lr (now {lr:e}) or more lr_scheduler.warmup_steps",
        last_checkpoint.as_ref().map_or_else(|| "there is no checkpoint \
            yet".to_owned(), |path| format!("the last checkpoint, {}, is untouched", path.display()))
    )]
    Diverged {
        /// The step at which it was seen; it may have begun a few steps before.
        step: u64,
        /// Its loss.
        loss: f32,
        /// Mean loss of the steps before.
        mean_loss: f32,
        /// Its gradient norm.
        grad_norm: f32,
        /// Its learning rate.
        lr: f64,
        /// The last good checkpoint.
        last_checkpoint: Option<PathBuf>,
    },
    /// The last checkpoint could not be written, however often it was tried.
    #[error(
        "no checkpoint of step {step} can be written: {problem}\n  hint: {}; make room or mend the file system, then \
         the same command with --resume=auto goes on; --checkpoint-fallback DIR names a second place for the last one",
        last_checkpoint.as_ref().map_or_else(|| "there is no earlier one".to_owned(), |path| format!("the last one \
            is {}", path.display()))
    )]
    Unsaved {
        /// Steps done.
        step: u64,
        /// Why not.
        problem: String,
        /// The last one that was written.
        last_checkpoint: Option<PathBuf>,
    },
    /// Rows of the recipe do not divide.
    #[error(
        "training.global_batch_size {global} is not a multiple of training.local_batch_size {local}{}\n  hint: {}",
        if *ranks > 1 { format!(" x {ranks} ranks") } else { String::new() },
        batch_hint(*global, *ranks)
    )]
    BatchSizes {
        /// Rows of a step.
        global: usize,
        /// Rows of a micro-batch.
        local: usize,
        /// Processes that share a step.
        ranks: usize,
    },
    /// Processes that cannot share rows as the recipe says.
    #[error(
        "parallelism.context_parallel_degree = {degree}, and {ranks} processes are no multiple of that\n  \
         hint: sieve launch \
         --nproc {degree}, or --set parallelism.context_parallel_degree=1"
    )]
    RowParts {
        /// Processes that share a row.
        degree: usize,
        /// All processes.
        ranks: usize,
    },
    /// Muon needs whole matrices, which several processes have cut.
    #[error(
        "optimizer.name = \"Muon\" needs whole matrices, and {ranks} processes cut them\n  hint: --set \
         parallelism.zero_stage=0, which takes more memory, or optimizer.name=AdamW"
    )]
    MuonRanks {
        /// All processes.
        ranks: usize,
    },
    /// No label in a whole step.
    #[error("step {step} holds no token with a label\n  hint: documents of one token teach nothing; check data.paths")]
    NoLabels {
        /// The step.
        step: u64,
    },
    /// A file that appears whole or not at all.
    #[error(transparent)]
    File(#[from] sieve_files::FileError),
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

/// Which numbers would divide.
fn batch_hint(global: usize, ranks: usize) -> String {
    match ranks > 1 && global > 0 && global.is_multiple_of(ranks) {
        true => format!(
            "training.local_batch_size={} shares the same steps among {ranks}",
            global / ranks
        ),
        false => "choose multiples".to_owned(),
    }
}

fn gradients_of(ranks: &[usize]) -> String {
    let names = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        1 => format!("the gradients of rank {names}"),
        _ => format!("the gradients of ranks {names}"),
    }
}

impl TrainError {
    /// Whether so many processes can train a recipe together.
    ///
    /// # Errors
    /// They share rows unevenly, or they shard what the optimizer needs whole.
    pub fn check_ranks(recipe: &Recipe, ranks: usize) -> Result<(), Self> {
        let degree = recipe.parallelism.context_parallel_degree;
        if !ranks.is_multiple_of(degree) {
            return Err(Self::RowParts { degree, ranks });
        }
        if ranks > 1 && recipe.parallelism.zero_stage > 0 && recipe.optimizer.name.needs_whole_matrices() {
            return Err(Self::MuonRanks { ranks });
        }
        Ok(())
    }

    /// Adapter for `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
