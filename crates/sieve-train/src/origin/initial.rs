//! The weights that a new run begins with: `model.initial_weights`, and whether a checkpoint fits a recipe.
use super::saved_recipe;
use crate::TrainError;
use sieve_core::kinds::{ParamSpec, Part};
use sieve_core::model::{Conversion, ConversionGap, names_of};
use sieve_core::paths::expand;
use sieve_core::recipe::{OptimizerName, RANDOM_WEIGHTS};
use sieve_core::{InitialWeights, Recipe, Refusal, ShownPath};
use sieve_hf::{Checkpoint, CheckpointError, list_checkpoints};
use std::path::{Path, PathBuf};

/// The recipe's key for the weights that a new run begins with.
pub(super) const KEY: &str = "model.initial_weights";

/// The weights that a run of `recipe` begins with, or began with. The step is left out where the checkpoint is no
/// longer there.
pub fn initial_weights(recipe: &Recipe) -> InitialWeights {
    let Some(key) = recipe.model.initial_folder() else {
        return InitialWeights::Seed(recipe.training.seed);
    };
    let path = path_of(key).unwrap_or_else(|_| PathBuf::from(key));
    match Checkpoint::peek(&path) {
        Ok(found) => InitialWeights::Folder { path: found.path.shown().to_string(), step: Some(found.state.step) },
        Err(_) => InitialWeights::Folder { path: path.shown().to_string(), step: None },
    }
}

/// The checkpoint that a new run of `recipe` begins with by its own `model.initial_weights`; `None`: weights from the
/// seed. Only the checkpoint's state and recipe are read, and its tensors are not verified.
///
/// # Errors
/// There is no checkpoint; it is of another model.
pub fn initial_checkpoint(recipe: &Recipe) -> Result<Option<Checkpoint>, TrainError> {
    let checkpoint = named_checkpoint(recipe)?;
    if let Some(checkpoint) = &checkpoint {
        // Flags of the training command say what may be dropped.
        check_fit(checkpoint, recipe, BranchOptions::ANY)?;
    }
    Ok(checkpoint)
}

/// As [`initial_checkpoint`], but does not check that the checkpoint fits the recipe's model.
///
/// # Errors
/// There is no checkpoint.
pub fn named_checkpoint(recipe: &Recipe) -> Result<Option<Checkpoint>, TrainError> {
    let path = folder(recipe)?;
    path.map(|path| opened(Checkpoint::peek(&path))).transpose()
}

/// The latest checkpoint in `folder`, where the recipe's file lies, that has the sizes of the recipe's model; its
/// attention may differ. `None` if the recipe gives `model.initial_weights`. `folder` may be a checkpoint itself.
pub fn ignored_checkpoint(folder: &Path, recipe: &Recipe) -> Option<PathBuf> {
    if recipe.model.initial_weights.is_some() {
        return None;
    }
    let beside = list_checkpoints(folder).unwrap_or_default().into_iter().rev().map(|(_, path)| path);
    let is_of_model = |path: &PathBuf| {
        let found = Checkpoint::peek(path).and_then(|found| Ok((found.recipe_and_shape()?.1, found.state.vocab_size)));
        let Ok((there, vocab_size)) = found else {
            return false;
        };
        let now = recipe.model_shape(recipe.stated_vocab_size().unwrap_or(vocab_size));
        now.is_ok_and(|now| there.sizes() == now.sizes())
    };
    let own = folder.join("state.json").is_file().then(|| folder.to_owned());
    own.into_iter().chain(beside).find(is_of_model)
}

/// The path that a value of the key stands for. The program that reads a recipe expands variables and writes the path
/// in full, with `$$` for a dollar sign.
pub(super) fn path_of(key: &str) -> Result<PathBuf, TrainError> {
    Ok(PathBuf::from(expand(key, &|_| None)?))
}

/// The folder that a new run of `recipe` begins with; `None`: weights from the seed.
pub(super) fn folder(recipe: &Recipe) -> Result<Option<PathBuf>, TrainError> {
    recipe.model.initial_folder().map(path_of).transpose()
}

/// The value of the key that stands for a path.
pub(super) fn key_of(path: &Path) -> String {
    path.to_string_lossy().into_owned().replace('$', "$$")
}

/// The value of the key for a checkpoint, with its path in full.
pub(super) fn full_key_of(checkpoint: &Checkpoint) -> Result<String, TrainError> {
    let path = &checkpoint.path;
    Ok(key_of(&path.canonicalize().map_err(TrainError::io("reading", path))?))
}

/// Adds the key to the error of a folder that is no checkpoint.
pub(super) fn opened(found: Result<Checkpoint, CheckpointError>) -> Result<Checkpoint, TrainError> {
    found.map_err(|error| {
        let text = error.to_string();
        let Refusal { what, hint } = Refusal::of_text(&text, "");
        let hint = match error {
            CheckpointError::NotFound { .. } => {
                format!(
                    "{KEY} is a path from the recipe's file, by --set from the current folder; {RANDOM_WEIGHTS:?} \
                     begins without a checkpoint"
                )
            }
            _ => hint.into_owned(),
        };
        TrainError::refused(format!("{KEY}: {what}"), hint)
    })
}

