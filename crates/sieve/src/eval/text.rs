//! Text that the measures read.
use crate::text_files::{self, FormatArg};
use anyhow::{Result, bail};
use sieve_data::{Corpus, CorpusConfig, Tokenizer};
use sieve_eval::text_documents;

/// Files, folders and globs, each file read as its ending says.
pub(super) fn corpus(paths: &[String]) -> Result<Corpus> {
    open(paths, None, "text", false)
}

/// The same in a format, with the column that holds the text, and with or without the documents that cannot be read.
pub(super) fn open(
    paths: &[String],
    format: Option<FormatArg>,
    text_column: &str,
    skip_invalid: bool,
) -> Result<Corpus> {
    let corpus = Corpus::open(CorpusConfig {
        skip_invalid,
        ..text_files::config(paths.to_vec(), format, text_column)
    })?;
    text_files::warn_of_json(&corpus);
    Ok(corpus)
}

/// The first tokens of the documents laid end to end: enough for `windows` prompts of `length` tokens, each with the
/// token after it.
pub(super) fn tokens(paths: &[String], tokenizer: &Tokenizer, length: usize, windows: usize) -> Result<Vec<u32>> {
    let wanted = length.saturating_add(1).saturating_mul(windows);
    let corpus = corpus(paths)?;
    let mut tokens = Vec::new();
    for document in text_documents(corpus.documents(), tokenizer, tokenizer.eos_id()?) {
        tokens.extend(document?.tokens);
        if tokens.len() >= wanted {
            return Ok(tokens);
        }
    }
    bail!(
        "the data holds {} tokens, and {windows} prompts of {length} tokens need {wanted}\n  \
         hint: give more text, or fewer or shorter prompts",
        tokens.len(),
    )
}

/// `windows` prompts, each with the token after it.
pub(super) fn windows(tokens: &[u32], length: usize, windows: usize) -> Vec<Vec<u32>> {
    let prompts = tokens.chunks_exact(length + 1).take(windows);
    prompts.map(<[u32]>::to_vec).collect()
}
