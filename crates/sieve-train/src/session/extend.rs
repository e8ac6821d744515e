//! More steps for a finished run.
use crate::TrainError;
use sieve_core::{Recipe, ShownPath};
use sieve_hf::{Checkpoint, list_checkpoints};
use std::path::Path;

/// Extends the run in `out` to `steps`, with a warm-up and a decay of their own for the new steps.
pub(super) fn extend(recipe: &mut Recipe, out: &Path, steps: usize) -> Result<(), TrainError> {
    if !recipe.stage.is_empty() {
        return Err(TrainError::refused("--extend is for recipes without [[stage]]", "add a stage with the new steps"));
    }
    let folder = out.join(&recipe.checkpoint.folder);
    let all = list_checkpoints(&folder)?;
    // Where the state of the latest checkpoint is damaged, --resume=auto continues from the one before.
    let mut states = all.iter().rev().map(|(_, path)| Checkpoint::peek(path));
    let readable = states.find_map(Result::ok).map_or_else(|| Checkpoint::peek(&folder), Ok)?;
    let (saved, _) = readable.recipe_and_shape()?;
    let done = all.last().map_or(0, |(step, _)| *step as usize);
    recipe.training.steps = steps;
    recipe.lr_scheduler.after_step = match saved.training.steps {
        // The same --extend is given again, after an interruption.
        before if before == steps => saved.lr_scheduler.after_step,
        before if before == done && done < steps => done,
        before => {
            let hint = match (done < before, saved.lr_scheduler.after_step) {
                (false, _) => format!("name a step after {done}"),
                (true, 0) => "let it end with --resume first".to_owned(),
                // after_step > 0: an earlier extension was interrupted.
                (true, _) => format!("let it end with --resume --extend {before} first"),
            };
            let what = format!("--extend {steps}: the run in {} is at step {done} of {before}", out.shown());
            return Err(TrainError::refused(what, hint));
        }
    };
    Ok(recipe.validate()?)
}
