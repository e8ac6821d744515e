//! The checkpoint a run begins with or resumes from.
mod initial;

use crate::run_folder::rename_aside;
use crate::{RunFolder, Start, TrainError};
pub use initial::{
    BranchOptions, check_fit, ignored_checkpoint, initial_checkpoint, initial_weights, named_checkpoint,
};
use serde::{Deserialize, Serialize};
use sieve_core::recipe::{KeyChange, RANDOM_WEIGHTS};
use sieve_core::{InitialWeights, Recipe, ShownPath};
use sieve_files::{read_file, read_text, write_atomically};
use sieve_hf::{Checkpoint, CheckpointError, CheckpointState, list_checkpoints};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Keys that change what a model computes with the same weights. Windows and block counts are left out, because a
/// branch often changes them on purpose.
const READS_WEIGHTS: [&str; 11] = [
    "attention.bias",
    "attention.compress_stride",
    "attention.longest_period",
    "attention.recency",
    "attention.select_block_size",
    "attention.shortest_period",
    "model.layer_types",
    "model.rms_norm_eps",
    "model.rope_layers",
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
    /// Whether a branch begins without the checkpoint's moments.
    pub fresh_optimizer: bool,
    /// Whether a branch may leave trained tensors of the checkpoint out.
    drops: bool,
    /// The run's `model.initial_weights`, with the folder in full; `None` if the `config.toml` that it resumes from
    /// lacks the key.
    initial_weights: Option<String>,
    /// `model.initial_weights` as the recipe of a new run gives it, even if `--branch-from` names another checkpoint.
    recipe_key: Option<String>,
}

impl Origin {
    /// Finds and verifies the checkpoint that `start` names, and checks that `recipe` may continue it. Writes nothing,
    /// except that [`Start::ResumeAlone`] locks the folder and renames damaged checkpoints. A later checkpoint in the
    /// run's own fallback folder is used if `recipe` continues it.
    ///
    /// A run that was killed before its first checkpoint begins again with its first state: a checkpoint of another
    /// run, or the seed. The checkpoint that a run began with is verified again as long as the run has none of its own.
    /// Later a change of it is only a notice.
    ///
    /// # Errors
    /// A damaged checkpoint; a recipe that does not continue the run; `model.initial_weights` of a new run's recipe
    /// names no checkpoint, or one of another model; a branch that would lose a trained tensor, unless `options` drop
    /// it; the checkpoint that the run began with was removed or replaced.
    pub fn find(
        folder: &RunFolder,
        start: &Start,
        recipe: &Recipe,
        options: BranchOptions,
    ) -> Result<Self, TrainError> {
        let mut notices = Vec::new();
        let own = match start {
            Start::New => {
                return match initial::folder(recipe)? {
                    Some(path) => Self::branch(initial::opened(Checkpoint::open(&path))?, recipe, options),
                    None => Ok(Self::seed()),
                };
            }
            Start::BranchFrom(path) => return Self::branch(Checkpoint::open(path)?, recipe, options),
            Start::Resume if list_checkpoints(&folder.checkpoint_path())?.is_empty() => None,
            Start::Resume => Some(Checkpoint::open(&folder.checkpoint_path())?),
            Start::ResumeAlone { fallback } => latest_of_two(folder, fallback.as_deref(), recipe, &mut notices)?,
            Start::ResumeFrom(path) => Some(Checkpoint::open(path)?),
        };
        // Other ranks start with `ResumeFrom` the checkpoint that rank 0 found: notices of a change are given once.
        let tells_changes = matches!(start, Start::Resume | Start::ResumeAlone { .. });
        Self::resumed(folder, own, recipe, tells_changes, notices)
    }

