//! What a run lacks before it can begin, in one message: memory, its tokenizer, its text.
use super::variable;
use crate::terminal;
use anyhow::{Error, Result, bail};
use sieve_core::Recipe;
use sieve_core::recipe::TokenizerSource;
use sieve_data::{Corpus, DataError, Tokenizer, is_hub_tokenizer};
use sieve_train::{Origin, TrainError, corpus_configs};
use std::path::Path;

/// Adds missing files to an error about memory, so that a user meets all that is missing at once. A single problem is
/// left to the code that needs the thing.
pub(super) fn all_at_once<T>(memory: Result<T>, recipe: &Recipe, origin: &Origin) -> Result<T> {
    let mut lacks = Vec::new();
    // A run that is continued has its tokens and its tokenizer, a branch the tokenizer.
    let is_new = origin.checkpoint.is_none();
    if is_new {
        lacks.extend(tokenizer(recipe));
    }
    if is_new || origin.is_branch {
        lacks.extend(text(recipe));
    }
    let (memory, memory_error) = match memory {
        Ok(memory) => (Some(memory), None),
        Err(error) => (None, Some(error)),
    };
    let all: Vec<Error> = memory_error.into_iter().chain(lacks).collect();
    match (all.len(), memory) {
        (0 | 1, Some(memory)) => Ok(memory),
        (1, None) => Err(all.into_iter().next().expect("one")),
        (count, _) => {
            let numbered = (1..).zip(&all).map(|(number, error)| {
                let text = terminal::error_text(error);
                format!("\n  {number}. {}", text.trim_start_matches("error: ").replace('\n', "\n   "))
            });
            bail!("{count} things are missing before this run can begin:{}", numbered.collect::<String>())
        }
    }
}

/// The error of a tokenizer that is not there.
fn tokenizer(recipe: &Recipe) -> Option<Error> {
    let TokenizerSource::Path(path) = recipe.tokenizer.source() else {
        return None;
    };
    let path = sieve_core::paths::expand(path, &variable).ok()?;
    let is_here = is_hub_tokenizer(&path) || Path::new(&path).exists();
    (!is_here).then(|| Tokenizer::from_file(Path::new(&path)).err().map(Error::from))?
}

/// The errors of paths of text that match no file, those of the training text first.
fn text(recipe: &Recipe) -> Vec<Error> {
    let Ok((train, validation)) = corpus_configs(recipe, &variable) else {
        // Reported where the text is read.
        return Vec::new();
    };
    let corpora = std::iter::once(train).chain(validation).map(Corpus::open);
    let missing = corpora.filter_map(|opened| match opened {
        Err(error @ DataError::NoFiles { .. }) => Some(TrainError::from(error).into()),
        _ => None,
    });
    missing.collect()
}
