//! Runs the backward pass of one segment of a model (its embedding, a block or its head) from the gradient of the
//! segment's output.
use crate::SieveBackend;
use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// A zero `[1]`. Calling `backward()` on it gives `y` the gradient `dy`.
///
/// So a trainer can run the backward pass of one segment, whose output is y, from the gradient of y.
pub fn seed_gradient<B: SieveBackend, const D: usize>(y: Tensor<B, D>, dy: Tensor<B, D>) -> Tensor<B, 1> {
    let zero = Tensor::<B::Inner, 1>::zeros([1], (&y.device(), y.dtype()));
    let dy = B::value(primitive(dy));
    tensor(B::node([&primitive(y)], primitive(zero), |_ignored| [dy]))
}

#[cfg(test)]
mod tests;