    /// Continues a run from its own checkpoint; without one, from what it began with.
    fn resumed(
        folder: &RunFolder,
        own: Option<Checkpoint>,
        given: &Recipe,
        tells_changes: bool,
        mut notices: Vec<String>,
    ) -> Result<Self, TrainError> {
        let begun = match &own {
            // A run with a checkpoint of its own needs neither the checkpoint that it began with nor the file that
            // names it.
            Some(_) => Begun::read(folder).ok().flatten(),
            None => Begun::read(folder)?,
        };
        let mut saved = match &own {
            Some(checkpoint) => saved_recipe(checkpoint)?,
            None => {
                let path = folder.config_path();
                let text = read_text(&path).map_err(TrainError::io("reading", &path))?;
                Recipe::load(&text, &path.shown().to_string(), &[])?
            }
        };
        let mut recipe = continued(&saved, given);
        if recipe.lr_scheduler != given.lr_scheduler {
            let warmup = recipe.lr_scheduler.warmup_steps;
            notices.push(format!("note: lr_scheduler.warmup_steps stays {warmup}, as this run began"));
        }
        let named = recipe.model.initial_weights.clone();
        with_initial_weights(&mut saved, &mut recipe, begun.as_ref());
        let is_branch = own.is_none() && begun.as_ref().is_some_and(|begun| begun.is_branch);
        let mut origin = Self {
            checkpoint: None,
            notices,
            is_branch,
            fresh_optimizer: is_branch && begun.as_ref().is_some_and(|begun| begun.fresh_optimizer),
            drops: is_branch && begun.as_ref().is_some_and(|begun| begun.drops),
            initial_weights: recipe.model.initial_weights.clone(),
            recipe_key: begun.as_ref().and_then(|begun| begun.recipe_key.clone()),
        };
        origin.checkpoint = match (own, begun) {
            (None, Some(begun)) => {
                let found = begun.open(folder, named.as_deref())?;
                let note = "note: the run has no checkpoint yet; it begins again with";
                origin.notices.push(format!("{note} {}", found.path.shown()));
                if is_branch {
                    origin.initial_weights = Some(initial::full_key_of(&found)?);
                }
                Some(found)
            }
            (Some(own), Some(begun)) => {
                origin.notices.extend(tells_changes.then(|| begun.change()).flatten());
                Some(own)
            }
            (own, None) => own,
        };
        let steps_done = origin.step() as usize;
        for change in saved.check_resume(&recipe, steps_done)? {
            origin.notices.push(format!("note: {change}"));
        }
        origin.notices.extend(rate_line(&saved, &recipe, steps_done));
        let last = origin.note_of_start();
        origin.notices.extend(last);
        Ok(origin)
    }

