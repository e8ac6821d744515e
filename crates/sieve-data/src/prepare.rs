//! Preparation: a corpus becomes one shard to train on and one to validate on, once.
//!
//! ```text
//! <dir>/train.bin, train.idx                 documents to train on, each ended by the end-of-document token
//! <dir>/validation.bin, validation.idx       documents held out
//! <dir>/validation.docs.json                 bytes and words of each held-out document, for perplexity per byte and word
//! <dir>/meta.json                            what it was made from and what came out; written last, so with it all is whole
//! <dir>/prepare.lock                         held while a process prepares here; tells that files of these names are ours
//! ```

mod lock;
mod meta;
mod tokenise;

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use xxhash_rust::xxh3::Xxh3;

pub use meta::{DocumentSize, PreparedMeta, SplitMeta, ValidationSettings, read_document_sizes};

use crate::atomic_file::{AtomicFile, sync_dir, temporary_name};
use crate::corpus::{Corpus, CorpusReport};
use crate::error::DataError;
use crate::shard::{ShardReader, ShardWriter, TokenDtype, with_ending};
use crate::tokenizer::Tokenizer;
use lock::Lock;
use meta::FORMAT_VERSION;
use tokenise::{Encoded, Pass, Target};

/// Where the documents for validation come from.
#[derive(Debug, Clone, Copy)]
pub enum ValidationSource<'a> {
    /// This fraction of the corpus, in (0, 1): each document is held out or not by a hash of its text alone, so that
    /// more text does not move documents from one side to the other, and equal documents stay together.
    Fraction(f64),
    /// Another corpus. Its documents are left out of the training split.
    Corpus(&'a Corpus),
}

/// What to do with a folder that holds another preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnChange {
    /// Fail, and say what differs.
    Refuse,
    /// Prepare again and replace it.
    Replace,
}

/// How to prepare.
#[derive(Debug, Clone)]
pub struct PrepareConfig<'a> {
    /// The folder to write to; made if missing.
    pub dir: PathBuf,
    /// Where the documents for validation come from.
    pub validation: ValidationSource<'a>,
    /// Name of the end-of-document token; `None` looks for a known one ([`Tokenizer::eos_id`]).
    pub eos_token: Option<String>,
    /// What to do with a folder that holds another preparation.
    pub on_change: OnChange,
}

/// How far preparation is. The callback is called from the calling thread, a few times a second at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process prepares in the same folder.
    Waiting,
    /// Documents are read and tokenised.
    Tokenising {
        /// "validation" (an own corpus) or "train" (with the held-out documents, if they come from the same corpus).
        split: &'static str,
        /// Bytes of text done.
        bytes_done: u64,
        /// An upper bound of the bytes of text in all: sizes of files.
        bytes_total: u64,
        /// Documents done.
        num_documents: u64,
        /// Tokens so far.
        num_tokens: u64,
    },
    /// Everything is tokenised; files are being fsynced.
    Writing,
}

/// A finished preparation.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The folder.
    pub dir: PathBuf,
    /// The contents of `meta.json`.
    pub meta: PreparedMeta,
    /// True when an unchanged preparation was found and nothing was written.
    pub reused: bool,
}

impl Prepared {
    /// Opens what was prepared earlier, whatever it was made from.
    ///
    /// # Errors
    /// No `meta.json`, one of another version, or files that do not have the sizes it names.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        let meta = PreparedMeta::read(dir)?;
        meta.check_files(dir)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            meta,
            reused: true,
        })
    }

    /// Maps the shard to train on.
    ///
    /// # Errors
    /// Those of [`ShardReader::open`].
    pub fn train(&self) -> Result<ShardReader, DataError> {
        ShardReader::open(&self.dir.join(TRAIN))
    }

    /// Maps the shard to validate on.
    ///
    /// # Errors
    /// Those of [`ShardReader::open`].
    pub fn validation(&self) -> Result<ShardReader, DataError> {
        ShardReader::open(&self.dir.join(VALIDATION))
    }

    /// Bytes and words of each document of the validation shard, in its order.
    ///
    /// # Errors
    /// Those of [`read_document_sizes`].
    pub fn validation_sizes(&self) -> Result<Vec<DocumentSize>, DataError> {
        read_document_sizes(&self.dir.join(VALIDATION_SIZES))
    }
}

