//! Attention in plain Burn operations, with its full score matrix.
use super::masks::hidden_by_documents;
use super::scores::{Gradients, backward, forward};
use super::{AttentionCall, AttentionOutput, AttentionSpec};
use crate::tensors::{Float, primitive, split_heads, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Tensor};

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
