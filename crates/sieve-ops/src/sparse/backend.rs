//! Attention under a selector's mask as a backend computes it.
use crate::tensors::Float;
use burn::tensor::backend::Backend;
use sieve_core::PackedMask;

/// Attention under a selector's mask.
pub trait SparseBackend: Backend {
    /// See [`crate::has_sparse_attention`].
    fn has_sparse_attention(qkv: &Float<Self>) -> bool;
    /// See [`crate::sparse_attention`].
    fn sparse_attention(
        qkv: Float<Self>,
        mask: &PackedMask,
        softmax_scale: f64,
    ) -> Result<Float<Self>, String>;
}
