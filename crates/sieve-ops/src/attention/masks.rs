//! Masks of the references: which pairs of a query and a key are hidden.
use super::AttentionCall;
use crate::DocumentBounds;
use crate::tensors::Ints;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

/// True for pairs that documents, causality or distance hide, `[batch, 1, 1, seq_len, seq_len]`; with keys beyond the
/// window `[batch, num_kv_heads, 1, seq_len, seq_len]`.
pub(crate) fn hidden_by_documents<B: Backend>(call: &AttentionCall<B>) -> Tensor<B, 5, Bool> {
    let num_heads = 1;
    let (query, key, hidden) = pairs::<B>(&call.documents, num_heads);
    let Some(window_size) = call.spec.window_size else {
        return hidden;
    };
    let distance = query - key.clone();
    let beyond = distance.clone().greater_equal_elem(window_size as i64);
    let Some(far) = call.spec.far else {
        return hidden.bool_or(beyond);
    };
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(call.documents[0].clone());
    let [batch, seq_len] = start.dims();
    let in_document = key - start.reshape([batch, 1, 1, seq_len, 1]);
    let beyond = beyond.bool_and(in_document.greater_equal_elem(far.sink_tokens as i64));
    let heads = (0..call.spec.num_kv_heads).map(|kv_head| {
        let [first, end] = [far.band(kv_head).start, far.band(kv_head).end].map(|at| at as i64);
        let outside = distance.clone().lower_elem(first).bool_or(distance.clone().greater_equal_elem(end));
        hidden.clone().bool_or(beyond.clone().bool_and(outside))
    });
    Tensor::cat(heads.collect(), 1)
}

/// True for pairs that documents, causality or `expire` hide, `[batch, num_kv_heads, 1, seq_len, seq_len]`.
pub(crate) fn hidden_by_expiry<B: Backend>(documents: &DocumentBounds<B>, expire: Ints<B>) -> Tensor<B, 5, Bool> {
    let expire: Tensor<B, 3, Int> = Tensor::from_primitive(expire);
    let [batch, num_kv_heads, seq_len] = expire.dims();
    let (query, _, hidden) = pairs::<B>(documents, num_kv_heads);
    let expire = expire.reshape([batch, num_kv_heads, 1, 1, seq_len]).expand(query.dims());
    hidden.bool_or(query.greater_equal(expire))
}

/// Position of the query and of the key of each pair, and whether causality or documents hide it; each
/// `[batch, num_heads, 1, seq_len, seq_len]`.
fn pairs<B: Backend>(
    documents: &DocumentBounds<B>,
    num_heads: usize,
) -> (Tensor<B, 5, Int>, Tensor<B, 5, Int>, Tensor<B, 5, Bool>) {
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(documents[0].clone());
    let [batch, seq_len] = start.dims();
    let all = [batch, num_heads, 1, seq_len, seq_len];
    let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &start.device());
    let query = positions.clone().reshape([1, 1, 1, seq_len, 1]).expand(all);
    let key = positions.reshape([1, 1, 1, 1, seq_len]).expand(all);
    let start = start.reshape([batch, 1, 1, seq_len, 1]).expand(all);
    let hidden = key.clone().greater(query.clone()).bool_or(key.clone().lower(start));
    (query, key, hidden)
}
