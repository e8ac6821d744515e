//! The CPU computes attention under a selector's mask from slices: `sieve_select::block_sparse_attention`.
use super::backend::SparseBackend;
use burn_flex::{Flex, FlexTensor};
use sieve_core::PackedMask;

impl SparseBackend for Flex {
    fn has_sparse_attention(_qkv: &FlexTensor) -> bool {
        false
    }

    fn sparse_attention(
        _qkv: FlexTensor,
        _mask: &PackedMask,
        _softmax_scale: f64,
    ) -> Result<FlexTensor, String> {
        Err("the CPU computes it from slices (sieve_select::block_sparse_attention)".to_owned())
    }
}
