//! The side files of prepared data: `meta.json` and `validation.docs.json`.

use sieve_files::read_file;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use xxhash_rust::xxh3::xxh3_128;

use super::names::{VALIDATION, VALIDATION_SIZES, hex, train_names};
#[cfg(doc)]
use crate::chat::ChatFormat;
use crate::corpus::{Corpus, CorpusConfig, CorpusReport};
use crate::error::DataError;
use crate::shard::{TokenDtype, with_ending};

/// Version of the side files' format.
pub(super) const FORMAT_VERSION: u32 = 1;

/// For documents of cut corpora, by hash in hexadecimal: how many bytes from their beginning may be trained on.
pub(super) type TrainBytes = BTreeMap<String, u64>;

pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join("meta.json")
}

/// The sources, settings and sizes of prepared data: the contents of `meta.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedMeta {
    /// Version of the side files' format.
    pub format_version: u32,
    /// A hash of everything that decides the result: source files, settings, tokenizer.
    pub fingerprint: String,
    /// Hash of the tokenizer ([`Tokenizer::hash`](crate::Tokenizer::hash)), in hexadecimal.
    pub tokenizer_hash: String,
    /// Size of the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Integer type in which token ids are stored.
    pub dtype: TokenDtype,
    /// The template that made texts of messages; `None` where documents are no chats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chats: Option<ChatsMeta>,
    /// Id of the token that ends each document.
    pub eos_id: u32,
    /// Hash of the corpora ([`Corpus::fingerprint`](crate::Corpus::fingerprint)), in hexadecimal.
    pub sources_hash: String,
    /// Settings of the corpus, or of the first of several.
    pub settings: CorpusConfig,
    /// Each corpus, if there are several; empty for one corpus.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceMeta>,
    /// Where the validation documents come from.
    pub validation_settings: ValidationSettings,
    /// Whether a corpus had too few documents to hold whole documents out, so that the end of its text is held out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// For documents of cut corpora, by hash: how many bytes from their beginning may be trained on.
    #[serde(default, skip_serializing_if = "TrainBytes::is_empty")]
    pub(super) train_bytes: TrainBytes,
    /// Contents of `train.bin`, or of `train-000.bin`, `train-001.bin`, … together.
    pub train: SplitMeta,
    /// Sizes of the validation shard, `validation.bin`.
    pub validation: SplitMeta,
    /// Numbers of documents of the training corpora that were used or left out.
    pub report: CorpusReport,
    /// The same numbers of the separate validation corpus; `None` if validation documents come from the training
    /// corpora.
    pub validation_report: Option<CorpusReport>,
}

/// Where the validation documents come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValidationSettings {
    /// This fraction of the training corpora.
    Fraction(f64),
    /// A corpus of its own.
    Corpus {
        /// Fingerprint of the corpus, in hexadecimal.
        sources_hash: String,
        /// Settings of the corpus.
        settings: Box<CorpusConfig>,
    },
}

/// One of several corpora in a folder of prepared data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceMeta {
    /// Hash of the corpus ([`Corpus::fingerprint`](crate::Corpus::fingerprint)), in hexadecimal.
    pub sources_hash: String,
    /// Settings of the corpus.
    pub settings: CorpusConfig,
    /// Sizes of the corpus's training shard.
    pub train: SplitMeta,
    /// Numbers of the corpus's documents that were used or left out.
    pub report: CorpusReport,
}

/// The template of chats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatsMeta {
    /// Hash of the template ([`ChatFormat::hash`]), in hexadecimal.
    pub template_hash: String,
    /// Whether it marks the assistant's words itself ([`ChatFormat::marks_answers`]).
    pub marks_answers: bool,
}

impl ChatsMeta {
    pub(super) fn of(corpus: &Corpus) -> Option<Self> {
        let chats = corpus.chats()?;
        Some(Self { template_hash: hex(chats.hash()), marks_answers: chats.marks_answers() })
    }
}

