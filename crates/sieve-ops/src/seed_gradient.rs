//! The joint between segments of a model: a graph seeded with a gradient that is already known.
use crate::SieveBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// A zero `[1]` whose backward pass hands `dy` to `y`, whatever gradient reaches it.
///
/// Calling `backward()` on the result walks one segment of the model from its output gradient, which lets a trainer
/// treat each segment as a graph of its own.
pub fn seed_gradient<B: SieveBackend, const D: usize>(
    y: Tensor<B, D>,
    dy: Tensor<B, D>,
) -> Tensor<B, 1> {
    let seed = B::seed_gradient(y.into_primitive().tensor(), dy.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(seed))
}

#[cfg(test)]
mod tests;
