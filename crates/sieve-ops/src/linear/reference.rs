//! Products with a `[out, in]` weight.
use crate::tensors::{Float, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

fn flatten<B: Backend>(x: Float<B>) -> (Tensor<B, 2>, Vec<usize>) {
    let shape = x.shape().to_vec();
    let last = shape[shape.len() - 1];
    let count = shape.iter().product::<usize>() / last.max(1);
    (tensor(B::float_reshape(x, [count, last].into())), shape)
}

/// `y = x Wᵀ` for `x [.., in]`, `weight [out, in]`.
pub fn linear<B: Backend>(x: Float<B>, weight: Float<B>) -> Float<B> {
    let (x, mut shape) = flatten::<B>(x);
    let weight = tensor::<B, 2>(weight);
    let last = shape.len() - 1;
    shape[last] = weight.dims()[0];
    B::float_reshape(primitive(x.matmul(weight.transpose())), shape.into())
}

/// `dx = dy W` of [`linear`].
pub fn linear_input_gradient<B: Backend>(weight: Float<B>, dy: Float<B>) -> Float<B> {
    let (dy, mut shape) = flatten::<B>(dy);
    let weight = tensor::<B, 2>(weight);
    let last = shape.len() - 1;
    shape[last] = weight.dims()[1];
    B::float_reshape(primitive(dy.matmul(weight)), shape.into())
}

/// `dW = dyᵀ x` of [`linear`].
pub fn linear_weight_gradient<B: Backend>(x: Float<B>, dy: Float<B>) -> Float<B> {
    let (x, _) = flatten::<B>(x);
    let (dy, _) = flatten::<B>(dy);
    primitive(dy.transpose().matmul(x))
}

/// A gradient with those before it.
pub(crate) fn added<B: Backend>(sum: Option<Float<B>>, gradient: Float<B>) -> Float<B> {
    match sum {
        Some(sum) => B::float_add(sum, gradient),
        None => gradient,
    }
}
