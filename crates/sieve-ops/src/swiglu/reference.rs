//! `silu(gate) * up` and its gradient.
use crate::tensors::{Float, rows, unrows};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;

/// `gate_up [.., 2 * d_ff]`, gate first; returns `[.., d_ff]`.
pub fn swiglu<B: Backend>(gate_up: Float<B>) -> Float<B> {
    let (gate_up, dtype, mut shape) = rows::<B>(gate_up);
    let [gate, up] = halves(gate_up);
    let last = shape.len() - 1;
    shape[last] /= 2;
    unrows(gate.clone() * sigmoid(gate) * up, dtype, shape)
}

/// With `s = sigmoid(gate)`: `dgate = dy * up * s * (1 + gate * (1 - s))`, `dup = dy * gate * s`.
pub fn swiglu_backward<B: Backend>(gate_up: Float<B>, dy: Float<B>) -> Float<B> {
    let (gate_up, dtype, shape) = rows::<B>(gate_up);
    let (dy, _, _) = rows::<B>(dy);
    let [gate, up] = halves(gate_up);
    let s = sigmoid(gate.clone());
    let slope = s.clone() * (gate.clone() * (-s.clone() + 1.0) + 1.0);
    let d_gate = dy.clone() * up * slope;
    let d_up = dy * gate * s;
    unrows(Tensor::cat(vec![d_gate, d_up], 1), dtype, shape)
}

fn halves<B: Backend>(gate_up: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let [rows, width] = gate_up.dims();
    let d_ff = width / 2;
    [
        gate_up.clone().slice([0..rows, 0..d_ff]),
        gate_up.slice([0..rows, d_ff..width]),
    ]
}
