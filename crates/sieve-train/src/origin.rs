//! Where a run goes on from.
use crate::{RunFolder, Start, TrainError};
use sieve_core::{ModelShape, Recipe};
use sieve_hf::{Checkpoint, list_checkpoints};

/// What a run has before its first step in this process.
#[derive(Debug)]
pub struct Origin {
    /// The verified checkpoint; `None` starts from the seed.
    pub checkpoint: Option<Checkpoint>,
    /// What a person should know of it.
    pub notices: Vec<String>,
    /// Whether another recipe begins with it: its tokenizer counts, its data does not.
    pub is_branch: bool,
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
            Start::BranchFrom(path) => return Self::branch(Checkpoint::open(path)?, recipe),
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
            is_branch: false,
        })
    }

    /// A run of `recipe` that begins with `checkpoint`, which may come from any recipe with the same parameters.
    fn branch(checkpoint: Checkpoint, recipe: &Recipe) -> Result<Self, TrainError> {
        let (_, saved) = checkpoint.recipe_and_shape()?;
        let now = recipe.model_shape(checkpoint.state.vocab_size)?;
        let sizes = |shape: &ModelShape| {
            let sizes = [
                ("num_hidden_layers", shape.num_layers),
                ("hidden_size", shape.d_model),
                ("intermediate_size", shape.d_ff),
                ("num_attention_heads", shape.num_heads),
                ("num_key_value_heads", shape.num_kv_heads),
                ("head_dim", shape.head_dim),
                ("vocab_size", shape.vocab_size),
            ];
            let sizes = sizes.map(|(key, size)| (key, size as u64));
            sizes.into_iter().chain(shape.parameters().by_part())
        };
        let kinds = [&saved, &now].map(|shape| std::mem::discriminant(&shape.attention));
        let what = match sizes(&saved)
            .zip(sizes(&now))
            .find(|(saved, now)| saved != now)
        {
            Some(((key, saved), (_, now))) => format!("{key} is {saved} there and {now} here"),
            None if kinds[0] != kinds[1] => "its attention is of another kind".to_owned(),
            None => String::new(),
        };
        if !what.is_empty() {
            return Err(TrainError::OtherModel {
                path: checkpoint.path,
                what,
            });
        }
        let path = checkpoint.path.join("config.toml");
        let text = checkpoint.recipe_toml()?;
        let before = Recipe::load(&text, &path.display().to_string(), &[])?;
        let mut notices = vec![format!(
            "note: a new run that begins with {}",
            checkpoint.path.display()
        )];
        // An import's recipe says nothing about training.
        if checkpoint.state.step > 0 {
            let changes = before.diff(recipe)?.into_iter();
            notices.extend(changes.map(|change| format!("note: {change}")));
        }
        Ok(Self {
            checkpoint: Some(checkpoint),
            notices,
            is_branch: true,
        })
    }

    /// A new run.
    pub fn seed() -> Self {
        Self {
            checkpoint: None,
            notices: Vec::new(),
            is_branch: false,
        }
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.checkpoint
            .as_ref()
            .map_or(0, |checkpoint| checkpoint.state.step)
    }
}
