//! Settings with which a run that does not fit would.

use serde::Serialize;

use super::MemoryPlan;
use sieve_core::recipe::{ActivationCheckpointMode, Recipe};

/// One change of a recipe, and what it needs then.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FittingSetting {
    /// As `--set` takes it; several are separated by a space.
    pub setting: String,
    /// Bytes with it.
    pub total_bytes: u64,
}

/// The least change of either setting alone, and of both together where neither is enough. Both leave the step's tokens
/// as they are.
pub(super) fn settings_that_fit(
    recipe: &Recipe,
    ranks: usize,
    needed: impl Fn(&Recipe) -> MemoryPlan,
) -> Vec<FittingSetting> {
    let mut found = Vec::new();
    let mut consider = |recipe: &Recipe, setting: String| {
        let plan = needed(recipe);
        let fits = plan.total_bytes <= plan.available_bytes / 10 * 9;
        if fits {
            found.push(FittingSetting {
                setting,
                total_bytes: plan.total_bytes,
            });
        }
        fits
    };
    let by_mode = modes_after(recipe.activation_checkpoint.mode)
        .into_iter()
        .any(|(name, mode)| consider(&with_mode(recipe, mode), mode_setting(name)));
    let by_batch = smaller_batches(recipe, ranks).any(|batch| {
        let setting = batch_setting(batch);
        consider(&with_batch(recipe, batch), setting)
    });
    if !by_mode && !by_batch {
        let full = with_mode(recipe, ActivationCheckpointMode::Full);
        let _found = smaller_batches(recipe, ranks).any(|batch| {
            let setting = format!("{} {}", mode_setting("full"), batch_setting(batch));
            consider(&with_batch(&full, batch), setting)
        });
    }
    found
}

fn modes_after(mode: ActivationCheckpointMode) -> Vec<(&'static str, ActivationCheckpointMode)> {
    use ActivationCheckpointMode::{Full, None, Selective};
    match mode {
        None => vec![("selective", Selective), ("full", Full)],
        Selective => vec![("full", Full)],
        Full => Vec::new(),
    }
}

fn with_mode(recipe: &Recipe, mode: ActivationCheckpointMode) -> Recipe {
    let mut changed = recipe.clone();
    changed.activation_checkpoint.mode = mode;
    changed
}

fn mode_setting(name: &str) -> String {
    format!("activation_checkpoint.mode={name}")
}

/// Divisors of the rows of a step below the present micro-batch, the largest first.
fn smaller_batches(recipe: &Recipe, ranks: usize) -> impl Iterator<Item = usize> {
    let rows = recipe.training.global_batch_size;
    let local = recipe.training.local_batch_size;
    (1..local)
        .rev()
        .filter(move |batch| rows.is_multiple_of(*batch * ranks))
}

fn with_batch(recipe: &Recipe, batch: usize) -> Recipe {
    let mut changed = recipe.clone();
    changed.training.local_batch_size = batch;
    changed
}

fn batch_setting(batch: usize) -> String {
    format!("training.local_batch_size={batch}")
}
