//! Reads rows of tokens from one shard.

use std::sync::{Arc, Mutex};

use super::batch::{Batch, IGNORE_LABEL, LoaderConfig, Order, PAD_DOCUMENT};
use super::epoch::Epoch;
use crate::error::DataError;
use crate::shard::{ShardReader, with_ending};

/// A shard of documents, divided into rows.
#[derive(Debug)]
pub(super) struct ShardRows {
    shard: Arc<ShardReader>,
    pub(super) samples_per_epoch: u64,
    /// The epochs used last, of eight bytes per document each.
    epochs: Mutex<Vec<Arc<Epoch>>>,
}

/// Two, because a batch may begin in one epoch and end in the next.
const MAX_EPOCHS_HELD: usize = 2;

impl ShardRows {
    /// Divides a shard into rows; refuses one with too many documents, or too few tokens for a row.
    pub(super) fn new(shard: Arc<ShardReader>, config: &LoaderConfig) -> Result<Self, DataError> {
        if shard.num_documents() >= u64::from(PAD_DOCUMENT) {
            let what = format!("{} documents; the loader numbers them with 32 bits", shard.num_documents());
            return Err(DataError::shard(&with_ending(shard.prefix(), ".idx"), what));
        }
        let first = Epoch::new(&shard, config, 0);
        let samples_per_epoch = first.num_samples;
        if samples_per_epoch == 0 {
            let [tokens, documents] = [shard.num_tokens(), shard.num_documents()];
            let seq_len = config.seq_len;
            let what = format!("{tokens} tokens in {documents} documents give no sample of seq_len {seq_len}");
            let path = with_ending(shard.prefix(), ".bin");
            return Err(DataError::file(&path, what, "give more text or lower seq_len"));
        }
        Ok(Self { shard, samples_per_epoch, epochs: Mutex::new(vec![Arc::new(first)]) })
    }

    /// Appends row `sample`, counted over all epochs, to the batch.
    pub(super) fn push(&self, sample: u64, config: &LoaderConfig, batch: &mut Batch) -> Result<(), DataError> {
        let epoch = self.epoch(sample / self.samples_per_epoch, config);
        let mut filled = 0;
        let mut buffer = Vec::with_capacity(config.seq_len + 1);
        for piece in epoch.row(&self.shard, sample % self.samples_per_epoch) {
            // Reads one token more than the row holds, if the document has one, because it is the last label.
            let len = (piece.tokens.end - piece.tokens.start) as usize;
            let document_len = self.shard.document_len(piece.document);
            buffer.clear();
            let range = piece.tokens.start..document_len.min(piece.tokens.end + 1);
            self.shard.read(piece.document, range, config.vocab_size, &mut buffer)?;
            batch.tokens.extend_from_slice(&buffer[..len]);
            // A token's label is the next token of the document, if that is predicted. Where the document ends, its
            // last token has none.
            let labels_start = batch.labels.len();
            batch.labels.extend(std::iter::repeat_n(IGNORE_LABEL, len));
            let first_label = piece.tokens.start + 1;
            for predicted in self.shard.predicted(piece.document) {
                let nexts =
                    predicted.start.max(first_label)..predicted.end.min(piece.tokens.start + buffer.len() as u64);
                for next in nexts {
                    let at = (next - first_label) as usize;
                    batch.labels[labels_start + at] = buffer[at + 1] as i32;
                }
            }
            batch.push_segment(piece.document as u32, filled, len);
            filled += len;
        }
        batch.push_padding(config.pad_id, filled);
        Ok(())
    }

    /// Epoch `number`, from the cache of the last two.
    fn epoch(&self, number: u64, config: &LoaderConfig) -> Arc<Epoch> {
        let number = match config.order {
            // All epochs have the same order.
            Order::Sequential => 0,
            Order::Shuffled { .. } => number,
        };
        // A poisoned lock is harmless: no code can panic while an entry is half written.
        let mut epochs = self.epochs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(epoch) = epochs.iter().find(|epoch| epoch.number == number) {
            return Arc::clone(epoch);
        }
        let epoch = Arc::new(Epoch::new(&self.shard, config, number));
        if epochs.len() == MAX_EPOCHS_HELD {
            epochs.remove(0);
        }
        epochs.push(Arc::clone(&epoch));
        epoch
    }
}
