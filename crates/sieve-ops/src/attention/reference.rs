//! Attention in plain Burn operations, with its full score matrix.
use super::masks::hidden_by_documents;
use super::scores::{Gradients, backward, forward};
use super::{AttentionCall, AttentionOutput, AttentionSpec};
use crate::tensors::{Float, compute_dtype, primitive, split_heads, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Tensor, TensorMetadata};

/// Dense causal or sliding-window attention; see [`crate::attention`].
pub fn attention<B: Backend>(qkv: Float<B>, call: &AttentionCall<B>) -> AttentionOutput<B> {
    let delta = None;
    masked_attention::<B>(qkv, delta, hidden_by_documents(call), call.spec)
}

/// Gradient `dqkv` of [`attention`].
pub fn attention_backward<B: Backend>(
    qkv: Float<B>,
    call: &AttentionCall<B>,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> Float<B> {
    let (delta, hidden) = (None, hidden_by_documents(call));
    let [dqkv, _] = masked_attention_backward::<B>(qkv, delta, hidden, call.spec, output, d_o);
    dqkv
}

/// Joins the logit `sinks[head]`, whose value is zero, to the softmax of each query; see
/// [`crate::attention_with_sinks`].
pub fn join_sinks<B: Backend>(output: AttentionOutput<B>, sinks: Float<B>) -> AttentionOutput<B> {
    let (o, dtype) = upcast::<B, 4>(output.o);
    let lse = tensor::<B, 3>(output.lse).cast(o.dtype());
    let sinks = by_head(sinks, &lse);
    let largest = lse.clone().max_pair(sinks.clone());
    // -inf - -inf is NaN: rows that see neither a key nor a sink stay as they are.
    let nothing = largest.clone().equal_elem(f64::NEG_INFINITY);
    let finite = largest.mask_fill(nothing.clone(), 0.0);
    let sum = (lse.clone() - finite.clone()).exp() + (sinks - finite.clone()).exp();
    let joined = (finite + sum.log()).mask_fill(nothing.clone(), f64::NEG_INFINITY);
    let factor = (lse - joined.clone().mask_fill(nothing, 0.0)).exp();
    let o = o * factor.swap_dims(1, 2).unsqueeze_dim::<4>(3);
    AttentionOutput::new(primitive(o.cast(dtype)), primitive(joined))
}

/// Gradient of the sinks of [`join_sinks`], which returned `output`: `-sum exp(sink - lse) (o . d_o)`.
pub fn sinks_backward<B: Backend>(output: &AttentionOutput<B>, sinks: Float<B>, d_o: Float<B>) -> Float<B> {
    let (o, _) = upcast::<B, 4>(output.o.clone());
    let (d_o, _) = upcast::<B, 4>(d_o);
    let [batch, seq_len, heads, _] = o.dims();
    let lse = tensor::<B, 3>(output.lse.clone()).cast(o.dtype());
    let dtype = sinks.dtype();
    let sinks = by_head(sinks, &lse);
    let nothing = sinks.clone().equal_elem(f64::NEG_INFINITY);
    let weight = (sinks - lse).mask_fill(nothing, f64::NEG_INFINITY).exp();
    let dots = (o * d_o).sum_dim(3).reshape([batch, seq_len, heads]).swap_dims(1, 2);
    let gradient = -(weight * dots).sum_dim(2).sum_dim(0).reshape([heads]);
    // The gradient of a bf16 parameter is f32, as kernels have it.
    primitive(gradient.cast(compute_dtype(dtype)))
}

/// One number of each head in the shape and dtype of `lse`, `[batch, num_heads, seq_len]`.
fn by_head<B: Backend>(sinks: Float<B>, lse: &Tensor<B, 3>) -> Tensor<B, 3> {
    let heads = lse.dims()[1];
    tensor::<B, 1>(sinks).cast(lse.dtype()).reshape([1, heads, 1]).expand(lse.dims())
}

/// Attention over the pairs where `hidden`, `[batch, num_kv_heads or 1, 1, seq_len, seq_len]`, is false. `delta` is the
/// bias of each key, `[batch, num_kv_heads, seq_len]`.
pub(crate) fn masked_attention<B: Backend>(
    qkv: Float<B>,
    delta: Option<Float<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
) -> AttentionOutput<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    forward(split_heads(qkv, spec.num_kv_heads), delta, hidden, spec, dtype)
}

/// Gradients `[dqkv, ddelta]` of [`masked_attention`].
pub(crate) fn masked_attention_backward<B: Backend>(
    qkv: Float<B>,
    delta: Option<Float<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> [Float<B>; 2] {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let qkv = split_heads(qkv, spec.num_kv_heads);
    let Gradients { dq, dk, dv, d_delta } = backward(qkv, delta, hidden, spec, output, d_o);
    let dqkv = Tensor::cat(vec![dq, dk, dv], 2).cast(dtype);
    [primitive(dqkv), primitive(d_delta)]
}

/// Dense causal attention on q and k, `[batch, seq_len, heads, head_dim]`, and v, which may be narrower; o is `dtype`.
pub(crate) fn separate_attention<B: Backend>(
    qkv: [Tensor<B, 4>; 3],
    call: &AttentionCall<B>,
    dtype: DType,
) -> AttentionOutput<B> {
    let (delta, hidden) = (None, hidden_by_documents(call));
    forward(qkv, delta, hidden, call.spec, dtype)
}

/// Gradients `[dq, dk, dv]` of [`separate_attention`].
pub(crate) fn separate_attention_backward<B: Backend>(
    qkv: [Tensor<B, 4>; 3],
    call: &AttentionCall<B>,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> [Tensor<B, 4>; 3] {
    let (delta, hidden) = (None, hidden_by_documents(call));
    let gradients = backward(qkv, delta, hidden, call.spec, output, d_o);
    [gradients.dq, gradients.dk, gradients.dv]
}
