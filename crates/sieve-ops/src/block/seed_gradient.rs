//! The joint between segments of a model: a graph seeded with a gradient that is already known.
use crate::DeviceBackend;
use crate::device::autodiff::enter;
use crate::tensors::{Float, primitive, tensor};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// A zero `[1]` whose backward pass hands `dy` to `y`, whatever gradient reaches it.
///
/// Calling `backward()` on the result walks one segment of the model from its output gradient, which lets a trainer
/// treat each segment as a graph of its own.
pub fn seed_gradient<B: SeedBackend, const D: usize>(y: Tensor<B, D>, dy: Tensor<B, D>) -> Tensor<B, 1> {
    tensor(B::seed_gradient(primitive(y), primitive(dy)))
}

/// The op behind [`seed_gradient()`].
pub trait SeedBackend: Backend {
    /// Replaces whatever gradient arrives by `dy`; the output is a zero `[1]`.
    fn seed_gradient(y: Float<Self>, dy: Float<Self>) -> Float<Self>;
}

impl<B: DeviceBackend> SeedBackend for B {
    fn seed_gradient(y: Float<Self>, _dy: Float<Self>) -> Float<Self> {
        zero_scalar::<Self>(y)
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> SeedBackend for Autodiff<B, C> {
    fn seed_gradient(y: Float<Self>, dy: Float<Self>) -> Float<Self> {
        let zero = zero_scalar::<B>(y.primitive.clone());
        let dy = dy.primitive;
        enter::<B, C, _, _>([&y], zero, move |_ignored| [dy])
    }
}

/// A zero `[1]` of the dtype and on the device of `y`.
fn zero_scalar<B: Backend>(y: Float<B>) -> Float<B> {
    B::float_zeros([1].into(), &B::float_device(&y), y.dtype().into())
}

#[cfg(test)]
mod tests;
