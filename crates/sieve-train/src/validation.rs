//! Loss on held-out documents.
use crate::group::Share;
use crate::{DeviceBatch, TrainError, Unigram, ValidationReport};
use sieve_data::{IGNORE_LABEL, Loader, Tokenizer};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{RotaryEmbedding, SieveBackend};

/// Bytes of text that each token stands for behind another one; special tokens stand for none.
#[derive(Clone, Debug)]
pub struct TokenBytes(Vec<u32>);

impl TokenBytes {
    /// For a vocabulary of `vocab_size` rows, which may be larger than the tokenizer's.
    ///
    /// # Errors
    /// A token the tokenizer cannot decode.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, TrainError> {
        let mut bytes = vec![0; vocab_size];
        for (id, bytes) in bytes.iter_mut().enumerate().take(tokenizer.vocab_size()) {
            *bytes = tokenizer.token_bytes(id as u32, false)? as u32;
        }
        Ok(Self(bytes))
    }
}

/// Checks that a validation of `loader` reads a label, in the rows that it reads.
///
/// # Errors
/// It reads none; a shard that cannot be read.
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
        "raise validation.tokens, or training.seq_len where prompts (data.prompt_column) fill whole rows",
    ))
}

/// Mean loss over about `num_tokens` tokens spread evenly over `loader`, or over all of it when that is less, in
/// batches of `batch_size` rows. The batch size does not decide which rows are read.
///
/// Every token of a document but its first is predicted once; the unigram model is scored on the same tokens.
///
/// # Errors
/// A shard that cannot be read.
pub fn validate<B: SieveBackend>(
    model: &Qwen3<B>,
    loader: &Loader,
    rope: &RotaryEmbedding<B>,
    size: ValidationSize,
    tokens: (&TokenBytes, &Unigram),
    device: &B::Device,
) -> Result<ValidationReport, TrainError> {
    let sums = share_sums(Share::ALL, model, loader, rope, size, tokens, device, &|| ())?;
    Ok(report(&sums))
}

/// How much text a validation reads, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidationSize {
    /// Tokens, rounded up to whole rows.
    pub num_tokens: usize,
    /// Rows of a batch.
    pub batch_size: usize,
}

/// Sums over the predicted tokens of one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BatchSums {
    nats: f64,
    unigram_nats: f64,
    num_labels: u64,
    num_bytes: u64,
}

impl BatchSums {
    const BYTES: usize = 32;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let floats = [self.nats, self.unigram_nats].map(f64::to_bits);
        let words = [floats[0], floats[1], self.num_labels, self.num_bytes];
        let bytes = words.map(u64::to_le_bytes).concat();
        bytes.try_into().expect("four words")
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let word = |place: usize| {
            let bytes = bytes[8 * place..8 * place + 8].try_into();
            u64::from_le_bytes(bytes.expect("eight bytes"))
        };
        Self {
            nats: f64::from_bits(word(0)),
            unigram_nats: f64::from_bits(word(1)),
            num_labels: word(2),
            num_bytes: word(3),
        }
    }
}

/// The sums of batches as bytes, to be sent.
pub(crate) fn sums_to_bytes(sums: &[BatchSums]) -> Vec<u8> {
    sums.iter().flat_map(|sums| sums.to_bytes()).collect()
}

/// The sums of all batches in order, merged from the ranks' shares.
pub(crate) fn sums_of_shares(shares: &[Vec<u8>]) -> Vec<BatchSums> {
    let mut shares = shares
        .iter()
        .map(|bytes| bytes.chunks_exact(BatchSums::BYTES).map(BatchSums::of_bytes))
        .collect::<Vec<_>>();
    let mut all = Vec::new();
    while let Some(sums) = {
        let next = all.len() % shares.len();
        shares[next].next()
    } {
        all.push(sums);
    }
    all
}

/// The sums of this rank's batches: of N ranks, rank r has the batches r, r + N, …. `tick` is called after each.
#[allow(clippy::too_many_arguments)]
pub(crate) fn share_sums<B: SieveBackend>(
    share: Share,
    model: &Qwen3<B>,
    loader: &Loader,
    rope: &RotaryEmbedding<B>,
    size: ValidationSize,
    tokens: (&TokenBytes, &Unigram),
    device: &B::Device,
    tick: &dyn Fn(),
) -> Result<Vec<BatchSums>, TrainError> {
    let (TokenBytes(bytes), unigram) = tokens;
    let samples = loader.spread_samples(size.num_tokens as u64);
    let batches = samples.chunks(size.batch_size.max(1));
    let own = batches.skip(share.rank).step_by(share.size);
    own.map(|samples| {
        let batch = loader.batch_of(samples)?;
        let on_device = DeviceBatch::<B>::new(&batch, device);
        let context = LayerContext::new(&on_device.documents, rope);
        let losses = model.token_losses(on_device.tokens, on_device.labels, &context);
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
        tick();
        Ok(sums)
    })
    .collect()
}

/// What the sums of all batches come to, added in their order: the same digits however many ranks made them.
pub(crate) fn report(batches: &[BatchSums]) -> ValidationReport {
    let mut sum = BatchSums::default();
    for batch in batches {
        sum.nats += batch.nats;
        sum.unigram_nats += batch.unigram_nats;
        sum.num_labels += batch.num_labels;
        sum.num_bytes += batch.num_bytes;
    }
    // No labels have no mean.
    let nats = if sum.num_labels == 0 { f64::NAN } else { sum.nats };
    let loss = nats / sum.num_labels as f64;
    let bits = std::f64::consts::LN_2 * sum.num_bytes.max(1) as f64;
    ValidationReport {
        step: 0,
        loss,
        perplexity: loss.exp(),
        bits_per_byte: nats / bits,
        unigram_bits_per_byte: sum.unigram_nats / bits,
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
        assert!(
            [found.loss, found.perplexity, found.bits_per_byte]
                .iter()
                .all(|number| number.is_nan())
        );
    }

    #[test]
    fn shares_are_put_together_in_the_order_of_the_batches() {
        let sums = |number: u64| BatchSums {
            nats: 0.1 * number as f64,
            unigram_nats: -1e-9,
            num_labels: number,
            num_bytes: 3 * number,
        };
        for (num_batches, size) in [(0, 2), (1, 2), (5, 1), (5, 2), (6, 3), (7, 3)] {
            let shares = (0..size).map(|rank| {
                let own = (rank..num_batches).step_by(size as usize).map(sums);
                sums_to_bytes(&own.collect::<Vec<_>>())
            });
            let all = sums_of_shares(&shares.collect::<Vec<_>>());
            assert!(all.into_iter().eq((0..num_batches).map(sums)), "{num_batches}, {size}");
        }
    }
}
