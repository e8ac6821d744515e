//! Masks of the references: which pairs of a query and a key are hidden.
use super::AttentionCall;
use crate::DocumentBounds;
use crate::tensors::Ints;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

/// Positions of queries, `[1, seq_len, 1]`, and of keys, `[1, 1, seq_len]`.
fn grid<B: Backend>(seq_len: usize, device: &B::Device) -> (Tensor<B, 3, Int>, Tensor<B, 3, Int>) {
    let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, device);
    (positions.clone().reshape([1, seq_len, 1]), positions.reshape([1, 1, seq_len]))
}

/// True for pairs that documents, causality or the call's window hide, `[batch, 1, 1, seq_len, seq_len]`.
pub(crate) fn hidden_by_documents<B: Backend>(call: &AttentionCall<B>) -> Tensor<B, 5, Bool> {
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(call.documents[0].clone());
    let [batch, seq_len] = start.dims();
    let (i, j) = grid::<B>(seq_len, &start.device());
    let i = i.expand([batch, seq_len, seq_len]);
    let j = j.expand([batch, seq_len, seq_len]);
    let start = start.reshape([batch, seq_len, 1]).expand([batch, seq_len, seq_len]);
    let mut hidden = j.clone().greater(i.clone()).bool_or(j.clone().lower(start));
    if let Some(window_size) = call.spec.window_size {
        hidden = hidden.bool_or((i - j).greater_equal_elem(window_size as i64));
    }
    hidden.reshape([batch, 1, 1, seq_len, seq_len])
}

/// True for pairs that documents, causality or `expire` hide, `[batch, num_kv_heads, 1, seq_len, seq_len]`.
pub(crate) fn hidden_by_expiry<B: Backend>(documents: &DocumentBounds<B>, expire: Ints<B>) -> Tensor<B, 5, Bool> {
    let expire: Tensor<B, 3, Int> = Tensor::from_primitive(expire);
    let start: Tensor<B, 2, Int> = Tensor::from_primitive(documents[0].clone());
    let [batch, kv_heads, seq_len] = expire.dims();
    let (i, j) = grid::<B>(seq_len, &expire.device());
    let full = [batch, kv_heads, 1, seq_len, seq_len];
    let i = i.reshape([1, 1, 1, seq_len, 1]).expand(full);
    let j = j.reshape([1, 1, 1, 1, seq_len]).expand(full);
    let expire = expire.reshape([batch, kv_heads, 1, 1, seq_len]).expand(full);
    let start = start.reshape([batch, 1, 1, seq_len, 1]).expand(full);
    j.clone().greater(i.clone()).bool_or(i.greater_equal(expire)).bool_or(j.lower(start))
}
