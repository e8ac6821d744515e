//! A loader's batch as tensors.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_data::Batch;
use sieve_ops::Documents;

/// Tokens, labels and document bounds of one micro-batch on the device.
#[derive(Clone, Debug)]
pub struct DeviceBatch<B: Backend> {
    /// `[batch, seq_len]`.
    pub tokens: Tensor<B, 2, Int>,
    /// `[batch, seq_len]`, [`sieve_ops::IGNORE_LABEL`] where there is none.
    pub labels: Tensor<B, 2, Int>,
    /// Where documents begin and end.
    pub documents: Documents<B>,
    /// Tokens with a label.
    pub num_labels: usize,
}

impl<B: Backend> DeviceBatch<B> {
    /// Copies `batch` to `device`.
    pub fn new(batch: &Batch, device: &B::Device) -> Self {
        let shape = [batch.batch, batch.seq_len];
        let tokens: Vec<i32> = batch.tokens.iter().map(|&token| token as i32).collect();
        Self {
            tokens: Tensor::from_data(TensorData::new(tokens, shape), device),
            labels: Tensor::from_data(TensorData::new(batch.labels.clone(), shape), device),
            documents: Documents::new(&batch.doc_start, &batch.doc_end, shape, device),
            num_labels: batch.num_labels(),
        }
    }
}
