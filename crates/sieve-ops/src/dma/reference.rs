//! DMA's scores, selection and attention in plain Burn operations.
use super::rank::{Recency, ranks};
use super::{DmaCall, DmaScoresCall, DmaSelection};
use crate::attention::masks::hidden_by_expiry;
use crate::attention::reference::{masked_attention, masked_attention_backward};
use crate::documents::HostBounds;
use crate::tensors::{Float, ints, primitive, split_heads, tensor, upcast};
use crate::{AttentionOutput, AttentionSpec, DocumentBounds};
use burn::tensor::activation::{sigmoid, softplus};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Tensor, TensorMetadata};
use sieve_core::DmaWindow;

/// The values of a packed tensor, `[batch * seq_len, num_kv_heads * head_dim]`.
fn value_rows<B: Backend>(qkv: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 2> {
    let [batch, seq_len, _, head_dim] = qkv.dims();
    let [_, _, v] = split_heads(qkv, spec.num_kv_heads);
    v.reshape([batch * seq_len, spec.num_kv_heads * head_dim])
}

/// `z = A * softplus(concat(v) . W_dt)`, `[batch, num_kv_heads, seq_len]`.
pub fn dma_scores<B: Backend>(call: &DmaScoresCall<B>) -> Float<B> {
    let DmaScoresCall { qkv, w_dt, a, spec } = call.clone();
    let (qkv, _) = upcast::<B, 4>(qkv);
    let [batch, seq_len, _, _] = qkv.dims();
    let dtype = qkv.dtype();
    let x = value_rows(qkv, spec).matmul(tensor::<B, 2>(w_dt).cast(dtype).transpose());
    let z = softplus(x, 1.0) * tensor::<B, 1>(a).cast(dtype).unsqueeze();
    primitive(z.reshape([batch, seq_len, spec.num_kv_heads]).swap_dims(1, 2))
}

/// Ranks of keys: their scores plus the recency term.
pub fn dma_ranks<B: Backend>(call: &DmaScoresCall<B>, recency: Option<Recency<B>>) -> Float<B> {
    ranks(dma_scores(call), recency)
}

/// `[dqkv, dw_dt, da]`, where the gradient of the values through the scores is added to `dqkv`.
pub fn dma_scores_backward<B: Backend>(call: &DmaScoresCall<B>, dz: Float<B>, dqkv: Float<B>) -> [Float<B>; 3] {
    let DmaScoresCall { qkv, w_dt, a, spec } = call.clone();
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let [batch, seq_len, heads, head_dim] = qkv.dims();
    let compute = qkv.dtype();
    let (w_dtype, a_dtype) = (w_dt.dtype(), a.dtype());
    let w_dt = tensor::<B, 2>(w_dt).cast(compute);
    let a = tensor::<B, 1>(a).cast(compute);
    let v = value_rows(qkv, spec);
    let x = v.clone().matmul(w_dt.clone().transpose());
    let dz = tensor::<B, 3>(dz).cast(compute).swap_dims(1, 2);
    let dz = dz.reshape([batch * seq_len, spec.num_kv_heads]);
    let da = (dz.clone() * softplus(x.clone(), 1.0)).sum_dim(0).squeeze_dim::<1>(0);
    let dx = dz * a.unsqueeze() * sigmoid(x);
    let dw = v.transpose().matmul(dx.clone()).transpose();
    let dv = dx.matmul(w_dt);
    let dv = dv.reshape([batch, seq_len, spec.num_kv_heads, head_dim]);
    let first_value = heads - spec.num_kv_heads;
    let dqkv = tensor::<B, 4>(dqkv);
    let values = dqkv.clone().narrow(2, first_value, spec.num_kv_heads).cast(compute) + dv;
    let dqkv = Tensor::cat(vec![dqkv.narrow(2, 0, first_value), values.cast(dtype)], 2);
    [primitive(dqkv), primitive(dw.cast(w_dtype)), primitive(da.cast(a_dtype))]
}

/// `expire` by its definition, on the host, in O(n² log n): for each query the last keys are kept, and the best of the
/// older keys. It defines the op for tests and is too slow for training.
pub fn dma_select<B: Backend>(rank: Float<B>, documents: &DocumentBounds<B>, window: DmaWindow) -> DmaSelection<B> {
    let z = tensor::<B, 3>(rank);
    let [batch, kv_heads, seq_len] = z.dims();
    let device = z.device();
    let scores: Vec<f64> = z.into_data().iter::<f64>().collect();
    let documents = HostBounds::new::<B>(documents);
    let mut expire = vec![0i32; batch * kv_heads * seq_len];
    for (head, expire) in expire.chunks_mut(seq_len).enumerate() {
        let row = head / kv_heads;
        let scores = &scores[head * seq_len..][..seq_len];
        expire.copy_from_slice(&documents.end[row * seq_len..][..seq_len]);
        for query in 0..seq_len {
            let first = documents.start[row * seq_len + query] as usize;
            let older = (query + 1).saturating_sub(window.local_window_size).max(first);
            let mut keys: Vec<usize> = (first..older).collect();
            // Sorts the best keys first: larger score, then more recent. `+ 0.0` makes -0 equal to +0.
            keys.sort_by(|&a, &b| (scores[b] + 0.0).total_cmp(&(scores[a] + 0.0)).then(b.cmp(&a)));
            for &key in keys.iter().skip(window.num_ranked()) {
                expire[key] = expire[key].min(query as i32);
            }
        }
    }
    let expire = ints::<B, 3>(expire, [batch, kv_heads, seq_len], &device);
    DmaSelection::of_expire(expire.into_primitive())
}

/// Attention over the keys with `j <= i < expire[j]`, plus `delta` per key.
pub fn dma_attention<B: Backend>(call: &DmaCall<B>) -> AttentionOutput<B> {
    let DmaCall { qkv, delta, attention, .. } = call.clone();
    masked_attention::<B>(qkv, Some(delta), hidden(call), attention.spec)
}

/// Gradients `[dqkv, ddelta]` of [`dma_attention`].
pub fn dma_attention_backward<B: Backend>(
    call: &DmaCall<B>,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> [Float<B>; 2] {
    let DmaCall { qkv, delta, attention, .. } = call.clone();
    masked_attention_backward::<B>(qkv, Some(delta), hidden(call), attention.spec, output, d_o)
}

fn hidden<B: Backend>(call: &DmaCall<B>) -> Tensor<B, 5, Bool> {
    hidden_by_expiry(&call.attention.documents, call.selection.expire.clone())
}