/// Number of documents and sizes of one shard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitMeta {
    /// Number of documents in the shard.
    pub num_documents: u64,
    /// Number of tokens, one end-of-document token per document included.
    pub num_tokens: u64,
    /// Bytes of UTF-8 text that were tokenised.
    pub num_bytes: u64,
    /// Words: runs of characters that are not white space.
    pub num_words: u64,
    /// Size of the `.bin` file in bytes.
    pub bin_bytes: u64,
    /// Size of the `.idx` file in bytes.
    pub idx_bytes: u64,
    /// XXH3-128 of the `.bin` file, in hexadecimal. Equal hashes mean equal tokens, from whatever sources.
    pub tokens_hash: String,
    /// Number of tokens that are predicted; `None` where all are, but for the first of each document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_predicted: Option<u64>,
    /// XXH3-128 of the `.idx` file, in hexadecimal, where it says which tokens are predicted; `None` where all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounds_hash: Option<String>,
}

impl SplitMeta {
    /// The sums over several shards; the hash is taken of the concatenated hashes.
    pub(super) fn total(parts: &[Self]) -> Self {
        let sum = |number: fn(&Self) -> u64| parts.iter().map(number).sum();
        let joined = |hashes: Vec<&str>| match hashes.as_slice() {
            [only] => (*only).to_owned(),
            several => hex(xxh3_128(several.concat().as_bytes())),
        };
        let bounds = parts.iter().map(|part| part.bounds_hash.as_deref()).collect::<Option<Vec<_>>>();
        Self {
            num_documents: sum(|part| part.num_documents),
            num_tokens: sum(|part| part.num_tokens),
            num_bytes: sum(|part| part.num_bytes),
            num_words: sum(|part| part.num_words),
            bin_bytes: sum(|part| part.bin_bytes),
            idx_bytes: sum(|part| part.idx_bytes),
            tokens_hash: joined(parts.iter().map(|part| part.tokens_hash.as_str()).collect()),
            num_predicted: parts.iter().map(|part| part.num_predicted).sum(),
            bounds_hash: bounds.map(joined),
        }
    }
}

impl PreparedMeta {
    /// Whether the data was prepared from these corpora: the same settings and the same, unchanged files. Data sets of
    /// the hub whose files were not listed count as unchanged.
    pub fn is_made_of(&self, train: &[Corpus], validation: Option<&Corpus>) -> bool {
        let is_same = |hash: &String, corpus: &Corpus| corpus.check_connected().is_err() || corpus.is_of_hash(hash);
        let held_out = match (&self.validation_settings, validation) {
            (ValidationSettings::Corpus { sources_hash, .. }, Some(corpus)) => is_same(sources_hash, corpus),
            _ => true,
        };
        let corpora = self.corpora();
        let mut pairs = corpora.iter().zip(train);
        held_out && corpora.len() == train.len() && pairs.all(|((hash, ..), corpus)| is_same(hash, corpus))
    }

    /// Hash, settings and training shard of each corpus, be it one or several.
    pub(super) fn corpora(&self) -> Vec<(&String, &CorpusConfig, &SplitMeta)> {
        match self.sources.as_slice() {
            [] => vec![(&self.sources_hash, &self.settings, &self.train)],
            sources => sources.iter().map(|source| (&source.sources_hash, &source.settings, &source.train)).collect(),
        }
    }

    /// Reads the `meta.json` of a folder; refuses one of another format version.
    pub(super) fn read(dir: &Path) -> Result<Self, DataError> {
        let path = path(dir);
        let bytes = read_file(&path).map_err(DataError::io("read", &path))?;
        let bad = |what: String| DataError::meta(&path, what);
        // Checked first, because another version may have other fields.
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        match value.get("format_version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(FORMAT_VERSION) => {}
            Some(version) => {
                let what = format!("holds a meta.json of format_version {version}; only {FORMAT_VERSION} is known");
                return Err(DataError::OtherPreparation { dir: dir.to_path_buf(), what });
            }
            None => return Err(bad("is not the meta.json of a preparation: no format_version".into())),
        }
        serde_json::from_value(value).map_err(|error| bad(error.to_string()))
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        let mut json = serde_json::to_vec_pretty(self).expect("plain numbers and strings serialise");
        json.push(b'\n');
        json
    }

