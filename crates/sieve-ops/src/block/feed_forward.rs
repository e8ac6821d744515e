//! The feed-forward layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: only the residual stream and the packed gate and up.
//! Weight gradients also need the normed stream and the gated activation; the backward kernels of the norm and of
//! SwiGLU recompute these from inputs that they read anyway. The norm's kernel also adds the gradient of the residual
//! stream.
use super::gemm::{Operands, Weight, begin_gradients, gemm, gemm_gradients};
use super::{PassFor, Residual, WeightSums, kept_by};
use crate::backend::value;
use crate::tensors::{Float, primitive, tensor};
use crate::{DeviceBackend, GemmPrecision, RmsNormCall, SieveBackend, ToQuantise};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::Keeping;

/// Weights and settings of [`feed_forward`].
#[derive(Clone, Debug)]
pub struct FeedForward<B: Backend> {
    /// Weight of the RMSNorm before the GEMMs, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// Packed gate and up weights, `[2 * d_ff, d_model]`, gate first.
    pub gate_up: Tensor<B, 2>,
    /// Weight of the down projection, `[d_model, d_ff]`.
    pub down: Tensor<B, 2>,
    /// Added to the mean square of the norm.
    pub epsilon: f64,
    /// Data type in which both GEMMs multiply: bf16 or fp8.
    pub precision: GemmPrecision,
    /// Whether activations are kept that the backward pass could recompute. The other setting of [`Keeping`] concerns
    /// attention.
    pub keeping: Keeping,
    /// Whether the output is read.
    pub pass: PassFor,
    /// Sums of earlier micro-batches' gradients of `gate_up` and `down`.
    pub sums: WeightSums<B>,
}

/// `[x +] down(swiglu(gate_up(rms_norm(x))))` (arXiv:2002.05202 after arXiv:1910.07467).
///
/// # Shapes
/// - x: `[.., d_model]`
/// - returns: shape of x. Where `layer.pass` is [`PassFor::Gradients`], so that nobody reads the output, it is x itself
///   except in fp8: the GEMM with `down`, a third of the layer's forward pass, is left out.
pub fn feed_forward<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    layer: FeedForward<B>,
    residual: Residual,
) -> Tensor<B, D> {
    let x = primitive(x);
    let [norm, gate_up, down] =
        [primitive(layer.norm.clone()), primitive(layer.gate_up.clone()), primitive(layer.down.clone())];
    let layer = layer.values();
    let (y, kept) = forward::<B::Inner>(B::value(x.clone()), layer, residual);
    tensor(B::node([&x, &norm, &gate_up, &down], y, |dy| backward(kept, dy)))
}

impl<B: SieveBackend> FeedForward<B> {
    /// The layer without the tensors' places in the graph.
    fn values(self) -> FeedForward<B::Inner> {
        FeedForward {
            norm: value::<B, 1>(self.norm),
            gate_up: value::<B, 2>(self.gate_up),
            down: value::<B, 2>(self.down),
            epsilon: self.epsilon,
            precision: self.precision,
            keeping: kept_by::<B>(self.keeping),
            pass: self.pass,
            sums: self.sums.map(|sum| sum.map(value::<B, 2>)),
        }
    }
}

/// What the forward pass keeps for the backward pass.
#[derive(Clone, Debug)]
struct Kept<B: Backend> {
    x: Float<B>,
    gate_up: Float<B>,
    /// Inputs of the GEMMs with `gate_up` and with `down`.
    operands: [Operands<B>; 2],
    layer: FeedForward<B>,
    residual: Residual,
}

/// The layer's output, and what its backward pass needs.
fn forward<B: DeviceBackend>(x: Float<B>, layer: FeedForward<B>, residual: Residual) -> (Float<B>, Kept<B>) {
    let normed = ToQuantise::new(B::rms_norm(RmsNormCall {
        x: x.clone(),
        weight: primitive(layer.norm.clone()),
        epsilon: layer.epsilon,
    }));
    let how = (layer.precision, layer.keeping);
    // `None`: the residual stream is added in the second GEMM.
    let (gate_up, first) = gemm::<B>(how, normed, primitive(layer.gate_up.clone()), None);
    if layer.pass == PassFor::Gradients && layer.precision == GemmPrecision::Tensors {
        // Not in fp8, where the GEMM with `down` makes the rounded operands that the backward pass reads.
        let second = if layer.keeping.recomputable { Operands::X(B::swiglu(gate_up.clone())) } else { Operands::None };
        return (x.clone(), Kept { x, gate_up, operands: [first, second], layer, residual });
    }
    let hidden = match layer.precision {
        GemmPrecision::Fp8 => B::fp8_swiglu(gate_up.clone()),
        GemmPrecision::Tensors => ToQuantise::new(B::swiglu(gate_up.clone())),
    };
    let added = (residual == Residual::Stream).then(|| x.clone());
    let (y, second) = gemm::<B>(how, hidden, primitive(layer.down.clone()), added);
    let kept = Kept { x, gate_up, operands: [first, second], layer, residual };
    (y, kept)
}

/// Gradients of x, norm, gate_up and down.
// Memory of a step peaks here, so each tensor is moved into its last use, which frees it.
fn backward<B: DeviceBackend>(kept: Kept<B>, dy: Float<B>) -> [Float<B>; 4] {
    let Kept { x, gate_up, operands: [first, second], layer, residual } = kept;
    let [gate_up_sum, down_sum] = layer.sums;
    let down = Weight::new(layer.down, down_sum);
    let d_output = ToQuantise::new(dy.clone());
    let (d_gate_up, d_down) = match gemm_gradients(second, &down, d_output) {
        Some([d_hidden, d_down]) if layer.precision == GemmPrecision::Fp8 => {
            (B::fp8_swiglu_backward(gate_up, d_hidden), d_down)
        }
        Some([d_hidden, d_down]) => (ToQuantise::new(B::swiglu_backward(gate_up, d_hidden)), d_down),
        // The second GEMM's input was not kept: SwiGLU's backward kernel recomputes it.
        None => {
            let Weight(down, sum) = down;
            let d_hidden = B::linear_input_gradient(down, dy.clone());
            let [d_gate_up, hidden] = B::swiglu_backward_with_output(gate_up, d_hidden);
            (ToQuantise::new(d_gate_up), B::linear_weight_gradient(hidden, dy.clone(), sum))
        }
    };
    let norm = RmsNormCall { x, weight: primitive(layer.norm), epsilon: layer.epsilon };
    let first = (first, Weight::new(layer.gate_up, gate_up_sum));
    let d_residual = (residual == Residual::Stream).then_some(dy);
    let [dx, d_norm, d_gate_up_weight] = begin_gradients::<B>(norm, first, d_gate_up, d_residual);
    [dx, d_norm, d_gate_up_weight, d_down]
}

#[cfg(test)]
mod tests;
