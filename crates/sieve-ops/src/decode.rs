//! Attention of one new query over the keys of a cache, dense and DMA.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{DecodeBackend, DmaCache, DmaToken};

use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;
use sieve_core::DmaBias;

/// One query per sequence over all `kv_len` given keys, with an optional additive bias per key.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - k, v: `[batch, kv_len, num_kv_heads, head_dim]`
/// - delta: `[batch, num_kv_heads, kv_len]`
/// - returns: `[batch, num_heads, head_dim]`
pub fn attention_decode<B: DecodeBackend>(
    q: Tensor<B, 3>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    delta: Option<Tensor<B, 3>>,
    softmax_scale: f64,
) -> Tensor<B, 3> {
    let (q, delta) = (primitive(q), delta.map(primitive));
    tensor(B::attention_decode(
        q,
        primitive(k),
        primitive(v),
        delta,
        softmax_scale,
    ))
}

/// Offers the token's key to the cache, then attends with its query: exactly the row that the full forward pass
/// computes.
///
/// While slots are free the key is appended. After that it takes the slot of the smallest (rank, position) among the
/// keys outside the local window. Without a local window it is a candidate itself: if it is the smallest, no query ever
/// sees it.
pub fn dma_decode<B: DecodeBackend>(
    cache: DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<B>, Tensor<B, 3>) {
    let (cache, o) = B::dma_decode(cache, token, softmax_scale, bias);
    (cache, tensor(o))
}
