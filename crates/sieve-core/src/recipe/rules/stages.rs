//! Rules of `[[stage]]`.

use super::attention::check_stage_layers;
use super::broken::Rules;
use super::data::check_weights;
use super::parts::Parts;
use super::paths::check_paths;
use crate::kinds::{AttentionKind, names_of_kinds};
use crate::recipe::{DataFormat, StageSection, TrainingPrecision};

/// Checks every `[[stage]]`, and that their steps add up to `training.steps`.
pub(super) fn check_stages(stages: &[StageSection], parts: &Parts, rules: &mut Rules<'_>) {
    for (number, stage) in (1..).zip(stages) {
        check_stage(number, stage, parts, rules);
    }
    let sum = stages.iter().fold(0usize, |sum, stage| sum.saturating_add(stage.steps));
    if let Some(training) = &parts.training {
        rules.require(
            training.steps == sum,
            "training.steps",
            format!("is {}, but the stages take {sum} steps", training.steps),
            "leave training.steps out; a stage's own are changed as stage.1.steps",
        );
    }
}

/// Checks that only kinds whose queries choose blocks have dense steps.
pub(super) fn check_dense_steps(parts: &Parts, rules: &mut Rules<'_>) {
    let (Some(training), Some(attention)) = (&parts.training, &parts.attention) else {
        return;
    };
    rules.require(
        training.dense_steps == 0.0 || attention.block_choice().is_some(),
        "training.dense_steps",
        format!("does not go with kind = {:?}, whose queries choose no blocks", attention.kind().name()),
        format!("leave it out, or set attention.kind to {}", names_of_kinds(AttentionKind::choosers_of_blocks())),
    );
}

/// Checks that `training.train` names what can be trained alone, and that the model has it.
pub(super) fn check_train(parts: &Parts, rules: &mut Rules<'_>) {
    let Some(train) = parts.training.as_ref().and_then(|training| training.train.as_ref()) else {
        return;
    };
    let key = "training.train";
    let hint = "leave it out to train everything";
    rules.require(*train == ["indexer"], key, format!("is {train:?}, and only [\"indexer\"] is trained alone"), hint);
    if let Some(attention) = &parts.attention {
        rules.require(
            attention.kinds().any(|kind| kind.as_kind().indexer().is_some()),
            key,
            format!("does not go with kind = {:?}, which has no indexer", attention.kind().name()),
            "leave it out, or set attention.kind = \"msa\"",
        );
    }
    let degree = parts.parallelism.as_ref().map_or(1, |parallelism| parallelism.context_parallel_degree);
    rules.require(
        degree <= 1,
        key,
        format!("does not go with parallelism.context_parallel_degree = {degree}: one process trains an indexer alone"),
        "leave context_parallel_degree out",
    );
}

/// Checks that nothing else in the recipe gives a token other sums than `training.same_bits` asks for.
pub(super) fn check_same_bits(parts: &Parts, rules: &mut Rules<'_>) {
    let Some(training) = parts.training.as_ref().filter(|training| training.same_bits) else {
        return;
    };
    let degree = parts.parallelism.as_ref().map_or(1, |parallelism| parallelism.context_parallel_degree);
    let of_stages = parts.stage.iter().flatten().map(|stage| stage.index_warmup);
    let mut warm_ups = of_stages.chain([parts.attention.as_ref().and_then(|attention| attention.index_warmup())]);
    for (holds, what, hint) in [
        (training.deterministic, "deterministic = false: sums have no order then", "set training.deterministic = true"),
        (
            training.one_document_per_row,
            "one_document_per_row = false: a document's sums depend on where its row has it",
            "set training.one_document_per_row = true",
        ),
        (
            training.precision == TrainingPrecision::Bf16,
            "precision = \"fp8\": weights are read in bf16 elsewhere",
            "set training.precision = \"bf16\"",
        ),
        (
            degree <= 1,
            "parallelism.context_parallel_degree: processes that share a row add its parts",
            "leave context_parallel_degree out",
        ),
        (
            training.dense_steps == 0.0,
            "dense_steps: queries read all keys in such steps",
            "leave training.dense_steps out",
        ),
        (
            !warm_ups.any(|warms_up| warms_up == Some(true)),
            "index_warmup: queries read all keys then",
            "leave index_warmup out, or train the indexer in a run before",
        ),
    ] {
        rules.require(holds, "training.same_bits", format!("does not go with {what}"), hint);
    }
}

