//! Token embedding on CUDA. Where the gradient's kernel refuses: Burn's scatter, or products in a fixed order where two
//! runs must be bit-equal.
use super::backend::{EmbeddingBackend, EmbeddingGradients};
use super::reference;
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::{kernel_or, sum_order};
use burn::tensor::{DType, Int, Tensor, TensorPrimitive};
use sieve_kernels::{CudaPrimitive as Float, SumOrder, ToBurn};

/// Tokens of one product in the fixed-order form; bounds the one-hot matrix.
const TOKENS: usize = 1024;

impl EmbeddingBackend for Cuda {
    fn embedding(weight: Float, ids: Float) -> Float {
        let [table, rows] = tensors([&weight, &ids]);
        let attempt = sieve_kernels::step::embedding_forward(&table, &rows);
        kernel_or("embedding", attempt.map(ToBurn::burn), || {
            reference::embedding::<Self>(weight, ids)
        })
    }
}

impl EmbeddingGradients for Cuda {
    /// In f32, by a sort of the ids: no atomics.
    fn embedding_backward(dy: Float, ids: Float, vocab_size: usize) -> Float {
        let [d, rows] = tensors([&dy, &ids]);
        let attempt = sieve_kernels::step::embedding_backward(&d, &rows, vocab_size);
        kernel_or("embedding_backward", attempt.map(ToBurn::burn), || {
            plain_backward(dy, ids, vocab_size)
        })
    }
}

/// `dweight [vocab_size, d_model]` in f32: many tokens share a row, and a bf16 sum of them would lose the small ones.
fn plain_backward(dy: Float, ids: Float, vocab_size: usize) -> Float {
    let dy: Tensor<Cuda, 3> = Tensor::from_primitive(TensorPrimitive::Float(dy));
    let dy = dy.cast(DType::F32);
    match sum_order() {
        SumOrder::Any => {
            let dy = dy.into_primitive().tensor();
            reference::embedding_backward::<Cuda>(dy, ids, vocab_size)
        }
        SumOrder::Fixed => {
            let ids: Tensor<Cuda, 2, Int> = Tensor::from_primitive(ids);
            by_products(dy, ids, vocab_size).into_primitive().tensor()
        }
    }
}

/// One-hot products, chunk after chunk: slower than a scatter, which adds in whatever order its atomics meet.
fn by_products(dy: Tensor<Cuda, 3>, ids: Tensor<Cuda, 2, Int>, vocab_size: usize) -> Tensor<Cuda, 2> {
    let [batch, seq_len, d_model] = dy.dims();
    let device = dy.device();
    let tokens = batch * seq_len;
    let dy = dy.reshape([tokens, d_model]);
    let ids = ids.reshape([1, tokens]);
    let rows = Tensor::<Cuda, 1, Int>::arange(0..vocab_size as i64, &device);
    let rows = rows.reshape([vocab_size, 1]);
    let mut sum = Tensor::<Cuda, 2>::zeros([vocab_size, d_model], (&device, DType::F32));
    for first in (0..tokens).step_by(TOKENS) {
        let count = TOKENS.min(tokens - first);
        let here = ids.clone().narrow(1, first, count);
        let one_hot = rows
            .clone()
            .expand([vocab_size, count])
            .equal(here.expand([vocab_size, count]));
        let one_hot = one_hot.float().cast(DType::F32);
        sum = sum + one_hot.matmul(dy.clone().narrow(0, first, count));
    }
    sum
}
