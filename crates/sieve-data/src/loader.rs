//! Batches as a pure function of the index of their first sample.
//!
//! In an epoch the documents are permuted and concatenated, and the tokens are divided into rows of `seq_len`. The rows
//! are permuted too; otherwise neighbouring rows of one long document would be in the same batch. Sample `i` belongs to
//! epoch `i / samples_per_epoch`. The loader has no other state, so a run resumes from an index, and any division of
//! the samples among ranks and micro-batches reads the same samples.

mod epoch;
mod shard_rows;

use std::sync::Arc;

use crate::error::DataError;
use crate::mixture::Schedule;
use crate::mqar::MqarMixture;
use crate::shard::{ShardReader, check_vocab_size};
use shard_rows::ShardRows;

/// The label of a token without a prediction: before a token that the model only reads (of a prompt, or what others
/// say in a chat), at a document's end, and in padding.
pub const IGNORE_LABEL: i32 = -100;

/// Document id of padding tokens.
pub const PAD_DOCUMENT: u32 = u32::MAX;

/// The order in which documents are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// For training: another permutation in each epoch, determined by the seed. Tokens at the end of an epoch that do
    /// not fill a row are left out; they differ from epoch to epoch.
    Shuffled {
        /// Seed of the epochs' permutations.
        seed: u64,
    },
    /// For validation: the order of the shard, each document once, the last row padded.
    Sequential,
}

/// How documents are packed into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Documents are concatenated: a row may hold many, and a document may continue in the next row.
    Concatenated,
    /// A row holds one document, or `seq_len` tokens of it, and then padding. The last token of a document, which has
    /// no label, is left out. For comparison with programs without packing.
    OneDocumentPerRow,
}

/// Settings of a data loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Tokens of each row.
    pub seq_len: usize,
    /// The order in which documents are read.
    pub order: Order,
    /// How documents are packed into rows.
    pub packing: Packing,
    /// Rows of the model's embedding; a token id of this size or more is an error.
    pub vocab_size: usize,
    /// Token id that fills rows up.
    pub pad_id: u32,
}

/// Rows of tokens. Every list is `[batch, seq_len]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Index of the first row among all rows of the run.
    pub first_sample: u64,
    /// Number of rows.
    pub batch: usize,
    /// Tokens of each row.
    pub seq_len: usize,
    /// Token ids, `[batch, seq_len]`.
    pub tokens: Vec<u32>,
    /// The next token of the same document, or [`IGNORE_LABEL`].
    pub labels: Vec<i32>,
    /// Column where the token's segment begins. A segment is the part of a row that holds one document, or padding.
    pub doc_start: Vec<u32>,
    /// Column where the token's segment ends, exclusive.
    pub doc_end: Vec<u32>,
    /// Position in the segment, from 0, even if the document began in an earlier row.
    pub positions: Vec<u32>,
    /// Index of the token's document in the shard, or [`PAD_DOCUMENT`].
    pub documents: Vec<u32>,
}

impl Batch {
    /// Number of tokens with a label.
    pub fn num_labels(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE_LABEL).count()
    }

    /// Makes each token that no label depends on padding, and a document of its own, so that its query attends only to
    /// itself. Such a token is padding, or the last one of a segment without a label of its own: the end-of-document
    /// token, which rows of one document lack.
    pub fn part_padding(&mut self) {
        for at in 0..self.documents.len() {
            let column = (at % self.seq_len) as u32;
            let start = at - (column - self.doc_start[at]) as usize;
            let is_last = self.doc_end[at] == column + 1 && self.labels[at] == IGNORE_LABEL;
            if is_last && self.documents[at] != PAD_DOCUMENT {
                self.doc_end[start..at].fill(column);
                self.documents[at] = PAD_DOCUMENT;
            }
            if self.documents[at] == PAD_DOCUMENT {
                (self.doc_start[at], self.doc_end[at], self.positions[at]) = (column, column + 1, 0);
            }
        }
    }

    pub(crate) fn empty(first_sample: u64, batch: usize, seq_len: usize) -> Self {
        let len = batch * seq_len;
        Self {
            first_sample,
            batch,
            seq_len,
            tokens: Vec::with_capacity(len),
            labels: Vec::with_capacity(len),
            doc_start: Vec::with_capacity(len),
            doc_end: Vec::with_capacity(len),
            positions: Vec::with_capacity(len),
            documents: Vec::with_capacity(len),
        }
    }

    /// Appends a segment at column `start` of the current row to all lists but `tokens` and `labels`.
    pub(crate) fn push_segment(&mut self, document: u32, start: usize, len: usize) {
        self.doc_start.extend(std::iter::repeat_n(start as u32, len));
        self.doc_end.extend(std::iter::repeat_n((start + len) as u32, len));
        self.positions.extend(0..len as u32);
        self.documents.extend(std::iter::repeat_n(document, len));
    }

    /// Fills the current row up from column `start`.
    pub(crate) fn push_padding(&mut self, pad_id: u32, start: usize) {
        let len = self.seq_len - start;
        self.tokens.extend(std::iter::repeat_n(pad_id, len));
        self.labels.extend(std::iter::repeat_n(IGNORE_LABEL, len));
        self.push_segment(PAD_DOCUMENT, start, len);
    }
}

/// Makes batches from shards or from a generator. Threads can share it by reference.
#[derive(Debug)]
pub struct Loader {
    rows: Rows,
    config: LoaderConfig,
}

