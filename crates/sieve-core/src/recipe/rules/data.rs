//! Rules of `[data]`.

use super::broken::Rules;
use super::parts::Parts;
use super::paths::check_paths;
use crate::keys::MAX_VOCAB;
use crate::recipe::{DataFormat, DataSection, MqarSection, TokenizerSection, TokenizerSource};

/// Appends the broken rules of `[data]`.
pub(super) fn check_data(data: &DataSection, parts: &Parts, rules: &mut Rules<'_>) {
    rules.bounds("data", data);
    match (data.format, &data.mqar) {
        (DataFormat::Mqar, Some(mqar)) => check_mqar(mqar, parts, rules),
        (DataFormat::Mqar, None) => rules.require(
            data.mqar.is_some(),
            "data.mqar",
            "is missing, and format = \"mqar\" needs it",
            "mqar = { vocab_size = 8192, seq_lens = [64], num_pairs = [4], num_samples = [100000] }",
        ),
        (_, mqar) => {
            check_paths("data.paths", &data.paths, rules);
            rules.require(
                mqar.is_none(),
                "data.mqar",
                "is given, but data.format names a different one",
                "set data.format = \"mqar\", or leave data.mqar out",
            );
        }
    }
    if data.format == DataFormat::Mqar {
        let given = [("data.paths", !data.paths.is_empty()), ("data.fallback", data.fallback.is_some())];
        for (key, is_given) in given {
            let what = "is given, but format = \"mqar\" reads no files";
            rules.require(!is_given, key, what, format!("leave {key} out"));
        }
    }
    if let Some(weights) = &data.weights {
        check_weights("data.weights", weights, ("data.paths", data.paths.len()), rules);
    }
    if let Some(column) = &data.prompt_column {
        rules.require(
            !matches!(data.format, DataFormat::Text | DataFormat::Mqar),
            "data.prompt_column",
            "is given, but plain text and MQAR have no columns",
            "leave it out, or read JSONL or Parquet",
        );
        rules.require(
            !column.is_empty() && *column != data.text_column,
            "data.prompt_column",
            format!("is {column:?}, but must name a different column from data.text_column = {:?}", data.text_column),
            "name the field or column that holds the prompt, or leave it out",
        );
    }
    if let Some(column) = &data.messages_column {
        check_messages(column, data, parts, rules);
    }
    rules.require(
        !data.text_column.is_empty(),
        "data.text_column",
        "is empty",
        "name the field or column that holds the text; \"text\" is usual",
    );
    rules.require(
        data.cache_dir.as_ref().is_none_or(|folder| !folder.trim().is_empty()),
        "data.cache_dir",
        "is empty",
        "leave it out to keep the shards under the output folder",
    );
}

/// Appends the broken rules of `data.messages_column`.
fn check_messages(column: &str, data: &DataSection, parts: &Parts, rules: &mut Rules<'_>) {
    let key = "data.messages_column";
    rules.require(
        !matches!(data.format, DataFormat::Text | DataFormat::Mqar),
        key,
        "is given, but plain text and MQAR have no columns",
        "leave it out, or read JSONL or Parquet",
    );
    rules.require(!column.is_empty(), key, "is empty", "name the field or column of messages, or leave it out");
    rules.require(
        data.prompt_column.is_none(),
        key,
        "is given, and data.prompt_column too",
        "leave one of them out: a chat has its questions among its messages",
    );
    rules.require(
        data.text_column == "text",
        key,
        format!("is given, and data.text_column = {:?} too", data.text_column),
        "leave one of them out: what is read of a chat is its messages",
    );
    if let Some(tokenizer) = parts.tokenizer.as_ref().and_then(TokenizerSection::given) {
        rules.require(
            matches!(tokenizer, TokenizerSource::Path(_)),
            key,
            "is given, but only a tokenizer of tokenizer.path has a chat template in its folder",
            "set tokenizer.path to the tokenizer.json of a model with a chat template",
        );
    }
}

