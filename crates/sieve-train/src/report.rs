//! Events of a run, for its caller.
use crate::{AttentionStatistics, PeakMemory};
use serde::{Deserialize, Deserializer, Serialize};
use std::path::{Path, PathBuf};

/// One logged step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps of the whole run.
    pub num_steps: u64,
    /// Mean cross-entropy over the step's labels, nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens trained on so far.
    pub tokens_seen: u64,
    /// Tokens a second since the last report, steps only; of all processes together.
    pub tokens_per_second: f64,
    /// Executed FLOPs a second on one device, in units of 10¹².
    pub tflops: f64,
    /// Executed FLOPs as a share of the device's peak, in percent; `None` where no peak is known, as of a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu_percent: Option<f64>,
    /// FLOPs of the same model with dense causal attention as a share of the peak, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_mfu_percent: Option<f64>,
    /// Memory in use, in bytes.
    pub memory_bytes: u64,
    /// Memory of the device or machine, in bytes; 0 where unknown.
    pub memory_total_bytes: u64,
    /// Seconds left at the present speed.
    pub eta_seconds: f64,
    /// What the mask did in this step's last micro-batch; of several processes in rank 0's.
    pub attention: AttentionStatistics,
}

/// One validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationReport {
    /// Optimizer steps done before it.
    pub step: u64,
    /// Mean cross-entropy, nats per token.
    #[serde(deserialize_with = "nan_of_null")]
    pub loss: f64,
    /// `exp(loss)`.
    #[serde(deserialize_with = "nan_of_null")]
    pub perplexity: f64,
    /// Cross-entropy in bits per byte of the predicted tokens' text.
    #[serde(deserialize_with = "nan_of_null")]
    pub bits_per_byte: f64,
    /// The same for a unigram model counted on the training documents.
    pub unigram_bits_per_byte: f64,
    /// Predicted tokens.
    pub num_labels: u64,
    /// Bytes of text of those tokens.
    pub num_bytes: u64,
}

/// JSON has `null` for a number that is not finite.
fn nan_of_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A step that was not taken: the weights and moments are as before it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkippedStep {
    /// Number of the step.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// Its gradient norm.
    pub grad_norm: f64,
    /// Mean loss of the steps taken before, nats.
    pub mean_loss: f64,
    /// The first of its rows, in the stage's order.
    pub first_row: u64,
    /// Its rows.
    pub num_rows: u64,
    /// Documents in it, by their numbers in the shard; the first of them.
    pub documents: Vec<u32>,
    /// How many there are in all.
    pub num_documents: usize,
    /// Gradient norm by part of the model; empty where the gradients were gone when the host learned of the step.
    pub grad_norms: Vec<(String, f64)>,
}

/// What happens during a run.
#[derive(Clone, Debug)]
pub enum TrainEvent<'a> {
    /// A step worth a line.
    Step(&'a StepReport),
    /// An optimizer step that the guard skipped.
    Skipped(&'a SkippedStep),
    /// A validation.
    Validation(&'a ValidationReport),
    /// A checkpoint is on disk.
    Checkpoint(&'a Path),
    /// The device has done the first step of this process.
    FirstStep,
    /// Something a person should know.
    Notice(&'a str),
    /// Something that is wrong though the run continues.
    Warning(&'a str),
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct TrainSummary {
    /// Optimizer steps done.
    pub step: u64,
    /// Whether a signal ended it before its last step.
    pub interrupted: bool,
    /// The run's first validation, also where an earlier process made it.
    pub first_validation: Option<ValidationReport>,
    /// The last validation.
    pub last_validation: Option<ValidationReport>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The last logged step.
    pub last_step: Option<StepReport>,
    /// Memory at its fullest, where known.
    pub peak_memory: Option<PeakMemory>,
}
