//! The gated sum of the branches.
use crate::tensors::{Float, primitive, upcast};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// Gates `[batch, seq_len, num_heads, 3]` from logits `[batch, seq_len, num_heads * 3]` and bias.
fn gates<B: Backend>(logits: Float<B>, bias: Float<B>, num_heads: usize) -> Tensor<B, 4> {
    let (logits, _) = upcast::<B, 3>(logits);
    let (bias, _) = upcast::<B, 1>(bias);
    let [batch, n, width] = logits.dims();
    sigmoid(logits + bias.reshape([1, 1, width])).reshape([batch, n, num_heads, 3])
}

/// See [`crate::nsa_gates`].
pub fn nsa_gates<B: Backend>(branches: [Float<B>; 3], logits: Float<B>, bias: Float<B>) -> Float<B> {
    let dtype = branches[0].dtype();
    let [a, b, c] = branches.map(|x| upcast::<B, 4>(x).0);
    let gates = gates::<B>(logits, bias, a.dims()[2]);
    let gate = |branch| gates.clone().narrow(3, branch, 1);
    primitive((a * gate(0) + b * gate(1) + c * gate(2)).cast(dtype))
}

/// Gradients of the branches, the logits and the bias of [`nsa_gates`].
pub fn nsa_gates_backward<B: Backend>(
    branches: [Float<B>; 3],
    logits: Float<B>,
    bias: Float<B>,
    d_o: Float<B>,
) -> [Float<B>; 5] {
    let (logits_dtype, bias_dtype) = (logits.dtype(), bias.dtype());
    let (d_o, dtype) = upcast::<B, 4>(d_o);
    let [batch, n, num_heads, _] = d_o.dims();
    let gates = gates::<B>(logits, bias, num_heads);
    let branches = branches.map(|x| upcast::<B, 4>(x).0);
    let d_gates = branches.map(|x| (x * d_o.clone()).sum_dim(3));
    let d_gates = Tensor::cat(d_gates.into(), 3);
    let slope = gates.clone() * (gates.ones_like() - gates.clone());
    let d_logits = (d_gates * slope).reshape([batch, n, num_heads * 3]);
    let d_bias = d_logits.clone().sum_dim(0).sum_dim(1).reshape([num_heads * 3]);
    let of_branch = |c| primitive((d_o.clone() * gates.clone().narrow(3, c, 1)).cast(dtype));
    [
        of_branch(0),
        of_branch(1),
        of_branch(2),
        primitive(d_logits.cast(logits_dtype)),
        primitive(d_bias.cast(bias_dtype)),
    ]
}
