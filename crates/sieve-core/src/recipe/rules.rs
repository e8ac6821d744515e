//! Rules between values that have the right types. All are checked; none hides another.

mod attention;
mod stages;

use std::path::{Component, Path};

use attention::{check_attention, check_layer_types};

use super::data;
use super::mistake::{Mistake, Problem};
use super::{
    ActivationCheckpointSection, AttentionSection, CheckpointSection, DataSection,
    GenerationSection, LrSchedulerSection, MetricsSection, ModelSection, OptimizerSection, Recipe,
    StageSection, TokenizerSection, TrainingSection, ValidationSection,
};

/// 256 bytes, the token that ends a document, and the token that pads.
const MIN_TRAINED_VOCAB: usize = 258;
/// Token ids and positions are `i32` on devices, and products of sizes must stay inside `u64`.
const MAX_WIDTH: usize = 1 << 20;
const MAX_COUNT: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 12;
pub(super) const MAX_VOCAB: usize = 1 << 24;
const MAX_SEQ_LEN: usize = 1 << 27;
const MAX_BATCH: usize = 1 << 24;
const MAX_STEPS: usize = 1 << 40;

/// The sections to check; `None` for one that could not be read, whose rules are then left out.
pub(super) struct Parts<'a> {
    pub(super) model: Option<&'a ModelSection>,
    pub(super) attention: Option<&'a AttentionSection>,
    pub(super) tokenizer: Option<&'a TokenizerSection>,
    pub(super) data: Option<&'a DataSection>,
    pub(super) training: Option<&'a TrainingSection>,
    pub(super) optimizer: Option<&'a OptimizerSection>,
    pub(super) lr_scheduler: Option<&'a LrSchedulerSection>,
    pub(super) checkpoint: Option<&'a CheckpointSection>,
    pub(super) metrics: Option<&'a MetricsSection>,
    pub(super) validation: Option<&'a ValidationSection>,
    pub(super) generation: Option<&'a GenerationSection>,
    pub(super) activation_checkpoint: Option<&'a ActivationCheckpointSection>,
    pub(super) stage: Option<&'a [StageSection]>,
}

impl<'a> From<&'a Recipe> for Parts<'a> {
    fn from(recipe: &'a Recipe) -> Self {
        Self {
            model: Some(&recipe.model),
            attention: Some(&recipe.attention),
            tokenizer: Some(&recipe.tokenizer),
            data: Some(&recipe.data),
            training: Some(&recipe.training),
            optimizer: Some(&recipe.optimizer),
            lr_scheduler: Some(&recipe.lr_scheduler),
            checkpoint: Some(&recipe.checkpoint),
            metrics: Some(&recipe.metrics),
            validation: Some(&recipe.validation),
            generation: Some(&recipe.generation),
            activation_checkpoint: Some(&recipe.activation_checkpoint),
            stage: Some(&recipe.stage),
        }
    }
}

/// Appends every broken rule to `mistakes`.
pub(super) fn check(parts: &Parts<'_>, mistakes: &mut Vec<Mistake>) {
    let mut rules = Rules(mistakes);
    if let Some(model) = parts.model {
        check_model(model, &mut rules);
    }
    if let Some(attention) = parts.attention {
        check_attention(attention, parts.model, &mut rules);
        if let Some(model) = parts.model {
            check_layer_types(model, attention, &mut rules);
        }
    }
    if let Some(tokenizer) = parts.tokenizer {
        check_tokenizer(tokenizer, parts.model, &mut rules);
    }
    if let Some(data) = parts.data {
        data::check_data(data, parts, &mut rules);
    }
    if let Some(training) = parts.training {
        check_training(training, parts.model, &mut rules);
    }
    if let Some(optimizer) = parts.optimizer {
        check_optimizer(optimizer, &mut rules);
    }
    if let Some(lr_scheduler) = parts.lr_scheduler {
        check_lr_scheduler(lr_scheduler, parts.training, &mut rules);
    }
    if let Some(checkpoint) = parts.checkpoint {
        rules.at_least_one("checkpoint.interval", checkpoint.interval as u64);
        check_folder(&checkpoint.folder, &mut rules);
    }
    if let Some(metrics) = parts.metrics {
        rules.at_least_one("metrics.log_freq", metrics.log_freq as u64);
    }
    if let Some(validation) = parts.validation {
        rules.at_least_one("validation.interval", validation.interval as u64);
        rules.at_least_one("validation.steps", validation.steps as u64);
        if let Some(paths) = &validation.paths {
            check_paths("validation.paths", paths, &mut rules);
        }
    }
    if let Some(section) = parts.activation_checkpoint {
        rules.at_least_one(
            "activation_checkpoint.selective_ac_option",
            section.selective_ac_option as u64,
        );
    }
    if let Some(stages) = parts.stage.filter(|stages| !stages.is_empty()) {
        stages::check_stages(stages, parts, &mut rules);
    }
    if let Some(generation) = parts.generation {
        let wanted = generation.prompts.is_empty() || generation.max_new_tokens > 0;
        rules.require(
            wanted,
            "generation.max_new_tokens",
            || "is 0, but there are prompts".to_owned(),
            || "give it at least 1, or leave the prompts out".to_owned(),
        );
    }
}

