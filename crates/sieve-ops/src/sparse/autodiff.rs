//! Attention under a selector's mask under autodiff: it has no gradient, so there is none.
use super::backend::SparseBackend;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use sieve_core::PackedMask;

impl<B: Backend, C: CheckpointStrategy> SparseBackend for Autodiff<B, C> {
    fn has_sparse_attention(_qkv: &Float<Self>) -> bool {
        false
    }

    fn sparse_attention(
        _qkv: Float<Self>,
        _mask: &PackedMask,
        _softmax_scale: f64,
    ) -> Result<Float<Self>, String> {
        Err("it has no gradient".to_owned())
    }
}
