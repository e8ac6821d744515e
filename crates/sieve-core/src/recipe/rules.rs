//! Rules between the values of a recipe, for values of the right types. All rules are checked, so that every broken
//! rule is reported at once.

mod attention;
mod broken;
mod data;
mod parallelism;
mod parts;
mod paths;
mod stages;

use std::path::{Component, Path};

pub(crate) use broken::Rules;
pub(super) use parts::Parts;

use attention::{check_attention, check_layer_tables, check_layer_types, check_rope_layers, check_sinks};
use paths::check_paths;

use super::mistake::Mistake;
use super::{
    CheckpointSection, LrSchedulerSection, ModelSection, TokenizerSection, TokenizerSource, TrainingPrecision,
    TrainingSection, ValidationSection,
};
use crate::keys::MAX_COUNT;
use crate::model::RopeScaling;

/// Appends every broken rule to `mistakes`.
pub(super) fn check(parts: &Parts, mistakes: &mut Vec<Mistake>) {
    let mut rules = Rules(mistakes);
    if let Some(model) = &parts.model {
        check_model(model, &mut rules);
    }
    if let Some(attention) = &parts.attention {
        check_attention(attention, parts.model.as_ref(), &mut rules);
        let stages = parts.stage.as_deref().unwrap_or_default();
        check_layer_tables(attention, parts.model.as_ref(), stages, &mut rules);
        if let Some(model) = &parts.model {
            check_layer_types(model, attention, &mut rules);
            check_sinks(model, attention, &mut rules);
        }
    }
    if let Some(tokenizer) = &parts.tokenizer {
        check_tokenizer(tokenizer, parts.model.as_ref(), &mut rules);
    }
    if let Some(data) = &parts.data {
        data::check_data(data, parts, &mut rules);
    }
    if let Some(training) = &parts.training {
        check_training(training, parts.model.as_ref(), &mut rules);
        if training.precision == TrainingPrecision::Fp8 {
            check_fp8(training, parts, &mut rules);
        }
    }
    if let Some(optimizer) = &parts.optimizer {
        rules.bounds("optimizer", optimizer);
        // `None` without an indexer's learning rate, so that the rule holds.
        let attention = parts.attention.as_ref().filter(|_| optimizer.indexer_lr.is_some());
        rules.require(
            attention.is_none_or(|attention| attention.kinds().any(|kind| kind.as_kind().indexer().is_some())),
            "optimizer.indexer_lr",
            attention.map_or(String::new(), |attention| {
                format!("does not go with kind = {:?}, which has no indexer", attention.kind().name())
            }),
            "leave it out, or set attention.kind = \"msa\"",
        );
        rules.require(
            optimizer.lr > 0.0 || optimizer.indexer_lr.is_none_or(|rate| rate == 0.0),
            "optimizer.indexer_lr",
            format!("is {}, but follows the schedule of optimizer.lr, which is 0", optimizer.indexer_lr.unwrap_or(0.0)),
            "give optimizer.lr a rate; training.train = [\"indexer\"] trains indexers alone",
        );
    }
    if let Some(lr_scheduler) = &parts.lr_scheduler {
        check_lr_scheduler(lr_scheduler, parts.training.as_ref(), &mut rules);
    }
    if let Some(checkpoint) = &parts.checkpoint {
        rules.bounds("checkpoint", checkpoint);
        check_folder(&checkpoint.folder, &mut rules);
        check_keep_best(checkpoint, parts.validation.as_ref(), &mut rules);
    }
    if let Some(metrics) = &parts.metrics {
        rules.bounds("metrics", metrics);
    }
    if let Some(validation) = &parts.validation {
        rules.bounds("validation", validation);
        if let Some(paths) = &validation.paths {
            check_paths("validation.paths", paths, &mut rules);
        }
    }
    if let Some(section) = &parts.activation_checkpoint {
        rules.bounds("activation_checkpoint", section);
    }
    if let Some(section) = &parts.parallelism {
        parallelism::check_parallelism(section, parts, &mut rules);
    }
    stages::check_warmup(parts, &mut rules);
    stages::check_dense_steps(parts, &mut rules);
    stages::check_train(parts, &mut rules);
    stages::check_same_bits(parts, &mut rules);
    if let Some(stages) = parts.stage.as_deref().filter(|stages| !stages.is_empty()) {
        stages::check_stages(stages, parts, &mut rules);
    }
    if let Some(generation) = &parts.generation {
        rules.bounds("generation", generation);
        let wanted = generation.prompts.is_empty() || generation.max_new_tokens > 0;
        rules.require(
            wanted,
            "generation.max_new_tokens",
            "is 0, but there are prompts",
            "give it at least 1, or leave the prompts out",
        );
        rules.require(
            generation.interval == 0 || !generation.prompts.is_empty(),
            "generation.interval",
            format!("is {}, but there are no prompts", generation.interval),
            "add generation.prompts, the prompts to continue, or leave it out",
        );
    }
}

