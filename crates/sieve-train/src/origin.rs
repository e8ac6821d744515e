//! The checkpoint a run resumes from.
use crate::run_folder::rename_aside;
use crate::{RunFolder, Start, TrainError};
use serde::{Deserialize, Serialize};
use sieve_core::model::AttentionForm;
use sieve_core::recipe::{AttentionKind, KeyChange, OptimizerName};
use sieve_core::{Attention, ModelShape, Recipe};
use sieve_files::write_atomically;
use sieve_hf::{Checkpoint, CheckpointError, CheckpointState, list_checkpoints};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Keys that change what a model computes with the same weights. Windows and block counts are left out, because a
/// branch often changes them on purpose.
const READS_WEIGHTS: [&str; 10] = [
    "attention.bias",
    "attention.compress_stride",
    "attention.longest_period",
    "attention.recency",
    "attention.select_block_size",
    "attention.shortest_period",
    "model.layer_types",
    "model.rms_norm_eps",
    "model.rope_scaling",
    "model.rope_theta",
];

/// The state that a run begins with in this process.
#[derive(Debug)]
pub struct Origin {
    /// The verified checkpoint; `None` initialises the weights from the seed.
    pub checkpoint: Option<Checkpoint>,
    /// Messages for the user about the checkpoint.
    pub notices: Vec<String>,
    /// Whether a new run with another recipe begins with the checkpoint: it uses the checkpoint's tokenizer, but its
    /// own data.
    pub is_branch: bool,
}

impl Origin {
    /// Finds and verifies the checkpoint that `start` names, and checks that `recipe` may continue it. Writes nothing,
    /// except that [`Start::ResumeAlone`] locks the folder and renames damaged checkpoints. A later checkpoint in the
    /// fallback folder is used if it belongs to this run.
    ///
    /// A run that was killed before its first checkpoint begins again with its first state: a checkpoint of another
    /// run, or the seed.
    ///
    /// # Errors
    /// A damaged checkpoint; a recipe that does not continue the run; the checkpoint that the run began with was
    /// removed or replaced.
    pub fn find(folder: &RunFolder, start: &Start, recipe: &Recipe) -> Result<Self, TrainError> {
        let mut notices = Vec::new();
        let checkpoint = match start {
            Start::New => return Ok(Self::seed()),
            Start::BranchFrom(path) => return Self::branch(Checkpoint::open(path)?, recipe),
            Start::Resume if list_checkpoints(&folder.checkpoint_path())?.is_empty() => None,
            Start::Resume => Some(Checkpoint::open(&folder.checkpoint_path())?),
            Start::ResumeAlone { fallback } => latest_of_two(folder, fallback.as_deref(), recipe, &mut notices)?,
            Start::ResumeFrom(path) => Some(Checkpoint::open(path)?),
        };
        let begun = match &checkpoint {
            Some(_) => None,
            None => Begun::read(folder)?,
        };
        let saved = match &checkpoint {
            Some(checkpoint) => saved_recipe(checkpoint)?,
            None => {
                let path = folder.config_path();
                let text = std::fs::read_to_string(&path).map_err(TrainError::io("reading", &path))?;
                Recipe::load(&text, &path.display().to_string(), &[])?
            }
        };
        let given = recipe;
        let recipe = &continued(&saved, recipe);
        if recipe.lr_scheduler != given.lr_scheduler {
            let warmup = recipe.lr_scheduler.warmup_steps;
            notices.push(format!("note: lr_scheduler.warmup_steps stays {warmup}, as this run began"));
        }
        let is_branch = begun.as_ref().is_some_and(|begun| begun.is_branch);
        let checkpoint = match begun {
            Some(begun) => {
                let note = "note: the run has no checkpoint yet; it begins again with";
                notices.push(format!("{note} {}", begun.checkpoint.display()));
                Some(begun.open(folder)?)
            }
            None => checkpoint,
        };
        let steps_done = checkpoint.as_ref().map_or(0, |found| found.state.step);
        for change in saved.check_resume(recipe, steps_done as usize)? {
            notices.push(format!("note: {change}"));
        }
        notices.extend(rate_line(&saved, recipe, steps_done as usize));
        match &checkpoint {
            // A new run has no earlier sums to repeat.
            Some(_) if is_branch => {}
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
        Ok(Self { checkpoint, notices, is_branch })
    }

    /// Writes `origin.json` into the folder of a run, or removes the file if the run begins with no other checkpoint.
    ///
    /// # Errors
    /// Any failure of the file system.
    pub(crate) fn note(begun: Option<&Begun>, folder: &RunFolder) -> Result<(), TrainError> {
        let path = folder.origin_path();
        match begun {
            Some(begun) => {
                let text = serde_json::to_string_pretty(begun).expect("plain data serialises");
                Ok(write_atomically(&path, text.as_bytes())?)
            }
            None => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(TrainError::io("removing", &path)(error)),
                _ => Ok(()),
            },
        }
    }

