//! Dense causal and sliding-window attention on the packed tensor.
mod autodiff;
mod backend;
pub(crate) mod cuda;
pub(crate) mod flex;
pub(crate) mod masks;
pub(crate) mod reference;
pub(crate) mod scores;
#[cfg(test)]
mod tests;

pub use backend::{AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec};

use crate::documents::Documents;
use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// Grouped-query attention: query i sees the keys j of its document with `i - window < j <= i`.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn attention<B: AttentionBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    let output = <B as AttentionBackend>::attention(primitive(qkv), &documents.bounds(), spec);
    tensor(output.o)
}
