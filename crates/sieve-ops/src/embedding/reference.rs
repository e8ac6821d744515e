//! Rows of a table, and their gradient.
use crate::tensors::{Float, Ints, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{IndexingUpdateOp, Int, Shape, Tensor};

/// `weight[ids]`.
pub fn embedding<B: Backend>(weight: Float<B>, ids: Ints<B>) -> Float<B> {
    let ids: Tensor<B, 2, Int> = Tensor::from_primitive(ids);
    let [batch, seq_len] = ids.dims();
    let weight = tensor::<B, 2>(weight);
    let [_, d_model] = weight.dims();
    primitive(
        weight
            .select(0, ids.reshape([batch * seq_len]))
            .reshape([batch, seq_len, d_model]),
    )
}

/// Rows of `dy [batch, seq_len, d_model]` added by id into `[vocab_size, d_model]`.
pub fn embedding_backward<B: Backend>(dy: Float<B>, ids: Ints<B>, vocab_size: usize) -> Float<B> {
    let ids: Tensor<B, 2, Int> = Tensor::from_primitive(ids);
    let [batch, seq_len] = ids.dims();
    let dy = tensor::<B, 3>(dy);
    let [_, _, d_model] = dy.dims();
    let zeros = Tensor::<B, 2>::zeros(Shape::new([vocab_size, d_model]), (&dy.device(), dy.dtype()));
    let dy = dy.reshape([batch * seq_len, d_model]);
    primitive(zeros.select_assign(0, ids.reshape([batch * seq_len]), dy, IndexingUpdateOp::Add))
}
