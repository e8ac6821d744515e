//! Batches as a pure function of the number of their first sample.
//!
//! An epoch is a permutation of the documents, laid end to end and cut into rows of `seq_len` tokens, which are permuted in
//! turn: neighbouring rows of one long document would make a batch of one kind. Sample `i` of all belongs to epoch `i / samples_per_epoch`; nothing else is remembered, so a run is resumed by a number, and any
//! split of the samples over ranks and micro-batches reads the same ones.

mod epoch;

use std::sync::{Arc, Mutex};

use crate::error::DataError;
use crate::shard::{ShardReader, with_ending};
use epoch::Epoch;

/// The label of a position that nothing is predicted at: the end of a document, and padding.
pub const IGNORED_LABEL: i32 = -100;

/// The document id of padding.
pub const PAD_DOCUMENT: u32 = u32::MAX;

/// In which order documents come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Another permutation in each epoch, fixed by the seed. The last tokens of an epoch that fill no row are left out:
    /// others in each epoch. To train with.
    Shuffled {
        /// Another seed, another order.
        seed: u64,
    },
    /// As in the shard, each document once, the last row padded. To validate with.
    Sequential,
}

/// How documents fill rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// End to end; a row may hold many documents, and a document may go on in the next row.
    Concatenated,
    /// A row holds one document, or `seq_len` tokens of it, and then padding; a document's end, which has no label, is
    /// left out. To compare with programs that know no packing.
    OneDocumentPerRow,
}

/// What batches look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Tokens of a row.
    pub seq_len: usize,
    /// In which order documents come.
    pub order: Order,
    /// How documents fill rows.
    pub packing: Packing,
    /// The model's vocabulary; a larger token id is an error.
    pub vocab_size: usize,
    /// The token of padding.
    pub pad_id: u32,
}

/// Rows of tokens. Every list has `batch * seq_len` entries, row after row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of the first row's sample.
    pub first_sample: u64,
    /// Rows.
    pub batch: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The next token of the same document, or [`IGNORED_LABEL`].
    pub labels: Vec<i32>,
    /// Where in its row the token's segment begins. A segment is what the row holds of one document, or padding.
    pub doc_start: Vec<u32>,
    /// Where in its row the token's segment ends, exclusive.
    pub doc_end: Vec<u32>,
    /// Place in the segment, from 0, also where the document began in an earlier row.
    pub positions: Vec<u32>,
    /// The token's document in the shard, or [`PAD_DOCUMENT`].
    pub documents: Vec<u32>,
}

impl Batch {
    /// Positions with a label.
    pub fn num_labels(&self) -> usize {
        self.labels
            .iter()
            .filter(|&&label| label != IGNORED_LABEL)
            .count()
    }

