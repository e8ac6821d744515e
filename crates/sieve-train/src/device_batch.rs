//! A loader's batch as tensors.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_data::{Batch, IGNORE_LABEL, PAD_DOCUMENT};
use sieve_ops::{ContextParallel, Documents, RankGroup};
use std::sync::Arc;

/// Tokens, labels and document bounds of one micro-batch on the device.
#[derive(Clone, Debug)]
pub struct DeviceBatch<B: Backend> {
    /// `[batch, seq_len]`.
    pub tokens: Tensor<B, 2, Int>,
    /// `[batch, seq_len]`, [`sieve_ops::IGNORE_LABEL`] where there is none.
    pub labels: Tensor<B, 2, Int>,
    /// Where documents begin and end.
    pub documents: Documents<B>,
    /// Context parallelism: the whole rows, where these tokens are one part of each.
    pub parts: Option<ContextParallel>,
    /// Tokens with a label.
    pub num_labels: usize,
}

impl<B: Backend> DeviceBatch<B> {
    /// Copies this rank's part of each row to `device`.
    pub(crate) fn of_part(batch: &Batch, links: Arc<dyn RankGroup>, device: &B::Device) -> Self {
        let (part, parts) = (links.part(), links.num_parts());
        let (rows, len) = (batch.batch, batch.seq_len / parts);
        let tokens = of_part(&batch.tokens, batch.seq_len, [part, parts]);
        let tokens = tokens.map(|&token| token as i32).collect::<Vec<_>>();
        let labels = of_part(&batch.labels, batch.seq_len, [part, parts]);
        let labels = labels.copied().collect::<Vec<_>>();
        let num_labels = num_labels_of_part(batch, [part, parts]);
        let bounds = [batch.doc_start.clone(), batch.doc_end.clone()];
        let context_parallel = ContextParallel::new(links, bounds, [rows, batch.seq_len]);
        let ints = |values| Tensor::from_data(TensorData::new(values, [rows, len]), device);
        Self {
            tokens: ints(tokens),
            labels: ints(labels),
            documents: Documents::of_part(&context_parallel, device),
            parts: Some(context_parallel),
            num_labels,
        }
    }

    /// Copies `batch` to `device`.
    pub fn new(batch: &Batch, device: &B::Device) -> Self {
        let shape = [batch.batch, batch.seq_len];
        let tokens: Vec<i32> = batch.tokens.iter().map(|&token| token as i32).collect();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens, shape), device),
            labels: Tensor::from_data(TensorData::new(batch.labels.clone(), shape), device),
            documents: Documents::new(&batch.doc_start, &batch.doc_end, shape, device),
            parts: None,
            num_labels: batch.num_labels(),
        }
    }
}

/// Tokens with a label in a part of each row; `part` is its number and the number of parts.
pub(crate) fn num_labels_of_part(batch: &Batch, part: [usize; 2]) -> usize {
    let labels = of_part(&batch.labels, batch.seq_len, part);
    labels.filter(|&&label| label != IGNORE_LABEL).count()
}

/// Tokens besides padding in a part of each row, as [`num_labels_of_part`].
pub(crate) fn num_tokens_of_part(batch: &Batch, part: [usize; 2]) -> usize {
    let documents = of_part(&batch.documents, batch.seq_len, part);
    documents.filter(|&&document| document != PAD_DOCUMENT).count()
}

/// The values of part `part` of each row, which has `parts` parts.
fn of_part<T>(values: &[T], seq_len: usize, [part, parts]: [usize; 2]) -> impl Iterator<Item = &T> {
    let len = seq_len / parts;
    let rows = values.chunks_exact(seq_len);
    rows.flat_map(move |row| &row[part * len..(part + 1) * len])
}