/// Where the rows of a loader come from.
#[derive(Debug)]
enum Rows {
    Shard(ShardRows),
    Mixture { sources: Vec<ShardRows>, schedule: Schedule },
    Mqar(MqarMixture),
}

impl Loader {
    /// Reads one shard.
    ///
    /// # Errors
    /// A `seq_len` of 0, a `pad_id` outside the vocabulary, a shard with too few tokens for one sample or with 2^32
    /// documents or more.
    pub fn new(shard: Arc<ShardReader>, config: LoaderConfig) -> Result<Self, DataError> {
        check(&config)?;
        let rows = Rows::Shard(ShardRows::new(shard, &config)?);
        Ok(Self { rows, config })
    }

    /// Mixes shards by weights w: for every n, the first n rows hold `n w_s / (w_0 + w_1 + …)` rows of shard s, with an
    /// error below one row. Rows have equal length, so these are also shares of tokens. Each shard has its own epochs;
    /// a small one with a large weight is repeated more often.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) for each shard; a weight that is not positive; an order that is not shuffled,
    /// because a mixture has no end.
    pub fn mixture(sources: Vec<(Arc<ShardReader>, f64)>, config: LoaderConfig) -> Result<Self, DataError> {
        check(&config)?;
        if config.order == Order::Sequential {
            let reason = "a mixture has no end, so it cannot be read in sequence";
            return Err(DataError::setting("order", reason));
        }
        let weights = sources.iter().map(|source| source.1).collect::<Vec<_>>();
        let schedule = Schedule::new(&weights)?;
        let sources = sources.into_iter().map(|(shard, _)| ShardRows::new(shard, &config));
        let rows = Rows::Mixture { sources: sources.collect::<Result<_, _>>()?, schedule };
        Ok(Self { rows, config })
    }

    /// Generates MQAR samples. The mixture determines the order; `config.order` and `config.packing` are ignored.
    ///
    /// # Errors
    /// A `seq_len` that is not the mixture's, a `pad_id` outside the vocabulary, a vocabulary smaller than the
    /// samples'.
    pub fn mqar(mixture: MqarMixture, config: LoaderConfig) -> Result<Self, DataError> {
        check(&config)?;
        for (name, got, wanted) in [
            ("seq_len", config.seq_len, mixture.seq_len()),
            // A larger vocabulary than the samples' is allowed.
            ("vocab_size", config.vocab_size, mixture.vocab_size().max(config.vocab_size)),
        ] {
            if got != wanted {
                let reason = format!("{got}, but the MQAR samples are made for {wanted}");
                return Err(DataError::setting(name, reason));
            }
        }
        let rows = Rows::Mqar(mixture);
        Ok(Self { rows, config })
    }

    /// The loader's settings.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Number of samples of an epoch; for a mixture, the sum over its shards.
    pub fn samples_per_epoch(&self) -> u64 {
        match &self.rows {
            Rows::Shard(rows) => rows.samples_per_epoch,
            Rows::Mixture { sources, .. } => sources.iter().map(|rows| rows.samples_per_epoch).sum(),
            Rows::Mqar(mixture) => mixture.rows_per_epoch(),
        }
    }

    /// The samples `first_sample..first_sample + count`, as rows. The result depends on nothing else.
    ///
    /// # Errors
    /// A token id outside the vocabulary; the message names its document.
    pub fn batch(&self, first_sample: u64, count: usize) -> Result<Batch, DataError> {
        let samples = (0..count as u64).map(|row| first_sample + row);
        self.batch_of(&samples.collect::<Vec<_>>())
    }

    /// These samples as rows, in the given order.
    ///
    /// # Errors
    /// The errors of [`batch`](Self::batch).
    pub fn batch_of(&self, samples: &[u64]) -> Result<Batch, DataError> {
        let first_sample = samples.first().copied().unwrap_or_default();
        let mut batch = Batch::empty(first_sample, samples.len(), self.config.seq_len);
        for &sample in samples {
            match &self.rows {
                Rows::Shard(rows) => rows.push(sample, &self.config, &mut batch)?,
                Rows::Mixture { sources, schedule } => {
                    let (source, sample) = schedule.get(sample);
                    sources[source].push(sample, &self.config, &mut batch)?;
                }
                Rows::Mqar(mixture) => mixture.push(sample, self.config.pad_id, &mut batch),
            }
        }
        Ok(batch)
    }

    /// Samples of an epoch that hold about this many tokens, at least one sample. They are spread evenly over the
    /// epoch, because the first documents may all be of one kind. All samples of the epoch if it has fewer tokens.
    pub fn spread_samples(&self, num_tokens: u64) -> Vec<u64> {
        let all = self.samples_per_epoch();
        let count = num_tokens.div_ceil(self.config.seq_len as u64).max(1).min(all);
        let sample = |row: u64| (u128::from(row) * u128::from(all) / u128::from(count)) as u64;
        (0..count).map(sample).collect()
    }
}

/// Checks the settings that every source of rows needs.
fn check(config: &LoaderConfig) -> Result<(), DataError> {
    let bad = |name, reason| Err(DataError::BadSetting { name, reason });
    if config.seq_len == 0 || config.seq_len >= u32::MAX as usize {
        return bad("seq_len", format!("{} is not a length of a row", config.seq_len));
    }
    check_vocab_size(config.vocab_size)?;
    if config.pad_id as usize >= config.vocab_size {
        return bad("pad_id", format!("{} is outside the vocabulary of {}", config.pad_id, config.vocab_size));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
