//! Disk space of a run's checkpoints.
use serde::Serialize;
use sieve_core::Recipe;

/// A checkpoint holds for each parameter the weight and two moments, in f32.
const BYTES_A_PARAMETER: u64 = 3 * 4;

/// Number and size of a run's checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskPlan {
    /// Bytes of one checkpoint, without its small files.
    pub checkpoint_bytes: u64,
    /// Checkpoints on the disk at the same time, at most: the kept ones, and the one being written.
    pub num_checkpoints: u64,
}

impl DiskPlan {
    /// The disk space of a run of `recipe` whose model has `num_parameters` parameters.
    pub fn new(recipe: &Recipe, num_parameters: u64) -> Self {
        let (checkpoint, steps) = (&recipe.checkpoint, recipe.training.steps as u64);
        let all = steps.div_ceil(checkpoint.interval.max(1) as u64);
        let latest = match checkpoint.keep_latest_k as u64 {
            0 => all,
            latest => (latest + 1).min(all),
        };
        let always = steps.checked_div(checkpoint.keep_every as u64).unwrap_or(0);
        Self {
            checkpoint_bytes: BYTES_A_PARAMETER * num_parameters,
            num_checkpoints: (latest + always).min(all) + u64::from(checkpoint.at_start),
        }
    }

    /// Bytes of all checkpoints.
    pub fn total_bytes(&self) -> u64 {
        self.checkpoint_bytes.saturating_mul(self.num_checkpoints)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_than_stay_and_those_that_stay_for_ever() {
        let recipe = include_str!("../../../recipes/quickstart.toml");
        for (steps, latest, every, count) in [(1000, 3, 0, 4), (1000, 3, 250, 8), (1000, 0, 0, 20), (101, 9, 0, 3)] {
            let sets = [
                format!("training.steps={steps}"),
                format!("checkpoint.keep_latest_k={latest}"),
                format!("checkpoint.keep_every={every}"),
                "checkpoint.interval=50".to_owned(),
            ];
            let recipe = Recipe::load(recipe, "quickstart", &sets).expect("a recipe");
            let disk = DiskPlan::new(&recipe, 10);
            assert_eq!((disk.num_checkpoints, disk.checkpoint_bytes), (count, 120), "{sets:?}");
        }
    }
}
