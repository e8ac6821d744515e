//! The gated sum of NSA's three branches.
use crate::tensors::{Float, primitive, rows, tensor, unrows, upcast};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// The gates of the compressed, selected and window branch, contiguous `[batch * seq_len * num_heads, 1]` each.
fn gates<B: Backend>(logits: Float<B>, bias: Float<B>) -> [Tensor<B, 2>; 3] {
    let (logits, _) = upcast::<B, 3>(logits);
    let (bias, _) = upcast::<B, 1>(bias);
    let [batch, n, width] = logits.dims();
    let rows = batch * n * width / 3;
    let gates = sigmoid(logits + bias.reshape([1, 1, width])).reshape([rows, 3]);
    [0, 1, 2].map(|branch| gates.clone().narrow(1, branch, 1).reshape([rows]).reshape([rows, 1]))
}

/// Reference of [`crate::nsa_gates`].
pub fn nsa_gates<B: Backend>(branches: [Float<B>; 3], logits: Float<B>, bias: Float<B>) -> Float<B> {
    let [(compressed, dtype, shape), (selected, ..), (window, ..)] = branches.map(rows::<B>);
    let [gate_compressed, gate_selected, gate_window] = gates::<B>(logits, bias);
    let sum = compressed * gate_compressed + selected * gate_selected + window * gate_window;
    unrows::<B>(sum, dtype, shape)
}

/// Gradients of the branches, the logits and the bias of [`nsa_gates`].
pub fn nsa_gates_backward<B: Backend>(
    branches: [Float<B>; 3],
    logits: Float<B>,
    bias: Float<B>,
    d_o: Float<B>,
) -> [Float<B>; 5] {
    let (logits_dtype, bias_dtype) = (logits.dtype(), bias.dtype());
    let [batch, n, width] = tensor::<B, 3>(logits.clone()).dims();
    let (d_o, dtype, shape) = rows::<B>(d_o);
    let gates = gates::<B>(logits, bias);
    let d_branches = gates.clone().map(|gate| unrows::<B>(d_o.clone() * gate, dtype, shape.clone()));
    let d_logits = branches.into_iter().zip(gates).map(|(x, gate)| {
        let slope = gate.clone() * (gate.ones_like() - gate);
        (rows::<B>(x).0 * d_o.clone()).sum_dim(1) * slope
    });
    let d_logits = Tensor::cat(d_logits.collect(), 1).reshape([batch * n, width]);
    let d_bias = d_logits.clone().sum_dim(0).reshape([width]);
    let [compressed, selected, window] = d_branches;
    [
        compressed,
        selected,
        window,
        primitive(d_logits.reshape([batch, n, width]).cast(logits_dtype)),
        primitive(d_bias.cast(bias_dtype)),
    ]
}
