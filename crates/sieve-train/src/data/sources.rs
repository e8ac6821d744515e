//! Converts a recipe's `[data]` and `[validation]` into the settings of corpora.
use crate::TrainError;
use sieve_core::Recipe;
use sieve_core::recipe::DataFormat;
use sieve_data::{CorpusConfig, FileOrder};

/// Seed of the order in which files are read if `data.max_bytes` takes a sample of a larger corpus.
const CORPUS_SEED: u64 = 0;

/// Settings of the training corpus, and of the validation corpus if the recipe names one. `variable` looks environment
/// variables up.
///
/// # Errors
/// A path that uses an unset variable; a recipe of a synthetic task, which has no text.
pub fn corpus_configs(
    recipe: &Recipe,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<(CorpusConfig, Option<CorpusConfig>), TrainError> {
    let expand = |paths: &[String]| {
        let expanded = paths.iter().map(|path| sieve_core::paths::expand(path, variable));
        expanded.collect::<Result<Vec<_>, _>>()
    };
    let data = &recipe.data;
    let base = |paths: Vec<String>| match data.format {
        DataFormat::Auto => Ok(CorpusConfig::by_ending(paths, &data.text_column)),
        DataFormat::Text => Ok(CorpusConfig::text(paths)),
        DataFormat::Jsonl => Ok(CorpusConfig::jsonl(paths, &data.text_column)),
        DataFormat::Parquet => Ok(CorpusConfig::parquet(paths, &data.text_column)),
        DataFormat::Mqar => Err(TrainError::NoText),
    };
    let train = CorpusConfig {
        order: match data.max_bytes {
            Some(_) => FileOrder::Hashed { seed: CORPUS_SEED },
            None => FileOrder::Sorted,
        },
        max_bytes: data.max_bytes,
        max_document_bytes: data.max_document_bytes,
        deduplicate: data.deduplicate,
        skip_invalid: data.skip_invalid,
        prompt_column: data.prompt_column.clone(),
        messages_column: data.messages_column.clone(),
        ..base(expand(&data.paths)?)?
    };
    let validation = match &recipe.validation.paths {
        Some(paths) => Some(CorpusConfig {
            max_document_bytes: data.max_document_bytes,
            skip_invalid: data.skip_invalid,
            prompt_column: data.prompt_column.clone(),
            messages_column: data.messages_column.clone(),
            ..base(expand(paths)?)?
        }),
        None => None,
    };
    Ok((train, validation))
}

/// Settings of the training corpora: without `data.weights`, only `whole`; with it, one corpus per path, whose
/// `max_bytes` is its weight's share of `data.max_bytes`.
pub(super) fn weighted_configs(recipe: &Recipe, whole: &CorpusConfig) -> Vec<CorpusConfig> {
    let Some(weights) = &recipe.data.weights else {
        return vec![whole.clone()];
    };
    let total = weights.iter().sum::<f64>();
    let one = |(path, weight): (&String, &f64)| CorpusConfig {
        paths: vec![path.clone()],
        max_bytes: whole.max_bytes.map(|max_bytes| (max_bytes as f64 * weight / total) as u64),
        ..whole.clone()
    };
    whole.paths.iter().zip(weights).map(one).collect()
}
