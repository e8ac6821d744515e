//! Disk space that a run's checkpoints take.
use serde::Serialize;
use sieve_core::Recipe;
use sieve_core::model::ParameterCounts;
use sieve_core::recipe::OptimizerName;

/// Number and size of a run's checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskPlan {
    /// Bytes of one checkpoint, without its small files.
    pub checkpoint_bytes: u64,
    /// Checkpoints on the disk at the same time, at most: the kept ones, and the one being written.
    pub num_checkpoints: u64,
}

impl DiskPlan {
    /// The disk space of a run of `recipe` whose model has these parameters.
    pub fn new(recipe: &Recipe, parameters: &ParameterCounts) -> Self {
        let (checkpoint, steps) = (&recipe.checkpoint, recipe.training.steps as u64);
        let all = steps.div_ceil(checkpoint.interval.max(1) as u64);
        // `keep_latest_k = 0` keeps all; else one more exists while it is written.
        let latest = match checkpoint.keep_latest_k as u64 {
            0 => all,
            latest => (latest + 1).min(all),
        };
        // `keep_every` keeps some checkpoints for good; its 0 keeps none. `keep_best` keeps one more.
        let always = steps.checked_div(checkpoint.keep_every as u64).unwrap_or(0) + u64::from(checkpoint.keep_best);
        Self {
            // Weights and moments are stored in f32, whatever the device.
            checkpoint_bytes: 4 * (parameters.total() + num_moments(recipe, parameters)),
            num_checkpoints: (latest + always).min(all) + u64::from(checkpoint.at_start),
        }
    }

    /// Size of all checkpoints in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.checkpoint_bytes.saturating_mul(self.num_checkpoints)
    }
}

/// The optimizer's moments: two of each trained parameter, but one of the blocks' matrices with Muon.
pub(crate) fn num_moments(recipe: &Recipe, parameters: &ParameterCounts) -> u64 {
    2 * num_trained(recipe, parameters) - orthogonalised(recipe, parameters)
}

/// Parameters that a run trains.
pub(crate) fn num_trained(recipe: &Recipe, parameters: &ParameterCounts) -> u64 {
    if recipe.training.trains_indexers_alone() { parameters.indexer } else { parameters.total() }
}

/// Parameters that Muon updates: about all of the blocks'.
pub(crate) fn orthogonalised(recipe: &Recipe, parameters: &ParameterCounts) -> u64 {
    match recipe.optimizer.name {
        _ if recipe.training.trains_indexers_alone() => 0,
        OptimizerName::AdamW => 0,
        OptimizerName::Muon => parameters.attention + parameters.mlp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_on_disk_are_those_kept_and_the_one_being_written() {
        let recipe = include_str!("../../../recipes/quickstart.toml");
        for (steps, latest, every, count) in [(1000, 3, 0, 4), (1000, 3, 250, 8), (1000, 0, 0, 20), (101, 9, 0, 3)] {
            let sets = [
                format!("training.steps={steps}"),
                format!("checkpoint.keep_latest_k={latest}"),
                format!("checkpoint.keep_every={every}"),
                "checkpoint.interval=50".to_owned(),
            ];
            let recipe = Recipe::load(recipe, "quickstart", &sets).expect("a recipe");
            let shape = recipe.model_shape(300).expect("a shape");
            let parameters = shape.parameters();
            let disk = DiskPlan::new(&recipe, &parameters);
            let bytes = 12 * parameters.total();
            assert_eq!((disk.num_checkpoints, disk.checkpoint_bytes), (count, bytes), "{sets:?}");
            let mut muon = recipe.clone();
            muon.optimizer.name = OptimizerName::Muon;
            let saved = bytes - DiskPlan::new(&muon, &parameters).checkpoint_bytes;
            assert_eq!(saved, 4 * (parameters.attention + parameters.mlp));
        }
    }
}