    /// A notice of a run that starts over, or whose sums are added up by another number of threads than before; `None`
    /// for other runs.
    fn note_of_start(&self) -> Option<String> {
        let Some(Checkpoint { state, .. }) = &self.checkpoint else {
            return Some("note: the run has no checkpoint yet; it starts over".to_owned());
        };
        // A branch is a new run: it need not repeat the bits of earlier sums, which depend on the threads.
        let (before, now) = (state.num_threads, rayon::current_num_threads());
        (!self.is_branch && before != now).then(|| {
            format!(
                "note: {now} threads compute, the run used {before} before; the last bits of its sums may differ from \
                 here on (RAYON_NUM_THREADS={before} repeats them)"
            )
        })
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
    fn branch(checkpoint: Checkpoint, recipe: &Recipe, options: BranchOptions) -> Result<Self, TrainError> {
        let conversion = initial::check_fit(&checkpoint, recipe, options)?;
        let before = saved_recipe(&checkpoint)?;
        let mut notices = initial::notices(&checkpoint, &before, recipe);
        notices.extend(conversion.words().map(|words| format!("note: {words}")));
        let fresh_optimizer = options.fresh_optimizer;
        if fresh_optimizer && checkpoint.has_optimizer() {
            notices.push("note: the optimizer begins without the checkpoint's moments".to_owned());
        }
        let mut changes = before.diff(recipe)?;
        // Where the checkpoint's own run began does not matter to this one.
        changes.retain(|change| change.key != initial::KEY);
        let (tokenizer, changes) = changes.into_iter().partition::<Vec<_>, _>(|change| names_tokenizer(&change.key));
        if !tokenizer.is_empty() {
            let path = checkpoint.tokenizer_path();
            notices
                .push(format!("note: the tokenizer is the checkpoint's, {}; the recipe's is not used", path.shown()));
        }
        for change in changes {
            // Where layers change their kind, the trainer reports the loss before and after, which says more.
            let is_told = conversion.changes_layers()
                && ["attention.", "model.layer_types", "model.rope_layers"]
                    .iter()
                    .any(|key| change.key.starts_with(key));
            // `starts_with` also finds the keys of a table such as `model.rope_scaling`.
            if READS_WEIGHTS.iter().any(|key| change.key.starts_with(key)) && !is_told {
                notices.push(format!(
                    "warning: {change}; the weights were trained with the former, and what they compute changes at once"
                ));
            } else if checkpoint.state.step > 0 {
                // At step 0 the checkpoint is an import, whose recipe has no training settings to compare with.
                notices.push(format!("note: {change}"));
            }
        }
        let initial_weights = Some(initial::full_key_of(&checkpoint)?);
        let recipe_key = recipe.model.initial_weights.clone();
        let (checkpoint, is_branch, drops) = (Some(checkpoint), true, options.drops);
        Ok(Self { checkpoint, notices, is_branch, fresh_optimizer, drops, initial_weights, recipe_key })
    }

    /// A new run with weights from the seed.
    pub fn seed() -> Self {
        Self {
            checkpoint: None,
            notices: Vec::new(),
            is_branch: false,
            fresh_optimizer: false,
            drops: false,
            initial_weights: Some(RANDOM_WEIGHTS.to_owned()),
            recipe_key: None,
        }
    }

    /// The recipe that the run's folder and its checkpoints keep: with the initial weights that the run began with, and
    /// with the tokenizer that it reads. A branch whose recipe names another tokenizer reads the checkpoint's, and the
    /// recipe in the run's folder names that one.
    ///
    /// # Errors
    /// A recipe beside the checkpoint that cannot be read.
    pub fn own_recipe(&self, recipe: &Recipe) -> Result<Recipe, TrainError> {
        let mut own = self.with_own_tokenizer(recipe)?;
        own.model.initial_weights.clone_from(&self.initial_weights);
        Ok(own)
    }

    /// `recipe` as it continues the checkpoint's run; for a branch, with the tokenizer that the branch reads.
    fn with_own_tokenizer(&self, recipe: &Recipe) -> Result<Recipe, TrainError> {
        let Some(checkpoint) = &self.checkpoint else {
            return Ok(recipe.clone());
        };
        let (saved, _) = checkpoint.recipe_and_shape()?;
        let is_other = |change: &KeyChange| names_tokenizer(&change.key);
        if !self.is_branch || !saved.diff(recipe)?.iter().any(is_other) {
            return Ok(if self.is_branch {
                with_tokenizer_of_branch(&saved, recipe)
            } else {
                continued(&saved, recipe)
            });
        }
        let path = checkpoint.tokenizer_path();
        let path = path.canonicalize().map_err(TrainError::io("reading", path))?;
        let mut own = recipe.clone();
        (own.tokenizer.train, own.tokenizer.numbers) = (None, None);
        own.tokenizer.path = Some(path.to_string_lossy().into_owned());
        Ok(own)
    }

    /// The weights that the run in `folder` begins with, or began with if it is resumed.
    pub(crate) fn initial_weights(&self, folder: &RunFolder, recipe: &Recipe) -> InitialWeights {
        if recipe.model.initial_weights.is_some() {
            return initial_weights(recipe);
        }
        // A run whose `config.toml` lacks the key.
        let of = |path: &Path, step| InitialWeights::Folder { path: path.shown().to_string(), step: Some(step) };
        let begins = !RunFolder::holds_run(folder.path());
        match (Begun::read(folder), &self.checkpoint) {
            (Ok(Some(begun)), _) if !begins => of(&begun.checkpoint, begun.state.step),
            (_, Some(checkpoint)) if begins => of(&checkpoint.path, checkpoint.state.step),
            _ => InitialWeights::Seed(recipe.training.seed),
        }
    }

    /// Number of optimizer steps before the checkpoint.
    pub fn step(&self) -> u64 {
        self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.state.step)
    }
}

