//! Computes the loss on held-out documents.
use crate::share::Share;
use crate::unigram::Unigram;
use crate::{DeviceBatch, TrainError, ValidationReport};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use sieve_data::{IGNORE_LABEL, Loader, Tokenizer};
use sieve_ops::SieveBackend;

/// Number of bytes of text that each token decodes to after another token; 0 for special tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenBytes(Vec<u32>);

impl TokenBytes {
    /// For a vocabulary of `vocab_size` rows, which may be larger than the tokenizer's.
    ///
    /// # Errors
    /// A token the tokenizer cannot decode.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, TrainError> {
        let mut bytes = vec![0; vocab_size];
        let is_first = false;
        for (id, bytes) in bytes.iter_mut().enumerate().take(tokenizer.vocab_size()) {
            *bytes = tokenizer.token_bytes(id as u32, is_first)? as u32;
        }
        Ok(Self(bytes))
    }
}

/// Checks that the rows of a validation hold at least one label.
///
/// # Errors
/// They hold none; a shard that cannot be read.
pub(crate) fn check_labels(loader: &Loader, size: ValidationSize) -> Result<(), TrainError> {
    let samples = loader.spread_samples(size.num_tokens as u64);
    for samples in samples.chunks(size.batch_size.max(1)) {
        if loader.batch_of(samples)?.num_labels() > 0 {
            return Ok(());
        }
    }
    let num_tokens = size.num_tokens;
    Err(TrainError::refused(
        format!("validation.tokens is {num_tokens}, and these rows of held-out text hold no token to predict"),
        "raise validation.tokens, or training.seq_len where prompts or questions of chats fill whole rows",
    ))
}

/// How much text one validation reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValidationSize {
    /// Number of tokens, rounded up to whole rows.
    pub(crate) num_tokens: usize,
    /// Rows of one batch.
    pub(crate) batch_size: usize,
}

/// Sums over the predicted tokens of one batch. They are sent to other ranks as integers, because JSON has no NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "[u64; 4]", into = "[u64; 4]")]
pub(crate) struct BatchSums {
    nats: f64,
    unigram_nats: f64,
    num_labels: u64,
    num_bytes: u64,
}

impl From<BatchSums> for [u64; 4] {
    fn from(sums: BatchSums) -> Self {
        let [nats, unigram_nats] = [sums.nats, sums.unigram_nats].map(f64::to_bits);
        [nats, unigram_nats, sums.num_labels, sums.num_bytes]
    }
}

impl From<[u64; 4]> for BatchSums {
    fn from([nats, unigram_nats, num_labels, num_bytes]: [u64; 4]) -> Self {
        Self { nats: f64::from_bits(nats), unigram_nats: f64::from_bits(unigram_nats), num_labels, num_bytes }
    }
}

/// The sums of all batches in order, from the shares of all ranks: rank r of N has the batches r, r + N, ….
pub(crate) fn sums_of_shares(shares: &[Vec<BatchSums>]) -> Vec<BatchSums> {
    let (num_batches, size) = (shares.iter().map(Vec::len).sum::<usize>(), shares.len());
    (0..num_batches).map(|batch| shares[batch % size][batch / size]).collect()
}

/// Computes the cross-entropy of each token of a batch in nats, `[batch, seq_len]`. It is called with `None`, and
/// returns `None`, where other ranks have a batch and this one does not.
pub(crate) type TokenLosses<'a, B> =
    dyn FnMut(Option<&DeviceBatch<B>>) -> Result<Option<Tensor<B, 2>>, TrainError> + 'a;

