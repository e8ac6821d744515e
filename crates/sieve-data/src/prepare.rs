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

mod check;
mod lock;
mod meta;
mod partial;
mod plan;
mod split;
mod tokenise;

use std::fs;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

pub use check::ShardCheck;
pub use meta::{ChatsMeta, DocumentSize, PreparedMeta, SourceMeta, SplitMeta, ValidationSettings, read_document_sizes};

use crate::corpus::{Corpus, CorpusConfig, Document};
use crate::error::DataError;
use crate::shard::ShardReader;
use crate::tokenizer::Tokenizer;
use lock::Lock;
use meta::FORMAT_VERSION;
use plan::{Plan, earlier_preparation, refuse_foreign_files, remove_leftovers};
use tokenise::Pace;

/// Where the validation documents come from.
#[derive(Debug, Clone, Copy)]
pub enum ValidationSource<'a> {
    /// This fraction of the corpus, in (0, 1). A hash of its text decides whether a document is held out, so that
    /// adding text moves no document between the splits, and equal documents stay together. If this left one split
    /// empty, the last bytes of the corpus are held out instead, and the document around the boundary is cut
    /// ([`PreparedMeta::is_cut`]); no corpus that holds the same documents trains on these bytes.
    Fraction(f64),
    /// Another corpus, whose documents are left out of the training split.
    Corpus(&'a Corpus),
}

impl<'a> ValidationSource<'a> {
    /// The corpus of validation documents; `None` if they come from the training corpora.
    fn corpus(self) -> Option<&'a Corpus> {
        match self {
            Self::Corpus(corpus) => Some(corpus),
            Self::Fraction(_) => None,
        }
    }
}

/// What to do with a folder that holds data prepared from other sources or settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnChange {
    /// Fail with an error that says what differs.
    Refuse,
    /// Prepare again and replace the folder's data.
    Replace,
    /// As `Replace`, and also if the shards are not the ones that were prepared ([`Prepared::verify`]).
    ReplaceDamaged,
}

/// Sources and settings of [`prepare`].
#[derive(Debug, Clone)]
pub struct PrepareConfig<'a> {
    /// The folder to write to; created if missing.
    pub dir: PathBuf,
    /// Where the validation documents come from.
    pub validation: ValidationSource<'a>,
    /// What to do if the folder holds data prepared from other sources or settings.
    pub on_change: OnChange,
    /// For the text of a stage, the run's data: the stage does not train on text that the run validates on.
    pub base: Option<&'a Prepared>,
}

/// How far [`prepare`] is. The callback runs on the thread that called it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process prepares in the same folder.
    Waiting,
    /// Documents are read and tokenised.
    Tokenising {
        /// `"validation"` for a separate validation corpus, else `"train"`, whose corpus may have held-out documents.
        split: &'static str,
        /// Bytes of text tokenised so far.
        bytes_done: u64,
        /// Upper bound of the bytes of text, from the sizes of the files.
        bytes_total: u64,
        /// Number of documents tokenised so far.
        num_documents: u64,
        /// Number of tokens written so far.
        num_tokens: u64,
        /// Number of files read to their end.
        num_files_done: usize,
        /// Number of files of all corpora.
        num_files: usize,
    },
    /// All documents are tokenised; files are being fsynced.
    Writing,
}

/// A folder of prepared data.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Path of the folder.
    pub dir: PathBuf,
    /// The contents of `meta.json`.
    pub meta: PreparedMeta,
    /// Whether the data existed already and nothing was written.
    pub reused: bool,
}

impl Prepared {
    /// Opens data that was prepared earlier, from any sources.
    ///
    /// # Errors
    /// No `meta.json`, a `meta.json` of another version, or files of other sizes than it names.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        let meta = PreparedMeta::read(dir)?;
        meta.check_files(dir)?;
        Ok(Self { dir: dir.to_path_buf(), meta, reused: true })
    }

    /// Starts a thread that reads the shards and compares their checksums with the ones in `meta.json`; opening
    /// compared only sizes.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn check_beside(&self) -> Result<ShardCheck, DataError> {
        ShardCheck::start(self.hashed_files())
    }

    /// Reads the shards to their end and compares their checksums with the ones in `meta.json`.
    ///
    /// # Errors
    /// A shard whose bytes are not those that were prepared.
    pub fn verify(&self) -> Result<(), DataError> {
        // Opening checks every entry of the .idx files.
        self.train_shards()?;
        self.validation()?;
        check::check_now(self.hashed_files())
    }

    /// The `.bin` files, and the `.idx` files that say what is predicted, each with its XXH3-128 in hexadecimal.
    fn hashed_files(&self) -> Vec<(PathBuf, String)> {
        let files = self.meta.shards().into_iter().flat_map(|(name, split)| {
            let path = |ending: &str| crate::shard::with_ending(&self.dir.join(&name), ending);
            let bounds = split.bounds_hash.clone().map(|hash| (path(".idx"), hash));
            std::iter::once((path(".bin"), split.tokens_hash.clone())).chain(bounds)
        });
        files.collect()
    }

    /// Maps the training shard.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`]; several corpora were prepared.
    pub fn train(&self) -> Result<ShardReader, DataError> {
        if !self.meta.sources.is_empty() {
            let what = format!("{} sources to be mixed, not one", self.meta.sources.len());
            return Err(DataError::meta(&meta::path(&self.dir), what));
        }
        self.shard(TRAIN)
    }

    /// Maps the training shards, one for each corpus.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`].
    pub fn train_shards(&self) -> Result<Vec<ShardReader>, DataError> {
        let names = train_names(self.meta.sources.len().max(1));
        names.iter().map(|name| self.shard(name)).collect()
    }

    fn shard(&self, name: &str) -> Result<ShardReader, DataError> {
        let shard = ShardReader::open(&self.dir.join(name))?;
        match self.meta.settings.has_parts() {
            true => shard.with_parts(),
            false => Ok(shard),
        }
    }

    /// Maps the validation shard.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`].
    pub fn validation(&self) -> Result<ShardReader, DataError> {
        self.shard(VALIDATION)
    }

    /// Bytes and words of each document of the validation shard, in order.
    ///
    /// # Errors
    /// The errors of [`read_document_sizes`].
    pub fn validation_sizes(&self) -> Result<Vec<DocumentSize>, DataError> {
        read_document_sizes(&self.dir.join(VALIDATION_SIZES))
    }
}

