//! The checkpoint with the lowest loss on held-out text, which `checkpoint.keep_best` keeps.
use crate::metrics::validations;
use crate::{RunFolder, TrainError};
use sieve_hf::list_checkpoints;
use std::path::PathBuf;

/// The checkpoint of a run whose validation has the lowest loss.
#[derive(Clone, Debug, PartialEq)]
pub struct BestCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Its step.
    pub step: u64,
    /// Its loss on held-out text, nats per token.
    pub loss: f64,
}

/// The checkpoint in a run's folder with the lowest loss by the validations in `metrics.jsonl`, of equal losses the
/// earliest; `None` if no checkpoint has a validation.
///
/// # Errors
/// A folder or a file that cannot be read.
pub fn best_checkpoint(folder: &RunFolder) -> Result<Option<BestCheckpoint>, TrainError> {
    let checkpoints = list_checkpoints(&folder.checkpoint_path())?;
    let losses = validations(&folder.metrics_path())?;
    let measured = checkpoints.into_iter().filter_map(|(step, path)| {
        // The guard may lead a run through a step again; the last validation is of the weights that were kept.
        let report = losses.iter().rev().find(|report| report.step == step)?;
        report.loss.is_finite().then_some(BestCheckpoint { path, step, loss: report.loss })
    });
    Ok(measured.min_by(|a, b| a.loss.total_cmp(&b.loss).then(a.step.cmp(&b.step))))
}