/// The recipe beside a checkpoint, with all its stages.
pub(crate) fn saved_recipe(checkpoint: &Checkpoint) -> Result<Recipe, TrainError> {
    let path = checkpoint.path.join("config.toml");
    Ok(Recipe::load(&checkpoint.recipe_toml()?, &path.shown().to_string(), &[])?)
}

/// The contents of `origin.json`: the checkpoint of another folder that a run began with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// Absolute path of the checkpoint.
    checkpoint: PathBuf,
    /// Whether the run is a new one with another recipe: it takes the checkpoint's tokenizer, but its own data.
    is_branch: bool,
    /// Whether the new run began without the checkpoint's moments.
    #[serde(default)]
    fresh_optimizer: bool,
    /// Whether the new run was allowed to leave trained tensors out.
    #[serde(default)]
    drops: bool,
    /// The checkpoint's state, which includes the checksums of its files.
    state: CheckpointState,
    /// `model.initial_weights` of the recipe that the run began with, if it gave the key: the same recipe resumes the
    /// run, even if `--branch-from` named another checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recipe_key: Option<String>,
}

impl Begun {
    /// The origin of a run that begins with the checkpoint of `origin`; `None` if that has none.
    pub(crate) fn of(origin: &Origin) -> Result<Option<Self>, TrainError> {
        let Some(Checkpoint { path, state }) = &origin.checkpoint else {
            return Ok(None);
        };
        Ok(Some(Self {
            checkpoint: path.canonicalize().map_err(TrainError::io("reading", path))?,
            is_branch: origin.is_branch,
            fresh_optimizer: origin.fresh_optimizer,
            drops: origin.drops,
            state: state.clone(),
            recipe_key: origin.recipe_key.clone(),
        }))
    }

