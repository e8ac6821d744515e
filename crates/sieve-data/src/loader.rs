//! Batches as a pure function of the index of their first sample.
//!
//! In an epoch the documents are permuted and concatenated, and the tokens are divided into rows of `seq_len`. The rows
//! are permuted too; otherwise neighbouring rows of one long document would be in the same batch. Sample `i` belongs to
//! epoch `i / samples_per_epoch`. The loader has no other state, so a run resumes from an index, and any division of
//! the samples among ranks and micro-batches reads the same samples.

mod batch;
mod epoch;
mod shard_rows;

use std::sync::Arc;

pub use batch::{Batch, IGNORE_LABEL, LoaderConfig, Order, PAD_DOCUMENT, Packing};

use crate::error::DataError;
use crate::mixture::Schedule;
use crate::mqar::MqarMixture;
use crate::shard::{ShardReader, check_vocab_size};
use shard_rows::ShardRows;

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