/// How a new run takes over a checkpoint's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchOptions {
    /// Whether trained tensors that the new model has no place for may be dropped.
    pub drops: bool,
    /// Whether the optimizer's moments begin at zero; the step and the position in the data stay.
    pub fresh_optimizer: bool,
}

impl BranchOptions {
    /// The options that allow the most: a checkpoint that does not fit with them fits with no others.
    pub(super) const ANY: Self = Self { drops: true, fresh_optimizer: true };
}

/// Checks that `checkpoint` can begin a run of `recipe`, which may differ from the checkpoint's in everything but the
/// model's sizes. Returns how its tensors become the run's.
///
/// # Errors
/// A kind of attention that cannot use the weights, or a size that differs; a trained tensor that has no place in the
/// model, unless `options` drop it; a recipe beside the checkpoint that cannot be read.
pub fn check_fit(checkpoint: &Checkpoint, recipe: &Recipe, options: BranchOptions) -> Result<Conversion, TrainError> {
    let refused = |what: String, hint: String| {
        TrainError::refused(format!("{} cannot begin this run: {what}", checkpoint.path.shown()), hint)
    };
    let (_, saved) = checkpoint.recipe_and_shape()?;
    let first = recipe.at_stage(&recipe.stage_of_step(checkpoint.state.step as usize));
    let now = first.model_shape(checkpoint.state.vocab_size)?;
    let conversion = Conversion::of(&saved, &now).map_err(|gap| {
        let hint = match &gap {
            ConversionGap::Kinds(_) => "give [attention] a kind that the checkpoint's weights can become",
            ConversionGap::Size(_) => {
                "[model] and the weights' sizes in [attention] must be the checkpoint's; windows, numbers of blocks \
                 and rope_theta may differ"
            }
        };
        refused(gap.to_string(), hint.to_owned())
    })?;
    let lost = if options.drops { Vec::new() } else { trained(checkpoint, &conversion.dropped)? };
    if !lost.is_empty() {
        return Err(refused(
            format!("its model has trained tensors that this one has no place for: {}", names_of(&lost)),
            "--drop begins the run without them".to_owned(),
        ));
    }
    let before = saved_recipe(checkpoint)?;
    let names = [&before, recipe].map(|recipe| recipe.optimizer.name);
    let has_moments = checkpoint.has_optimizer() && checkpoint.state.step > 0 && !options.fresh_optimizer;
    if has_moments && names == [OptimizerName::Muon, OptimizerName::AdamW] {
        return Err(refused(
            "optimizer.name is Muon there, which keeps no second moments of matrices, and AdamW here".to_owned(),
            "--set optimizer.name=Muon; or --fresh-optimizer, which begins without moments".to_owned(),
        ));
    }
    Ok(conversion)
}

/// The `dropped` tensors without which the model computes something else. DMA's A of zeros, and the W_dt that it is
/// multiplied with, are not among them.
fn trained(checkpoint: &Checkpoint, dropped: &[ParamSpec]) -> Result<Vec<ParamSpec>, TrainError> {
    if dropped.is_empty() {
        return Ok(Vec::new());
    }
    let tensors = checkpoint.model()?;
    let mut lost = Vec::new();
    for spec in dropped {
        let layer = spec.ours.rsplit_once("self_attn.").map_or("", |(layer, _)| layer);
        let a = dropped.iter().find(|other| other.ours == format!("{layer}self_attn.a"));
        let is_zero = match a.filter(|_| spec.part == Part::Mask) {
            Some(a) => tensors.tensor(&a.ours, &a.dims)?.iter::<f32>().all(|value| value == 0.0),
            None => false,
        };
        if !is_zero {
            lost.push(spec.clone());
        }
    }
    Ok(lost)
}

/// Notices about where a new run of `recipe` begins: with `checkpoint`, whose own recipe is `saved`; and that
/// `--branch-from` wins if the recipe names other weights.
pub(super) fn notices(checkpoint: &Checkpoint, saved: &Recipe, recipe: &Recipe) -> Vec<String> {
    // At step 0 a checkpoint still has the weights that its own recipe names.
    let source = saved.model.initial_folder().filter(|_| checkpoint.state.step == 0);
    let of_source = source.map_or(String::new(), |source| format!(", which has the weights of {source}"));
    let begins = format!("note: a new run that begins with {}{of_source}", checkpoint.path.shown());
    let is_overruled = source.is_none() || source != recipe.model.initial_folder();
    let overruled = is_overruled.then(|| overruled(checkpoint, recipe)).flatten();
    std::iter::once(begins).chain(overruled).collect()
}

/// A notice if the run begins with `checkpoint` by `--branch-from`, and the recipe names other weights.
fn overruled(checkpoint: &Checkpoint, recipe: &Recipe) -> Option<String> {
    let key = recipe.model.initial_weights.as_deref()?;
    let full = |path: &Path| path.canonicalize().ok();
    let named = folder(recipe).ok().flatten().and_then(|path| full(&Checkpoint::peek(&path).ok()?.path));
    let is_same = named.is_some() && named == full(&checkpoint.path);
    (!is_same).then(|| format!("note: --branch-from wins over the recipe's {KEY} = {key:?}, which is not read"))
}
