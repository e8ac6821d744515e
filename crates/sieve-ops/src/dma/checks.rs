//! Which operands the public ops of DMA take.
use super::DmaLayer;
use crate::operands::Operands;
use crate::{AttentionSpec, DmaCache, DmaToken, Documents, OperandError};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use sieve_core::{DmaBias, DmaRecency, DmaShape, DmaWindow};

const PACKED: &str = "[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]";
const PER_KEY: &str = "[batch, num_kv_heads, seq_len]";
const PACK: &str = "pack the heads of queries, then keys, then values, as the spec counts them";
const OF_QKV: &str = "batch and seq_len are qkv's, num_kv_heads is the spec's";

/// Checks a packed tensor against the numbers of heads. Returns the shape of one number for each key.
pub(super) fn packed<B: Backend>(
    op: Operands,
    qkv: &Tensor<B, 4>,
    spec: AttentionSpec,
) -> Result<[usize; 3], OperandError> {
    let (heads, kv_heads) = (spec.num_heads, spec.num_kv_heads);
    let groups = kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads);
    op.value(groups, "num_heads", heads, format!("a multiple of num_kv_heads = {kv_heads}, at least 1"))?;
    let [batch, seq_len, _, head_dim] = qkv.dims();
    let wanted = [batch, seq_len, spec.packed_heads(), head_dim];
    op.shape(("qkv", PACKED, &wanted), &qkv.dims(), PACK)?;
    Ok([batch, kv_heads, seq_len])
}

/// Checks the bounds of the documents of rows of these keys.
pub(super) fn documents<B: Backend>(
    op: Operands,
    documents: &Documents<B>,
    [batch, _, seq_len]: [usize; 3],
) -> Result<(), OperandError> {
    for (name, bounds) in [
        ("documents.start", &documents.start),
        ("documents.end", &documents.end),
        ("documents.positions", &documents.positions),
    ] {
        let hint = "make them with Documents::new or Documents::whole_rows for the rows of this call";
        op.shape((name, "[batch, seq_len]", &[batch, seq_len]), &bounds.dims(), hint)?;
    }
    Ok(())
}

/// Checks the shape of a tensor with one number for each KV head and key, such as the ranks by which DMA orders keys.
pub(super) fn per_key(
    op: Operands,
    name: &'static str,
    got: [usize; 3],
    wanted: [usize; 3],
) -> Result<(), OperandError> {
    op.shape((name, PER_KEY, &wanted), &got, OF_QKV)
}

/// Checks the parameters of the scores.
pub(crate) fn layer<B: Backend>(
    op: Operands,
    layer: &DmaLayer<B>,
    spec: AttentionSpec,
    head_dim: usize,
) -> Result<(), OperandError> {
    let kv_heads = spec.num_kv_heads;
    let hint = "W_dt is a linear layer's weight, [out, in], as in PyTorch; a transposed one gives other scores";
    let axes = "[num_kv_heads, num_kv_heads * head_dim]";
    op.shape(("w_dt", axes, &[kv_heads, kv_heads * head_dim]), &layer.w_dt.dims(), hint)?;
    op.shape(("a", "[num_kv_heads]", &[kv_heads]), &layer.a.dims(), "one factor for each KV head")
}

/// Checks the number of keys that a query keeps.
pub(super) fn window(op: Operands, window: DmaWindow) -> Result<(), OperandError> {
    let DmaWindow { keep_window_size: kept, local_window_size: local } = window;
    op.value(kept > 0, "keep_window_size", kept, "a query keeps at least one key, its own among them")?;
    op.value(local <= kept, "local_window_size", local, format!("at most keep_window_size = {kept}"))
}

/// Checks the settings of a layer: its window, and that its bias goes with its recency.
pub(super) fn form(op: Operands, dma: DmaShape) -> Result<(), OperandError> {
    window(op, dma.window())?;
    let fits = dma.recency == DmaRecency::None || dma.bias == DmaBias::Linear;
    op.value(fits, "bias", "Exp with a recency slope", "the slope adds to the logit itself: DmaBias::Linear")
}

/// Checks a token against the cache that it enters.
pub(crate) fn token<B: Backend>(op: Operands, token: &DmaToken<B>, cache: &DmaCache<B>) -> Result<(), OperandError> {
    window(op, cache.window)?;
    let [batch, kv_heads, _, head_dim] = cache.keys.k.tokens().dims();
    let heads = token.q.shape().to_vec().get(1).copied().unwrap_or_default();
    let groups = heads > 0 && heads.is_multiple_of(kv_heads);
    op.value(groups, "num_heads", heads, format!("a multiple of the cache's {kv_heads} KV heads, at least 1"))?;
    let hint = "batch, num_kv_heads and head_dim are the cache's";
    for (name, axes, wanted, x) in [
        ("q", "[batch, num_heads, head_dim]", &[batch, heads, head_dim][..], &token.q),
        ("k", "[batch, num_kv_heads, head_dim]", &[batch, kv_heads, head_dim], &token.k),
        ("v", "[batch, num_kv_heads, head_dim]", &[batch, kv_heads, head_dim], &token.v),
        ("rank", "[batch, num_kv_heads]", &[batch, kv_heads], &token.rank),
    ] {
        op.shape((name, axes, wanted), &x.shape().to_vec(), hint)?;
    }
    Ok(())
}
