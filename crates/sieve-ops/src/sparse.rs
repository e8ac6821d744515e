//! Attention under a selector's mask, without gradient.
mod autodiff;
mod backend;
mod cuda;
mod flex;

pub use backend::SparseBackend;

use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;
use sieve_core::PackedMask;

/// Whether the backend has a kernel for [`sparse_attention`] on this tensor. Where it has none, sieve-select's attention on the
/// host takes the call.
pub fn has_sparse_attention<B: SparseBackend>(qkv: &Tensor<B, 4>) -> bool {
    B::has_sparse_attention(&primitive(qkv.clone()))
}

/// Attention of a tensor's last tokens over the keys that a mask names.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[1, num_queries, num_heads, head_dim]`
///
/// # Errors
/// Why the kernel refuses the call, or that the backend has none.
pub fn sparse_attention<B: SparseBackend>(
    qkv: Tensor<B, 4>,
    mask: &PackedMask,
    softmax_scale: f64,
) -> Result<Tensor<B, 4>, String> {
    B::sparse_attention(primitive(qkv), mask, softmax_scale).map(tensor)
}
