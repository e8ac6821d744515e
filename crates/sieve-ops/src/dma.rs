//! Dynamic Mask Attention (arXiv:2508.02124, eq. 3 to 6), exact to the token.
//!
//! Every key has a score z that does not depend on the query, and a rank: the score, or the score plus recency. A query
//! sees the last `local_window_size` keys of its document and the older ones with the largest (rank, position),
//! `keep_window_size` in all. A key that has left never returns, so one integer a key is the whole mask.
mod bias;
pub(crate) mod composed;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod rank;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use bias::dma_bias;
pub(crate) use bias::dma_bias_backward as bias_gradient;
pub use composed::DmaLayer;
pub use rank::{PositionOrigin, Recency, dma_rank};

use crate::tensors::{Float, Ints, primitive, tensor};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, Documents, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use composed::{backward, by_rank, forward};
use sieve_core::{DmaBias, DmaShape, DmaWindow, KeepOLow};

/// Output of a DMA layer.
#[derive(Clone, Debug)]
pub struct DmaAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// What ranks the keys, without gradient, `[batch, num_kv_heads, seq_len]`.
    pub rank: Tensor<B, 3>,
    /// First query that no longer sees the key, `[batch, num_kv_heads, seq_len]`.
    pub expire: Tensor<B, 3, Int>,
}

/// Scores, selection and attention over the kept keys, as one node of the graph. The selection has no gradient; scores
/// get theirs through the bias.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, after q/k-norm and RoPE
pub fn dynamic_mask_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    layer: DmaLayer<B>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> DmaAttention<B> {
    let qkv = primitive(qkv);
    let [w_dt, a] = layer.weights();
    let call = AttentionCall::new(documents.bounds(), spec);
    let inputs = layer.values().inputs(B::value(qkv.clone()), &call);
    let o_low = match B::HAS_GRAPH {
        true => KeepOLow::default(),
        false => KeepOLow::Never,
    };
    let found = forward::<B::Inner>(&inputs, o_low);
    let (rank, expire) = (found.rank.clone(), found.selection.expire.clone());
    let o = B::node([&qkv, &w_dt, &a], found.output.o.clone(), move |d_o| {
        backward(&inputs, found, d_o)
    });
    DmaAttention {
        o: tensor(o),
        rank: tensor(B::constant(rank)),
        expire: Tensor::from_primitive(expire),
    }
}

/// The same from given ranks, as for new tokens after a cache; without gradient.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - rank: `[batch, num_kv_heads, seq_len]`, f32
pub fn dma_attention_by_rank<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    dma: DmaShape,
) -> DmaAttention<B> {
    let attention = AttentionCall::<B>::new(documents.bounds(), spec);
    let found = by_rank::<B>(primitive(qkv), primitive(rank), attention, dma, KeepOLow::Never);
    DmaAttention {
        o: tensor(found.output.o),
        rank: tensor(found.rank),
        expire: Tensor::from_primitive(found.selection.expire),
    }
}

/// Attention over keys that were kept before, with the bias of their ranks.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - rank, expire: `[batch, num_kv_heads, seq_len]`, as [`DmaAttention`] holds them
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn dma_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    expire: Tensor<B, 3, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    bias: DmaBias,
) -> Tensor<B, 4> {
    let (qkv, delta) = (primitive(qkv), primitive(dma_bias(rank, bias)));
    let call = DmaCall {
        qkv: B::value(qkv.clone()),
        delta: B::value(delta.clone()),
        selection: DmaSelection::of_expire(expire.into_primitive()),
        attention: AttentionCall::new(documents.bounds(), spec),
    };
    let output = B::Inner::dma_attention(&call, KeepOLow::Never);
    tensor(B::node([&qkv, &delta], output.o.clone(), move |d_o| {
        B::Inner::dma_attention_backward(&call, output, d_o)
    }))
}

/// The exact mask of DMA: `expire` `[batch, num_kv_heads, seq_len]` for ranks of the same shape.
///
/// Of equal ranks the more recent key stays; `expire[j] = j` marks a key that left with its own arrival.
pub fn dma_select<B: SieveBackend>(
    rank: Tensor<B, 3>,
    documents: &Documents<B>,
    window: impl Into<DmaWindow>,
) -> Tensor<B, 3, Int> {
    let rank = B::value(primitive(rank));
    let selection = B::Inner::dma_select(rank, &documents.bounds(), window.into());
    Tensor::from_primitive(selection.expire)
}

/// Ranks of the keys of a packed tensor, without gradient: their scores plus the recency term, f32
/// `[batch, num_kv_heads, seq_len]`. Shapes as in [`dynamic_mask_attention`].
pub fn dma_ranks<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    layer: &DmaLayer<B>,
    spec: AttentionSpec,
    recency: Option<Recency<B>>,
) -> Tensor<B, 3> {
    tensor(B::dma_ranks(&layer.scores(primitive(qkv), spec), recency))
}

/// Largest score that still enters the exponential: `exp(z)` overflows f32 at 88.7.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// What `dma_select` found: the exact mask, and how the backend's kernels find its keys.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`:
    /// `active(i, j) <=> j <= i < expire[j]`.
    pub expire: Ints<B>,
    /// How kernels find the keys.
    pub keys: DmaKeys<B>,
}

/// How a backend's kernels find the keys of a selection, in the forward and the backward pass.
#[derive(Clone, Debug)]
pub enum DmaKeys<B: Backend> {
    /// By `expire` alone, as the references and the CPU do.
    Expire,
    /// All keys of the document so far are kept: dense attention with a bias per key.
    All,
    /// By lists of the kept keys.
    Lists(DmaKeyLists<B>),
}

/// Lists of the kept keys for tiles of queries, as `sieve_kernels::Selection::dma_lists` makes them.
#[derive(Clone, Debug)]
pub struct DmaKeyLists<B: Backend> {
    /// Keys of each tile.
    pub list: Ints<B>,
    /// Keys in each tile's list.
    pub list_len: Ints<B>,
    /// Stretch of the list that each tile of queries reads.
    pub tile_window: Ints<B>,
}

impl<B: Backend> DmaSelection<B> {
    /// A mask that no backend has prepared for its kernels.
    pub fn of_expire(expire: Ints<B>) -> Self {
        let keys = DmaKeys::Expire;
        Self { expire, keys }
    }
}

/// What DMA's scores are computed from.
#[derive(Clone, Debug)]
pub struct DmaScoresCall<B: Backend> {
    /// The packed tensor, of which v is read.
    pub qkv: Float<B>,
    /// `[num_kv_heads * head_dim, num_kv_heads]`.
    pub w_dt: Float<B>,
    /// `[num_kv_heads]`.
    pub a: Float<B>,
    /// Heads.
    pub spec: AttentionSpec,
}

/// A call of attention over the keys of a selection.
#[derive(Clone, Debug)]
pub struct DmaCall<B: Backend> {
    /// The packed tensor.
    pub qkv: Float<B>,
    /// Bias of each key, `[batch, num_kv_heads, seq_len]`.
    pub delta: Float<B>,
    /// The kept keys: the whole mask, so that a window of `attention` is not read.
    pub selection: DmaSelection<B>,
    /// Documents, heads and scale.
    pub attention: AttentionCall<B>,
}
