//! Attention with its full score matrix under the one mask form.
use super::norm::split_heads;
use super::{primitive, tensor, upcast};
use crate::{AttentionOutput, AttentionSpec, DmaSelection, DocumentBounds};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Bool, DType, Int, Tensor};

/// A logit that no softmax sees; finite, so that a row without keys yields no NaN on the way.
const MASKED: f64 = -1e30;

/// Dense causal or sliding-window attention; see [`crate::attention`].
pub fn attention<B: Backend>(
    qkv: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
) -> AttentionOutput<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let hidden = hidden_by_documents(documents, spec);
    forward(Grouped::new(qkv, spec), None, hidden, spec, dtype)
}

/// `dqkv` of [`attention`].
pub fn attention_backward<B: Backend>(
    qkv: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> FloatTensor<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let hidden = hidden_by_documents(documents, spec);
    let grouped = Grouped::new(qkv, spec);
    backward(grouped, None, hidden, spec, output, d_o).packed(dtype)
}

/// Attention over the pairs that `hidden` does not mask; `hidden` is `[batch, num_kv_heads, 1, seq_len, seq_len]`.
pub(super) fn masked_attention<B: Backend>(
    qkv: FloatTensor<B>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
) -> AttentionOutput<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    forward(Grouped::new(qkv, spec), None, hidden, spec, dtype)
}

/// `dqkv` of [`masked_attention`].
pub(super) fn masked_attention_backward<B: Backend>(
    qkv: FloatTensor<B>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> FloatTensor<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    backward(Grouped::new(qkv, spec), None, hidden, spec, output, d_o).packed(dtype)
}

/// Probabilities of [`masked_attention`] summed over the heads of a group, `[batch, num_kv_heads, seq_len, seq_len]`.
pub(super) fn group_probabilities<B: Backend>(
    qkv: FloatTensor<B>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    lse: FloatTensor<B>,
) -> Tensor<B, 4> {
    let (qkv, _) = upcast::<B, 4>(qkv);
    let grouped = Grouped::new(qkv, spec);
    let [batch, kv_heads, group_size, seq_len, _] = grouped.q.dims();
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let s = logits(&grouped, None, &hidden, spec);
    let lse = finite_lse(lse, &s);
    let p = (s - lse).exp().mask_fill(hidden.expand(full), 0.0);
    p.sum_dim(2).reshape([batch, kv_heads, seq_len, seq_len])
}

/// Dense causal attention on q, k `[batch, seq_len, heads, head_dim]` and a narrower v.
pub(super) fn separate_attention<B: Backend>(
    [q, k, v]: [Tensor<B, 4>; 3],
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    dtype: DType,
) -> AttentionOutput<B> {
    let hidden = hidden_by_documents(documents, spec);
    let grouped = Grouped {
        q: group(q, spec),
        k: group(k, spec),
        v: group(v, spec),
    };
    forward(grouped, None, hidden, spec, dtype)
}

/// `[dq, dk, dv]` of [`separate_attention`].
pub(super) fn separate_attention_backward<B: Backend>(
    [q, k, v]: [Tensor<B, 4>; 3],
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> [Tensor<B, 4>; 3] {
    let hidden = hidden_by_documents(documents, spec);
    let grouped = Grouped {
        q: group(q, spec),
        k: group(k, spec),
        v: group(v, spec),
    };
    let gradients = backward(grouped, None, hidden, spec, output, d_o);
    [gradients.dq, gradients.dk, gradients.dv]
}

/// Attention over the keys with `j <= i < expire[j]`, plus `delta` per key.
pub fn dma_attention<B: Backend>(
    qkv: FloatTensor<B>,
    delta: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    selection: &DmaSelection<B>,
    spec: AttentionSpec,
) -> AttentionOutput<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let hidden = hidden_by_expiry(documents, selection.expire.clone());
    forward(Grouped::new(qkv, spec), Some(delta), hidden, spec, dtype)
}

/// `(dqkv, ddelta)` of [`dma_attention`].
pub fn dma_attention_backward<B: Backend>(
    qkv: FloatTensor<B>,
    delta: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    selection: &DmaSelection<B>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let hidden = hidden_by_expiry(documents, selection.expire.clone());
    let grouped = Grouped::new(qkv, spec);
    let gradients = backward(grouped, Some(delta), hidden, spec, output, d_o);
    let d_delta = primitive(gradients.d_delta.clone());
    (gradients.packed(dtype), d_delta)
}

