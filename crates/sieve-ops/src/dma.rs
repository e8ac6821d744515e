//! Dynamic Mask Attention (arXiv:2508.02124, eq. 3 to 6), exact to the token.
//!
//! Every key has a score z that does not depend on the query, and a rank: the score, or the score plus recency. A query
//! sees the last `local_window_size` keys of its document and the older ones with the largest (rank, position),
//! `keep_window_size` in all. A key that has left never returns, so one integer a key is the whole mask.
mod autodiff;
mod backend;
mod bias;
pub(crate) mod composed;
mod cuda;
mod flex;
pub(crate) mod rank;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{DMA_SCORE_CLAMP, DmaBackend, DmaGradients, DmaKeyLists, DmaKeys, DmaSelection};
pub use bias::dma_bias;
pub(crate) use bias::dma_bias_backward as bias_gradient;
pub use composed::{DmaForward, DynamicMaskBackend};
pub use rank::{PositionOrigin, Recency, dma_rank};

use crate::attention::AttentionSpec;
use crate::documents::Documents;
use crate::tensors::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{DmaBias, DmaShape, DmaWindow, KeepRest};

/// What a DMA layer hands on.
#[derive(Clone, Debug)]
pub struct DmaAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// What ranks the keys, without gradient, `[batch, num_kv_heads, seq_len]`.
    pub rank: Tensor<B, 3>,
    /// First query that no longer sees the key, `[batch, num_kv_heads, seq_len]`.
    pub expire: Tensor<B, 3, Int>,
}

/// Scores, selection and attention over the kept keys. The selection has no gradient; scores get theirs through the
/// bias.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, after q/k-norm and RoPE
/// - w_dt: `[num_kv_heads * head_dim, num_kv_heads]`
/// - a: `[num_kv_heads]`
pub fn dynamic_mask_attention<B: DynamicMaskBackend>(
    qkv: Tensor<B, 4>,
    w_dt: Tensor<B, 2>,
    a: Tensor<B, 1>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    dma: DmaShape,
) -> DmaAttention<B> {
    let forward = B::dynamic_mask_attention(
        primitive(qkv),
        primitive(w_dt),
        primitive(a),
        &documents.bounds(),
        spec,
        dma,
    );
    DmaAttention {
        o: tensor(forward.output.o),
        rank: tensor(forward.rank),
        expire: Tensor::from_primitive(forward.selection.expire),
    }
}

/// Attention over keys that were kept before, with the bias of their ranks.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - rank, expire: `[batch, num_kv_heads, seq_len]`, as [`DmaAttention`] holds them
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn dma_attention<B: DmaBackend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    expire: Tensor<B, 3, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    bias: DmaBias,
) -> Tensor<B, 4> {
    let selection = DmaSelection::of_expire(expire.into_primitive());
    let delta = primitive(dma_bias(rank, bias));
    let rest = KeepRest::Never;
    let output = B::dma_attention(primitive(qkv), delta, &documents.bounds(), &selection, spec, rest);
    tensor(output.o)
}

/// The exact mask of DMA: `expire` `[batch, num_kv_heads, seq_len]` for ranks of the same shape.
///
/// Of equal ranks the more recent key stays; `expire[j] = j` marks a key that left with its own arrival.
pub fn dma_select<B: DmaBackend>(
    rank: Tensor<B, 3>,
    documents: &Documents<B>,
    window: impl Into<DmaWindow>,
) -> Tensor<B, 3, Int> {
    let selection = B::dma_select(primitive(rank), &documents.bounds(), window.into());
    Tensor::from_primitive(selection.expire)
}