const TRAIN: &str = "train";
const VALIDATION: &str = "validation";
const VALIDATION_SIZES: &str = "validation.docs.json";
const LOCK: &str = "prepare.lock";

/// File names of the training shards, without suffix.
fn train_names(num_corpora: usize) -> Vec<String> {
    match num_corpora {
        1 => vec![TRAIN.to_owned()],
        _ => (0..num_corpora).map(|number| format!("{TRAIN}-{number:03}")).collect(),
    }
}

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
    let has_mark = fs::read(dir.join(LOCK)).is_ok_and(|text| lock::is_mark(&text));
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
        let reason = format!("{fraction} does not lie between 0 and 1");
        return Err(DataError::setting("validation_fraction", reason));
    }
    for (key, column) in [
        ("prompt_column", (|config| config.prompt_column.is_some()) as fn(&CorpusConfig) -> bool),
        ("messages_column", |config| config.messages_column.is_some()),
    ] {
        let first = column(corpora[0].config());
        if corpora.iter().chain(config.validation.corpus()).any(|corpus| column(corpus.config()) != first) {
            let what = if key == "prompt_column" { "prompts" } else { "messages" };
            return Err(DataError::setting(key, format!("some of the corpora have {what} and some have none")));
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
        fingerprint: fingerprint(corpora, tokenizer, config, eos_id),
        lock,
        pace,
    };
    if let Some(meta) = &earlier {
        let found = Prepared { dir: dir.clone(), meta: meta.clone(), reused: true };
        let is_whole = || match config.on_change {
            OnChange::ReplaceDamaged => meta.check_files(dir).and_then(|()| found.verify()).is_ok(),
            OnChange::Refuse | OnChange::Replace => meta.check_files(dir).is_ok(),
        };
        if meta.fingerprint == plan.fingerprint && is_whole() {
            if plan.lock.has_mark()? {
                remove_leftovers(dir)?;
            }
            return Ok(found);
        }
        if meta.fingerprint != plan.fingerprint && config.on_change == OnChange::Refuse {
            return Err(DataError::OtherPreparation { dir: dir.clone(), what: plan.difference(meta) });
        }
    }
    let meta = plan.run(progress)?;
    Ok(Prepared { dir: dir.clone(), meta, reused: false })
}

/// A hash of everything that the shards depend on, in hexadecimal.
fn fingerprint(corpora: &[Corpus], tokenizer: &Tokenizer, config: &PrepareConfig, eos_id: u32) -> String {
    let mut hash = Xxh3::new();
    hash.update(&FORMAT_VERSION.to_le_bytes());
    hash.update(&tokenizer.hash().to_le_bytes());
    hash.update(&eos_id.to_le_bytes());
    for corpus in corpora {
        hash.update(&corpus.fingerprint().to_le_bytes());
    }
    if let Some(chats) = corpora[0].chats() {
        hash.update(&chats.hash().to_le_bytes());
    }
    match config.validation {
        ValidationSource::Fraction(fraction) => {
            hash.update(&fraction.to_le_bytes());
            if corpora.len() > 1 {
                // An earlier version did not hold text out of every corpus; its data must not count as the same.
                hash.update(b"of each");
            }
            for (document, most) in config.base.iter().flat_map(|base| &base.meta.train_bytes) {
                hash.update(document.as_bytes());
                hash.update(&most.to_le_bytes());
            }
        }
        ValidationSource::Corpus(corpus) => hash.update(&corpus.fingerprint().to_le_bytes()),
    }
    hex(hash.digest128())
}

/// A hash of a document's prompt and text, which decides whether the document is held out and finds equal documents.
fn content_hash(document: &Document) -> u128 {
    const SEED: u64 = 0x7661_6C69_6461_7465;
    let hash = |text: &str| xxhash_rust::xxh3::xxh3_128_with_seed(text.as_bytes(), SEED);
    match &document.prompt {
        None => hash(&document.text),
        // No text holds a NUL, so prompt and text cannot be divided in another way with the same hash.
        Some(prompt) => hash(&[prompt.as_str(), "\0", &document.text].concat()),
    }
}

fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

#[cfg(test)]
mod tests;
