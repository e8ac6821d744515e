//! How often a run reads its text, where that is tokenised already.
use crate::terminal;
use sieve_core::Recipe;
use sieve_core::recipe::DataFormat;
use sieve_data::Prepared;
use std::path::Path;

/// Text with an order of its own.
#[derive(Debug, serde::Serialize)]
pub(super) struct TextEpochs {
    /// A folder of shards, or a path of `data.weights`.
    text: String,
    /// Tokens to train on.
    num_tokens: u64,
    /// How often the run reads all of them.
    epochs: f64,
}

/// The text of a run whose shards are in `dir`; `None` where a part of it is not there.
pub(super) fn of_run(recipe: &Recipe, dir: &Path) -> Option<Vec<TextEpochs>> {
    let one = |text: String, num_tokens: u64, read: f64| TextEpochs {
        text,
        num_tokens,
        epochs: read / num_tokens.max(1) as f64,
    };
    let mut all = Vec::new();
    // Tokens that are read of the run's own text.
    let mut read = 0.0;
    for stage in recipe.stages() {
        let training = recipe.at_stage(&stage).training;
        let tokens = stage.section.steps as f64 * training.tokens_per_step() as f64;
        if stage.section.paths.is_none() {
            read += tokens;
            continue;
        }
        let dir = dir.join(format!("stage-{}", stage.index + 1));
        let meta = Prepared::open(&dir).ok()?.meta;
        all.push(one(dir.display().to_string(), meta.train.num_tokens, tokens));
    }
    let meta = Prepared::open(dir).ok()?.meta;
    let weights = recipe.data.weights.iter().flatten();
    let total = weights.clone().sum::<f64>();
    let mixed = meta.sources.iter().zip(weights).zip(&recipe.data.paths);
    let own = mixed.map(|((source, weight), path)| one(path.clone(), source.train.num_tokens, read * weight / total));
    let mut own = own.collect::<Vec<_>>();
    if own.is_empty() {
        own.push(one(dir.display().to_string(), meta.train.num_tokens, read));
    }
    own.append(&mut all);
    Some(own)
}

/// The same in lines.
pub(super) fn lines(found: Option<&[TextEpochs]>, recipe: &Recipe) -> Vec<String> {
    match found {
        _ if recipe.data.format == DataFormat::Mqar => Vec::new(),
        None => vec![
            "  text       not tokenised yet; sieve data prepare does it, then this says how often the run reads it"
                .to_owned(),
        ],
        Some(found) => {
            let line = |part: &TextEpochs| {
                let tokens = terminal::thousands(part.num_tokens);
                format!(
                    "  text       {tokens} training tokens of {}, read {:.2} times",
                    part.text, part.epochs
                )
            };
            found.iter().map(line).collect()
        }
    }
}
