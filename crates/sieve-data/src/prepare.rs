//! Prepares data: tokenises a corpus once, into a training shard and a validation shard. Several corpora that a loader
//! mixes get a training shard each and share a validation shard.
//!
//! ```text
//! <dir>/train.bin, train.idx              training documents, each followed by the end-of-document token; a document
//!                                         with a prompt is two sequences, prompt and text; a chat, which no token
//!                                         follows, is what others say and what the assistant says, in turn
//!       (train-000.bin, train-001.bin, …  one pair for each of several corpora)
//! <dir>/validation.bin, validation.idx    held-out documents
//! <dir>/validation.docs.json              bytes and words of each held-out document, for losses per byte and word
//! <dir>/meta.json                         sources, settings and sizes; written last
//! <dir>/prepare.journal.tmp, *.tmp        an unfinished preparation; the next one continues with the source file
//!                                         that this one was reading
//! <dir>/prepare.lock                      locked while a process prepares; its content says that the files of these
//!                                         names are Sieve's
//! ```

mod call;
mod check;
mod known;
mod lock;
mod meta;
mod names;
mod partial;
mod plan;
mod prepared;
mod split;
mod tokenise;

use std::fs;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

pub use call::{OnChange, PrepareConfig, Progress, ValidationSource};
pub use check::ShardCheck;
pub use meta::{ChatsMeta, DocumentSize, PreparedMeta, SourceMeta, SplitMeta, ValidationSettings, read_document_sizes};
pub use prepared::Prepared;
pub use tokenise::DocumentTokens;

use crate::corpus::{Corpus, CorpusConfig};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;
use lock::Lock;
use meta::FORMAT_VERSION;
use names::{LOCK, hex};
use plan::{Plan, earlier_preparation, refuse_foreign_files, remove_leftovers};
use tokenise::Pace;

/// Tokenises `corpora` into `config.dir`, unless the folder holds data prepared from the same files, tokenizer and
/// settings. Each corpus gets its own training shard; the held-out text of all of them goes into one shard.
///
/// Files get their final names when all of them are complete. After an error or a kill, the next call with the same
/// arguments keeps the tokens of finished source files (except the last 128 MB of text) and reads the others again; the
/// result is the same as without the interruption. If several processes call this for one folder, one works and the
/// others wait for it.
///
/// # Errors
/// Errors of the corpora and the tokenizer, an empty split, a folder that holds other files, a full disk. After an
/// error the data prepared earlier is unchanged.
pub fn prepare(
    corpora: &[Corpus],
    tokenizer: &Tokenizer,
    config: &PrepareConfig,
    progress: &dyn Fn(Progress),
) -> Result<Prepared, DataError> {
    prepare_at_pace(corpora, tokenizer, config, progress, Pace::default())
}

/// Refuses a folder with files of a preparation's names that no preparation has written; a missing folder is fine.
///
/// # Errors
/// Such a file, or a folder that cannot be listed.
pub fn check_owner(dir: &Path) -> Result<(), DataError> {
    let has_mark = sieve_files::read_file(&dir.join(LOCK)).is_ok_and(|text| lock::is_mark(&text));
    refuse_foreign_files(dir, has_mark)
}

