//! The recipe: one TOML text that describes one complete run.
//!
//! [`Recipe::load`] is the door: text in, a checked recipe out, or every mistake in the text at once.

mod sections;

mod data;

mod schema;

mod document;

mod check;

mod rules;

mod load;

mod resolve;

mod mistake;

mod error;

mod lr_schedule;

mod resume;

mod model_names;

mod stages;

pub use data::{DataFallback, DataFormat, DataSection, MqarNoise, MqarSection};
pub use error::RecipeError;
pub use mistake::{Location, Mistake, Problem};
pub use resume::{KeyChange, MAY_CHANGE_ON_RESUME};
pub use sections::{
    ActivationCheckpointMode, ActivationCheckpointSection, AttentionKind, AttentionSection,
    CheckpointSection, DecayType, GenerationSection, LrSchedulerSection, MetricsSection,
    ModelSection, OptimizerName, OptimizerSection, TokenizerSection, TokenizerTraining,
    TrainingSection, ValidationSection,
};
pub use stages::{Stage, StageSection};

use serde::{Deserialize, Serialize};

/// One complete run. The section and key names are Hugging Face's (`[model]`) and torchtitan's (the rest).
///
/// A recipe is complete: nothing is inherited from another file. What changes the mathematics has no default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Sizes of the model.
    pub model: ModelSection,
    /// Which attention, and its sizes.
    pub attention: AttentionSection,
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerSection,
    /// The text to train on.
    pub data: DataSection,
    /// Steps, batch sizes, seed.
    pub training: TrainingSection,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// The learning rate over time.
    pub lr_scheduler: LrSchedulerSection,
    /// When checkpoints are written, and which stay.
    #[serde(default)]
    pub checkpoint: CheckpointSection,
    /// What is logged.
    #[serde(default)]
    pub metrics: MetricsSection,
    /// Validation inside the training loop.
    #[serde(default)]
    pub validation: ValidationSection,
    /// What is recomputed in the backward pass.
    #[serde(default)]
    pub activation_checkpoint: ActivationCheckpointSection,
    /// What changes on the way; empty: nothing does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage: Vec<StageSection>,
    /// Sample lines printed at the end of a run.
    #[serde(default)]
    pub generation: GenerationSection,
}

#[cfg(test)]
mod tests;
