//! The weights that a new run begins with: `model.initial_weights`, and whether a checkpoint fits a recipe.
use super::saved_recipe;
use crate::TrainError;
use sieve_core::paths::expand;
use sieve_core::recipe::{OptimizerName, RANDOM_WEIGHTS};
use sieve_core::{Attention, InitialWeights, ModelShape, Recipe, ShownPath};
use sieve_hf::{Checkpoint, CheckpointError, list_checkpoints};
use std::path::{Path, PathBuf};

/// The recipe's key.
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
    checkpoint.iter().try_for_each(|checkpoint| check_fit(checkpoint, recipe))?;
    Ok(checkpoint)
}

/// As [`initial_checkpoint`], of whatever model.
///
/// # Errors
/// There is no checkpoint.
pub fn named_checkpoint(recipe: &Recipe) -> Result<Option<Checkpoint>, TrainError> {
    let path = folder(recipe)?;
    path.map(|path| opened(Checkpoint::peek(&path))).transpose()
}

/// The latest checkpoint in `folder`, in which a recipe lies that gives no `model.initial_weights`, if that checkpoint
/// is of the recipe's model; the attention may be another. `folder` may be a checkpoint itself.
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
        now.is_ok_and(|now| sizes(&there) == sizes(&now))
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
        let (what, hint) = text.split_once("\n  hint: ").unwrap_or((&text, ""));
        let hint = match error {
            CheckpointError::NotFound { .. } => {
                format!(
                    "{KEY} is a path from the recipe's file, by --set from the current folder; {RANDOM_WEIGHTS:?} \
                     begins without a checkpoint"
                )
            }
            _ => hint.to_owned(),
        };
        TrainError::refused(format!("{KEY}: {what}"), hint)
    })
}

/// Checks that `checkpoint` can begin a run of `recipe`, which may differ from the checkpoint's in everything but the
/// model's parameters.
///
/// # Errors
/// Another kind of attention, or a size that differs; a recipe beside the checkpoint that cannot be read.
pub fn check_fit(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<(), TrainError> {
    let refused = |what: String, hint: String| {
        TrainError::refused(format!("{} cannot begin this run: {what}", checkpoint.path.shown()), hint)
    };
    let (there, saved) = checkpoint.recipe_and_shape()?;
    let now = recipe.model_shape(checkpoint.state.vocab_size)?;
    let difference = match have_other_kinds(&there, recipe) {
        true => Some(other_kind(there.attention.own, recipe.attention.own)),
        false => other_size(&saved, &now),
    };
    if let Some((what, hint)) = difference {
        return Err(refused(what, hint));
    }
    let before = saved_recipe(checkpoint)?;
    let names = [&before, recipe].map(|recipe| recipe.optimizer.name);
    if checkpoint.has_optimizer() && checkpoint.state.step > 0 && names == [OptimizerName::Muon, OptimizerName::AdamW] {
        return Err(refused(
            "optimizer.name is Muon there, which keeps no second moments of matrices, and AdamW here".to_owned(),
            "--set optimizer.name=Muon; or sieve export, then sieve import, which begins with the weights alone"
                .to_owned(),
        ));
    }
    Ok(())
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

/// Whether `checkpoint` has another kind of attention than `recipe`, so that an import alone can begin the run with its
/// weights.
///
/// # Errors
/// A recipe beside the checkpoint that cannot be read.
pub fn needs_import(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<bool, TrainError> {
    let (there, _) = checkpoint.recipe_and_shape()?;
    Ok(have_other_kinds(&there, recipe))
}

/// Whether one model's parameters are not the other's, because of the kinds of attention.
fn have_other_kinds(there: &Recipe, here: &Recipe) -> bool {
    let attentions = [there, here].map(|recipe| recipe.attention.own);
    let [saved, now] = attentions.map(Attention::kind);
    saved != now && !attentions.into_iter().all(is_dense_or_chosen)
}

/// Whether attention has exactly the parameters of dense attention, so that it can load any dense model: dense
/// attention itself, and kinds that choose blocks by pooled keys.
fn is_dense_or_chosen(attention: Attention) -> bool {
    attention.as_kind().has_dense_parameters()
}

/// Problem and hint for a checkpoint with another kind of attention.
fn other_kind(saved: Attention, now: Attention) -> (String, String) {
    let [there, here] = [saved, now].map(|attention| attention.kind().name());
    let what = format!("attention.kind is {there} there, {here} here");
    let hint = match saved.as_kind().is_dense() && !now.as_kind().is_latent() {
        true => {
            format!(
                "sieve export it, then sieve import --from EXPORT --attention {here} makes a checkpoint to branch from"
            )
        }
        false => "[attention] must have the kind of the checkpoint".to_owned(),
    };
    (what, hint)
}

/// Problem and hint for the first size that differs: a key of `[model]`, or the number of parameters of a part of the
/// model; `None` if all sizes are equal.
fn other_size(saved: &ModelShape, now: &ModelShape) -> Option<(String, String)> {
    let hint = "[model] and [attention] must have the sizes of the checkpoint; windows and rope_theta may differ";
    let mut pairs = sizes(saved).into_iter().zip(sizes(now));
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

/// The sizes of a model in `[model]` that do not depend on its attention, by their keys.
fn sizes(shape: &ModelShape) -> [(&'static str, usize); 7] {
    [
        ("num_hidden_layers", shape.num_layers),
        ("hidden_size", shape.d_model),
        ("intermediate_size", shape.d_ff),
        ("num_attention_heads", shape.num_heads),
        ("num_key_value_heads", shape.num_kv_heads),
        ("head_dim", shape.head_dim),
        ("vocab_size", shape.vocab_size),
    ]
}