/// One query per sequence over all keys; see [`crate::decode_attention`].
pub fn decode_attention<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    delta: Option<FloatTensor<B>>,
    softmax_scale: f64,
) -> FloatTensor<B> {
    let (q, dtype) = upcast::<B, 3>(q);
    let (k, _) = upcast::<B, 4>(k);
    let (v, _) = upcast::<B, 4>(v);
    let [batch, num_heads, head_dim] = q.dims();
    let [_, kv_len, num_kv_heads, _] = k.dims();
    let group_size = num_heads / num_kv_heads;
    let q = q.reshape([batch, num_kv_heads, group_size, head_dim]);
    let mut logits = q.matmul(k.permute([0, 2, 3, 1])) * softmax_scale;
    if let Some(delta) = delta {
        let delta = tensor::<B, 3>(delta).cast(logits.dtype());
        logits = logits + delta.reshape([batch, num_kv_heads, 1, kv_len]);
    }
    let p = burn::tensor::activation::softmax(logits, 3);
    let o = p.matmul(v.swap_dims(1, 2));
    primitive(o.reshape([batch, num_heads, head_dim]).cast(dtype))
}

/// q as `[batch, num_kv_heads, group_size, seq_len, head_dim]`, k and v with a group of one.
struct Grouped<B: Backend> {
    q: Tensor<B, 5>,
    k: Tensor<B, 5>,
    v: Tensor<B, 5>,
}

impl<B: Backend> Grouped<B> {
    fn new(qkv: Tensor<B, 4>, spec: AttentionSpec) -> Self {
        let [q, k, v] = split_heads(qkv, spec.num_kv_heads);
        Self {
            q: group(q, spec),
            k: group(k, spec),
            v: group(v, spec),
        }
    }
}

/// `[batch, seq_len, heads, head_dim]` to `[batch, num_kv_heads, heads / num_kv_heads, seq_len, head_dim]`.
fn group<B: Backend>(x: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 5> {
    let [batch, seq_len, heads, head_dim] = x.dims();
    x.reshape([
        batch,
        seq_len,
        spec.num_kv_heads,
        heads / spec.num_kv_heads,
        head_dim,
    ])
    .permute([0, 2, 3, 1, 4])
}

/// The inverse of [`group`].
fn ungroup<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 4> {
    let [batch, kv_heads, group_size, seq_len, head_dim] = x.dims();
    x.permute([0, 3, 1, 2, 4])
        .reshape([batch, seq_len, kv_heads * group_size, head_dim])
}

/// `(i, j)` as `[1, seq_len, 1]` and `[1, 1, seq_len]`.
fn grid<B: Backend>(seq_len: usize, device: &B::Device) -> (Tensor<B, 3, Int>, Tensor<B, 3, Int>) {
    let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, device);
    (
        positions.clone().reshape([1, seq_len, 1]),
        positions.reshape([1, 1, seq_len]),
    )
}

/// True where a pair is masked, `[batch, 1, 1, seq_len, seq_len]`.
fn hidden_by_documents<B: Backend>(
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
) -> Tensor<B, 5, Bool> {
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(documents[0].clone());
    let [batch, seq_len] = start.dims();
    let (i, j) = grid::<B>(seq_len, &start.device());
    let i = i.expand([batch, seq_len, seq_len]);
    let j = j.expand([batch, seq_len, seq_len]);
    let start = start
        .reshape([batch, seq_len, 1])
        .expand([batch, seq_len, seq_len]);
    let mut hidden = j.clone().greater(i.clone()).bool_or(j.clone().lower(start));
    if let Some(window_size) = spec.window_size {
        hidden = hidden.bool_or((i - j).greater_equal_elem(window_size as i64));
    }
    hidden.reshape([batch, 1, 1, seq_len, seq_len])
}

/// True where a pair is masked, `[batch, num_kv_heads, 1, seq_len, seq_len]`.
pub(super) fn hidden_by_expiry<B: Backend>(
    documents: &DocumentBounds<B>,
    expire: IntTensor<B>,
) -> Tensor<B, 5, Bool> {
    let expire: Tensor<B, 3, Int> = Tensor::from_primitive(expire);
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(documents[0].clone());
    let [batch, kv_heads, seq_len] = expire.dims();
    let (i, j) = grid::<B>(seq_len, &expire.device());
    let full = [batch, kv_heads, 1, seq_len, seq_len];
    let i = i.reshape([1, 1, 1, seq_len, 1]).expand(full);
    let j = j.reshape([1, 1, 1, 1, seq_len]).expand(full);
    let expire = expire
        .reshape([batch, kv_heads, 1, 1, seq_len])
        .expand(full);
    let start = start.reshape([batch, 1, 1, seq_len, 1]).expand(full);
    j.clone()
        .greater(i.clone())
        .bool_or(i.greater_equal(expire))
        .bool_or(j.lower(start))
}

