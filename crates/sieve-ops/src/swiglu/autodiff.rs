//! SwiGLU as a node of the autodiff graph.
use super::backend::{SwigluBackend, SwigluGradients};
use crate::device::autodiff::{Gradient, enter};
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Gated<B: Backend> {
    gate_up: Float<B>,
}

impl<B: SwigluGradients> Gradient<B, 1> for Gated<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        [B::swiglu_backward(self.gate_up, dy)]
    }
}

impl<B: SwigluGradients, C: CheckpointStrategy> SwigluBackend for Autodiff<B, C> {
    fn swiglu(gate_up: Float<Self>) -> Float<Self> {
        let kept = Gated::<B> {
            gate_up: gate_up.primitive.clone(),
        };
        let y = B::swiglu(gate_up.primitive.clone());
        enter::<B, C, _, 1>([&gate_up], kept, y)
    }
}
