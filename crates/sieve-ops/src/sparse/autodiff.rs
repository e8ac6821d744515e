//! Attention under a selector's mask under autodiff: it has no gradient, so there is none.
use super::backend::{ChosenBlocks, SparseBackend};
use crate::decode::DmaCache;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::IntTensor;
use sieve_core::{BlockSelection, HeavyKeys, MaskLayout, ProbeCorrection};
use std::ops::Range;

impl<B: Backend, C: CheckpointStrategy> SparseBackend for Autodiff<B, C> {
    fn has_sparse_attention(_qkv: &Float<Self>) -> bool {
        false
    }

    fn sparse_attention(
        _qkv: Float<Self>,
        _mask: &MaskLayout,
        _data: IntTensor<Self>,
        _softmax_scale: f64,
    ) -> Result<[Float<Self>; 2], String> {
        Err("it has no gradient".to_owned())
    }

    fn select_blocks(
        _qkv: Float<Self>,
        _selection: &BlockSelection,
        _bounds: Option<Float<Self>>,
    ) -> Result<ChosenBlocks<IntTensor<Self>>, String> {
        Err("it has no gradient".to_owned())
    }
    fn correct_by_probes(
        _qkv: Float<Self>,
        _o: Float<Self>,
        _correction: ProbeCorrection,
        _dense_rows: Range<usize>,
        _softmax_scale: f64,
    ) -> Result<Float<Self>, String> {
        Err("it has no gradient".to_owned())
    }

    fn keep_heavy_keys(_qkv: Float<Self>, _heavy: &HeavyKeys) -> Result<DmaCache<Self>, String> {
        Err("it has no gradient".to_owned())
    }

    fn heavy_decode(
        _cache: &mut DmaCache<Self>,
        _qkv: Float<Self>,
        _position: usize,
        _softmax_scale: f64,
        _scratch: &mut Self::DecodeScratch,
    ) -> Result<Float<Self>, String> {
        Err("it has no gradient".to_owned())
    }
}
