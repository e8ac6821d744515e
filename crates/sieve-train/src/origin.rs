//! Where a run goes on from.
use crate::{RunFolder, Start, TrainError};
use sieve_core::Recipe;
use sieve_hf::{Checkpoint, list_checkpoints};

/// What a run has before its first step in this process.
#[derive(Debug)]
pub struct Origin {
    /// The verified checkpoint; `None` starts from the seed.
    pub checkpoint: Option<Checkpoint>,
    /// What a person should know of it.
    pub notices: Vec<String>,
}

impl Origin {
    /// Finds and verifies the checkpoint that `start` names, and checks that `recipe` may continue it. Writes nothing.
    ///
    /// A run that was killed before its first checkpoint is resumed from the seed.
    ///
    /// # Errors
    /// A damaged checkpoint, a recipe that asks for another run.
    pub fn find(folder: &RunFolder, start: &Start, recipe: &Recipe) -> Result<Self, TrainError> {
        let mut notices = Vec::new();
        let checkpoint = match start {
            Start::New => return Ok(Self::seed()),
            Start::Resume if list_checkpoints(&folder.checkpoint_path())?.is_empty() => None,
            Start::Resume => Some(Checkpoint::open(&folder.checkpoint_path())?),
            Start::ResumeFrom(path) => Some(Checkpoint::open(path)?),
        };
        let (saved, path) = match &checkpoint {
            Some(checkpoint) => (
                checkpoint.recipe_toml()?,
                checkpoint.path.join("config.toml"),
            ),
            None => {
                let path = folder.config_path();
                let text =
                    std::fs::read_to_string(&path).map_err(TrainError::io("reading", &path))?;
                (text, path)
            }
        };
        let saved = Recipe::load(&saved, &path.display().to_string(), &[])?;
        let steps_done = checkpoint.as_ref().map_or(0, |found| found.state.step);
        for change in saved.check_resume(recipe, steps_done as usize)? {
            notices.push(format!("note: {change}"));
        }
        match &checkpoint {
            Some(Checkpoint { state, .. }) => {
                let now = rayon::current_num_threads();
                if state.num_threads != now {
                    notices.push(format!(
                        "note: {now} threads compute, the run used {} before; the last bits of its sums may differ \
                         from here on (RAYON_NUM_THREADS={} repeats them)",
                        state.num_threads, state.num_threads
                    ));
                }
            }
            None => notices.push("note: the run has no checkpoint yet; it starts over".to_owned()),
        }
        Ok(Self {
            checkpoint,
            notices,
        })
    }

    /// A new run.
    pub fn seed() -> Self {
        Self {
            checkpoint: None,
            notices: Vec::new(),
        }
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.checkpoint
            .as_ref()
            .map_or(0, |checkpoint| checkpoint.state.step)
    }
}
