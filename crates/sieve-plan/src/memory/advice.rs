//! Finds settings with which a run fits into memory.

use super::{FittingSetting, MemoryPlan};
use sieve_core::recipe::{ActivationCheckpointMode, GradientDtype, Recipe};

/// Up to three settings, the cheapest first, each the smallest change of its sort that fits: of the micro-batch, which
/// costs a few percent of the speed; of the gradients' sharding and type; of recomputation, which costs up to a third.
/// If neither the first nor the last fits, both are changed together; if nothing fits then, gradients and micro-batch
/// are. The tokens of a step stay the same. `ranks` is the number of ranks with different rows; `is_shared` says
/// whether there are several ranks, which may share rows.
pub(super) fn settings_that_fit(
    recipe: &Recipe,
    ranks: usize,
    is_shared: bool,
    needed: impl Fn(&Recipe) -> MemoryPlan,
) -> Vec<FittingSetting> {
    let mut found = Vec::new();
    let mut consider = |recipe: &Recipe, setting: String| {
        let plan = needed(recipe);
        let fits = plan.fits_surely();
        if fits {
            found.push(FittingSetting { setting, total_bytes: plan.total_bytes });
        }
        fits
    };
    let by_batch = smaller_batches(recipe, ranks).any(|batch| {
        let setting = batch_setting(batch);
        consider(&with_batch(recipe, batch), setting)
    });
    let by_sharding = other_sharding(recipe, ranks, is_shared).any(|(changed, setting)| consider(&changed, setting));
    let by_mode = modes_after(recipe.activation_checkpoint.mode)
        .into_iter()
        .any(|(name, mode)| consider(&with_mode(recipe, mode), mode_setting(name)));
    let both = |consider: &mut dyn FnMut(&Recipe, String) -> bool, changed: &Recipe, setting: &str| {
        smaller_batches(recipe, ranks)
            .any(|batch| consider(&with_batch(changed, batch), format!("{setting} {}", batch_setting(batch))))
    };
    let by_full_mode = !by_mode && !by_batch && {
        let full = with_mode(recipe, ActivationCheckpointMode::Full);
        both(&mut consider, &full, &mode_setting("full"))
    };
    if !(by_batch || by_sharding || by_mode || by_full_mode) {
        other_sharding(recipe, ranks, is_shared).any(|(changed, setting)| both(&mut consider, &changed, &setting));
    }
    found
}

/// The next smaller micro-batch, the next change of the gradients' sharding or type, and the next mode of
/// recomputation, the cheapest first: those that `recipe` does not have already and with which it takes less memory.
pub(super) fn settings_that_save(
    recipe: &Recipe,
    ranks: usize,
    is_shared: bool,
    needed: impl Fn(&Recipe) -> MemoryPlan,
) -> Vec<FittingSetting> {
    let all = needed(recipe).total_bytes;
    let batch = smaller_batches(recipe, ranks).next();
    let batch = batch.map(|batch| (with_batch(recipe, batch), batch_setting(batch)));
    let mode = modes_after(recipe.activation_checkpoint.mode).into_iter().next();
    let mode = mode.map(|(name, mode)| (with_mode(recipe, mode), mode_setting(name)));
    let changed = batch.into_iter().chain(other_sharding(recipe, ranks, is_shared).next()).chain(mode);
    let found = changed.map(|(changed, setting)| {
        let total_bytes = needed(&changed).total_bytes;
        FittingSetting { setting, total_bytes }
    });
    found.filter(|fitting| fitting.total_bytes < all).collect()
}

/// Recipes with less memory for gradients or weights, beginning with the smallest change.
fn other_sharding(recipe: &Recipe, ranks: usize, is_shared: bool) -> impl Iterator<Item = (Recipe, String)> {
    let training = &recipe.training;
    let has_micro_batches = training.global_batch_size > training.local_batch_size * ranks;
    let stage = recipe.parallelism.zero_stage;
    // ZeRO-2 keeps fewer gradients only where there are several micro-batches.
    let may_take = move |other: usize| match other {
        2 => stage < 2 && has_micro_batches,
        3 => stage < 3 && is_shared,
        _ => true,
    };
    let may_round = training.gradient_dtype == GradientDtype::F32;
    // (`parallelism.zero_stage`, whether gradients are stored in bf16).
    let ways = [(2, false), (stage, true), (2, true), (3, false), (3, true)].into_iter();
    let ways = ways.filter(move |&(other, rounds)| {
        let is_change = other != stage || rounds;
        let saves_by_stage = other == stage || may_take(other);
        is_change && saves_by_stage && (may_round || !rounds)
    });
    ways.map(move |(other, rounds)| {
        let (mut changed, mut settings) = (recipe.clone(), Vec::new());
        if other != stage {
            changed.parallelism.zero_stage = other;
            settings.push(format!("parallelism.zero_stage={other}"));
        }
        if rounds {
            changed.training.gradient_dtype = GradientDtype::Bf16;
            settings.push("training.gradient_dtype=bf16".to_owned());
        }
        (changed, settings.join(" "))
    })
}

/// (name, mode) of the modes that keep fewer activations than `mode`, the smallest change first.
fn modes_after(mode: ActivationCheckpointMode) -> Vec<(&'static str, ActivationCheckpointMode)> {
    use ActivationCheckpointMode::{Full, None, Selective};
    match mode {
        None => vec![("selective", Selective), ("full", Full)],
        Selective => vec![("full", Full)],
        Full => Vec::new(),
    }
}

pub(super) fn with_mode(recipe: &Recipe, mode: ActivationCheckpointMode) -> Recipe {
    let mut changed = recipe.clone();
    changed.activation_checkpoint.mode = mode;
    changed
}

fn mode_setting(name: &str) -> String {
    format!("activation_checkpoint.mode={name}")
}

/// The recipe with the smallest micro-batch that divides a step's rows among `ranks`; `None` if none does.
pub(super) fn smallest_batch(recipe: &Recipe, ranks: usize) -> Option<Recipe> {
    let rows = recipe.training.global_batch_size;
    rows.is_multiple_of(ranks).then(|| with_batch(recipe, 1))
}

/// Smaller micro-batches that divide a step's rows, the largest first.
fn smaller_batches(recipe: &Recipe, ranks: usize) -> impl Iterator<Item = usize> {
    let rows = recipe.training.global_batch_size;
    let local = recipe.training.local_batch_size;
    (1..local).rev().filter(move |batch| rows.is_multiple_of(*batch * ranks))
}

fn with_batch(recipe: &Recipe, batch: usize) -> Recipe {
    let mut changed = recipe.clone();
    changed.training.local_batch_size = batch;
    changed
}

fn batch_setting(batch: usize) -> String {
    format!("training.local_batch_size={batch}")
}