/// Validates this rank's batches by `losses` and returns the sums of each: of N ranks, rank r has the batches r, r + N,
/// …. All ranks call `losses` equally often.
///
/// The batches are about `size.num_tokens` tokens spread evenly over `loader`, or all of it when that is less, in
/// `size.batch_size` rows each. The batch size does not decide which rows are read. Every token of a document but its
/// first is predicted once; the unigram model is scored on the same tokens.
///
/// # Errors
/// A shard that cannot be read; the errors of `losses`.
pub(crate) fn share_sums<B: SieveBackend>(
    share: Share,
    loader: &Loader,
    size: ValidationSize,
    tokens: (&TokenBytes, &Unigram),
    device: &B::Device,
    losses: &mut TokenLosses<'_, B>,
) -> Result<Vec<BatchSums>, TrainError> {
    let (TokenBytes(bytes), unigram) = tokens;
    let samples = loader.spread_samples(size.num_tokens as u64);
    let batches = samples.chunks(size.batch_size.max(1)).collect::<Vec<_>>();
    let mut all = Vec::new();
    for round in batches.chunks(share.size) {
        let batch = round.get(share.rank).map(|samples| loader.batch_of(samples)).transpose()?;
        let on_device = batch.as_ref().map(|batch| DeviceBatch::<B>::new(batch, device));
        let (Some(batch), Some(losses)) = (batch, losses(on_device.as_ref())?) else {
            continue;
        };
        let losses = losses.into_data();
        let mut sums = BatchSums::default();
        for (loss, &label) in losses.iter::<f64>().zip(&batch.labels) {
            if label != IGNORE_LABEL {
                sums.nats += loss;
                sums.unigram_nats += unigram.nats(label as usize);
                sums.num_labels += 1;
                sums.num_bytes += u64::from(bytes[label as usize]);
            }
        }
        all.push(sums);
    }
    Ok(all)
}

/// Adds the sums of all batches in their order, so that the result does not depend on the number of ranks. The caller
/// sets the report's step.
pub(crate) fn report(batches: &[BatchSums]) -> ValidationReport {
    let mut sum = BatchSums::default();
    for batch in batches {
        sum.nats += batch.nats;
        sum.unigram_nats += batch.unigram_nats;
        sum.num_labels += batch.num_labels;
        sum.num_bytes += batch.num_bytes;
    }
    // A mean over no labels or no bytes is NaN, also where the sum is not 0.
    let mean = |sum: f64, count: f64| if count == 0.0 { f64::NAN } else { sum / count };
    let loss = mean(sum.nats, sum.num_labels as f64);
    let bits = std::f64::consts::LN_2 * sum.num_bytes as f64;
    ValidationReport {
        step: 0,
        loss,
        perplexity: loss.exp(),
        bits_per_byte: mean(sum.nats, bits),
        unigram_bits_per_byte: mean(sum.unigram_nats, bits),
        num_labels: sum.num_labels,
        num_bytes: sum.num_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_without_labels_has_no_loss() {
        let found = report(&[BatchSums::default()]);
        assert!([found.loss, found.perplexity, found.bits_per_byte].iter().all(|number| number.is_nan()));
        // An end-of-document token has no text.
        let found = report(&[BatchSums { nats: 3.0, unigram_nats: 4.0, num_labels: 2, num_bytes: 0 }]);
        assert_eq!(found.loss, 1.5);
        assert!(found.bits_per_byte.is_nan() && found.unigram_bits_per_byte.is_nan());
    }

    /// Sums as another rank receives them.
    fn sent(sums: &[BatchSums]) -> Vec<BatchSums> {
        serde_json::from_str(&serde_json::to_string(sums).expect("numbers")).expect("just written")
    }

    #[test]
    fn shares_are_put_together_in_the_order_of_the_batches() {
        let nan = BatchSums { nats: f64::NAN, ..BatchSums::default() };
        assert!(sent(&[nan])[0].nats.is_nan());
        let sums = |number: u64| BatchSums {
            nats: 0.1 * number as f64,
            unigram_nats: -1e-9,
            num_labels: number,
            num_bytes: 3 * number,
        };
        for (num_batches, size) in [(0, 2), (1, 2), (5, 1), (5, 2), (6, 3), (7, 3)] {
            let shares = (0..size).map(|rank| {
                let own = (rank..num_batches).step_by(size as usize).map(sums);
                sent(&own.collect::<Vec<_>>())
            });
            let all = sums_of_shares(&shares.collect::<Vec<_>>());
            assert!(all.into_iter().eq((0..num_batches).map(sums)), "{num_batches}, {size}");
        }
    }
}
