//! Loss on held-out documents.
use crate::{DeviceBatch, TrainError, Unigram, ValidationReport};
use sieve_data::{IGNORED_LABEL, Loader, Tokenizer};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{RotaryEmbedding, SieveBackend};

/// Bytes of text that each token stands for; special tokens stand for none.
#[derive(Clone, Debug)]
pub struct TokenBytes(Vec<u32>);

impl TokenBytes {
    /// For a vocabulary of `vocab_size` rows, which may be larger than the tokenizer's.
    ///
    /// # Errors
    /// A token the tokenizer cannot decode.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, TrainError> {
        let byte_level = tokenizer.is_byte_level();
        let mut bytes = vec![0; vocab_size];
        for (id, bytes) in bytes.iter_mut().enumerate().take(tokenizer.vocab_size()) {
            let text = tokenizer.decode(&[id as u32])?;
            let token = tokenizer.id_token(id as u32);
            *bytes = match token {
                // In the byte-level alphabet one character is one byte, also where the bytes alone are no text.
                Some(token) if byte_level && !text.is_empty() => token.chars().count() as u32,
                _ => text.len() as u32,
            };
        }
        Ok(Self(bytes))
    }
}

/// Mean loss over `num_batches` batches spread evenly over `loader`, or over all of it when that is less.
///
/// Every token of a document but its first is predicted once; the unigram model is scored on the same tokens.
///
/// # Errors
/// A shard that cannot be read.
pub fn validate<B: SieveBackend>(
    model: &Qwen3<B>,
    loader: &Loader,
    rope: &RotaryEmbedding<B>,
    [num_batches, batch_size]: [usize; 2],
    tokens: (&TokenBytes, &Unigram),
    device: &B::Device,
) -> Result<ValidationReport, TrainError> {
    let (TokenBytes(bytes), unigram) = tokens;
    let rows = loader
        .samples_per_epoch()
        .min((num_batches * batch_size) as u64);
    let num_chunks = rows.div_ceil(batch_size as u64);
    let (mut nats, mut unigram_nats, mut num_labels, mut num_bytes) = (0f64, 0f64, 0u64, 0u64);
    for chunk in 0..num_chunks {
        // Spread over the whole shard: its first documents alone may be of one kind.
        let first = chunk * loader.samples_per_epoch() / num_chunks;
        let last = (chunk + 1) * loader.samples_per_epoch() / num_chunks;
        let count = (last - first).min(batch_size as u64) as usize;
        let batch = loader.batch(first, count)?;
        let on_device = DeviceBatch::<B>::new(&batch, device);
        let context = LayerContext::new(&on_device.documents, rope);
        let losses = model.token_losses(on_device.tokens, on_device.labels, &context);
        let losses = losses.into_data();
        for (loss, &label) in losses.iter::<f64>().zip(&batch.labels) {
            if label != IGNORED_LABEL {
                nats += loss;
                unigram_nats += unigram.nats(label as usize);
                num_labels += 1;
                num_bytes += u64::from(bytes[label as usize]);
            }
        }
    }
    let loss = nats / num_labels.max(1) as f64;
    let bits = std::f64::consts::LN_2 * num_bytes.max(1) as f64;
    Ok(ValidationReport {
        step: 0,
        loss,
        perplexity: loss.exp(),
        bits_per_byte: nats / bits,
        unigram_bits_per_byte: unigram_nats / bits,
        num_labels,
        num_bytes,
    })
}