    fn empty(first_sample: u64, batch: usize, seq_len: usize) -> Self {
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

    /// Appends a segment at place `start` of the current row, all but `tokens` and `labels`.
    fn push_segment(&mut self, document: u32, start: usize, len: usize) {
        self.doc_start
            .extend(std::iter::repeat_n(start as u32, len));
        self.doc_end
            .extend(std::iter::repeat_n((start + len) as u32, len));
        self.positions.extend(0..len as u32);
        self.documents.extend(std::iter::repeat_n(document, len));
    }
}

/// Makes batches from a shard. Shared between threads by reference.
#[derive(Debug)]
pub struct Loader {
    shard: Arc<ShardReader>,
    config: LoaderConfig,
    samples_per_epoch: u64,
    /// The epochs used last: eight bytes a document each. Two, since a batch may cross from one into the next.
    epochs: Mutex<Vec<Arc<Epoch>>>,
}

const MAX_EPOCHS_HELD: usize = 2;

impl Loader {
    /// Checks the settings against the shard.
    ///
    /// # Errors
    /// A `seq_len` of 0, a `pad_id` outside the vocabulary, a shard with too few tokens for one sample or with 2^32
    /// documents or more.
    pub fn new(shard: Arc<ShardReader>, config: LoaderConfig) -> Result<Self, DataError> {
        let bad = |name, reason| Err(DataError::BadSetting { name, reason });
        if config.seq_len == 0 || config.seq_len >= u32::MAX as usize {
            return bad(
                "seq_len",
                format!("{} is not a length of a row", config.seq_len),
            );
        }
        if config.vocab_size > i32::MAX as usize {
            return bad(
                "vocab_size",
                format!("{} is more than 31 bits can number", config.vocab_size),
            );
        }
        if config.pad_id as usize >= config.vocab_size {
            return bad(
                "pad_id",
                format!(
                    "{} is outside the vocabulary of {}",
                    config.pad_id, config.vocab_size
                ),
            );
        }
        if shard.num_documents() >= u64::from(PAD_DOCUMENT) {
            let what = format!(
                "{} documents; the loader numbers them with 32 bits",
                shard.num_documents()
            );
            return Err(DataError::BadShard {
                path: with_ending(shard.prefix(), ".idx"),
                what,
            });
        }
        let first = Epoch::new(&shard, &config, 0);
        let samples_per_epoch = first.num_samples();
        if samples_per_epoch == 0 {
            return Err(DataError::TooFewTokens {
                path: with_ending(shard.prefix(), ".bin"),
                num_tokens: shard.num_tokens(),
                num_documents: shard.num_documents(),
                seq_len: config.seq_len,
            });
        }
        Ok(Self {
            shard,
            config,
            samples_per_epoch,
            epochs: Mutex::new(vec![Arc::new(first)]),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// The shard it reads.
    pub fn shard(&self) -> &Arc<ShardReader> {
        &self.shard
    }

    /// Samples of an epoch, the same for each.
    pub fn samples_per_epoch(&self) -> u64 {
        self.samples_per_epoch
    }

    /// The samples `first_sample..first_sample + count`, as rows. Depends on nothing else.
    ///
    /// # Errors
    /// A token id outside the vocabulary; the message names its document.
    pub fn batch(&self, first_sample: u64, count: usize) -> Result<Batch, DataError> {
        let mut batch = Batch::empty(first_sample, count, self.config.seq_len);
        for sample in (0..count as u64).map(|row| first_sample + row) {
            let epoch = self.epoch(sample / self.samples_per_epoch);
            self.push_row(&epoch, sample % self.samples_per_epoch, &mut batch)?;
        }
        Ok(batch)
    }

    fn epoch(&self, number: u64) -> Arc<Epoch> {
        let number = if self.config.order == Order::Sequential {
            0
        } else {
            number
        };
        // A panic elsewhere leaves the list whole: entries are only ever put in or taken out.
        let mut epochs = self
            .epochs
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(epoch) = epochs.iter().find(|epoch| epoch.number() == number) {
            return Arc::clone(epoch);
        }
        let epoch = Arc::new(Epoch::new(&self.shard, &self.config, number));
        if epochs.len() == MAX_EPOCHS_HELD {
            epochs.remove(0);
        }
        epochs.push(Arc::clone(&epoch));
        epoch
    }

    fn push_row(&self, epoch: &Epoch, sample: u64, batch: &mut Batch) -> Result<(), DataError> {
        let seq_len = self.config.seq_len;
        let mut filled = 0;
        let mut buffer = Vec::with_capacity(seq_len + 1);
        for piece in epoch.row(&self.shard, sample) {
            // One token more than the row takes, if the document has it: the last label.
            let len = (piece.tokens.end - piece.tokens.start) as usize;
            let document_len = self.shard.document_len(piece.document);
            buffer.clear();
            let range = piece.tokens.start..document_len.min(piece.tokens.end + 1);
            self.shard
                .read(piece.document, range, self.config.vocab_size, &mut buffer)?;
            batch.tokens.extend_from_slice(&buffer[..len]);
            batch
                .labels
                .extend(buffer[1..].iter().map(|&token| token as i32));
            if buffer.len() == len {
                batch.labels.push(IGNORED_LABEL);
            }
            batch.push_segment(piece.document as u32, filled, len);
            filled += len;
        }
        let num_pads = seq_len - filled;
        batch
            .tokens
            .extend(std::iter::repeat_n(self.config.pad_id, num_pads));
        batch
            .labels
            .extend(std::iter::repeat_n(IGNORED_LABEL, num_pads));
        batch.push_segment(PAD_DOCUMENT, filled, num_pads);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
