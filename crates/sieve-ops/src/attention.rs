//! Dense causal and sliding-window attention on the packed tensor.
use crate::{AttentionSpec, Documents, SieveBackend};
use burn::tensor::{Tensor, TensorPrimitive};

/// Grouped-query attention: query i sees the keys j of its document with `i - window < j <= i`.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    let output = B::packed_attention(qkv.into_primitive().tensor(), &documents.bounds(), spec);
    Tensor::from_primitive(TensorPrimitive::Float(output.o))
}

#[cfg(test)]
mod tests;