    /// A new run of `recipe` that begins with `checkpoint`. The checkpoint's recipe may differ in everything but the
    /// model's parameters.
    fn branch(checkpoint: Checkpoint, recipe: &Recipe) -> Result<Self, TrainError> {
        let (there, saved) = checkpoint.recipe_and_shape()?;
        let now = recipe.model_shape(checkpoint.state.vocab_size)?;
        let attentions = [&there, recipe].map(|recipe| recipe.attention);
        let [kind, own] = attentions.map(Attention::kind);
        let difference = match kind == own || attentions.into_iter().all(is_dense_or_chosen) {
            true => other_size(&saved, &now),
            false => Some(other_kind(kind, own)),
        };
        if let Some((what, hint)) = difference {
            let what = format!("{} cannot begin this run: {what}", checkpoint.path.display());
            return Err(TrainError::refused(what, hint));
        }
        let before = saved_recipe(&checkpoint)?;
        let names = [&before, recipe].map(|recipe| recipe.optimizer.name);
        if checkpoint.has_optimizer()
            && checkpoint.state.step > 0
            && names == [OptimizerName::Muon, OptimizerName::AdamW]
        {
            return Err(TrainError::refused(
                format!(
                    "{} cannot begin this run: optimizer.name is Muon there, which keeps no second moments of \
                     matrices, and AdamW here",
                    checkpoint.path.display()
                ),
                "--set optimizer.name=Muon; or sieve export, then sieve import, which begins with the weights alone",
            ));
        }
        let mut notices = vec![format!("note: a new run that begins with {}", checkpoint.path.display())];
        let changes = before.diff(recipe)?;
        let (tokenizer, changes) = changes.into_iter().partition::<Vec<_>, _>(|change| names_tokenizer(&change.key));
        if !tokenizer.is_empty() {
            let path = checkpoint.tokenizer_path();
            notices
                .push(format!("note: the tokenizer is the checkpoint's, {}; the recipe's is not read", path.display()));
        }
        for change in changes {
            // `starts_with` also finds the keys of a table such as `model.rope_scaling`.
            if READS_WEIGHTS.iter().any(|key| change.key.starts_with(key)) {
                notices.push(format!(
                    "warning: {change}; the weights were trained with the former, and what they compute changes at once"
                ));
            } else if checkpoint.state.step > 0 {
                // At step 0 the checkpoint is an import, whose recipe has no training settings to compare with.
                notices.push(format!("note: {change}"));
            }
        }
        Ok(Self { checkpoint: Some(checkpoint), notices, is_branch: true })
    }

    /// A new run with weights from the seed.
    pub fn seed() -> Self {
        Self { checkpoint: None, notices: Vec::new(), is_branch: false }
    }

