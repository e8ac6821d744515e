//! Softmax attention with its full score matrix, forward and backward.
use super::{AttentionOutput, AttentionSpec};
use crate::tensors::{Float, primitive, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Tensor};

/// Logit of a hidden pair. Finite, so that a row without keys yields no NaN in intermediate results.
const MASKED: f64 = -1e30;

/// `[batch, seq_len, heads, head_dim]` to `[batch, num_kv_heads, heads / num_kv_heads, seq_len, head_dim]`.
fn group<B: Backend>(x: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 5> {
    let [batch, seq_len, heads, head_dim] = x.dims();
    x.reshape([batch, seq_len, spec.num_kv_heads, heads / spec.num_kv_heads, head_dim]).permute([0, 2, 3, 1, 4])
}

/// The inverse of [`group`]: joins group and KV head to query heads.
fn ungroup<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 4> {
    let [batch, kv_heads, group_size, seq_len, head_dim] = x.dims();
    x.permute([0, 3, 1, 2, 4]).reshape([batch, seq_len, kv_heads * group_size, head_dim])
}

/// Scaled logits of grouped q and k, plus biases; [`MASKED`] for hidden pairs.
fn logits<B: Backend>(
    [q, k]: [Tensor<B, 5>; 2],
    delta: Option<Float<B>>,
    hidden: &Tensor<B, 5, Bool>,
    spec: AttentionSpec,
) -> Tensor<B, 5> {
    let [batch, kv_heads, group_size, seq_len, head_dim] = q.dims();
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let k = k.swap_dims(3, 4).expand([batch, kv_heads, group_size, head_dim, seq_len]);
    let mut s = q.matmul(k) * spec.softmax_scale;
    if let Some(delta) = delta {
        // The largest bias that a row sees is subtracted: next to a large bias q . k would lose its digits.
        let delta = tensor::<B, 3>(delta).cast(s.dtype());
        let per_row = [batch, kv_heads, 1, seq_len, seq_len];
        let bias = delta.reshape([batch, kv_heads, 1, 1, seq_len]);
        let bias = bias.expand(per_row).mask_fill(hidden.clone().expand(per_row), MASKED);
        s = s + (bias.clone() - bias.max_dim(4));
    }
    s.mask_fill(hidden.clone().expand(full), MASKED)
}

/// Attention of q, k and v, `[batch, seq_len, heads, width]`, over the pairs that are not hidden, with the bias `delta`
/// of each key if there is one; o is `dtype`.
pub(crate) fn forward<B: Backend>(
    qkv: [Tensor<B, 4>; 3],
    delta: Option<Float<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    dtype: DType,
) -> AttentionOutput<B> {
    let [q, k, v] = qkv.map(|x| group(x, spec));
    let s = logits([q, k], delta, &hidden, spec);
    let [batch, kv_heads, group_size, seq_len, _] = s.dims();
    let head_dim = v.dims()[4];
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let largest = s.clone().max_dim(4);
    let p = (s - largest.clone()).exp().mask_fill(hidden.expand(full), 0.0);
    let sum = p.clone().sum_dim(4);
    let empty = sum.clone().equal_elem(0.0);
    let v = v.expand([batch, kv_heads, group_size, seq_len, head_dim]);
    let o = p.matmul(v) / sum.clone().mask_fill(empty.clone(), 1.0);
    let lse = (sum.log() + largest).mask_fill(empty, f64::NEG_INFINITY);
    AttentionOutput::new(
        primitive(ungroup(o).cast(dtype)),
        primitive(lse.reshape([batch, kv_heads * group_size, seq_len])),
    )
}

/// Gradients of an attention call, `[batch, seq_len, heads, width]`.
pub(crate) struct Gradients<B: Backend> {
    pub(crate) dq: Tensor<B, 4>,
    pub(crate) dk: Tensor<B, 4>,
    pub(crate) dv: Tensor<B, 4>,
    /// Gradient of the bias, `[batch, num_kv_heads, seq_len]`.
    pub(crate) d_delta: Tensor<B, 3>,
}

/// The log-sum-exp in the shape and dtype of the logits, 0 where a row sees nothing.
fn finite_lse<B: Backend>(lse: Float<B>, logits: &Tensor<B, 5>) -> Tensor<B, 5> {
    let [batch, kv_heads, group_size, seq_len, _] = logits.dims();
    let lse = tensor::<B, 3>(lse).cast(logits.dtype()).reshape([batch, kv_heads, group_size, seq_len, 1]);
    let empty = lse.clone().equal_elem(f64::NEG_INFINITY);
    lse.mask_fill(empty, 0.0)
}

/// Gradients of [`forward`], which returned `output`, from the gradient of o.
pub(crate) fn backward<B: Backend>(
    qkv: [Tensor<B, 4>; 3],
    delta: Option<Float<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> Gradients<B> {
    let [q, k, v] = qkv.map(|x| group(x, spec));
    let s = logits([q.clone(), k.clone()], delta, &hidden, spec);
    let [batch, kv_heads, group_size, seq_len, head_dim] = q.dims();
    let value_width = v.dims()[4];
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let like_q = [batch, kv_heads, group_size, seq_len, head_dim];
    let (o, _) = upcast::<B, 4>(output.o);
    let (d_o, _) = upcast::<B, 4>(d_o);
    let (o, d_o) = (group(o, spec), group(d_o, spec));
    let lse = finite_lse(output.lse, &s);
    let p = (s - lse).exp().mask_fill(hidden.expand(full), 0.0);
    let dv = p.clone().swap_dims(3, 4).matmul(d_o.clone()).sum_dim(2);
    let dp = d_o.clone().matmul(v.swap_dims(3, 4).expand([batch, kv_heads, group_size, value_width, seq_len]));
    let row_sum = (d_o * o).sum_dim(4);
    let ds = p * (dp - row_sum);
    let dq = ds.clone().matmul(k.expand(like_q)) * spec.softmax_scale;
    let dk = ds.clone().swap_dims(3, 4).matmul(q).sum_dim(2) * spec.softmax_scale;
    let d_delta = ds.sum_dim(3).sum_dim(2).reshape([batch, kv_heads, seq_len]);
    Gradients { dq: ungroup(dq), dk: ungroup(dk), dv: ungroup(dv), d_delta }
}
