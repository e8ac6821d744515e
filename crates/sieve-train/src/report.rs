//! The events that a run reports to its caller.
use crate::AttentionStatistics;
use serde::{Deserialize, Deserializer, Serialize};
use sieve_ops::MemoryPeak;
use std::path::{Path, PathBuf};

/// The metrics of one logged step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Number of optimizer steps done.
    pub step: u64,
    /// Number of optimizer steps of the whole run.
    pub num_steps: u64,
    /// Mean cross-entropy over the step's labels, nats.
    pub loss: f64,
    /// Global L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Number of tokens trained on so far.
    pub tokens_seen: u64,
    /// Tokens per second of all processes since the last report, without validations and checkpoints.
    pub tokens_per_second: f64,
    /// TFLOP/s of one device: the model's FLOPs, with attention counted over the pairs that the mask keeps and without
    /// recomputation.
    pub tflops: f64,
    /// `tflops` as a share of the device's peak, in percent; `None` where no peak is known, as for a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu_percent: Option<f64>,
    /// `mfu_percent` if the step had computed dense causal attention in this time; `None` where no peak is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_mfu_percent: Option<f64>,
    /// Device memory in use, in bytes.
    pub memory_bytes: u64,
    /// Memory of the device or machine, in bytes; 0 where unknown.
    pub memory_total_bytes: u64,
    /// Estimated seconds until the run ends.
    pub eta_seconds: f64,
    /// Mask statistics of this step's last micro-batch; with several processes, of rank 0's.
    pub attention: AttentionStatistics,
}

/// The loss of one validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationReport {
    /// Number of optimizer steps before this validation.
    pub step: u64,
    /// Mean cross-entropy of a token, in nats.
    #[serde(deserialize_with = "nan_of_null")]
    pub loss: f64,
    /// Perplexity per token: `exp(loss)`.
    #[serde(deserialize_with = "nan_of_null")]
    pub perplexity: f64,
    /// Cross-entropy in bits per byte of the predicted tokens' text; NaN if they have none.
    #[serde(deserialize_with = "nan_of_null")]
    pub bits_per_byte: f64,
    /// Bits per byte of a unigram model that was counted on the training documents; NaN as for `bits_per_byte`.
    #[serde(deserialize_with = "nan_of_null")]
    pub unigram_bits_per_byte: f64,
    /// Number of predicted tokens.
    pub num_labels: u64,
    /// Bytes of text that the predicted tokens stand for.
    pub num_bytes: u64,
}

/// Reads `null`, which stands for NaN and infinity in JSON, as NaN.
fn nan_of_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A step that was skipped: it changed neither weights nor moments, and counts as an update of the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkippedStep {
    /// Number of the skipped step.
    pub step: u64,
    /// Loss of the step, nats per label.
    pub loss: f64,
    /// Global gradient norm of the skipped step.
    pub grad_norm: f64,
    /// Running mean of the losses before the step, nats per label.
    pub mean_loss: f64,
    /// Index of the step's first row in the order of the stage.
    pub first_row: u64,
    /// Number of rows that the step read.
    pub num_rows: u64,
    /// Indices in the shard of the first documents in these rows.
    pub documents: Vec<u32>,
    /// Number of all documents in these rows.
    pub num_documents: usize,
    /// Gradient norm by part of the model; empty if the host read the step's numbers after its gradients were freed.
    pub grad_norms: Vec<(String, f64)>,
}

/// What a run reports to its caller while it trains.
#[derive(Clone, Debug)]
pub enum TrainEvent<'a> {
    /// A step was logged (every `metrics.log_freq` steps).
    Step(&'a StepReport),
    /// An optimizer step that the guard skipped.
    Skipped(&'a SkippedStep),
    /// A validation has ended.
    Validation(&'a ValidationReport),
    /// A checkpoint was written to this folder.
    Checkpoint(&'a Path),
    /// A text that the model wrote after this step.
    Sample(u64, &'a str),
    /// A micro-batch was computed; of a GPU, given to it. The number of steps so far, with the part of the next one.
    Computed(f64),
    /// The device has done the first step of this process.
    FirstStep,
    /// A message for the user.
    Notice(&'a str),
    /// A problem after which the run continues.
    Warning(&'a str),
}

/// How far a run came, and its last results.
#[derive(Clone, Debug)]
pub struct TrainSummary {
    /// Number of optimizer steps done.
    pub step: u64,
    /// Whether the run ended before its last step.
    pub interrupted: bool,
    /// The run's first validation, which an earlier process may have written; `None` before it.
    pub first_validation: Option<ValidationReport>,
    /// Result of the last validation; `None` before the first one.
    pub last_validation: Option<ValidationReport>,
    /// Folder of the last checkpoint, if one was written.
    pub checkpoint: Option<PathBuf>,
    /// Metrics of the last logged step, if one was logged.
    pub last_step: Option<StepReport>,
    /// Peak memory of the run, if it was measured.
    pub peak_memory: Option<MemoryPeak>,
}