const TRAIN: &str = "train";
const VALIDATION: &str = "validation";
const VALIDATION_SIZES: &str = "validation.docs.json";
const LOCK: &str = "prepare.lock";

/// Tokenises `corpus` into `config.dir`, or finds that it was done before from the same files, tokenizer and settings.
///
/// Files appear under their own names only when all of them are whole. Several processes may call this for one folder:
/// one works, the others wait for it.
///
/// # Errors
/// The corpus's and the tokenizer's errors, an empty split, a folder that holds something else, a full disk. After an
/// error an earlier preparation is still whole.
pub fn prepare(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    config: &PrepareConfig,
    progress: &dyn Fn(Progress),
) -> Result<Prepared, DataError> {
    if let ValidationSource::Fraction(fraction) = config.validation
        && !(fraction > 0.0 && fraction < 1.0)
    {
        let reason = format!("{fraction} does not lie between 0 and 1");
        return Err(DataError::BadSetting {
            name: "validation_fraction",
            reason,
        });
    }
    let eos_id = tokenizer.eos_id(config.eos_token.as_deref())?;
    let dir = &config.dir;
    fs::create_dir_all(dir).map_err(DataError::io("create", dir))?;
    let lock = Lock::take(dir.join(LOCK), progress)?;
    let earlier = earlier_preparation(dir, lock.has_mark()?)?;
    let fingerprint = fingerprint(corpus, tokenizer, config, eos_id);
    let plan = Plan {
        corpus,
        tokenizer,
        config,
        eos_id,
        fingerprint,
        lock,
    };
    if let Some(meta) = &earlier {
        if meta.fingerprint == plan.fingerprint && meta.check_files(dir).is_ok() {
            return Ok(Prepared {
                dir: dir.clone(),
                meta: meta.clone(),
                reused: true,
            });
        }
        if meta.fingerprint != plan.fingerprint && config.on_change == OnChange::Refuse {
            return Err(DataError::OtherPreparation {
                dir: dir.clone(),
                what: plan.difference(meta),
            });
        }
    }
    let meta = plan.run(progress)?;
    Ok(Prepared {
        dir: dir.clone(),
        meta,
        reused: false,
    })
}

struct Plan<'a> {
    corpus: &'a Corpus,
    tokenizer: &'a Tokenizer,
    config: &'a PrepareConfig<'a>,
    eos_id: u32,
    fingerprint: String,
    lock: Lock,
}

