//! RMSNorm in plain Burn operations.
use super::backend::RmsNormCall;
use crate::tensors::{Float, primitive, rows, tensor, unrows};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// `x / sqrt(mean(x²) + epsilon) * weight` over the last dimension.
pub fn rms_norm<B: Backend>(call: RmsNormCall<B>) -> Float<B> {
    let (x, dtype, shape) = rows::<B>(call.x);
    let weight = tensor::<B, 1>(call.weight).cast(x.dtype());
    unrows(normalise(x, call.epsilon).0 * weight.unsqueeze(), dtype, shape)
}

/// With `r = 1/sqrt(mean(x²) + epsilon)`, `n = x r`, `g = dy * weight`: `dx = r (g - n mean(g n))`, `dweight = sum(dy
/// n)`.
pub fn rms_norm_backward<B: Backend>(call: RmsNormCall<B>, dy: Float<B>) -> (Float<B>, Float<B>) {
    let (x, dtype, shape) = rows::<B>(call.x);
    let (dy, _, _) = rows::<B>(dy);
    let weight_dtype = call.weight.dtype();
    let weight = tensor::<B, 1>(call.weight).cast(x.dtype());
    let (dx, dweight) = normalise_backward(x, weight, call.epsilon, dy);
    (unrows(dx, dtype, shape), primitive(dweight.cast(weight_dtype)))
}

/// `(n, r)` of the rows.
pub(crate) fn normalise<B: Backend>(x: Tensor<B, 2>, epsilon: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let r = (x.clone().powi_scalar(2).mean_dim(1) + epsilon).sqrt().recip();
    (x * r.clone(), r)
}

pub(crate) fn normalise_backward<B: Backend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 1>,
    epsilon: f64,
    dy: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 1>) {
    let (n, r) = normalise(x, epsilon);
    let g = dy.clone() * weight.unsqueeze();
    let dx = r * (g.clone() - n.clone() * (g * n.clone()).mean_dim(1));
    (dx, (dy * n).sum_dim(0).squeeze_dim(0))
}

/// `x + addend` where there is one.
pub(super) fn plus<B: Backend>(x: Float<B>, addend: Option<Float<B>>) -> Float<B> {
    match addend {
        Some(addend) => B::float_add(x, addend),
        None => x,
    }
}
