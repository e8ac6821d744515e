//! RMSNorm as a node of the autodiff graph.
use super::backend::{NormBackend, NormGradients, RmsNormCall};
use crate::device::autodiff::enter;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: NormGradients, C: CheckpointStrategy> NormBackend for Autodiff<B, C> {
    fn rms_norm(call: RmsNormCall<Self>) -> Float<Self> {
        let inner = RmsNormCall::<B> {
            x: call.x.primitive.clone(),
            weight: call.weight.primitive.clone(),
            epsilon: call.epsilon,
        };
        let y = B::rms_norm(inner.clone());
        enter::<B, C, _, _>([&call.x, &call.weight], y, move |dy| {
            B::rms_norm_backward(inner, dy, None).into()
        })
    }
}