fn check_model(model: &ModelSection, rules: &mut Rules<'_>) {
    rules.size("model.hidden_size", model.hidden_size, MAX_WIDTH);
    rules.size(
        "model.intermediate_size",
        model.intermediate_size,
        MAX_WIDTH,
    );
    rules.size(
        "model.num_hidden_layers",
        model.num_hidden_layers,
        MAX_COUNT,
    );
    rules.size(
        "model.num_attention_heads",
        model.num_attention_heads,
        MAX_COUNT,
    );
    rules.size(
        "model.num_key_value_heads",
        model.num_key_value_heads,
        MAX_COUNT,
    );
    rules.size("model.head_dim", model.head_dim, MAX_HEAD_DIM);
    rules.size(
        "model.max_position_embeddings",
        model.max_position_embeddings,
        MAX_SEQ_LEN,
    );
    if let Some(vocab_size) = model.vocab_size {
        rules.size("model.vocab_size", vocab_size, MAX_VOCAB);
    }
    let (heads, kv_heads) = (model.num_attention_heads, model.num_key_value_heads);
    rules.require(
        kv_heads == 0 || heads.is_multiple_of(kv_heads),
        "model.num_key_value_heads",
        || format!("is {kv_heads}, which does not divide num_attention_heads = {heads}"),
        || {
            let divisors = (1..=heads.min(MAX_COUNT)).filter(|count| heads.is_multiple_of(*count));
            let divisors = divisors
                .map(|count| count.to_string())
                .collect::<Vec<_>>()
                .join(", ");
            format!("{heads} heads can share {divisors} key-value heads")
        },
    );
    rules.require(
        model.head_dim.is_multiple_of(2),
        "model.head_dim",
        || {
            format!(
                "is {}, but rotary embedding turns pairs and needs an even number",
                model.head_dim
            )
        },
        || {
            format!(
                "use {} or {}",
                model.head_dim.saturating_sub(1).max(2),
                model.head_dim.saturating_add(1)
            )
        },
    );
    rules.positive("model.rope_theta", model.rope_theta);
    rules.positive("model.rms_norm_eps", model.rms_norm_eps);
    rules.positive("model.initializer_range", model.initializer_range);
}

fn check_tokenizer(
    tokenizer: &TokenizerSection,
    model: Option<&ModelSection>,
    rules: &mut Rules<'_>,
) {
    match tokenizer {
        TokenizerSection::Path(path) => rules.require(
            !path.trim().is_empty(),
            "tokenizer.path",
            || "is empty".to_owned(),
            || "name a Hugging Face tokenizer.json".to_owned(),
        ),
        TokenizerSection::Numbers(numbers) => {
            rules.size("tokenizer.numbers", *numbers, MAX_VOCAB);
            if let Some(rows) = model.and_then(|model| model.vocab_size) {
                rules.require(
                    rows >= *numbers,
                    "model.vocab_size",
                    || format!("is {rows}, below tokenizer.numbers = {numbers}"),
                    || "leave model.vocab_size out to take the tokenizer's".to_owned(),
                );
            }
        }
        TokenizerSection::Train(train) => {
            let vocab_size = train.vocab_size;
            rules.require(
                (MIN_TRAINED_VOCAB..=MAX_VOCAB).contains(&vocab_size),
                "tokenizer.train.vocab_size",
                || format!("is {vocab_size}, outside {MIN_TRAINED_VOCAB} to {MAX_VOCAB}"),
                || {
                    "a byte-level vocabulary holds 256 bytes, an end-of-text and a padding token, and the merges"
                        .to_owned()
                },
            );
            rules.at_least_one("tokenizer.train.sample_bytes", train.sample_bytes);
            if let Some(rows) = model.and_then(|model| model.vocab_size) {
                rules.require(
                    rows >= vocab_size,
                    "model.vocab_size",
                    || format!("is {rows}, below tokenizer.train.vocab_size = {vocab_size}"),
                    || "leave model.vocab_size out to take the tokenizer's".to_owned(),
                );
            }
        }
    }
}

pub(super) fn check_paths(key: &str, paths: &[String], rules: &mut Rules<'_>) {
    rules.require(
        !paths.is_empty(),
        key,
        || "is an empty list".to_owned(),
        || "name at least one file or glob".to_owned(),
    );
    for (index, path) in paths.iter().enumerate() {
        rules.require(
            !path.trim().is_empty(),
            key,
            || format!("item {} is empty", index + 1),
            || "name a file or a glob, or remove the item".to_owned(),
        );
    }
}

