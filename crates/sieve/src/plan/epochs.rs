//! How often a run reads its text, where that is tokenised already.
use crate::terminal;
use crate::train::variable;
use sieve_core::Recipe;
use sieve_core::recipe::{DataFormat, EPOCHS_AS_NEW, tokens_of_text};
use sieve_data::{Corpus, Prepared};
use sieve_train::corpus_configs;
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

/// About how often the run reads its text, by the size of its files; `None` where they are not here.
fn estimate(recipe: &Recipe) -> Option<f64> {
    let (config, _) = corpus_configs(recipe, &variable).ok()?;
    let corpus = Corpus::open(config).ok()?;
    // A data set of the hub is listed when it is fetched.
    let num_bytes = Some(corpus.max_text_bytes()).filter(|_| !corpus.files().is_empty())?;
    Some(recipe.num_tokens() as f64 / tokens_of_text(num_bytes).max(1.0))
}

/// The same in lines, by what is tokenised or else by the size of the files.
pub(super) fn lines(found: Option<&[TextEpochs]>, recipe: &Recipe) -> Vec<String> {
    if recipe.data.format == DataFormat::Mqar {
        return Vec::new();
    }
    let most = match found {
        Some(found) => found.iter().map(|part| part.epochs).reduce(f64::max),
        None => estimate(recipe),
    };
    let mut lines = match found {
        None => vec![format!(
            "  text       not tokenised yet{}; sieve data prepare does it, then this says how often the run reads it",
            most.map_or(String::new(), |most| format!(
                ", read about {most:.1} times by its size"
            )),
        )],
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
    };
    if most.is_some_and(|most| most > EPOCHS_AS_NEW) {
        lines.push(format!(
            "             more than {EPOCHS_AS_NEW} times teaches less each time (arXiv:2305.16264): take more text or \
             fewer steps"
        ));
    }
    lines
}
