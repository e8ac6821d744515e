//! What a run lacks before it can begin, in one message: memory, its tokenizer, its text.
use anyhow::{Error, Result, anyhow, bail};
use sieve_core::Recipe;
use sieve_core::recipe::TokenizerSource;
use sieve_data::{Corpus, CorpusConfig, DataError, Tokenizer, is_hub_tokenizer};
use sieve_host::environment::variable;
use sieve_host::terminal;
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

/// One error for all paths of text that match no file.
fn text(recipe: &Recipe) -> Option<Error> {
    // Other mistakes in the paths are reported where the text is read.
    let (train, validation) = corpus_configs(recipe, &variable).ok()?;
    let configs = std::iter::once(train).chain(validation);
    let of_one_path = configs.flat_map(|config| {
        let paths = config.paths.clone();
        paths.into_iter().map(move |path| CorpusConfig { paths: vec![path], ..config.clone() })
    });
    let missing = of_one_path.filter_map(|config| match Corpus::open(config) {
        Err(error @ DataError::NoFiles { .. }) => Some(TrainError::from(error).to_string()),
        _ => None,
    });
    let missing: Vec<String> = missing.collect();
    // The hint is that of the last one.
    let (last, others) = missing.split_last()?;
    let others = others.iter().filter_map(|text| text.lines().next()).map(|line| format!("{line}\n  "));
    Some(anyhow!("{}{last}", others.collect::<String>()))
}