    /// Reads the file of the run in `folder`; `None` if that run began with the seed.
    fn read(folder: &RunFolder) -> Result<Option<Self>, TrainError> {
        let path = folder.origin_path();
        match read_file(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(begun) => Ok(Some(begun)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(TrainError::io("reading", &path)(error)),
        }
    }

    /// Opens the checkpoint, if it is still the one that the run began with. It may have moved to where `named`, the
    /// `model.initial_weights` of the recipe, leads.
    fn open(self, folder: &RunFolder, named: Option<&str>) -> Result<Checkpoint, TrainError> {
        let problem = match Checkpoint::open(&self.checkpoint) {
            Ok(found) if found.state == self.state => return Ok(found),
            Ok(_) => "a different checkpoint is there now".to_owned(),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        let moved = named.and_then(|key| Checkpoint::open(&initial::path_of(key).ok()?).ok());
        if let Some(found) = moved.filter(|found| found.state == self.state) {
            return Ok(found);
        }
        let (run, path) = (folder.path().shown(), self.checkpoint.shown());
        Err(TrainError::refused(
            format!("{run} has no checkpoint yet, and {path}, which it began with, cannot be used: {problem}"),
            "put that checkpoint back, or begin the run in a different folder with --out",
        ))
    }

    /// A notice if the checkpoint that a branch began with was removed or replaced. The branch no longer needs it: it
    /// has one of its own. `None` if it is unchanged, or if the run is no branch.
    fn change(&self) -> Option<String> {
        let path = &self.checkpoint;
        let what = match Checkpoint::open_model(path) {
            _ if !self.is_branch => return None,
            Ok(found) if found.state == self.state => return None,
            Ok(_) => "a different checkpoint is there now".to_owned(),
            Err(_) if !path.exists() => "it is gone".to_owned(),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        let path = path.shown();
        Some(format!(
            "note: the run began with {path}: {what}; it continues from its own checkpoint, which needs no other"
        ))
    }

    /// Whether `key`, a recipe's `model.initial_weights`, stands for the weights that this run began with: it is that
    /// of the run's recipe, or leads to the same weights, for example in a folder that was moved.
    fn is_meant_by(&self, key: &str) -> bool {
        let leads_here = |path: PathBuf| Checkpoint::peek(&path).is_ok_and(|found| found.state == self.state);
        self.recipe_key.as_deref() == Some(key) || initial::path_of(key).is_ok_and(leads_here)
    }
}

/// Gives both recipes of a resumed run the initial weights that it began with, so that they do not differ; but if
/// `recipe` names other weights, it keeps them, and the run refuses it. `saved` is the recipe in the run's folder.
fn with_initial_weights(saved: &mut Recipe, recipe: &mut Recipe, begun: Option<&Begun>) {
    let of_branch = begun.filter(|begun| begun.is_branch);
    let then = saved.model.initial_weights.take();
    let is_same = match recipe.model.initial_weights.as_deref() {
        None => true,
        Some(RANDOM_WEIGHTS) if of_branch.is_none() && then.is_none() => true,
        Some(now) => then.as_deref() == Some(now) || of_branch.is_some_and(|begun| begun.is_meant_by(now)),
    };
    if is_same {
        recipe.model.initial_weights.clone_from(&then);
    }
    saved.model.initial_weights = then;
}

/// The whole checkpoint of a run with the most steps, from its own folder or from its folder in `fallback`; `None` if
/// the run has none.
fn latest_of_two(
    folder: &RunFolder,
    fallback: Option<&Path>,
    recipe: &Recipe,
    notices: &mut Vec<String>,
) -> Result<Option<Checkpoint>, TrainError> {
    let own_folder = folder.checkpoint_path();
    let own =
        if list_checkpoints(&own_folder)?.is_empty() { Ok(None) } else { latest_whole(&own_folder, notices).map(Some) };
    let own_step = own.iter().flatten().next().map(|own| own.state.step);
    let Some(fallback) = fallback else {
        return own;
    };
    if folder.had_no_identity() && std::fs::read_dir(fallback).is_ok_and(|mut entries| entries.next().is_some()) {
        notices.push(format!(
            "warning: {} is not searched: {} does not name the run\n  \
             hint: --resume=DIR names a checkpoint to continue from",
            fallback.shown(),
            folder.lock_path().shown()
        ));
    }
    for (step, path) in list_checkpoints(&fallback.join(folder.fallback_name()))?.into_iter().rev() {
        if own_step.is_some_and(|own| step <= own) {
            break;
        }
        match continued_by(&path, recipe) {
            Ok(checkpoint) => {
                let than = own_step.map_or("; its own folder has none".to_owned(), |own| {
                    format!(", which is later than step-{own} of its own folder")
                });
                notices.push(format!("note: the run continues from {}{than}", path.shown()));
                return Ok(Some(checkpoint));
            }
            Err(reason) => notices.push(format!(
                "warning: {} is not taken, though it is later than what the run's own folder holds: {reason}",
                path.shown()
            )),
        }
    }
    own
}

/// Opens a checkpoint of the run's own fallback folder if `recipe` continues it. An error is the reason, on one line.
fn continued_by(path: &Path, recipe: &Recipe) -> Result<Checkpoint, String> {
    let first_lines = |text: String, count: usize| {
        let lines = text.lines().take(count).map(str::trim);
        lines.collect::<Vec<_>>().join(" ")
    };
    let checkpoint = Checkpoint::open(path).map_err(|error| first_lines(error.to_string(), 1))?;
    // The second line of these errors names the first key that differs, or that cannot be read.
    let saved = saved_recipe(&checkpoint).map_err(|error| first_lines(error.to_string(), 2))?;
    let mut recipe = continued(&saved, recipe);
    // The initial weights are not compared: the run's own folder names them.
    recipe.model.initial_weights.clone_from(&saved.model.initial_weights);
    saved.check_resume(&recipe, checkpoint.state.step as usize).map_err(|error| first_lines(error.to_string(), 2))?;
    Ok(checkpoint)
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
                aside.shown(),
                checkpoint.path.shown()
            ));
        }
        return Ok(checkpoint);
    }
    match damaged.into_iter().next() {
        Some((_, error)) => Err(error.into()),
        None => Err(CheckpointError::NotFound { path: folder.to_owned(), beside: Vec::new(), runs: Vec::new() }.into()),
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
            "\n  to give the new steps a schedule of their own: first --resume without --extend up to step {first}, \
             then --resume --extend {steps}"
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
