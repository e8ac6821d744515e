//! The loss as a node of the autodiff graph.
use super::backend::{LossBackend, LossGradients};
use crate::device::autodiff::{constant, enter, inner};
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: LossGradients, C: CheckpointStrategy> LossBackend for Autodiff<B, C> {
    fn token_losses(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self> {
        constant::<B, C>(B::token_losses(h.primitive, weight.primitive, labels))
    }

    fn linear_cross_entropy(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self> {
        if !h.is_tracked() && !weight.is_tracked() {
            let loss = B::linear_cross_entropy(h.primitive, weight.primitive, labels);
            return constant::<B, C>(loss);
        }
        let [inner_h, inner_weight] = [&h, &weight].map(inner::<B, C>);
        let (loss, dh, dweight) = B::linear_cross_entropy_with_gradients(inner_h, inner_weight, labels);
        // The forward pass has the gradients already; the backward pass scales them.
        enter::<B, C, _, _>([&h, &weight], loss, move |dy| {
            [dh, dweight].map(|gradient| B::scale(gradient, dy.clone()))
        })
    }
}