fn check_training(training: &TrainingSection, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    rules.size("training.steps", training.steps, MAX_STEPS);
    rules.size("training.seq_len", training.seq_len, MAX_SEQ_LEN);
    rules.size(
        "training.local_batch_size",
        training.local_batch_size,
        MAX_BATCH,
    );
    let (local, global) = (training.local_batch_size, training.global_batch_size);
    if (local, global) != (0, 0) {
        // Both 0 is one mistake: the global batch is the local one where the text leaves it out.
        rules.size("training.global_batch_size", global, MAX_BATCH);
    }
    rules.require(
        local == 0 || global.is_multiple_of(local),
        "training.global_batch_size",
        || format!("is {global}, not a multiple of local_batch_size = {local}"),
        || match global / local.max(1) {
            0 => format!("{local} is the smallest"),
            rounds => format!("{} and {} are", rounds * local, (rounds + 1) * local),
        },
    );
    if let Some(model) = model {
        let longest = model.max_position_embeddings;
        rules.require(
            training.seq_len <= longest,
            "training.seq_len",
            || {
                format!(
                    "is {}, above model.max_position_embeddings = {longest}",
                    training.seq_len
                )
            },
            || {
                format!(
                    "set model.max_position_embeddings to {} or more",
                    training.seq_len
                )
            },
        );
    }
    rules.positive("training.max_norm", training.max_norm);
    let factor = training.guard_spike_factor;
    rules.require(
        factor == 0.0 || (factor.is_finite() && factor > 1.0),
        "training.guard_spike_factor",
        || format!("is {factor}, neither 0 nor a finite number above 1"),
        || "0 puts no limit on the loss; steps that are not finite are never taken".to_owned(),
    );
    rules.at_least_one("training.guard_patience", training.guard_patience as u64);
    rules.require(
        i64::try_from(training.seed).is_ok(),
        "training.seed",
        || format!("is {}, more than TOML can hold", training.seed),
        || format!("the largest is {}", i64::MAX),
    );
}

fn check_optimizer(optimizer: &OptimizerSection, rules: &mut Rules<'_>) {
    rules.not_negative("optimizer.lr", optimizer.lr);
    for (key, beta) in [
        ("optimizer.beta1", optimizer.beta1),
        ("optimizer.beta2", optimizer.beta2),
    ] {
        rules.require(
            (0.0..1.0).contains(&beta),
            key,
            || format!("is {beta}, outside [0, 1)"),
            || "0.9 and 0.95 are usual".to_owned(),
        );
    }
    rules.positive("optimizer.eps", optimizer.eps);
    rules.not_negative("optimizer.weight_decay", optimizer.weight_decay);
}

fn check_lr_scheduler(
    section: &LrSchedulerSection,
    training: Option<&TrainingSection>,
    rules: &mut Rules<'_>,
) {
    rules.share("lr_scheduler.decay_ratio", section.decay_ratio);
    rules.share("lr_scheduler.min_lr_factor", section.min_lr_factor);
    if let Some(training) = training {
        let (warmup_steps, steps) = (section.warmup_steps, training.steps);
        rules.require(
            steps == 0 || warmup_steps <= steps,
            "lr_scheduler.warmup_steps",
            || format!("is {warmup_steps}, more than training.steps = {steps}"),
            || {
                format!(
                    "set lr_scheduler.warmup_steps to {} or less",
                    (steps / 5).max(1)
                )
            },
        );
    }
}

fn check_folder(folder: &str, rules: &mut Rules<'_>) {
    let plain = Path::new(folder)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    rules.require(
        plain && !folder.trim().is_empty(),
        "checkpoint.folder",
        || format!("is {folder:?}, not a folder below the output folder"),
        || "\"checkpoint\" is usual; --out chooses where the run lives".to_owned(),
    );
}

/// Collects broken rules.
pub(super) struct Rules<'a>(&'a mut Vec<Mistake>);

impl Rules<'_> {
    pub(super) fn require(
        &mut self,
        holds: bool,
        key: &str,
        what: impl FnOnce() -> String,
        hint: impl FnOnce() -> String,
    ) {
        if !holds {
            self.0.push(Mistake::new(
                key,
                Problem::Rule {
                    what: what(),
                    hint: hint(),
                },
            ));
        }
    }

    pub(super) fn at_least_one(&mut self, key: &str, value: u64) {
        self.require(
            value > 0,
            key,
            || "is 0".to_owned(),
            || "the smallest is 1".to_owned(),
        );
    }

    fn size(&mut self, key: &str, value: usize, max: usize) {
        self.require(
            (1..=max).contains(&value),
            key,
            || format!("is {value}, outside 1 to {max}"),
            String::new,
        );
    }

    pub(super) fn positive(&mut self, key: &str, value: f64) {
        self.require(
            value.is_finite() && value > 0.0,
            key,
            || format!("is {value}, not a finite number above 0"),
            String::new,
        );
    }

    fn not_negative(&mut self, key: &str, value: f64) {
        self.require(
            value.is_finite() && value >= 0.0,
            key,
            || format!("is {value}, not a finite number of at least 0"),
            String::new,
        );
    }

    fn share(&mut self, key: &str, value: f64) {
        self.require(
            (0.0..=1.0).contains(&value),
            key,
            || format!("is {value}, outside [0, 1]"),
            || "it is a share, not a number of steps".to_owned(),
        );
    }
}