impl Plan<'_> {
    fn run(&self, progress: &dyn Fn(Progress)) -> Result<PreparedMeta, DataError> {
        let dir = &self.config.dir;
        let mut train = Split::create(dir, TRAIN, self.tokenizer.vocab_size())?;
        let mut validation = Split::create(dir, VALIDATION, self.tokenizer.vocab_size())?;
        let mut sizes = Vec::new();
        let mut keep = |document: Encoded| match document.target {
            Target::Train => train.push(&document),
            Target::Validation => {
                sizes.push(document.size);
                validation.push(&document)
            }
        };
        let pass = |split| Pass {
            tokenizer: self.tokenizer,
            eos_id: self.eos_id,
            split,
            progress,
        };
        let (report, validation_report) = match self.config.validation {
            ValidationSource::Fraction(fraction) => {
                let target = |text: &str| match is_held_out(text, fraction) {
                    true => Some(Target::Validation),
                    false => Some(Target::Train),
                };
                (pass(TRAIN).run(self.corpus, target, &mut keep)?, None)
            }
            ValidationSource::Corpus(corpus) => {
                let held_out = Mutex::new(HashSet::new());
                let target = |text: &str| {
                    held_out
                        .lock()
                        .expect("no panic while held")
                        .insert(content_hash(text));
                    Some(Target::Validation)
                };
                let validation_report = pass(VALIDATION).run(corpus, target, &mut keep)?;
                let held_out = held_out.into_inner().expect("no panic while held");
                let target =
                    |text: &str| (!held_out.contains(&content_hash(text))).then_some(Target::Train);
                (
                    pass(TRAIN).run(self.corpus, target, &mut keep)?,
                    Some(validation_report),
                )
            }
        };
        for (split, name) in [(&train, TRAIN), (&validation, VALIDATION)] {
            if split.meta.num_documents == 0 {
                return Err(DataError::EmptySplit {
                    split: name,
                    num_documents: report.num_documents,
                    validation_fraction: match self.config.validation {
                        ValidationSource::Fraction(fraction) => fraction,
                        ValidationSource::Corpus(_) => 0.0,
                    },
                });
            }
        }
        progress(Progress::Writing);
        self.publish(train, validation, &sizes, report, validation_report)
    }

    /// Fsyncs everything under temporary names, then renames, `meta.json` last.
    fn publish(
        &self,
        train: Split,
        validation: Split,
        sizes: &[DocumentSize],
        report: CorpusReport,
        validation_report: Option<CorpusReport>,
    ) -> Result<PreparedMeta, DataError> {
        let dir = &self.config.dir;
        let (train, train_meta) = train.finish()?;
        let (validation, validation_meta) = validation.finish()?;
        let mut sizes_file = AtomicFile::create(&dir.join(VALIDATION_SIZES))?;
        sizes_file.write(&meta::document_sizes_json(sizes))?;
        let sizes_file = sizes_file.finish()?;
        let meta = PreparedMeta {
            format_version: FORMAT_VERSION,
            fingerprint: self.fingerprint.clone(),
            tokenizer_hash: hex(self.tokenizer.hash()),
            vocab_size: self.tokenizer.vocab_size(),
            dtype: TokenDtype::for_vocab_size(self.tokenizer.vocab_size()),
            eos_id: self.eos_id,
            sources_hash: hex(self.corpus.fingerprint()),
            settings: self.corpus.config().clone(),
            validation_settings: match self.config.validation {
                ValidationSource::Fraction(fraction) => ValidationSettings::Fraction(fraction),
                ValidationSource::Corpus(corpus) => ValidationSettings::Corpus {
                    sources_hash: hex(corpus.fingerprint()),
                    settings: Box::new(corpus.config().clone()),
                },
            },
            train: train_meta,
            validation: validation_meta,
            report,
            validation_report,
        };
        let mut meta_file = AtomicFile::create(&meta::path(dir))?;
        meta_file.write(&meta.to_json())?;
        let meta_file = meta_file.finish()?;

        self.lock.mark()?;
        // Without meta.json nobody takes the folder for whole while its files change one by one.
        match fs::remove_file(meta::path(dir)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(DataError::io("remove", &meta::path(dir))(error));
            }
            _ => sync_dir(dir)?,
        }
        train.publish()?;
        validation.publish()?;
        sizes_file.publish()?;
        sync_dir(dir)?;
        meta_file.publish()?;
        sync_dir(dir)?;
        Ok(meta)
    }

    /// What is not as it was, for a message.
    fn difference(&self, earlier: &PreparedMeta) -> String {
        let mut changed = Vec::new();
        if earlier.format_version != FORMAT_VERSION {
            changed.push("the format's version");
        }
        if earlier.tokenizer_hash != hex(self.tokenizer.hash()) || earlier.eos_id != self.eos_id {
            changed.push("the tokenizer");
        }
        if &earlier.settings != self.corpus.config() {
            changed.push("the corpus's settings");
        } else if earlier.sources_hash != hex(self.corpus.fingerprint()) {
            changed.push("the source files");
        }
        if changed.is_empty() {
            changed.push("the validation documents");
        }
        format!(
            "holds data prepared otherwise: {} changed",
            changed.join(" and ")
        )
    }
}