/// Checks that `key` has a positive weight for each of `num_paths` paths, which the recipe gives as `paths`.
pub(super) fn check_weights(key: &str, weights: &[f64], (paths, num_paths): (&str, usize), rules: &mut Rules<'_>) {
    rules.require(
        weights.len() == num_paths,
        key,
        format!("has {} entries, {paths} has {num_paths}", weights.len()),
        "give one weight for each path, in their order",
    );
    for (index, weight) in weights.iter().enumerate() {
        rules.require(
            weight.is_finite() && *weight > 0.0,
            key,
            format!("item {} is {weight}, not a positive number", index + 1),
            "remove the path to leave its text out",
        );
    }
}

/// Appends the broken rules of `data.mqar`.
fn check_mqar(mqar: &MqarSection, parts: &Parts, rules: &mut Rules<'_>) {
    rules.bounds("data.mqar", mqar);
    let num_kinds = mqar.seq_lens.len();
    let same_lengths = mqar.num_pairs.len() == num_kinds && mqar.num_samples.len() == num_kinds;
    rules.require(
        num_kinds > 0 && same_lengths,
        "data.mqar.seq_lens",
        format!(
            "has {num_kinds} entries, num_pairs {} and num_samples {}",
            mqar.num_pairs.len(),
            mqar.num_samples.len()
        ),
        "give each list one entry per kind of sample, at least one",
    );
    let longest = mqar.seq_lens.iter().copied().max().unwrap_or(0);
    let vocab_size = mqar.vocab_size;
    rules.require(
        vocab_size.is_multiple_of(2) && vocab_size > longest && vocab_size <= MAX_VOCAB,
        "data.mqar.vocab_size",
        format!("is {vocab_size}, not an even number above the longest sample's {longest} tokens"),
        "8192 is usual",
    );
    if let Some(tokenizer) = parts.tokenizer.as_ref().and_then(TokenizerSection::given) {
        rules.require(
            matches!(tokenizer, TokenizerSource::Numbers(numbers) if numbers >= vocab_size),
            "tokenizer.numbers",
            "is missing or too small: MQAR's tokens are numbers, and the tokenizer's job is to name them",
            format!("[tokenizer] numbers = {vocab_size}"),
        );
    }
    if let Some(training) = &parts.training {
        rules.require(
            longest <= training.seq_len,
            "data.mqar.seq_lens",
            format!("holds {longest}, which does not fit rows of training.seq_len = {}", training.seq_len),
            format!("set training.seq_len = {longest}"),
        );
    }
    let vocab_sizes = mqar.vocab_size_of_kinds();
    rules.require(
        vocab_sizes.len() == num_kinds,
        "data.mqar.vocab_sizes",
        format!("has {} entries, seq_lens {num_kinds}", vocab_sizes.len()),
        "give it one entry per kind of sample, or leave it out",
    );
    let kinds = mqar.seq_lens.iter().zip(&mqar.num_pairs).zip(&mqar.num_samples).zip(&vocab_sizes);
    for (((&seq_len, &num_pairs), &num_samples), &of_kind) in kinds {
        rules.require(
            mqar.vocab_sizes.is_none() || (of_kind.is_multiple_of(2) && of_kind > seq_len && of_kind <= vocab_size),
            "data.mqar.vocab_sizes",
            format!("holds {of_kind} for samples of {seq_len} tokens"),
            format!("use even numbers above the sample's length, up to vocab_size = {vocab_size}"),
        );
        rules.require(
            seq_len.is_multiple_of(2),
            "data.mqar.seq_lens",
            format!("holds {seq_len}, which is odd"),
            "use even lengths",
        );
        // A sample has room for `seq_len / 4` pairs, and keys come from the lower half of the vocabulary.
        let room = (seq_len / 4).min((of_kind / 2).saturating_sub(1));
        rules.require(
            (1..=room).contains(&num_pairs),
            "data.mqar.num_pairs",
            format!("holds {num_pairs}, but samples of {seq_len} tokens have room for 1 to {room}"),
            "a pair takes two tokens, its query two more, and each needs a key of its own",
        );
        rules.at_least_one("data.mqar.num_samples", num_samples as u64);
    }
}