/// Checks that with `checkpoint.keep_best` every checkpoint is written at a step that is validated.
fn check_keep_best(checkpoint: &CheckpointSection, validation: Option<&ValidationSection>, rules: &mut Rules<'_>) {
    let Some(validation) = validation.filter(|_| checkpoint.keep_best) else {
        return;
    };
    let (interval, every) = (checkpoint.interval, validation.interval);
    rules.require(
        every == 0 || interval.is_multiple_of(every),
        "checkpoint.keep_best",
        format!(
            "needs a validation of each checkpoint, and checkpoint.interval = {interval} is not a multiple of \
             validation.interval = {every}"
        ),
        format!("set validation.interval = {interval}, or a divisor of it"),
    );
}

/// Checks the numbers of `model.rope_scaling`, and that its `rope_type` uses all of them.
fn check_rope_scaling(scaling: &RopeScaling, rules: &mut Rules<'_>) {
    rules.bounds("model.rope_scaling", scaling);
    let foreign = scaling.foreign();
    rules.require(
        foreign.is_none(),
        "model.rope_scaling",
        format!("has {}, which its rope_type does not use", foreign.unwrap_or_default()),
        "leave it out",
    );
    if let Some([few, many]) = scaling.turns() {
        rules.require(
            few < many,
            "model.rope_scaling",
            format!("mixes frequencies from {few} to {many} turns, which are reversed"),
            "low_freq_factor is below high_freq_factor, beta_slow below beta_fast",
        );
    }
}

/// Checks the numbers of `[model]` and the rules between them.
fn check_model(model: &ModelSection, rules: &mut Rules<'_>) {
    rules.bounds("model", model);
    check_rope_layers(model, rules);
    if let Some(scaling) = &model.rope_scaling {
        check_rope_scaling(scaling, rules);
    }
    let (heads, kv_heads) = (model.num_attention_heads, model.num_key_value_heads);
    rules.require(
        kv_heads == 0 || heads.is_multiple_of(kv_heads),
        "model.num_key_value_heads",
        format!("is {kv_heads}, which does not divide num_attention_heads = {heads}"),
        {
            let divisors = (1..=heads.min(MAX_COUNT)).filter(|count| heads.is_multiple_of(*count));
            let divisors = divisors.map(|count| count.to_string()).collect::<Vec<_>>().join(", ");
            format!("{heads} heads can share {divisors} key-value heads")
        },
    );
    rules.require(
        model.head_dim.is_multiple_of(2),
        "model.head_dim",
        format!("is {}, but rotary embedding turns pairs and needs an even number", model.head_dim),
        format!("use {} or {}", model.head_dim.saturating_sub(1).max(2), model.head_dim.saturating_add(1)),
    );
    rules.require(
        model.initial_weights.as_ref().is_none_or(|folder| !folder.trim().is_empty()),
        "model.initial_weights",
        "is empty",
        "name a checkpoint's folder, or \"random\"",
    );
}

/// Checks the tokenizer's source, and that the embedding has a row for each of its tokens.
fn check_tokenizer(tokenizer: &TokenizerSection, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    rules.bounds("tokenizer", tokenizer);
    match tokenizer.given() {
        None => {} // `check::check_tokenizer` reports it.
        Some(TokenizerSource::Path(path)) => {
            rules.require(!path.trim().is_empty(), "tokenizer.path", "is empty", "name a Hugging Face tokenizer.json")
        }
        Some(TokenizerSource::Numbers(numbers)) => check_rows(model, numbers, "tokenizer.numbers", rules),
        Some(TokenizerSource::Train(train)) => {
            rules.bounds("tokenizer.train", train);
            check_rows(model, train.vocab_size, "tokenizer.train.vocab_size", rules);
        }
    }
}

/// Checks that the embedding has a row for each of `tokens`, the tokenizer's size that the recipe gives as `key`.
fn check_rows(model: Option<&ModelSection>, tokens: usize, key: &str, rules: &mut Rules<'_>) {
    if let Some(rows) = model.and_then(|model| model.vocab_size) {
        let what = format!("is {rows}, below {key} = {tokens}");
        let hint = "leave model.vocab_size out to take the tokenizer's";
        rules.require(rows >= tokens, "model.vocab_size", what, hint);
    }
}

/// Checks the numbers of `[training]` and the rules between them.
fn check_training(training: &TrainingSection, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    rules.bounds("training", training);
    let (local, global) = (training.local_batch_size, training.global_batch_size);
    if (local, global) == (0, 0) {
        // The global batch size defaults to the local one, so a local one of 0 would be reported twice.
        rules.0.retain(|mistake| mistake.key != "training.global_batch_size");
    }
    rules.require(
        local == 0 || global.is_multiple_of(local),
        "training.global_batch_size",
        format!("is {global}, not a multiple of local_batch_size = {local}"),
        match global / local.max(1) {
            0 => format!("{local} is the smallest"),
            rounds => format!("{} and {} are", rounds * local, (rounds + 1).saturating_mul(local)),
        },
    );
    if let Some(model) = model {
        let longest = model.max_position_embeddings;
        rules.require(
            training.seq_len <= longest,
            "training.seq_len",
            format!("is {}, above model.max_position_embeddings = {longest}", training.seq_len),
            format!("set model.max_position_embeddings to {} or more", training.seq_len),
        );
    }
    let factor = training.guard_spike_factor;
    rules.require(
        factor == 0.0 || (factor.is_finite() && factor > 1.0),
        "training.guard_spike_factor",
        format!("is {factor}, neither 0 nor a finite number above 1"),
        "0 puts no limit on the loss; steps that are not finite are never taken",
    );
    rules.require(
        i64::try_from(training.seed).is_ok(),
        "training.seed",
        format!("is {}, more than TOML can hold", training.seed),
        format!("the largest is {}", i64::MAX),
    );
}