struct Split {
    writer: ShardWriter,
    meta: SplitMeta,
}

impl Split {
    fn create(dir: &Path, name: &str, vocab_size: usize) -> Result<Self, DataError> {
        Ok(Self {
            writer: ShardWriter::create(&dir.join(name), vocab_size)?,
            meta: SplitMeta::default(),
        })
    }

    fn push(&mut self, document: &Encoded) -> Result<(), DataError> {
        self.meta.num_documents += 1;
        self.meta.num_tokens += document.ids.len() as u64;
        self.meta.num_bytes += document.size.num_bytes;
        self.meta.num_words += document.size.num_words;
        self.writer.push(&document.ids)
    }

    fn finish(mut self) -> Result<(crate::shard::FinishedShard, SplitMeta), DataError> {
        let shard = self.writer.finish_unnamed()?;
        self.meta.bin_bytes = shard.bin_bytes;
        self.meta.idx_bytes = shard.idx_bytes;
        self.meta.tokens_hash = hex(shard.bin_hash);
        Ok((shard, self.meta))
    }
}

/// What a whole earlier preparation says of itself. Clears away what a killed one left; refuses files that are not ours.
fn earlier_preparation(dir: &Path, has_mark: bool) -> Result<Option<PreparedMeta>, DataError> {
    let shards = [TRAIN, VALIDATION].map(|name| dir.join(name));
    let shards = shards
        .iter()
        .flat_map(|prefix| [".bin", ".idx"].map(|ending| with_ending(prefix, ending)));
    let files = shards
        .chain([dir.join(VALIDATION_SIZES), meta::path(dir)])
        .collect::<Vec<_>>();
    for leftover in files.iter().map(|file| temporary_name(file)) {
        if has_mark && leftover.exists() {
            fs::remove_file(&leftover).map_err(DataError::io("remove", &leftover))?;
        }
    }
    if meta::path(dir).exists() {
        return PreparedMeta::read(dir).map(Some);
    }
    // A preparation killed between renames leaves its mark; other files of these names are somebody else's.
    match files.iter().find(|file| file.exists()) {
        Some(file) if !has_mark => {
            let what = format!(
                "holds {} without the meta.json of a preparation",
                file.display()
            );
            Err(DataError::OtherPreparation {
                dir: dir.to_path_buf(),
                what,
            })
        }
        _ => Ok(None),
    }
}

/// One string for everything that decides the result.
fn fingerprint(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    config: &PrepareConfig,
    eos_id: u32,
) -> String {
    let mut hash = Xxh3::new();
    hash.update(&FORMAT_VERSION.to_le_bytes());
    hash.update(&tokenizer.hash().to_le_bytes());
    hash.update(&eos_id.to_le_bytes());
    hash.update(&corpus.fingerprint().to_le_bytes());
    match config.validation {
        ValidationSource::Fraction(fraction) => hash.update(&fraction.to_le_bytes()),
        ValidationSource::Corpus(corpus) => hash.update(&corpus.fingerprint().to_le_bytes()),
    }
    hex(hash.digest128())
}

fn is_held_out(text: &str, fraction: f64) -> bool {
    // The upper 64 bits as a number in [0, 1).
    ((content_hash(text) >> 64) as f64) / 2f64.powi(64) < fraction
}

fn content_hash(text: &str) -> u128 {
    const SEED: u64 = 0x7661_6C69_6461_7465;
    xxhash_rust::xxh3::xxh3_128_with_seed(text.as_bytes(), SEED)
}

fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

#[cfg(test)]
mod tests;
