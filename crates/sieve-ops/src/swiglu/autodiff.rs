//! SwiGLU as a node of the autodiff graph.
use super::backend::{SwigluBackend, SwigluGradients};
use crate::device::autodiff::{Gradient, enter};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

#[derive(Clone, Debug)]
struct Gated<B: Backend> {
    gate_up: FloatTensor<B>,
}

impl<B: SwigluGradients> Gradient<B, 1> for Gated<B> {
    fn gradients(self, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        [B::swiglu_backward(self.gate_up, dy)]
    }
}

impl<B: SwigluGradients, C: CheckpointStrategy> SwigluBackend for Autodiff<B, C> {
    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let kept = Gated::<B> {
            gate_up: gate_up.primitive.clone(),
        };
        let y = B::swiglu(gate_up.primitive.clone());
        enter::<B, C, _, 1>([&gate_up], kept, y)
    }
}