/// Checks that the indexer's warm-up, in which queries read all keys, ends before the run does.
pub(super) fn check_warmup(parts: &Parts, rules: &mut Rules<'_>) {
    let stages = parts.stage.as_deref().unwrap_or_default();
    let (key, warms_up) = match stages.last() {
        Some(last) => (format!("stage.{}.index_warmup", stages.len()), last.index_warmup),
        None => {
            let warms_up = parts.attention.as_ref().and_then(|attention| attention.index_warmup());
            ("attention.index_warmup".to_owned(), warms_up)
        }
    };
    rules.require(
        warms_up != Some(true),
        &key,
        "is true to the end of the run, in which no query would choose its keys",
        "end with a [[stage]] that has index_warmup = false",
    );
}

/// Checks `[[stage]]` number `number`, counted from 1.
fn check_stage(number: usize, stage: &StageSection, parts: &Parts, rules: &mut Rules<'_>) {
    let key = |name: &str| format!("stage.{number}.{name}");
    rules.bounds(&format!("stage.{number}"), stage);
    if let Some(model) = &parts.model {
        let longest = model.max_position_embeddings;
        rules.require(
            stage.seq_len <= longest,
            &key("seq_len"),
            format!("is {}, above model.max_position_embeddings = {longest}", stage.seq_len),
            format!("set model.max_position_embeddings to {}", stage.seq_len),
        );
    }
    let attention = parts.attention.as_ref();
    if let Some(attention) = attention {
        check_stage_layers(number, stage, attention, parts.model.as_ref(), rules);
    }
    // The attention of the stage without its window and warm-up, which are checked against this attention below.
    let kind_alone = StageSection { window: None, index_warmup: None, ..stage.clone() };
    let attention = attention.map(|attention| attention.of_stage(&kind_alone));
    if let (Some(window), Some(attention)) = (stage.window, &attention) {
        let local = attention.local_window();
        rules.require(
            local <= window,
            &key("window"),
            format!("is {window}, less than attention.local_window_size = {local}"),
            format!("give the stage a window of at least {local}"),
        );
        rules.require(
            attention.window().is_some(),
            &key("window"),
            format!("does not go with kind = {:?}, which has no window", attention.kind().name()),
            "leave it out",
        );
    }
    if let (Some(_), Some(attention)) = (stage.index_warmup, &attention) {
        rules.require(
            attention.index_warmup().is_some(),
            &key("index_warmup"),
            format!("does not go with kind = {:?}, which has no indexer", attention.kind().name()),
            "leave it out, or set attention.kind = \"msa\"",
        );
    }
    if let Some(paths) = &stage.paths {
        check_paths(&key("paths"), paths, rules);
        let is_text = parts.data.as_ref().is_none_or(|data| data.format != DataFormat::Mqar);
        rules.require(is_text, &key("paths"), "is given, but format = \"mqar\" reads no files", "leave it out");
    }
    if let (Some(weights), Some(data)) = (&stage.weights, &parts.data) {
        let own = key("paths");
        let paths = match &stage.paths {
            Some(paths) => (own.as_str(), paths.len()),
            None => ("data.paths", data.paths.len()),
        };
        check_weights(&key("weights"), weights, paths, rules);
        rules.require(
            stage.paths.is_some() || data.weights.is_some(),
            &key("weights"),
            "is given, but the text of data.paths is read as one",
            "give data.weights too, or the stage paths of its own",
        );
    }
    let (local, global) = (stage.local_batch_size, stage.global_batch_size);
    rules.require(
        local == 0 || global.is_multiple_of(local),
        &key("global_batch_size"),
        format!("is {global}, not a multiple of local_batch_size = {local}"),
        "give the stage its own local_batch_size",
    );
}
