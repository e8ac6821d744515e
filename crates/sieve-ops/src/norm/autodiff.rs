//! RMSNorm as a node of the autodiff graph.
use super::backend::{NormBackend, NormGradients, RmsNormCall};
use crate::device::autodiff::{Gradient, enter};
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: NormGradients> Gradient<B, 2> for RmsNormCall<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 2] {
        B::rms_norm_backward(self, dy, None).into()
    }
}

impl<B: NormGradients, C: CheckpointStrategy> NormBackend for Autodiff<B, C> {
    fn rms_norm(call: RmsNormCall<Self>) -> Float<Self> {
        let inner = RmsNormCall::<B> {
            x: call.x.primitive.clone(),
            weight: call.weight.primitive.clone(),
            epsilon: call.epsilon,
        };
        let y = B::rms_norm(inner.clone());
        enter::<B, C, _, 2>([&call.x, &call.weight], inner, y)
    }
}
