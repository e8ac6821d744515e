//! Matrix product with a weight stored as `[out, in]`, the layout of PyTorch and of safetensors checkpoints.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{LinearBackend, LinearGradients};

use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// `y = x Wᵀ`.
///
/// # Shapes
/// - x: `[.., in]`
/// - weight: `[out, in]`
/// - returns: `[.., out]`
pub fn linear<B: LinearBackend, const D: usize>(x: Tensor<B, D>, weight: Tensor<B, 2>) -> Tensor<B, D> {
    tensor(<B as LinearBackend>::linear(primitive(x), primitive(weight)))
}

/// `y = residual + x Wᵀ`; shapes as [`linear`], residual `[.., out]`.
pub fn linear_add<B: LinearBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    residual: Tensor<B, D>,
) -> Tensor<B, D> {
    tensor(B::linear_add(primitive(x), primitive(weight), primitive(residual)))
}