    /// The recipe with the tokenizer that the run reads. A branch whose recipe names another tokenizer reads the
    /// checkpoint's, and the recipe in the run's folder names that one.
    ///
    /// # Errors
    /// A recipe beside the checkpoint that cannot be read.
    pub fn with_own_tokenizer(&self, recipe: &Recipe) -> Result<Recipe, TrainError> {
        let Some(checkpoint) = &self.checkpoint else {
            return Ok(recipe.clone());
        };
        let (saved, _) = checkpoint.recipe_and_shape()?;
        let is_other = |change: &KeyChange| names_tokenizer(&change.key);
        if !self.is_branch || !saved.diff(recipe)?.iter().any(is_other) {
            return Ok(match self.is_branch {
                true => with_tokenizer_of_branch(&saved, recipe),
                false => continued(&saved, recipe),
            });
        }
        let path = checkpoint.tokenizer_path();
        let path = path.canonicalize().map_err(TrainError::io("reading", path))?;
        let mut own = recipe.clone();
        (own.tokenizer.train, own.tokenizer.numbers) = (None, None);
        own.tokenizer.path = Some(path.display().to_string());
        Ok(own)
    }

    /// Number of optimizer steps before the checkpoint.
    pub fn step(&self) -> u64 {
        self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.state.step)
    }
}

/// The recipe beside a checkpoint, with all its stages.
pub(crate) fn saved_recipe(checkpoint: &Checkpoint) -> Result<Recipe, TrainError> {
    let path = checkpoint.path.join("config.toml");
    Ok(Recipe::load(&checkpoint.recipe_toml()?, &path.display().to_string(), &[])?)
}

/// The contents of `origin.json`: the checkpoint of another folder that a run began with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// Absolute path of the checkpoint.
    checkpoint: PathBuf,
    /// Whether the run is a new one with another recipe: it takes the checkpoint's tokenizer, but its own data.
    is_branch: bool,
    /// The checkpoint's state, which includes the checksums of its files.
    state: CheckpointState,
}

impl Begun {
    /// The origin of a run that begins with `checkpoint`.
    pub(crate) fn with(checkpoint: &Checkpoint, is_branch: bool) -> Result<Self, TrainError> {
        let path = &checkpoint.path;
        Ok(Self {
            checkpoint: path.canonicalize().map_err(TrainError::io("reading", path))?,
            is_branch,
            state: checkpoint.state.clone(),
        })
    }

    /// Reads the file of the run in `folder`; `None` if that run began with the seed.
    fn read(folder: &RunFolder) -> Result<Option<Self>, TrainError> {
        let path = folder.origin_path();
        match std::fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(begun) => Ok(Some(begun)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(TrainError::io("reading", &path)(error)),
        }
    }

    /// Opens the checkpoint, if it is still the one that the run began with.
    fn open(self, folder: &RunFolder) -> Result<Checkpoint, TrainError> {
        let problem = match Checkpoint::open(&self.checkpoint) {
            Ok(found) if found.state == self.state => return Ok(found),
            Ok(_) => "another checkpoint is there now".to_owned(),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        let (run, path) = (folder.path().display(), self.checkpoint.display());
        Err(TrainError::refused(
            format!("{run} has no checkpoint yet, and {path}, which it began with, cannot be used: {problem}"),
            "put that checkpoint back, or begin the run in another folder with --out",
        ))
    }
}

/// The latest whole checkpoint of a run, from its own folder or from `fallback`; `None` if the run has none.
fn latest_of_two(
    folder: &RunFolder,
    fallback: Option<&Path>,
    recipe: &Recipe,
    notices: &mut Vec<String>,
) -> Result<Option<Checkpoint>, TrainError> {
    let own_folder = folder.checkpoint_path();
    let own = match list_checkpoints(&own_folder)?.is_empty() {
        true => Ok(None),
        false => latest_whole(&own_folder, notices).map(Some),
    };
    let own_step = own.iter().flatten().next().map(|own| own.state.step);
    let Some(fallback) = fallback else {
        return own;
    };
    for (step, path) in list_checkpoints(fallback)?.into_iter().rev() {
        if own_step.is_some_and(|own| step <= own) {
            break;
        }
        match of_this_run(&path, folder, recipe) {
            Ok(checkpoint) => {
                let than = own_step.map_or("; its own folder has none".to_owned(), |own| {
                    format!(", which is later than step-{own} of its own folder")
                });
                notices.push(format!("note: the run continues from {}{than}", path.display()));
                return Ok(Some(checkpoint));
            }
            Err(reason) => notices.push(format!(
                "warning: {} is not taken, though it is later than what the run's own folder holds: {reason}",
                path.display()
            )),
        }
    }
    own
}

/// Opens a checkpoint outside of the run's folder if it belongs to the run: `recipe` continues it, and it was written
/// after the run began. Another run may have used the same folder before. An error is the reason, on one line.
fn of_this_run(path: &Path, folder: &RunFolder, recipe: &Recipe) -> Result<Checkpoint, String> {
    let first_lines = |text: String, count: usize| {
        let lines = text.lines().take(count).map(str::trim);
        lines.collect::<Vec<_>>().join(" ")
    };
    let checkpoint = Checkpoint::open(path).map_err(|error| first_lines(error.to_string(), 1))?;
    // The second line of these errors names the first key that differs, or that cannot be read.
    let saved = saved_recipe(&checkpoint).map_err(|error| first_lines(error.to_string(), 2))?;
    let recipe = continued(&saved, recipe);
    saved.check_resume(&recipe, checkpoint.state.step as usize).map_err(|error| first_lines(error.to_string(), 2))?;
    let written = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified()).ok();
    match (written(&folder.lock_path()), written(&path.join("state.json"))) {
        (Some(run), Some(own)) if own >= run => Ok(checkpoint),
        _ => Err("it was written before this run began".to_owned()),
    }
}

