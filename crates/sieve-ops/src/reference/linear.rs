//! Products with a `[out, in]` weight, and embedding rows.
use super::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{IndexingUpdateOp, Int, Shape, Tensor, TensorMetadata};

fn flatten<B: Backend>(x: FloatTensor<B>) -> (Tensor<B, 2>, Vec<usize>) {
    let shape = x.shape().to_vec();
    let last = shape[shape.len() - 1];
    let count = shape.iter().product::<usize>() / last.max(1);
    (tensor(B::float_reshape(x, [count, last].into())), shape)
}

/// `y = x Wᵀ` for `x [.., in]`, `weight [out, in]`.
pub fn linear<B: Backend>(x: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let (x, mut shape) = flatten::<B>(x);
    let weight = tensor::<B, 2>(weight);
    let last = shape.len() - 1;
    shape[last] = weight.dims()[0];
    B::float_reshape(primitive(x.matmul(weight.transpose())), shape.into())
}

/// `dx = dy W` of [`linear`].
pub fn linear_input_gradient<B: Backend>(
    weight: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    let (dy, mut shape) = flatten::<B>(dy);
    let weight = tensor::<B, 2>(weight);
    let last = shape.len() - 1;
    shape[last] = weight.dims()[1];
    B::float_reshape(primitive(dy.matmul(weight)), shape.into())
}

/// `dW = dyᵀ x` of [`linear`].
pub fn linear_weight_gradient<B: Backend>(x: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
    let (x, _) = flatten::<B>(x);
    let (dy, _) = flatten::<B>(dy);
    primitive(dy.transpose().matmul(x))
}

/// `(dx, dW)` of [`linear`].
pub fn linear_backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    (
        linear_input_gradient::<B>(weight, dy.clone()),
        linear_weight_gradient::<B>(x, dy),
    )
}

/// `weight[ids]`.
pub fn embedding<B: Backend>(weight: FloatTensor<B>, ids: IntTensor<B>) -> FloatTensor<B> {
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
pub fn embedding_backward<B: Backend>(
    dy: FloatTensor<B>,
    ids: IntTensor<B>,
    vocab_size: usize,
) -> FloatTensor<B> {
    let ids: Tensor<B, 2, Int> = Tensor::from_primitive(ids);
    let [batch, seq_len] = ids.dims();
    let dy = tensor::<B, 3>(dy);
    let [_, _, d_model] = dy.dims();
    let zeros = Tensor::<B, 2>::zeros(
        Shape::new([vocab_size, d_model]),
        (&dy.device(), dy.dtype()),
    );
    let dy = dy.reshape([batch * seq_len, d_model]);
    primitive(zeros.select_assign(0, ids.reshape([batch * seq_len]), dy, IndexingUpdateOp::Add))
}
