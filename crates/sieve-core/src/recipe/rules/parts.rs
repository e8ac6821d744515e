//! The sections of a recipe, each read by itself.

use toml::Table;

use crate::recipe::{
    ActivationCheckpointSection, AttentionSection, CheckpointSection, DataSection, GenerationSection,
    LrSchedulerSection, MetricsSection, ModelSection, OptimizerSection, ParallelismSection, Recipe, StageSection,
    TokenizerSection, TrainingSection, ValidationSection,
};

/// Defines [`Parts`] with one field per section, and its conversions from a TOML table and from a [`Recipe`].
macro_rules! parts {
    ($($name:ident: $section:ty),+ $(,)?) => {
        /// The sections to check. A section that could not be read, because a value has a wrong type, is `None`: its
        /// rules are skipped, and the other sections are still checked.
        pub(in crate::recipe) struct Parts {
            $(pub(in crate::recipe) $name: Option<$section>,)+
        }

        impl From<&Table> for Parts {
            fn from(table: &Table) -> Self {
                Self {
                    $($name: table.get(stringify!($name)).and_then(|section| section.clone().try_into().ok()),)+
                }
            }
        }

        impl From<&Recipe> for Parts {
            fn from(recipe: &Recipe) -> Self {
                Self {
                    $($name: Some(recipe.$name.clone()),)+
                }
            }
        }
    };
}

parts! {
    model: ModelSection,
    attention: AttentionSection,
    tokenizer: TokenizerSection,
    data: DataSection,
    training: TrainingSection,
    optimizer: OptimizerSection,
    lr_scheduler: LrSchedulerSection,
    checkpoint: CheckpointSection,
    metrics: MetricsSection,
    validation: ValidationSection,
    generation: GenerationSection,
    activation_checkpoint: ActivationCheckpointSection,
    parallelism: ParallelismSection,
    stage: Vec<StageSection>,
}
