//! The feed-forward layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: the stream and the packed gate and up. The normed stream
//! and the gated activation are read by weight gradients alone; the kernels of the norm's and SwiGLU's backward pass,
//! which read what they are made of anyway, write them once more. The gradient of the residual stream is added there
//! too.
use super::residual::{Residual, norm_gradient};
use crate::backend::DeviceBackend;
use crate::device::autodiff::{Gradient, enter};
use crate::linear::LinearBackend;
use crate::norm::RmsNormCall;
use crate::tensors::{Float, primitive, tensor};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// What [`feed_forward`] computes with.
#[derive(Clone, Debug)]
pub struct FeedForward<B: Backend> {
    /// Weight of the norm, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// `[2 * d_ff, d_model]`, gate first.
    pub gate_up: Tensor<B, 2>,
    /// `[d_model, d_ff]`.
    pub down: Tensor<B, 2>,
    /// Added to the mean square of the norm.
    pub epsilon: f64,
}

/// `[x +] down(swiglu(gate_up(rms_norm(x))))` (arXiv:2002.05202 after arXiv:1910.07467).
///
/// # Shapes
/// - x: `[.., d_model]`
/// - returns: shape of x
pub fn feed_forward<B: FeedForwardBackend, const D: usize>(
    x: Tensor<B, D>,
    layer: FeedForward<B>,
    residual: Residual,
) -> Tensor<B, D> {
    tensor(B::feed_forward(primitive(x), layer, residual))
}

/// The composed op behind [`feed_forward()`].
pub trait FeedForwardBackend: Backend {
    /// See [`feed_forward()`].
    fn feed_forward(x: Float<Self>, layer: FeedForward<Self>, residual: Residual) -> Float<Self>;
}

impl<B: DeviceBackend> FeedForwardBackend for B {
    fn feed_forward(x: Float<Self>, layer: FeedForward<Self>, residual: Residual) -> Float<Self> {
        forward::<Self>(x, layer, residual).1
    }
}

impl<B: DeviceBackend, C: CheckpointStrategy> FeedForwardBackend for Autodiff<B, C> {
    fn feed_forward(x: Float<Self>, layer: FeedForward<Self>, residual: Residual) -> Float<Self> {
        let FeedForward {
            norm,
            gate_up,
            down,
            epsilon,
        } = layer;
        let inner = FeedForward {
            norm: norm.clone().inner(),
            gate_up: gate_up.clone().inner(),
            down: down.clone().inner(),
            epsilon,
        };
        let (gated, y) = forward::<B>(x.primitive.clone(), inner.clone(), residual);
        let kept = Kept::<B> {
            x: x.primitive.clone(),
            gate_up: gated,
            layer: inner,
            residual,
        };
        let [norm, gate_up, down] = [primitive(norm), primitive(gate_up), primitive(down)];
        enter::<B, C, _, 4>([&x, &norm, &gate_up, &down], kept, y)
    }
}

/// `(gate_up, y)`: what the backward pass needs beside x, and the output.
fn forward<B: DeviceBackend>(
    x: Float<B>,
    layer: FeedForward<B>,
    residual: Residual,
) -> (Float<B>, Float<B>) {
    let normed = B::rms_norm(RmsNormCall {
        x: x.clone(),
        weight: primitive(layer.norm),
        epsilon: layer.epsilon,
    });
    let gate_up = <B as LinearBackend>::linear(normed, primitive(layer.gate_up));
    let hidden = B::swiglu(gate_up.clone());
    let down = primitive(layer.down);
    let y = match residual {
        Residual::Stream => B::linear_add(hidden, down, x),
        Residual::None => <B as LinearBackend>::linear(hidden, down),
    };
    (gate_up, y)
}

/// What the backward pass needs.
#[derive(Clone, Debug)]
struct Kept<B: Backend> {
    x: Float<B>,
    gate_up: Float<B>,
    layer: FeedForward<B>,
    residual: Residual,
}

/// Gradients of x, norm, gate_up and down.
impl<B: DeviceBackend> Gradient<B, 4> for Kept<B> {
    // Each tensor is handed on as soon as it is read for the last time: this is where a step needs most memory.
    fn gradients(self, dy: Float<B>) -> [Float<B>; 4] {
        let Kept {
            x,
            gate_up,
            layer,
            residual,
        } = self;
        let FeedForward {
            norm,
            gate_up: gate_up_weight,
            down,
            epsilon,
        } = layer;
        let d_hidden = B::linear_input_gradient(primitive(down), dy.clone());
        let (d_gate_up, hidden) = B::swiglu_backward_with_output(gate_up, d_hidden);
        let d_down = B::linear_weight_gradient(hidden, dy.clone());
        let d_normed = B::linear_input_gradient(primitive(gate_up_weight), d_gate_up.clone());
        let norm = RmsNormCall {
            x,
            weight: primitive(norm),
            epsilon,
        };
        let (dx, d_norm, normed) = norm_gradient::<B>(norm, d_normed, (residual, dy));
        let d_gate_up_weight = B::linear_weight_gradient(normed, d_gate_up);
        [dx, d_norm, d_gate_up_weight, d_down]
    }
}

#[cfg(test)]
mod tests;
