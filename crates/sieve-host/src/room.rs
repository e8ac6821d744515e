//! Disk space for a run's checkpoints, checked before the first one is written.
use crate::terminal;
use sieve_core::model::ParameterCounts;
use sieve_core::{Recipe, ShownPath};
use sieve_hf::list_checkpoints;
use sieve_plan::DiskPlan;
use std::path::Path;

/// What a run prints at its start: a line about its checkpoints, and a warning if the disk has too little free space.
pub fn lines(recipe: &Recipe, parameters: &ParameterCounts, out: &Path) -> (String, Option<String>) {
    let disk = DiskPlan::new(recipe, parameters);
    (line(recipe, disk, out), warning(recipe, disk, out))
}

/// A line about the checkpoints' size and the free space in the output folder.
pub fn line(recipe: &Recipe, disk: DiskPlan, out: &Path) -> String {
    let free = sieve_files::free_bytes(out);
    let free = free.map_or(String::new(), |free| format!("; {} are free in {}", terminal::bytes(free), out.shown()));
    format!(
        "checkpoints of {} every {} steps, at most {} at a time: {}{free}",
        terminal::bytes(disk.checkpoint_bytes),
        terminal::thousands(recipe.checkpoint.interval as u64),
        terminal::thousands(disk.num_checkpoints),
        terminal::bytes(disk.total_bytes()),
    )
}

/// A warning if the checkpoints still to be written do not fit into the free space.
fn warning(recipe: &Recipe, disk: DiskPlan, out: &Path) -> Option<String> {
    let num_existing = list_checkpoints(&out.join(&recipe.checkpoint.folder)).map_or(0, |found| found.len() as u64);
    // At least one: a checkpoint is written before an older one is deleted.
    let needed = disk.num_checkpoints.saturating_sub(num_existing).max(1) * disk.checkpoint_bytes;
    let free = sieve_files::free_bytes(out)?;
    (free < needed).then(|| {
        format!(
            "warning: the checkpoints of this run need {}, and {} are free in {}\n  \
             hint: make room, lower checkpoint.keep_latest_k (0 keeps all) or raise checkpoint.interval",
            terminal::bytes(needed),
            terminal::bytes(free),
            out.shown()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_disk_space_gives_a_warning_with_both_numbers() {
        let dir = std::env::temp_dir();
        let recipe = include_str!("../../../recipes/quickstart.toml");
        let recipe = Recipe::load(recipe, "quickstart", &[]).expect("a recipe");
        let disk = |num_parameters: u64| DiskPlan { checkpoint_bytes: 12 * num_parameters, num_checkpoints: 1 };
        assert_eq!(warning(&recipe, disk(1), &dir), None);
        let text = warning(&recipe, disk(1 << 50), &dir).expect("a petabyte");
        for part in ["are free in", "keep_latest_k", "checkpoint.interval"] {
            assert!(text.contains(part), "{text}");
        }
        let text = line(&recipe, disk(1 << 20), &dir);
        assert!(text.starts_with("checkpoints of 12.00 MiB every"), "{text}");
    }
}