    /// Name and contents of every shard, the validation shard last.
    pub(super) fn shards(&self) -> Vec<(String, &SplitMeta)> {
        let corpora = self.corpora();
        let names = train_names(corpora.len()).into_iter();
        let trains = names.zip(corpora).map(|(name, (.., train))| (name, train));
        trains.chain([(VALIDATION.to_owned(), &self.validation)]).collect()
    }

    /// Checks that the shards exist with the sizes that were written, and reads the sizes of held-out documents.
    pub(super) fn check_files(&self, dir: &Path) -> Result<(), DataError> {
        for (name, split) in self.shards() {
            for (ending, wanted) in [(".bin", split.bin_bytes), (".idx", split.idx_bytes)] {
                let path = with_ending(&dir.join(&name), ending);
                let found = fs::metadata(&path).map_err(DataError::io("read", &path))?.len();
                if found != wanted {
                    let what = format!("{found} bytes, but meta.json says {wanted}");
                    return Err(DataError::shard(&path, what));
                }
            }
        }
        let (path, wanted) = (dir.join(VALIDATION_SIZES), self.validation.num_documents);
        let found = read_document_sizes(&path)?.len() as u64;
        if found != wanted {
            let what = format!("sizes of {found} documents, but meta.json says {wanted}");
            return Err(DataError::meta(&path, what));
        }
        Ok(())
    }
}

/// Length of one document's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentSize {
    /// Bytes of UTF-8 text of the document.
    pub num_bytes: u64,
    /// Words: runs of characters that are not white space.
    pub num_words: u64,
}

impl DocumentSize {
    pub(super) fn of(text: &str) -> Self {
        Self { num_bytes: text.len() as u64, num_words: text.split_whitespace().count() as u64 }
    }
}

impl std::iter::Sum for DocumentSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self { num_bytes: 0, num_words: 0 }, |sum, size| Self {
            num_bytes: sum.num_bytes + size.num_bytes,
            num_words: sum.num_words + size.num_words,
        })
    }
}

/// `validation.docs.json`: two lists with one number for each document of the validation shard.
#[derive(Serialize, Deserialize)]
struct DocumentSizes {
    format_version: u32,
    num_bytes: Vec<u64>,
    num_words: Vec<u64>,
}

/// The JSON that keeps the sizes of held-out documents beside their tokens.
pub(super) fn document_sizes_json(sizes: &[DocumentSize]) -> Vec<u8> {
    let sizes = DocumentSizes {
        format_version: FORMAT_VERSION,
        num_bytes: sizes.iter().map(|size| size.num_bytes).collect(),
        num_words: sizes.iter().map(|size| size.num_words).collect(),
    };
    serde_json::to_vec(&sizes).expect("plain numbers serialise")
}

/// Reads a `validation.docs.json`.
///
/// # Errors
/// A file that cannot be read, is of another version, or whose lists differ in length.
pub fn read_document_sizes(path: &Path) -> Result<Vec<DocumentSize>, DataError> {
    let bytes = read_file(path).map_err(DataError::io("read", path))?;
    let bad = |what: String| DataError::meta(path, what);
    let sizes: DocumentSizes = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    if sizes.format_version != FORMAT_VERSION {
        return Err(bad(format!("format_version {}; only {FORMAT_VERSION} is known", sizes.format_version)));
    }
    if sizes.num_bytes.len() != sizes.num_words.len() {
        return Err(bad(format!("{} sizes in bytes, {} in words", sizes.num_bytes.len(), sizes.num_words.len())));
    }
    let pairs = sizes.num_bytes.into_iter().zip(sizes.num_words);
    Ok(pairs.map(|(num_bytes, num_words)| DocumentSize { num_bytes, num_words }).collect())
}
