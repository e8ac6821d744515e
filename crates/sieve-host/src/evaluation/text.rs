//! Text that the commands of `sieve eval` read, and the memory that long texts take.
use crate::text_files::{self, FormatArg};
use anyhow::{Result, bail};
use sieve_core::ModelShape;
use sieve_data::{Corpus, CorpusConfig, Tokenizer};
use sieve_infer::{TextsWithEndings, prompt_part, text_documents};
use sieve_plan::InferenceSize;

/// Opens files, folders and globs. A file's extension says its format; a document's text is in the column `text`.
pub fn corpus(paths: &[String]) -> Result<Corpus> {
    let skip_invalid = false;
    open(paths, None, "text", skip_invalid)
}

/// Opens files, folders and globs; without a format, a file's extension says it. A document's text is in the column
/// `text_column`. `skip_invalid` leaves out documents that cannot be read.
pub fn open(paths: &[String], format: Option<FormatArg>, text_column: &str, skip_invalid: bool) -> Result<Corpus> {
    let config = CorpusConfig { skip_invalid, ..text_files::config(paths.to_vec(), format, text_column) };
    let corpus = Corpus::open(config)?;
    corpus.check_text_column(text_column)?;
    text_files::warn_of_json(&corpus);
    Ok(corpus)
}

/// The first tokens of the concatenated documents: at least `windows * (length + 1)`, for prompts of `length` tokens
/// with the token after each.
pub fn tokens(paths: &[String], tokenizer: &Tokenizer, length: usize, windows: usize) -> Result<Vec<u32>> {
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

/// The memory of texts of up to `longest` tokens, each read once and continued by `num_endings` endings.
pub fn size_with_endings(shape: &ModelShape, longest: usize, num_endings: usize) -> InferenceSize {
    let part = prompt_part(shape, longest);
    InferenceSize {
        cached_tokens: longest,
        num_caches: TextsWithEndings::new(longest, num_endings).num_caches(),
        ..InferenceSize::rows_of(part, part)
    }
}

/// The first `windows` prompts of `tokens`, of `length + 1` tokens each: the prompt and the token after it.
pub fn windows(tokens: &[u32], length: usize, windows: usize) -> Vec<Vec<u32>> {
    let prompts = tokens.chunks_exact(length + 1).take(windows);
    prompts.map(<[u32]>::to_vec).collect()
}
