//! Loaders of training and validation rows.
use crate::data::{RowSource, StageText};
use crate::{TrainError, TrainingData};
use sieve_core::recipe::Stage;
use sieve_data::{Loader, LoaderConfig, MqarMixture, MqarPart, MqarSplit, Order, Prepared};
use std::sync::Arc;

/// A loader of training rows; with `weights`, rows are drawn from each shard by its weight.
fn text_loader(prepared: &Prepared, weights: Option<&[f64]>, config: LoaderConfig) -> Result<Loader, TrainError> {
    let Some(weights) = weights else {
        return Ok(Loader::new(Arc::new(prepared.train()?), config)?);
    };
    let shards = prepared.train_shards()?.into_iter().map(Arc::new);
    let sources = shards.zip(weights.iter().copied()).collect();
    Ok(Loader::mixture(sources, config)?)
}

/// Adds how often each token occurs in the shards to train on.
fn add_counts(counts: &mut [u64], prepared: &Prepared) -> Result<(), TrainError> {
    for shard in prepared.train_shards()? {
        let found = shard.token_counts(counts.len())?;
        counts.iter_mut().zip(found).for_each(|(sum, n)| *sum += n);
    }
    Ok(())
}

/// Number of rows of a synthetic task in which its tokens are counted.
const SAMPLED_ROWS: u64 = 1000;

impl TrainingData {
    /// The loader of the rows that `stage` trains on.
    ///
    /// # Errors
    /// An unreadable shard, or one with too few tokens for a row.
    pub(crate) fn stage_loader(&self, stage: &Stage, config: LoaderConfig) -> Result<Loader, TrainError> {
        if let Some(StageText { prepared, weights }) = self.stages.get(&stage.index) {
            return text_loader(prepared, weights.as_deref(), config);
        }
        match &self.rows {
            RowSource::Shards { prepared, weights } => {
                let weights = stage.section.weights.as_deref().or(weights.as_deref());
                text_loader(prepared, weights, config)
            }
            RowSource::Mqar { train, .. } => {
                let seed = match config.order {
                    Order::Shuffled { seed } => seed,
                    Order::Sequential => 0,
                };
                let mixture = MqarMixture::shuffled(train, MqarSplit::Train, config.seq_len, seed)?;
                Ok(Loader::mqar(mixture, config)?)
            }
        }
    }

    /// The loader of validation rows.
    ///
    /// # Errors
    /// An unreadable shard, or one with too few tokens for a row.
    pub(crate) fn validation_loader(&self, config: LoaderConfig) -> Result<Loader, TrainError> {
        match &self.rows {
            RowSource::Shards { prepared, .. } => Ok(Loader::new(Arc::new(prepared.validation()?), config)?),
            RowSource::Mqar { test, .. } => {
                let mixture = MqarMixture::sequential(test, MqarSplit::Test, config.seq_len)?;
                Ok(Loader::mqar(mixture, config)?)
            }
        }
    }

    /// The shards that rows come from; `None` for a synthetic task.
    pub fn prepared(&self) -> Option<&Prepared> {
        match &self.rows {
            RowSource::Shards { prepared, .. } => Some(prepared),
            RowSource::Mqar { .. } => None,
        }
    }

    /// Hash of the run's own data, without the stages' texts.
    pub(crate) fn base_fingerprint(&self) -> String {
        match &self.rows {
            RowSource::Shards { prepared, .. } => prepared.meta.fingerprint.clone(),
            RowSource::Mqar { train, test } => MqarPart::fingerprint(&[train.as_slice(), test].concat()),
        }
    }

    /// How often each of the first `rows` tokens occurs in the training data; `rows` is the size of the embedding.
    ///
    /// # Errors
    /// The errors of [`token_counts`](Self::token_counts); the data, or a stage's own text, holds a token without a row
    /// in the embedding.
    pub(crate) fn counts_of_rows(&self, rows: usize) -> Result<Vec<u64>, TrainError> {
        let all = rows.max(self.tokenizer.vocab_size());
        let mut counts = self.token_counts(all)?;
        let mut found = counts.clone();
        // If the embedding has a row for every token, the stages' texts need not be read.
        for text in self.stages.values().filter(|_| all > rows) {
            add_counts(&mut found, &text.prepared)?;
        }
        if let Some(id) = (rows..all).find(|&id| found[id] > 0) {
            let token = self.tokenizer.id_token(id as u32).unwrap_or_default();
            return Err(TrainError::refused(
                format!("the text holds token {id}, {token:?}, and the model's embedding has {rows} rows"),
                "leave the token out of the text, or give the model a row for it before it is imported",
            ));
        }
        counts.truncate(rows);
        Ok(counts)
    }

    /// How often each token occurs in the training data; for a synthetic task, in its first rows.
    ///
    /// # Errors
    /// An unreadable shard, a token outside the vocabulary.
    fn token_counts(&self, vocab_size: usize) -> Result<Vec<u64>, TrainError> {
        let mut counts = vec![0; vocab_size];
        match &self.rows {
            RowSource::Shards { prepared, .. } => add_counts(&mut counts, prepared)?,
            RowSource::Mqar { train, .. } => {
                let seq_len = train.iter().map(|part| part.config.seq_len).max().unwrap_or(0);
                let (seed, num_rows, pad_id) = (0, 1, 0);
                let mixture = MqarMixture::shuffled(train, MqarSplit::Train, seq_len, seed)?;
                for row in 0..SAMPLED_ROWS {
                    // Only labels are predicted, so a unigram model is counted on them.
                    for label in mixture.batch(row, num_rows, pad_id).labels {
                        if let Some(count) = counts.get_mut(label as usize) {
                            *count += 1;
                        }
                    }
                }
            }
        }
        Ok(counts)
    }
}
