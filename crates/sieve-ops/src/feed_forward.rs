//! The feed-forward layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: the stream and the packed gate and up. The normed stream and the
//! gated activation are read by weight gradients alone; the kernels of the norm's and SwiGLU's backward pass, which read what
//! they are made of anyway, write them once more. The gradient of the residual stream is added there too.
use crate::SieveBackend;
use crate::autodiff::Gradient;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

/// Whether a layer's output has the residual stream in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// `x + layer(x)`.
    Stream,
    /// `layer(x)`.
    None,
}

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

/// As [`FeedForward`], as primitives.
#[derive(Clone, Debug)]
pub struct FeedForwardWeights<B: Backend> {
    /// `[d_model]`.
    pub norm: FloatTensor<B>,
    /// `[2 * d_ff, d_model]`.
    pub gate_up: FloatTensor<B>,
    /// `[d_model, d_ff]`.
    pub down: FloatTensor<B>,
    /// Added to the mean square of the norm.
    pub epsilon: f64,
}

/// `[x +] down(swiglu(gate_up(rms_norm(x))))` (arXiv:2002.05202 after arXiv:1910.07467).
///
/// # Shapes
/// - x: `[.., d_model]`
/// - returns: shape of x
pub fn feed_forward<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    layer: FeedForward<B>,
    residual: Residual,
) -> Tensor<B, D> {
    let weights = FeedForwardWeights {
        norm: layer.norm.into_primitive().tensor(),
        gate_up: layer.gate_up.into_primitive().tensor(),
        down: layer.down.into_primitive().tensor(),
        epsilon: layer.epsilon,
    };
    let y = B::feed_forward(x.into_primitive().tensor(), weights, residual);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// `(gate_up, y)`: what the backward pass needs beside x, and the output.
pub(crate) fn forward<B: SieveBackend>(
    x: FloatTensor<B>,
    weights: FeedForwardWeights<B>,
    residual: Residual,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let normed = B::rms_norm(x.clone(), weights.norm, weights.epsilon);
    let gate_up = B::linear_nt(normed, weights.gate_up);
    let hidden = B::swiglu(gate_up.clone());
    let y = match residual {
        Residual::Stream => B::linear_nt_add(hidden, weights.down, x),
        Residual::None => B::linear_nt(hidden, weights.down),
    };
    (gate_up, y)
}

/// What a backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct FeedForwardState<B: Backend> {
    pub(crate) x: FloatTensor<B>,
    pub(crate) gate_up: FloatTensor<B>,
    pub(crate) weights: FeedForwardWeights<B>,
    pub(crate) residual: Residual,
}

/// Gradients of x, norm, gate_up and down.
#[derive(Debug)]
pub(crate) struct FeedForwardGradient;

impl<B: SieveBackend> Gradient<B, 4> for FeedForwardGradient {
    type State = FeedForwardState<B>;

    // Each tensor is handed on as soon as it is read for the last time: this is where a step needs most memory.
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 4] {
        let FeedForwardState {
            x,
            gate_up,
            weights,
            residual,
        } = state;
        let FeedForwardWeights {
            norm,
            gate_up: gate_up_weight,
            down,
            epsilon,
        } = weights;
        let d_hidden = B::linear_nt_input_gradient(down, dy.clone());
        let (d_gate_up, hidden) = B::swiglu_backward_with_output(gate_up, d_hidden);
        let d_down = B::linear_nt_weight_gradient(hidden, dy.clone());
        let d_normed = B::linear_nt_input_gradient(gate_up_weight, d_gate_up.clone());
        let (dx, d_norm, normed) = norm_gradient::<B>([x, norm], epsilon, d_normed, (residual, dy));
        let d_gate_up_weight = B::linear_nt_weight_gradient(normed, d_gate_up);
        [dx, d_norm, d_gate_up_weight, d_down]
    }
}

/// `(dx, dweight, y)` of the norm that begins a layer whose output had the gradient `dy`, y being the norm's output.
pub(crate) fn norm_gradient<B: SieveBackend>(
    [x, weight]: [FloatTensor<B>; 2],
    epsilon: f64,
    d_normed: FloatTensor<B>,
    (residual, dy): (Residual, FloatTensor<B>),
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    match residual {
        Residual::Stream => B::rms_norm_backward_with_output(x, weight, epsilon, d_normed, dy),
        Residual::None => {
            let y = B::rms_norm(x.clone(), weight.clone(), epsilon);
            let (dx, dweight) = B::rms_norm_backward(x, weight, epsilon, d_normed);
            (dx, dweight, y)
        }
    }
}

#[cfg(test)]
mod tests;
