//! Text that the measures read.
use anyhow::Result;
use sieve_data::{Corpus, CorpusConfig};

/// Files, folders and globs: JSONL where all of them end so, text otherwise.
pub(super) fn corpus(paths: &[String]) -> Result<Corpus> {
    let is_jsonl = paths.iter().all(|path| path.ends_with(".jsonl"));
    Ok(Corpus::open(match is_jsonl {
        true => CorpusConfig::jsonl(paths.to_vec(), "text"),
        false => CorpusConfig::text(paths.to_vec()),
    })?)
}