/// As [`prepare`]; `pace` says how many bytes of text are tokenised at a time, and how many are made durable.
fn prepare_at_pace(
    corpora: &[Corpus],
    tokenizer: &Tokenizer,
    config: &PrepareConfig,
    progress: &dyn Fn(Progress),
    pace: Pace,
) -> Result<Prepared, DataError> {
    if corpora.is_empty() || corpora.len() > 1000 {
        let reason = format!("{} corpora; 1 to 1000 can be prepared", corpora.len());
        return Err(DataError::setting("corpora", reason));
    }
    if let ValidationSource::Fraction(fraction) = config.validation
        && !(fraction > 0.0 && fraction < 1.0)
    {
        let reason = format!("{fraction} is not between 0 and 1");
        return Err(DataError::setting("validation_fraction", reason));
    }
    for (key, column) in [
        ("prompt_column", (|config| config.prompt_column.is_some()) as fn(&CorpusConfig) -> bool),
        ("messages_column", |config| config.messages_column.is_some()),
    ] {
        let first = column(corpora[0].config());
        if corpora.iter().chain(config.validation.corpus()).any(|corpus| column(corpus.config()) != first) {
            let what = if key == "prompt_column" { "prompts" } else { "messages" };
            return Err(DataError::setting(key, format!("some of the corpora have {what}, but not all of them")));
        }
    }
    let eos_id = tokenizer.eos_id()?;
    let dir = &config.dir;
    fs::create_dir_all(dir).map_err(DataError::io("create", dir))?;
    let lock = Lock::take(dir.join(LOCK), progress)?;
    let earlier = earlier_preparation(dir, lock.has_mark()?, config.on_change)?;
    let plan = Plan {
        corpora,
        tokenizer,
        config,
        eos_id,
        fingerprint: fingerprint(corpora, tokenizer, config, eos_id, Corpus::fingerprint),
        lock,
        pace,
    };
    if let Some(meta) = &earlier {
        // Data of earlier versions has a fingerprint without samples of the text.
        let is_same = meta.fingerprint == plan.fingerprint
            || meta.fingerprint == fingerprint(corpora, tokenizer, config, eos_id, Corpus::listing_hash);
        let found = Prepared { dir: dir.clone(), meta: meta.clone(), reused: true, taken_from: None };
        let is_whole = || match config.on_change {
            OnChange::ReplaceDamaged => meta.check_files(dir).and_then(|()| found.verify()).is_ok(),
            OnChange::Refuse | OnChange::Replace => meta.check_files(dir).is_ok(),
        };
        if is_same && is_whole() {
            if plan.lock.has_mark()? {
                remove_leftovers(dir)?;
            }
            return Ok(found);
        }
        if !is_same && config.on_change == OnChange::Refuse {
            return Err(DataError::OtherPreparation { dir: dir.clone(), what: plan.difference(meta) });
        }
    }
    if earlier.is_none()
        && let Some((meta, other)) = known::take(dir, &plan.lock, config.known, &plan.fingerprint)?
    {
        remove_leftovers(dir)?;
        return Ok(Prepared { dir: dir.clone(), meta, reused: true, taken_from: Some(other) });
    }
    let meta = plan.run(progress)?;
    Ok(Prepared { dir: dir.clone(), meta, reused: false, taken_from: None })
}

/// A hash of everything that the shards depend on, in hexadecimal; `of_corpus` gives the hash of a corpus.
fn fingerprint(
    corpora: &[Corpus],
    tokenizer: &Tokenizer,
    config: &PrepareConfig,
    eos_id: u32,
    of_corpus: fn(&Corpus) -> u128,
) -> String {
    let mut hash = Xxh3::new();
    hash.update(&FORMAT_VERSION.to_le_bytes());
    hash.update(&tokenizer.hash().to_le_bytes());
    hash.update(&eos_id.to_le_bytes());
    for corpus in corpora {
        hash.update(&of_corpus(corpus).to_le_bytes());
    }
    // All corpora of a recipe are chats, with the same template, or none is.
    if let Some(chats) = corpora[0].chats() {
        hash.update(&chats.hash().to_le_bytes());
    }
    match config.validation {
        ValidationSource::Fraction(fraction) => {
            hash.update(&fraction.to_le_bytes());
            if corpora.len() > 1 {
                // Text is held out of every corpus, and not of the first alone.
                hash.update(b"of each");
            }
            // The text of a stage is not trained on beyond the cuts of the run's data (`base`): of each cut document,
            // its hash and how many of its bytes may be trained on.
            for (document, max_bytes) in config.base.iter().flat_map(|base| &base.meta.train_bytes) {
                hash.update(document.as_bytes());
                hash.update(&max_bytes.to_le_bytes());
            }
        }
        ValidationSource::Corpus(corpus) => hash.update(&of_corpus(corpus).to_le_bytes()),
    }
    hex(hash.digest128())
}

#[cfg(test)]
mod tests;
