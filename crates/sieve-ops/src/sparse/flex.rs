//! The CPU computes attention under a selector's mask, and the mask, from slices: sieve-select.
use super::backend::{ChosenBlocks, SparseBackend};
use crate::decode::DmaCache;
use burn::tensor::ops::IntTensor;
use burn_flex::{Flex, FlexTensor};
use sieve_core::{BlockSelection, HeavyKeys, MaskLayout, ProbeCorrection};
use std::ops::Range;

impl SparseBackend for Flex {
    fn has_sparse_attention(_qkv: &FlexTensor) -> bool {
        false
    }

    fn sparse_attention(
        _qkv: FlexTensor,
        _mask: &MaskLayout,
        _data: IntTensor<Self>,
        _softmax_scale: f64,
    ) -> Result<[FlexTensor; 2], String> {
        Err("the CPU computes it from slices (sieve_select::block_sparse_attention)".to_owned())
    }

    fn select_blocks(
        _qkv: FlexTensor,
        _selection: &BlockSelection,
        _bounds: Option<FlexTensor>,
    ) -> Result<ChosenBlocks<IntTensor<Self>>, String> {
        Err("the CPU selects from slices (sieve_select::Selector::select)".to_owned())
    }
    fn correct_by_probes(
        _qkv: FlexTensor,
        _o: FlexTensor,
        _correction: ProbeCorrection,
        _dense_rows: Range<usize>,
        _softmax_scale: f64,
    ) -> Result<FlexTensor, String> {
        Err("the CPU corrects slices (sieve_select::block_sparse_attention)".to_owned())
    }

    fn keep_heavy_keys(_qkv: FlexTensor, _heavy: &HeavyKeys) -> Result<DmaCache<Self>, String> {
        Err("the CPU chooses from slices (sieve_select::DecodeSession)".to_owned())
    }

    fn heavy_decode(
        _cache: &mut DmaCache<Self>,
        _qkv: FlexTensor,
        _position: usize,
        _softmax_scale: f64,
        _scratch: &mut Self::DecodeScratch,
    ) -> Result<FlexTensor, String> {
        Err("the CPU chooses from slices (sieve_select::DecodeSession)".to_owned())
    }
}
