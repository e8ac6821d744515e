//! A loader's batch as tensors.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_data::{Batch, IGNORE_LABEL, PAD_DOCUMENT};
use sieve_ops::{ContextParallel, Documents, RankGroup};
use std::sync::Arc;

/// Tokens, labels and document bounds of one micro-batch on the device.
#[derive(Clone, Debug)]
pub struct DeviceBatch<B: Backend> {
    /// Token ids, `[batch, seq_len]`.
    pub tokens: Tensor<B, 2, Int>,
    /// `[batch, seq_len]`, [`sieve_ops::IGNORE_LABEL`] where there is none.
    pub labels: Tensor<B, 2, Int>,
    /// Where the documents of each row begin and end.
    pub documents: Documents<B>,
    /// With context parallelism, the ranks that hold the other parts of each row, and the bounds of whole rows.
    pub parts: Option<ContextParallel>,
}

impl<B: Backend> DeviceBatch<B> {
    /// Copies this rank's part of each row to `device`.
    pub(crate) fn of_part(batch: &Batch, links: Arc<dyn RankGroup>, device: &B::Device) -> Self {
        let part = [links.part(), links.num_parts()];
        let bounds = [batch.doc_start.clone(), batch.doc_end.clone()];
        let context_parallel = ContextParallel::new(links, bounds, [batch.batch, batch.seq_len]);
        let documents = Documents::of_part(&context_parallel, device);
        Self { parts: Some(context_parallel), ..Self::with_documents(batch, part, documents, device) }
    }

    /// Copies a batch of the loader to `device`.
    pub fn new(batch: &Batch, device: &B::Device) -> Self {
        let shape = [batch.batch, batch.seq_len];
        let documents = Documents::new(&batch.doc_start, &batch.doc_end, shape, device);
        Self::with_documents(batch, [0, 1], documents, device)
    }

    /// Part `part[0]` of `part[1]` of each row.
    fn with_documents(batch: &Batch, part: [usize; 2], documents: Documents<B>, device: &B::Device) -> Self {
        let shape = [batch.batch, batch.seq_len / part[1]];
        let tokens = of_part(&batch.tokens, batch.seq_len, part).map(|&token| token as i32);
        let labels = of_part(&batch.labels, batch.seq_len, part).copied();
        let ints = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
        Self { tokens: ints(tokens.collect()), labels: ints(labels.collect()), documents, parts: None }
    }
}

/// Labels in part `part[0]` of `part[1]` of each row.
pub(crate) fn num_labels_of_part(batch: &Batch, part: [usize; 2]) -> usize {
    let labels = of_part(&batch.labels, batch.seq_len, part);
    labels.filter(|&&label| label != IGNORE_LABEL).count()
}

/// Number of tokens without padding in part `part[0]` of `part[1]` of each row.
pub(crate) fn num_tokens_of_part(batch: &Batch, part: [usize; 2]) -> usize {
    let documents = of_part(&batch.documents, batch.seq_len, part);
    documents.filter(|&&document| document != PAD_DOCUMENT).count()
}

/// The values of part `part` of each row, which is divided into `num_parts`.
fn of_part<T>(values: &[T], seq_len: usize, [part, num_parts]: [usize; 2]) -> impl Iterator<Item = &T> {
    let len = seq_len / num_parts;
    let rows = values.chunks_exact(seq_len);
    rows.flat_map(move |row| &row[part * len..(part + 1) * len])
}