/// Checks that the sizes of fp8 GEMMs are multiples of 16: the model's widths, and a process's tokens in a micro-batch,
/// over which the GEMM of a weight's gradient sums.
fn check_fp8(training: &TrainingSection, parts: &Parts, rules: &mut Rules<'_>) {
    let degree = parts.parallelism.as_ref().map_or(1, |section| section.context_parallel_degree);
    // The words of the message between the key and the size.
    let is = match degree {
        0 | 1 => "times seq_len is",
        _ => "times seq_len / context_parallel_degree is",
    };
    let stages = (1..).zip(parts.stage.as_deref().unwrap_or_default());
    let stages = stages.map(|(number, stage)| (format!("stage.{number}"), stage.local_batch_size, stage.seq_len));
    let own = ("training".to_owned(), training.local_batch_size, training.seq_len);
    let rows = std::iter::once(own).chain(stages);
    let sizes = rows.map(|(section, local, seq_len)| {
        let tokens = local.saturating_mul(seq_len) / degree.max(1);
        (format!("{section}.local_batch_size"), is, tokens)
    });
    let mut sizes = sizes.collect::<Vec<_>>();
    if let Some(model) = parts.model.as_ref() {
        // If the KV heads' width is a multiple of 16, so is the query heads' width: their number is a multiple of the
        // KV heads'.
        let width = model.num_key_value_heads.saturating_mul(model.head_dim);
        sizes.extend([
            ("model.hidden_size".to_owned(), "is", model.hidden_size),
            ("model.intermediate_size".to_owned(), "is", model.intermediate_size),
            ("model.num_key_value_heads".to_owned(), "times head_dim is", width),
        ]);
        let (ends, blocks) = (training.bf16_end_blocks, model.num_hidden_layers);
        let most = blocks.saturating_sub(1) / 2;
        rules.require(
            ends <= most,
            "training.bf16_end_blocks",
            format!("is {ends} at each end of {blocks} blocks, which leaves none in fp8"),
            match most {
                0 => "set it to 0, or training.precision = \"bf16\"".to_owned(),
                _ => format!("set it to {most} or less, or training.precision = \"bf16\""),
            },
        );
    }
    for (key, is, size) in sizes {
        rules.require(
            size.is_multiple_of(16),
            &key,
            format!("{is} {size}, but fp8 GEMMs need a multiple of 16"),
            "choose a different size, or training.precision = \"bf16\"",
        );
    }
}

/// Checks that the warm-up fits the run, and that `lr_scheduler.after_step` leaves steps for a second schedule.
fn check_lr_scheduler(section: &LrSchedulerSection, training: Option<&TrainingSection>, rules: &mut Rules<'_>) {
    rules.bounds("lr_scheduler", section);
    if let Some(training) = training {
        let (warmup_steps, steps) = (section.warmup_steps, training.steps);
        rules.require(
            steps == 0 || warmup_steps <= steps,
            "lr_scheduler.warmup_steps",
            format!("is {warmup_steps}, more than training.steps = {steps}"),
            format!(
                "set lr_scheduler.warmup_steps to {} or less; to try only the first steps: sieve train \
                     --stop-after {steps}",
                (steps / 5).max(1)
            ),
        );
        let after_step = section.after_step;
        rules.require(
            steps == 0 || after_step < steps,
            "lr_scheduler.after_step",
            format!("is {after_step}, which leaves none of training.steps = {steps}"),
            "leave it out; sieve train --extend sets it",
        );
    }
}

/// What a run writes into its output folder beside checkpoints; `sieve-train/src/run_folder.rs` has the paths.
const RUN_FILES: [&str; 10] = [
    "config.toml",
    "data",
    "eval",
    "log",
    "metrics.aside.jsonl",
    "metrics.jsonl",
    "origin.json",
    "run.lock",
    "sweep.json",
    "tb",
];

/// Checks that `checkpoint.folder` lies below the output folder, where a run writes no other files.
fn check_folder(folder: &str, rules: &mut Rules<'_>) {
    let plain = Path::new(folder).components().all(|part| matches!(part, Component::Normal(_)));
    rules.require(
        plain && !folder.trim().is_empty(),
        "checkpoint.folder",
        format!("is {folder:?}, not a folder below the output folder"),
        "\"checkpoint\" is usual; --out chooses where the run lives",
    );
    let first = Path::new(folder).iter().next().and_then(|name| name.to_str());
    rules.require(
        first.is_none_or(|first| !RUN_FILES.contains(&first)),
        "checkpoint.folder",
        format!("is {folder:?}, where a run writes other files"),
        "\"checkpoint\" is usual",
    );
}
