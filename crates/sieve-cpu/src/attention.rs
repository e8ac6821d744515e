//! Attention forward and backward under one mask form: query i sees key j if `j <= i < expire[j]`.
//!
//! Dense causal, sliding window and DMA differ only in where `expire` comes from; with chosen blocks a query must also
//! have chosen the key's block, and a key that left the window is seen again at the distances of its head's band. No
//! tensor here is seq_len x seq_len.

pub(crate) mod backward;
mod cached_row;
pub mod decode;
#[cfg(test)]
mod equal_bits;
pub(crate) mod forward;
mod keys;
pub mod listed;
pub(crate) mod panel;
pub(crate) mod scratch;
pub(crate) mod segments;
mod shape;
pub mod sinks;
pub(crate) mod softmax;
#[cfg(test)]
mod tests;
pub(crate) mod tile;

pub use cached_row::{CachedRow, row_behind_cache};
pub use shape::{ChosenBlocks, Documents, Mask, ScaledShape};

/// Attention of every token over the keys it sees.
///
/// A query that sees no key has `o = 0` and `lse = -inf`. Keys and values that no query sees are never read.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, heads in the order q, k, v; with narrower values
///   `[batch, seq_len, (num_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v]`
/// - o: `[batch, seq_len, num_heads, head_dim_v]`, lse: `[batch, num_heads, seq_len]` (natural logarithm; with biases
///   the largest bias that the row sees is subtracted); written whole
///
/// # Panics
/// When lengths do not fit or the documents are not consecutive ranges.
pub fn attention_forward(
    shape: ScaledShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &mut [f32],
    lse: &mut [f32],
) {
    attention_from(0, shape, qkv, documents, mask, o, lse);
}

/// As [`attention_forward`], of the tokens from `first` on in each row: those before them have keys and values alone.
/// The other rows of o and lse may be computed or not.
///
/// # Panics
/// As [`attention_forward`].
pub fn attention_from(
    first: usize,
    shape: ScaledShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &mut [f32],
    lse: &mut [f32],
) {
    shape.check(documents, mask);
    shape.check_operands("attention_forward", qkv, o, lse);
    if shape.seq_len == 0 {
        return;
    }
    match tile::panel_width(shape.head_dim) {
        16 => forward::run::<16>(first, shape, qkv, documents, mask, o, lse),
        32 => forward::run::<32>(first, shape, qkv, documents, mask, o, lse),
        _ => forward::run::<64>(first, shape, qkv, documents, mask, o, lse),
    }
}

/// Gradients of [`attention_forward`], from its outputs; probabilities are recomputed from `lse`.
///
/// # Shapes
/// - qkv and d_qkv, o and d_o, lse: shaped as [`attention_forward`]'s qkv, o and lse
/// - d_delta: `[batch, num_kv_heads, seq_len]`, the gradient of [`Mask::Expire`]'s delta (zeros for the other masks);
///   `None`: it is not returned
///
/// d_qkv and d_delta are written whole.
///
/// # Panics
/// When lengths do not fit or the documents are not consecutive ranges.
#[allow(clippy::too_many_arguments, reason = "six operands, two results, all slices of one op")]
pub fn attention_backward(
    shape: ScaledShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    d_qkv: &mut [f32],
    d_delta: Option<&mut [f32]>,
) {
    shape.check(documents, mask);
    shape.check_operands("attention_backward", qkv, o, lse);
    assert_eq!(d_o.len(), o.len(), "attention_backward: d_o is not as long as o");
    assert_eq!(d_qkv.len(), qkv.len(), "attention_backward: d_qkv is not as long as qkv");
    if let Some(d_delta) = &d_delta {
        let keys = shape.batch * shape.num_kv_heads * shape.seq_len;
        assert_eq!(d_delta.len(), keys, "attention_backward: d_delta is not [batch, num_kv_heads, seq_len]");
    }
    if shape.seq_len == 0 || shape.batch == 0 {
        return;
    }
    match tile::panel_width(shape.head_dim) {
        16 => backward::run::<16>(shape, qkv, documents, mask, o, lse, d_o, d_qkv, d_delta),
        32 => backward::run::<32>(shape, qkv, documents, mask, o, lse, d_o, d_qkv, d_delta),
        _ => backward::run::<64>(shape, qkv, documents, mask, o, lse, d_o, d_qkv, d_delta),
    }
}
