//! The recipe: one TOML text that describes one complete run.
//!
//! [`Recipe::load`] is the entry point: it returns a checked recipe, or every mistake in the text at once.

mod sections;

mod attention;

mod data;

mod schema;

mod document;

mod check;

mod rules;

mod load;

mod resolve;

mod mistake;

mod error;

mod key_change;

mod lr_schedule;

mod resume;

mod model_names;

mod stages;

mod manual;

mod template;

mod siblings;

pub use crate::keys::MAX_SEQ_LEN;
pub use crate::kinds::{Attention, AttentionKind, SwaShape};
pub use attention::AttentionSection;
pub use data::{DataFallback, DataFormat, DataSection, MqarNoise, MqarSection};
pub use error::RecipeError;
pub use key_change::{KeyChange, other_losses};
pub use manual::{json_schema, keys_page};
pub use mistake::{Location, Mistake};
pub use sections::{
    ActivationCheckpointMode, ActivationCheckpointSection, CheckpointSection, DecayType, GenerationSection,
    GradientDtype, LrSchedulerSection, MetricsSection, ModelSection, OptimizerName, OptimizerSection,
    ParallelismSection, RANDOM_WEIGHTS, TokenizerSection, TokenizerSource, TokenizerTraining, TrainingPrecision,
    TrainingSection, ValidationSection,
};
pub use siblings::{sibling, siblings};
pub use stages::{Stage, StageSection};
pub use template::{
    EPOCHS_AS_NEW, StartingSize, fine_tuning_steps, least_tokens, steps_for_answers, steps_for_text, tokens_of_text,
    vocab_size_for_text,
};

pub(crate) use rules::Rules;
pub(crate) use sections::SHARED_LAYER;

use crate::keys::keys;

keys! {
    /// One complete run. The section and key names are Hugging Face's (`[model]`) and torchtitan's (the rest).
    ///
    /// A recipe is complete: nothing is inherited from another file. The sizes of a model and of its attention, the
    /// text, the steps and the learning rate have no default.
    pub struct Recipe {
        /// Sizes of the model.
        pub model: ModelSection,
        /// Which attention, and its sizes: `kind` alone is enough, and the defaults follow from the row's length and
        /// the model. `--set attention.kind=KIND` on a recipe of another kind takes that kind's defaults; what goes
        /// with other kinds alone, in the recipe or the command, is then left out, and a warning names it: their keys,
        /// `window` of a `[[stage]]`, and what `"mla"` cannot have (dense layers of `model.layer_types`, another
        /// `model.num_key_value_heads`, `model.rope_layers`). Without it a key of another kind is a mistake. `"mha"`
        /// and `"swa"` have no preset: no paper gives the one its own sizes, and each paper gives the other another
        /// window.
        ///
        /// A table `[attention.NAME]` gives layers that `model.layer_types` calls NAME a kind of their own, with the
        /// same keys: `[attention.swa]` with `sliding_window = 512`. NAME is a kind, `sliding_attention` (`swa`), or a
        /// word of yours beside a `kind`. `"mla"` goes with no other kind.
        pub attention: AttentionSection,
        /// Where the tokenizer comes from: exactly one of `path`, `numbers` and `train`.
        pub tokenizer: TokenizerSection,
        /// The text to train on.
        pub data: DataSection,
        /// Steps, batch sizes, seed.
        pub training: TrainingSection,
        /// The optimizer.
        pub optimizer: OptimizerSection,
        /// The learning rate over time: warm up, stay, decay.
        #[key(optional)]
        pub lr_scheduler: LrSchedulerSection,
        /// When checkpoints are written, and which stay.
        pub checkpoint: CheckpointSection = CheckpointSection::default(),
        /// What is logged.
        pub metrics: MetricsSection = MetricsSection::default(),
        /// Validation inside the training loop: before the first step, every `interval` steps, and after the last.
        pub validation: ValidationSection = ValidationSection::default(),
        /// What is recomputed in the backward pass.
        pub activation_checkpoint: ActivationCheckpointSection = ActivationCheckpointSection::default(),
        /// How several processes share a step.
        pub parallelism: ParallelismSection = ParallelismSection::default(),
        /// What changes on the way, one block after the other; without one, nothing does.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub stage: Vec<StageSection> = Vec::new(),
        /// Sample lines while a run trains and at its end.
        pub generation: GenerationSection = GenerationSection::default(),
    }
}

#[cfg(test)]
mod tests;