/// The latest whole checkpoint of a folder. Damaged checkpoints of later steps are renamed; if no checkpoint is whole,
/// all keep their names.
fn latest_whole(folder: &Path, notices: &mut Vec<String>) -> Result<Checkpoint, TrainError> {
    let mut damaged = Vec::new();
    for (_, path) in list_checkpoints(folder)?.into_iter().rev() {
        let checkpoint = match Checkpoint::open(&path) {
            // A checkpoint without `state.json` is reported as not found.
            Err(error @ (CheckpointError::Damaged { .. } | CheckpointError::NotFound { .. })) => {
                damaged.push((path, error));
                continue;
            }
            opened => opened?,
        };
        for (path, error) in damaged {
            let aside = rename_aside(&path, "damaged")?;
            let error = error.to_string();
            notices.push(format!(
                "warning: {}\n  it is kept as {}, and the run continues from {}",
                error.lines().next().unwrap_or_default(),
                aside.display(),
                checkpoint.path.display()
            ));
        }
        return Ok(checkpoint);
    }
    match damaged.into_iter().next() {
        Some((_, error)) => Err(error.into()),
        None => Err(CheckpointError::NotFound { path: folder.to_owned(), beside: Vec::new() }.into()),
    }
}

/// A message about the learning rate before and after a resume that changes the number of steps. `None` if the run did
/// no step yet or is complete, or if the number stays.
fn rate_line(saved: &Recipe, now: &Recipe, steps_done: usize) -> Option<String> {
    let steps = now.training.steps;
    if steps_done == 0 || steps_done >= steps || saved.training.steps == steps {
        return None;
    }
    let [before, after] = [saved.learning_rate(steps_done - 1), now.learning_rate(steps_done)];
    let last = now.learning_rate(steps - 1);
    let hint = match (now.lr_scheduler.after_step, saved.training.steps) {
        (0, first) if first == steps_done => {
            format!("\n  to give the new steps a schedule of their own: --extend {steps} instead of training.steps")
        }
        (0, first) if first < steps => format!(
            "\n  to give the new steps a schedule of their own: --resume alone up to step {first}, then --resume \
             --extend {steps}"
        ),
        _ => String::new(),
    };
    Some(format!(
        "note: the learning rate was {before:.2e} at step {steps_done}, is {after:.2e} at step {} and {last:.2e} at \
         step {steps}{hint}",
        steps_done + 1
    ))
}

/// Whether a recipe's key selects the tokenizer.
fn names_tokenizer(key: &str) -> bool {
    let key = key.strip_prefix("tokenizer.");
    key.is_some_and(|key| key != "eos_token")
}

