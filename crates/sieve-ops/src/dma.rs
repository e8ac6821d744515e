//! Dynamic Mask Attention (arXiv:2508.02124, eq. 3 to 6), which selects single tokens.
//!
//! Every key has a score z that does not depend on the query, and a rank, which is the score or the score plus a
//! recency term. A query sees `keep_window_size` keys of its document: the last `local_window_size` ones, and of the
//! older ones those with the largest (rank, position). A key that one query no longer sees is seen by no later query,
//! so the mask is one integer per key, `expire`: the first query that no longer sees the key.
mod bias;
mod call;
pub(crate) mod checks;
pub(crate) mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod rank;
pub(crate) mod reference;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use bias::dma_bias_backward;
pub use bias::{DMA_SCORE_CLAMP, dma_bias};
pub use call::{DmaCall, DmaKeyLists, DmaKeys, DmaLayer, DmaOrder, DmaScoresCall, DmaSelection};
pub use rank::{PositionOrigin, Recency, dma_rank};

use crate::operands::Operands;
use crate::tensors::{primitive, tensor};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, Documents, OperandError, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use composed::{backward, by_rank, forward};
use sieve_core::{DmaBias, DmaShape, DmaWindow, KeepOLow, KeyOrder};

/// Output of a DMA layer.
#[derive(Clone, Debug)]
pub struct DmaAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// Ranks of the keys, without gradient, `[batch, num_kv_heads, seq_len]`.
    pub rank: Tensor<B, 3>,
    /// First query that no longer sees the key, `[batch, num_kv_heads, seq_len]`.
    pub expire: Tensor<B, 3, Int>,
}

/// Scores, selection and attention over the selected keys, as one node of the graph. The selection has no gradient; the
/// scores get a gradient through the bias of the keys. `layer.spec` says which form of DMA is computed:
/// [`DmaShape::new`] is that of a recipe with `kind = "dma"`, [`DmaShape::published`] that of arXiv:2508.02124. Where a
/// query keeps more keys than a row has, this is dense attention with a bias.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, after q/k-norm and RoPE
/// - layer.w_dt: `[num_kv_heads, num_kv_heads * head_dim]`; layer.a: `[num_kv_heads]`
///
/// # Errors
/// An operand of a different shape, which the error names with both shapes; a window of 0 keys; a local window that is
/// larger than the window; an exponential bias with a recency slope.
pub fn dynamic_mask_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    layer: DmaLayer<B>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Result<DmaAttention<B>, OperandError> {
    let op = Operands("dynamic_mask_attention");
    let keys = checks::packed(op, &qkv, spec)?;
    checks::layer(op, &layer, spec, qkv.dims()[3])?;
    checks::documents(op, documents, keys)?;
    checks::form(op, layer.spec)?;
    let qkv = primitive(qkv);
    let [w_dt, a] = layer.weights();
    let call = AttentionCall::new(documents.bounds(), spec);
    let inputs = layer.values().inputs(B::value(qkv.clone()), &call);
    let o_low = if B::HAS_GRAPH { KeepOLow::default() } else { KeepOLow::Never };
    let found = forward::<B::Inner>(&inputs, o_low);
    let (rank, expire) = (found.rank.clone(), found.selection.expire.clone());
    let o = B::node([&qkv, &w_dt, &a], found.output.o.clone(), move |d_o| backward(&inputs, found, d_o));
    Ok(DmaAttention { o: tensor(o), rank: tensor(B::constant(rank)), expire: Tensor::from_primitive(expire) })
}

