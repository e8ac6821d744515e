//! Runs the backward pass of one segment of a model from the gradient of its output.
use crate::SieveBackend;
use crate::tensors::{Float, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// A zero `[1]`. Calling `backward()` on it gives `y` the gradient `dy`.
///
/// So a trainer can run the backward pass of one segment, with the output y, from the gradient of y.
pub fn seed_gradient<B: SieveBackend, const D: usize>(y: Tensor<B, D>, dy: Tensor<B, D>) -> Tensor<B, 1> {
    let (y, dy) = (primitive(y), B::value(primitive(dy)));
    let zero = zero_scalar::<B::Inner>(B::value(y.clone()));
    tensor(B::node([&y], zero, |_ignored| [dy]))
}

/// A zero `[1]` of the dtype and on the device of `y`.
fn zero_scalar<B: Backend>(y: Float<B>) -> Float<B> {
    B::float_zeros([1].into(), &B::float_device(&y), y.dtype().into())
}

#[cfg(test)]
mod tests;
