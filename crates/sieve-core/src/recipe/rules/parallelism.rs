//! Rules of `[parallelism]`.

use super::broken::Rules;
use super::parts::Parts;
use crate::kinds::IndexScores;
use crate::recipe::{AttentionSection, ParallelismSection};

const DEGREE: &str = "parallelism.context_parallel_degree";

/// Checks `[parallelism]`, and that rows and heads can be divided among the processes that share a row.
pub(super) fn check_parallelism(section: &ParallelismSection, parts: &Parts, rules: &mut Rules<'_>) {
    rules.bounds("parallelism", section);
    let shards = section.shard_ranks;
    rules.require(
        shards == 0 || (shards > 1 && section.zero_stage > 0),
        "parallelism.shard_ranks",
        format!("is {shards}, and parallelism.zero_stage = {}: nothing is divided", section.zero_stage),
        "leave it out, or choose the GPUs of a host and zero_stage = 1, 2 or 3",
    );
    let degree = section.context_parallel_degree;
    if degree < 2 {
        return; // Each process computes whole rows, for which there are no rules.
    }
    let rows = parts.training.as_ref().map(|training| ("training.seq_len".to_owned(), training.seq_len));
    let stages = (1..).zip(parts.stage.as_deref().unwrap_or_default());
    let stages = stages.map(|(number, stage)| (format!("stage.{number}.seq_len"), stage.seq_len));
    for (key, seq_len) in rows.into_iter().chain(stages) {
        rules.require(
            seq_len.is_multiple_of(degree),
            DEGREE,
            format!("is {degree}, and {key} = {seq_len} cannot be cut into as many equal parts"),
            "powers of two are usual for both",
        );
    }
    rules.require(
        parts.training.as_ref().is_none_or(|training| training.guard_replay == 0),
        "training.guard_replay",
        format!("computes whole rows in each process, and {DEGREE} = {degree} cuts them into parts"),
        "leave out one of the two",
    );
    // Grouped attention and DMA gather keys of earlier parts. The other kinds exchange tokens for heads (all-to-all),
    // so each process needs whole KV heads.
    let kinds = || parts.attention.iter().flat_map(AttentionSection::kinds);
    let by_heads = kinds().find(|attention| !attention.kind().facts().is_one_op);
    if let Some((attention, model)) = by_heads.zip(parts.model.as_ref()) {
        let heads = model.num_key_value_heads;
        rules.require(
            heads.is_multiple_of(degree),
            DEGREE,
            format!(
                "is {degree}, and attention of kind = {:?} shares out its KV heads: \
                     model.num_key_value_heads = {heads} is not a multiple of that",
                attention.kind().name()
            ),
            "choose a divisor of the KV heads; mha, swa and dma take any degree",
        );
    }
    let mut indexers = kinds().filter_map(|attention| attention.as_kind().indexer());
    let has_qsa = indexers.any(|indexer| indexer.scores == IndexScores::Qsa);
    rules.require(
        !has_qsa,
        "attention.indexer",
        format!("is \"qsa\", which chooses for all heads together, and {DEGREE} = {degree} shares out the heads"),
        "leave out one of the two, or set attention.indexer = \"msa\"",
    );
    if let Some(model) = &parts.model {
        rules.require(
            model.qk_norm && !model.qkv_bias && !model.attention_sinks,
            DEGREE,
            format!(
                "is {degree}, and a model with qk_norm = false, qkv_bias = true or attention_sinks = true needs whole \
                 rows"
            ),
            "leave it out, or train a model with norms of queries and keys and without biases and sinks",
        );
    }
}