/// As [`dynamic_mask_attention`] with ranks that the caller computed, for new tokens after cached ones. Without
/// gradient. Kernels go through the keys in `order`.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - rank: `[batch, num_kv_heads, seq_len]`, f32
///
/// # Errors
/// As [`dynamic_mask_attention`].
pub fn dma_attention_by_rank<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    dma: DmaShape,
    order: DmaOrder<B>,
) -> Result<DmaAttention<B>, OperandError> {
    let op = Operands("dma_attention_by_rank");
    let keys = checks::packed(op, &qkv, spec)?;
    checks::per_key(op, "rank", rank.dims(), keys)?;
    checks::documents(op, documents, keys)?;
    checks::form(op, dma)?;
    let attention = AttentionCall::<B>::new(documents.bounds(), spec);
    let found = by_rank::<B>((primitive(qkv), primitive(rank)), attention, dma, KeepOLow::Never, order);
    Ok(DmaAttention {
        o: tensor(found.output.o),
        rank: tensor(found.rank),
        expire: Tensor::from_primitive(found.selection.expire),
    })
}

/// Attention over keys that were selected before, with the biases that their ranks give.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - rank, expire: `[batch, num_kv_heads, seq_len]`, as [`DmaAttention`] holds them
/// - returns: `[batch, seq_len, num_heads, head_dim]`
///
/// # Errors
/// An operand of a different shape.
pub fn dma_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    expire: Tensor<B, 3, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    bias: DmaBias,
) -> Result<Tensor<B, 4>, OperandError> {
    let op = Operands("dma_attention");
    let keys = checks::packed(op, &qkv, spec)?;
    checks::per_key(op, "rank", rank.dims(), keys)?;
    checks::per_key(op, "expire", expire.dims(), keys)?;
    checks::documents(op, documents, keys)?;
    let (qkv, delta) = (primitive(qkv), primitive(dma_bias(rank, bias)));
    let call = DmaCall {
        qkv: B::value(qkv.clone()),
        delta: B::value(delta.clone()),
        selection: DmaSelection::of_expire(expire.into_primitive()),
        attention: AttentionCall::new(documents.bounds(), spec),
    };
    let output = B::Inner::dma_attention(&call, KeepOLow::Never);
    let o = output.o.clone();
    Ok(tensor(B::node([&qkv, &delta], o, move |d_o| B::Inner::dma_attention_backward(&call, output, d_o))))
}

/// DMA's mask `expire`, `[batch, num_kv_heads, seq_len]`, from ranks of the same shape.
///
/// Of keys with equal ranks the more recent one is kept. `expire[j] = j` marks a key that no query sees.
///
/// # Errors
/// Documents of other rows than the ranks'; a window of 0 keys; a local window that is larger than the window.
pub fn dma_select<B: SieveBackend>(
    rank: Tensor<B, 3>,
    documents: &Documents<B>,
    window: impl Into<DmaWindow>,
) -> Result<Tensor<B, 3, Int>, OperandError> {
    let (op, window) = (Operands("dma_select"), window.into());
    checks::documents(op, documents, rank.dims())?;
    checks::window(op, window)?;
    let rank = B::value(primitive(rank));
    let order = DmaOrder::Of(KeyOrder::Leaving);
    let selection = B::Inner::dma_select(rank, &documents.bounds(), window, order);
    Ok(Tensor::from_primitive(selection.expire))
}

/// Ranks of the keys of a packed tensor, without gradient: their scores plus the recency term, f32
/// `[batch, num_kv_heads, seq_len]`. Shapes as in [`dynamic_mask_attention`]. `recency` alone is added: the layer's own
/// is not read.
///
/// # Errors
/// An operand of a different shape; another number of slopes than KV heads.
pub fn dma_ranks<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    layer: &DmaLayer<B>,
    spec: AttentionSpec,
    recency: Option<Recency<B>>,
) -> Result<Tensor<B, 3>, OperandError> {
    let op = Operands("dma_ranks");
    checks::packed(op, &qkv, spec)?;
    checks::layer(op, layer, spec, qkv.dims()[3])?;
    if let Some(slopes) = recency.as_ref().map(|recency| recency.slopes.len()) {
        let hint = format!("one slope for each of the {} KV heads", spec.num_kv_heads);
        op.value(slopes == spec.num_kv_heads, "number of slopes", slopes, hint)?;
    }
    Ok(tensor(B::dma_ranks(&layer.scores(primitive(qkv), spec), recency)))
}