/// Scaled logits with masked pairs at [`MASKED`].
fn logits<B: Backend>(
    grouped: &Grouped<B>,
    delta: Option<FloatTensor<B>>,
    hidden: &Tensor<B, 5, Bool>,
    spec: AttentionSpec,
) -> Tensor<B, 5> {
    let Grouped { q, k, .. } = grouped;
    let [batch, kv_heads, group_size, seq_len, _] = q.dims();
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let mut s = q.clone().matmul(k.clone().swap_dims(3, 4).expand([
        batch,
        kv_heads,
        group_size,
        k.dims()[4],
        seq_len,
    ])) * spec.softmax_scale;
    if let Some(delta) = delta {
        let delta = tensor::<B, 3>(delta).cast(s.dtype());
        s = s + delta.reshape([batch, kv_heads, 1, 1, seq_len]);
    }
    s.mask_fill(hidden.clone().expand(full), MASKED)
}

fn forward<B: Backend>(
    grouped: Grouped<B>,
    delta: Option<FloatTensor<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    dtype: DType,
) -> AttentionOutput<B> {
    let s = logits(&grouped, delta, &hidden, spec);
    let [batch, kv_heads, group_size, seq_len, _] = grouped.q.dims();
    let head_dim = grouped.v.dims()[4];
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let largest = s.clone().max_dim(4);
    let p = (s - largest.clone())
        .exp()
        .mask_fill(hidden.expand(full), 0.0);
    let sum = p.clone().sum_dim(4);
    let empty = sum.clone().equal_elem(0.0);
    let v = grouped
        .v
        .expand([batch, kv_heads, group_size, seq_len, head_dim]);
    let o = p.matmul(v) / sum.clone().mask_fill(empty.clone(), 1.0);
    let lse = (sum.log() + largest).mask_fill(empty, f64::NEG_INFINITY);
    AttentionOutput {
        o: primitive(ungroup(o).cast(dtype)),
        lse: primitive(lse.reshape([batch, kv_heads * group_size, seq_len])),
        o_rest: None,
    }
}

/// Gradients of an attention call, `[batch, seq_len, heads, width]`.
struct Gradients<B: Backend> {
    dq: Tensor<B, 4>,
    dk: Tensor<B, 4>,
    dv: Tensor<B, 4>,
    /// `[batch, num_kv_heads, seq_len]`.
    d_delta: Tensor<B, 3>,
}

impl<B: Backend> Gradients<B> {
    fn packed(self, dtype: DType) -> FloatTensor<B> {
        primitive(Tensor::cat(vec![self.dq, self.dk, self.dv], 2).cast(dtype))
    }
}

/// The log-sum-exp in the shape and dtype of the logits, 0 where a row sees nothing.
fn finite_lse<B: Backend>(lse: FloatTensor<B>, logits: &Tensor<B, 5>) -> Tensor<B, 5> {
    let [batch, kv_heads, group_size, seq_len, _] = logits.dims();
    let lse = tensor::<B, 3>(lse)
        .cast(logits.dtype())
        .reshape([batch, kv_heads, group_size, seq_len, 1]);
    let empty = lse.clone().equal_elem(f64::NEG_INFINITY);
    lse.mask_fill(empty, 0.0)
}

fn backward<B: Backend>(
    grouped: Grouped<B>,
    delta: Option<FloatTensor<B>>,
    hidden: Tensor<B, 5, Bool>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> Gradients<B> {
    let s = logits(&grouped, delta, &hidden, spec);
    let [batch, kv_heads, group_size, seq_len, head_dim] = grouped.q.dims();
    let value_width = grouped.v.dims()[4];
    let full = [batch, kv_heads, group_size, seq_len, seq_len];
    let like_q = [batch, kv_heads, group_size, seq_len, head_dim];
    let (o, _) = upcast::<B, 4>(output.o);
    let (d_o, _) = upcast::<B, 4>(d_o);
    let (o, d_o) = (group(o, spec), group(d_o, spec));
    let lse = finite_lse(output.lse, &s);
    let p = (s - lse).exp().mask_fill(hidden.expand(full), 0.0);
    let dv = p.clone().swap_dims(3, 4).matmul(d_o.clone()).sum_dim(2);
    let dp = d_o.clone().matmul(grouped.v.swap_dims(3, 4).expand([
        batch,
        kv_heads,
        group_size,
        value_width,
        seq_len,
    ]));
    let row = (d_o * o).sum_dim(4);
    let ds = p * (dp - row);
    let dq = ds.clone().matmul(grouped.k.expand(like_q)) * spec.softmax_scale;
    let dk = ds.clone().swap_dims(3, 4).matmul(grouped.q).sum_dim(2) * spec.softmax_scale;
    let d_delta = ds.sum_dim(3).sum_dim(2).reshape([batch, kv_heads, seq_len]);
    Gradients {
        dq: ungroup(dq),
        dk: ungroup(dk),
        dv: ungroup(dv),
        d_delta,
    }
}
