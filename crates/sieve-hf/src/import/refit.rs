//! Gives the weights of a checkpoint to a model with another kind of attention.
use super::{list, no_place_for};
use crate::parameters::named_parameters_but;
use crate::{Checkpoint, CheckpointError, CheckpointFiles, CheckpointState};
use burn::tensor::backend::Backend;
use sieve_core::Recipe;
use sieve_nn::Qwen3;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What [`refit`] wrote.
#[derive(Clone, Debug)]
pub struct RefitReport {
    /// The checkpoint: `step-0` in the output folder.
    pub path: PathBuf,
    /// Parameters that the source does not have; they are initialised as in a new model.
    pub added: Vec<String>,
}

/// Writes the weights of the checkpoint `from` as a checkpoint of step 0 for the model of `recipe` into `out`, as
/// [`import`](super::import) of its export would: without moments, and with its tokenizer. The new checkpoint's recipe
/// names `from` as its initial weights. An earlier `step-0` there is replaced.
///
/// # Errors
/// A damaged checkpoint; a tensor of another shape; an attention kind that cannot use the weights; any failure of the
/// file system.
pub fn refit<B: Backend>(
    from: &Path,
    recipe: &Recipe,
    out: &Path,
    device: &B::Device,
) -> Result<RefitReport, CheckpointError> {
    let source = Checkpoint::open_model(from)?;
    let (saved, _) = source.recipe_and_shape()?;
    let full = source.path.canonicalize().map_err(CheckpointError::io("reading", &source.path))?;
    let mut recipe = recipe.clone();
    recipe.tokenizer = saved.tokenizer;
    recipe.model.initial_weights = Some(full.to_string_lossy().into_owned().replace('$', "$$"));
    let bad_recipe = CheckpointError::bad_recipe(from);
    let shape = recipe.model_shape(source.state.vocab_size).map_err(&bad_recipe)?;
    let tensors = source.model()?;
    let mut unused = tensors.names().into_iter().collect::<BTreeSet<_>>();
    let (mut added, mut misfit) = (Vec::new(), None);
    let model = named_parameters_but(&Qwen3::<B>::new(&shape, recipe.training.seed, device), |name, wanted| {
        if !unused.remove(name) {
            added.push(name.to_owned());
            return None;
        }
        tensors.tensor(name, wanted).map_err(|error| misfit.get_or_insert(error)).ok()
    });
    if let Some(error) = misfit {
        return Err(error);
    }
    if !unused.is_empty() {
        return Err(no_place_for(from, &list(&unused)));
    }
    let tokenizer = source.tokenizer_path();
    let files = CheckpointFiles {
        model,
        optimizer: Vec::new(),
        recipe_toml: recipe.to_toml().map_err(&bad_recipe)?,
        tokenizer_json: fs::read_to_string(&tokenizer).map_err(CheckpointError::io("reading", &tokenizer))?,
    };
    fs::create_dir_all(out).map_err(CheckpointError::io("creating", out))?;
    let path = Checkpoint::write(out, CheckpointState::untrained(shape.vocab_size), &files)?;
    Ok(RefitReport { path, added })
}
