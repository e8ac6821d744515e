//! Attention of one new query over the keys of a cache.
use crate::SieveBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// One query per sequence over all `kv_len` given keys, with an optional additive bias per key.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - k, v: `[batch, kv_len, num_kv_heads, head_dim]`
/// - delta: `[batch, num_kv_heads, kv_len]`
/// - returns: `[batch, num_heads, head_dim]`
pub fn decode_attention<B: SieveBackend>(
    q: Tensor<B, 3>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    delta: Option<Tensor<B, 3>>,
    softmax_scale: f64,
) -> Tensor<B, 3> {
    let o = B::decode_attention(
        q.into_primitive().tensor(),
        k.into_primitive().tensor(),
        v.into_primitive().tensor(),
        delta.map(|delta| delta.into_primitive().tensor()),
        softmax_scale,
    );
    Tensor::from_primitive(TensorPrimitive::Float(o))
}