/// `recipe` with the tokenizer of `saved`, if that is the `tokenizer.json` of a checkpoint, because the run is a
/// branch. The `eos_token` of `recipe` stays.
fn with_tokenizer_of_branch(saved: &Recipe, recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    let path = saved.tokenizer.path.as_ref().map(Path::new);
    let is_of_checkpoint = path.is_some_and(|path| {
        let folder = path.parent().and_then(Path::file_name);
        let is_step = folder.is_some_and(|folder| folder.to_string_lossy().starts_with("step-"));
        is_step && path.file_name().is_some_and(|name| name == "tokenizer.json")
    });
    if is_of_checkpoint {
        let eos_token = recipe.tokenizer.eos_token.take();
        recipe.tokenizer = saved.tokenizer.clone();
        recipe.tokenizer.eos_token = eos_token;
    }
    recipe
}

/// `recipe` as it continues the run of `saved`: with the tokenizer of a branch, and with the run's own warm-up unless
/// the recipe gives another one than the usual, which follows from the number of steps.
fn continued(saved: &Recipe, recipe: &Recipe) -> Recipe {
    let mut recipe = with_tokenizer_of_branch(saved, recipe);
    if recipe.has_usual_warmup() && saved.lr_scheduler.warmup_steps <= recipe.training.steps {
        recipe.lr_scheduler.warmup_steps = saved.lr_scheduler.warmup_steps;
    }
    recipe
}

/// Whether attention has exactly the parameters of dense attention, so that it can load any dense model: dense
/// attention itself, and kinds that choose blocks by pooled keys.
fn is_dense_or_chosen(attention: Attention) -> bool {
    match attention.form() {
        AttentionForm::Grouped { window } => window.is_none(),
        AttentionForm::Blocks(choice) => !choice.has_indexer(),
        _ => false,
    }
}

/// Problem and hint for a checkpoint with another kind of attention.
fn other_kind(saved: AttentionKind, now: AttentionKind) -> (String, String) {
    let what = format!("attention.kind is {} there, {} here", saved.name(), now.name());
    let hint = match (saved, now) {
        (AttentionKind::Mha, now) if now != AttentionKind::Mla => {
            format!(
                "sieve export it, then sieve import --from EXPORT --attention {} makes a checkpoint to branch from",
                now.name()
            )
        }
        _ => "[attention] must have the kind of the checkpoint".to_owned(),
    };
    (what, hint)
}

/// Problem and hint for the first size that differs: a key of `[model]`, or the number of parameters of a part of the
/// model; `None` if all sizes are equal.
fn other_size(saved: &ModelShape, now: &ModelShape) -> Option<(String, String)> {
    let keys = |shape: &ModelShape| {
        [
            ("num_hidden_layers", shape.num_layers),
            ("hidden_size", shape.d_model),
            ("intermediate_size", shape.d_ff),
            ("num_attention_heads", shape.num_heads),
            ("num_key_value_heads", shape.num_kv_heads),
            ("head_dim", shape.head_dim),
            ("vocab_size", shape.vocab_size),
        ]
    };
    let hint = "[model] and [attention] must have the sizes of the checkpoint; windows and rope_theta may differ";
    let mut pairs = keys(saved).into_iter().zip(keys(now));
    let key = pairs.find(|(saved, now)| saved != now);
    let what = key.map(|((key, saved), (_, now))| format!("{key} is {saved} there and {now} here"));
    let what = what.or_else(|| {
        // A part that only one of the two models has counts as 0 parameters in the other.
        let parts = [saved, now].map(|shape| shape.parameters().by_part());
        let of = |index: usize, part: &str| {
            let found = parts[index].iter().find(|(name, _)| *name == part);
            found.map_or(0, |(_, count)| *count)
        };
        let mut names = parts.iter().flatten().map(|(name, _)| *name);
        let part = names.find(|part| of(0, part) != of(1, part))?;
        let (saved, now) = (of(0, part), of(1, part));
        Some(format!("its {part} has {saved} parameters there and {now} here"))
    });
    what.map(|what| (what, hint.to_owned()))
}
